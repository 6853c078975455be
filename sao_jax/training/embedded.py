"""Rollout engines in the process that makes them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax

from sao_jax import models
from sao_jax.rollout.engine.engine import Engine, RolloutEngine
from sao_jax.rollout.engine_group import EngineGroup
from sao_jax.training.config import RunConfig
from sao_jax.training.evaluation import BothSplits
from sao_jax.training.placement import Placement
from sao_jax.types import Domain


def num_tokens(config: RunConfig, domain: Domain) -> int | None:
  """Returns the number of ids that the policy can sample: the tokenizer's, where the model has padding beyond them.

  None where nothing is excluded. A server samples from its whole vocabulary, and so the learner scores all of it, too.
  """
  size = domain.tokenizer.vocab_size
  return size if size < config.policy.vocab_size and config.remote.url is None else None


def embedded_engines(
  config: RunConfig, domain: Domain, placement: Placement, prompts: Sequence[str] = ()
) -> RolloutEngine:
  """Makes the engines of `config.rollout_mesh`.

  Args:
    config: the run.
    domain: the task.
    placement: the meshes of the run.
    prompts: further tasks, see `evaluation.BothSplits`.
  """
  if config.rollout_mesh.placement == "colocated":
    return embedded_engine(config, domain, placement, prompts)
  engines, devices = [], [mesh.devices.flat[0] for mesh in placement.engine_meshes]
  for index, device in enumerate(devices):
    with jax.default_device(device):
      engines.append(embedded_engine(config, domain, placement, prompts, index))
  return EngineGroup(engines, devices)


def embedded_engine(
  config: RunConfig, domain: Domain, placement: Placement, prompts: Sequence[str] = (), index: int = 0
) -> Engine:
  """Makes engine number `index`."""
  return Engine(
    model=placement.cached_policy(models.cached_policy(config.policy, num_tokens=num_tokens(config, domain)), index),
    make_env=functools.partial(BothSplits, domain, prompts),
    tokenizer=domain.tokenizer,
    config=config.engine,
    seed=config.seed,
  )
