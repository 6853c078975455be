"""Old module paths: they import the module at its new path, with a `DeprecationWarning`, until version 0.4."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Mapping, Sequence

MOVED: Mapping[str, str] = {
  "sao_jax.axes": "sao_jax.parallel.axes",
  "sao_jax.components": "sao_jax.training.components",
  "sao_jax.config": "sao_jax.training.config",
  "sao_jax.envs._math_worker": "sao_jax.envs.grading._math_worker",
  "sao_jax.envs.code_judge": "sao_jax.envs.coding.judge",
  "sao_jax.envs.coding_tasks": "sao_jax.envs.coding.tasks",
  "sao_jax.envs.demonstrations": "sao_jax.envs.tool_math.demonstrations",
  "sao_jax.envs.expressions": "sao_jax.envs.tool_math.expressions",
  "sao_jax.envs.gymnasium_env": "sao_jax.envs.adapters.gymnasium",
  "sao_jax.envs.math_grading": "sao_jax.envs.grading.math_grading",
  "sao_jax.envs.problems": "sao_jax.envs.tool_math.problems",
  "sao_jax.envs.reasoning_gym_env": "sao_jax.envs.adapters.reasoning_gym",
  "sao_jax.envs.swe_bench": "sao_jax.envs.coding.swe_bench",
  "sao_jax.envs.text_game": "sao_jax.envs.adapters.text_game",
  "sao_jax.envs.textarena_env": "sao_jax.envs.adapters.textarena",
  "sao_jax.envs.textworld_env": "sao_jax.envs.adapters.textworld",
  "sao_jax.envs.tool_math_config": "sao_jax.envs.tool_math.config",
  "sao_jax.envs.tools": "sao_jax.envs.sandbox",
  "sao_jax.envs.verifiers_env": "sao_jax.envs.adapters.verifiers",
  "sao_jax.evaluation": "sao_jax.training.evaluation",
  "sao_jax.foreign": "sao_jax.utils.untrusted_files",
  "sao_jax.loop": "sao_jax.training.loop",
  "sao_jax.models.checkpoint": "sao_jax.models.checkpoints.huggingface",
  "sao_jax.models.gguf_checkpoint": "sao_jax.models.checkpoints.gguf",
  "sao_jax.models.hf_config": "sao_jax.models.checkpoints.hf_config",
  "sao_jax.placement": "sao_jax.training.placement",
  "sao_jax.rollout.cluster": "sao_jax.rollout.ray.cluster",
  "sao_jax.rollout.cluster_config": "sao_jax.rollout.ray.config",
  "sao_jax.rollout.completions": "sao_jax.rollout.server.completions",
  "sao_jax.rollout.config": "sao_jax.rollout.engine.config",
  "sao_jax.rollout.protocols": "sao_jax.rollout.remote.protocols",
  "sao_jax.rollout.queue": "sao_jax.rollout.trajectory_queue",
  "sao_jax.rollout.remote_config": "sao_jax.rollout.remote.config",
  "sao_jax.rollout.sampler": "sao_jax.rollout.engine.sampling",
  "sao_jax.rollout.server_client": "sao_jax.rollout.remote.client",
  "sao_jax.rollout.server_config": "sao_jax.rollout.server.config",
  "sao_jax.rollout.sources": "sao_jax.rollout.schedules",
  "sao_jax.rollout.weights": "sao_jax.rollout.weight_sync",
  "sao_jax.sharding": "sao_jax.parallel",
  "sao_jax.stages": "sao_jax.training.stages",
}
"""New path by old path; a package stands for its modules, too."""


def new_path(name: str) -> str | None:
  """The present path of a module that has moved; None for any other name.

  >>> new_path("sao_jax.sharding.mesh"), new_path("sao_jax.ops")
  ('sao_jax.parallel.mesh', None)
  """
  parts = name.split(".")
  for length in range(len(parts), 0, -1):
    if (moved := MOVED.get(".".join(parts[:length]))) is not None:
      return ".".join([moved, *parts[length:]])
  return None


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
  """Imports a module that has moved as the same object as the module at the new path."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    if not fullname.startswith("sao_jax.") or new_path(fullname) is None:
      return None
    return importlib.machinery.ModuleSpec(fullname, self)

  def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
    name = new_path(spec.name)
    assert name is not None, "checked by find_spec"
    message = f"{spec.name} has moved to {name}; the old path works until version 0.4."
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    module = importlib.import_module(name)
    spec.loader_state = module.__spec__
    return module

  def exec_module(self, module: types.ModuleType) -> None:
    """The module has run already; only the spec that the import system has just replaced is put back."""
    assert module.__spec__ is not None
    module.__spec__ = module.__spec__.loader_state


def install() -> None:
  """Makes old paths importable."""
  if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())
