"""Rollout engines in the process that makes them."""

from __future__ import annotations

import functools

import jax

from sao_jax import models
from sao_jax.rollout.engine.engine import Engine, RolloutEngine
from sao_jax.rollout.engine_group import EngineGroup
from sao_jax.training.config import RunConfig
from sao_jax.training.evaluation import BothSplits
from sao_jax.training.placement import Placement
from sao_jax.types import Domain


def embedded_engines(config: RunConfig, domain: Domain, placement: Placement) -> RolloutEngine:
  """Makes the engines of `config.rollout_mesh`."""
  if config.rollout_mesh.placement == "colocated":
    return embedded_engine(config, domain, placement)
  engines, devices = [], [mesh.devices.flat[0] for mesh in placement.engine_meshes]
  for index, device in enumerate(devices):
    with jax.default_device(device):
      engines.append(embedded_engine(config, domain, placement, index))
  return EngineGroup(engines, devices)


def embedded_engine(config: RunConfig, domain: Domain, placement: Placement, index: int = 0) -> Engine:
  """Makes engine number `index`."""
  return Engine(
    model=placement.cached_policy(models.cached_policy(config.policy), index),
    make_env=functools.partial(BothSplits, domain),
    tokenizer=domain.tokenizer,
    config=config.engine,
    seed=config.seed,
  )
