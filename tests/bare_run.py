"""A run that compiles little: one dense layer, no critic, stages that do nothing; every action earns something."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.models import ModelConfig
from sao_jax.rollout import EngineConfig
from sao_jax.training.config import CheckpointConfig, CriticConfig, RunConfig, WarmStartConfig
from sao_jax.types import Domain, Split, Step
from tests.tiny_domain import VOCABULARY, TinyEnv, tiny_domain


def bare(**changes: Any) -> RunConfig:
  base: dict[str, Any] = {
    "algorithm": "running_mean",
    "schedule": "sync",
    "num_steps": 6,
    "batch_size": 16,
    "eval_episodes": 0,
    "policy": ModelConfig(
      vocab_size=len(VOCABULARY), hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8,
      intermediate_size=32, init_std=0.25,
    ),
    "warm_start": WarmStartConfig(),
    "critic": CriticConfig(),
    "learner": learner_config(
      "running_mean", eps_low=0.3, eps_high=5.0, row_length=32, rows_per_microbatch=4, min_microbatches=4,
      policy_optimizer=OptimizerConfig(learning_rate=1e-3),
    ),
    "engine": EngineConfig(
      num_slots=8, max_len=32, max_action_tokens=20, max_turns=4, chunk_steps=4, token_budget=32,
      env_workers=0, env_timeout_s=None,
    ),
    "checkpoint": CheckpointConfig(every_steps=2),
  }  # fmt: skip
  return RunConfig(**{**base, **changes})


class BusyEnv(TinyEnv):
  """Two turns, each worth the length of the action modulo 3."""

  split: Split = "train"

  def step(self, action: str) -> Step:
    self._turns += 1
    return Step(observation="w", reward=float(len(action) % 3), done=self._turns == 2)


def busy_domain(make: Callable[[], BusyEnv] = BusyEnv) -> Domain:
  def make_env(split: Split) -> BusyEnv:
    env = make()
    env.split = split
    return env

  return dataclasses.replace(tiny_domain(), make_env=make_env)
