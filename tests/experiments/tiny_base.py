"""The smallest base run of a suite: seconds per arm."""

from __future__ import annotations

from experiments.support import chaos_run
from sao_jax.training.config import RunConfig


def make_config() -> RunConfig:
  return chaos_run.make_config("sync", num_steps=3)
