"""Device meshes: axes, sharding rules, constraints, copies, and runs of several processes (`distributed`)."""

from __future__ import annotations

from sao_jax.parallel import rules
from sao_jax.parallel.axes import AXES
from sao_jax.parallel.cached_policy import cached_on_mesh
from sao_jax.parallel.mesh import (
  EngineMeshConfig,
  MeshConfig,
  RolloutMeshConfig,
  make_mesh,
  parse_engine_mesh,
  parse_mesh,
)
from sao_jax.parallel.rules import Rule, batch_shardings, cache_shardings, replicated, shardings_for
from sao_jax.parallel.step import constrain_params, jit_step, on_mesh, place, place_batch

__all__ = [
  "AXES",
  "EngineMeshConfig",
  "MeshConfig",
  "RolloutMeshConfig",
  "Rule",
  "batch_shardings",
  "cache_shardings",
  "cached_on_mesh",
  "constrain_params",
  "jit_step",
  "make_mesh",
  "on_mesh",
  "parse_engine_mesh",
  "parse_mesh",
  "place",
  "place_batch",
  "replicated",
  "rules",
  "shardings_for",
]
