"""The policy that a run starts from: a published checkpoint, or the policy of another run.

A path names a Hugging Face directory, a GGUF file, the workdir of a run (its newest checkpoint), or one checkpoint of a
run (`WORKDIR/checkpoints/STEP`).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax

from sao_jax import models
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.models import lora
from sao_jax.models.checkpoints import files
from sao_jax.models.config import ModelConfig
from sao_jax.training.placement import Placement
from sao_jax.types import Params
from sao_jax.utils import untrusted_files

Use: TypeAlias = Literal["policy", "critic", "adapters"]
HOW = ("dtype", "param_dtype", "remat", "moe_impl", "attention_impl", "init_std")
"""Fields of `ModelConfig` that choose how a model is computed and stored. The checkpoint decides the others."""


class _Run(NamedTuple):
  """A run's workdir, the config that it recorded, and a step (None: the newest)."""

  workdir: pathlib.Path
  config: Mapping[str, Any]
  step: int | None


def read_config(path: str | os.PathLike[str], *, dtype: str, param_dtype: str) -> ModelConfig:
  """Reads the architecture behind a path, and no weights.

  Raises:
    FileNotFoundError: there is no such file or directory.
    ValueError: the architecture is not supported; the message names what is not.
  """
  run = _run(path)
  if run is None:
    file = pathlib.Path(path)
    if not (file.is_file() or (file / "config.json").is_file()):
      what = f"{os.fspath(path)!r} holds no config.json" if file.is_dir() else f"there is no {os.fspath(path)!r}"
      raise FileNotFoundError(
        f"the checkpoint must be a Hugging Face directory, a GGUF file or the workdir of a run; {what}."
      )
    return models.read_config(path, dtype=dtype, param_dtype=param_dtype)
  return dataclasses.replace(_recorded_model(run), dtype=dtype, param_dtype=param_dtype)


def check(path: str | os.PathLike[str], wanted: ModelConfig, *, pinned: bool = False) -> None:
  """Checks that a config describes the model behind a path, before any weight is read.

  Args:
    path: the policy's starting point.
    wanted: the config.
    pinned: refuse the newest checkpoint of a run, which another run may replace.

  Raises:
    ValueError: it describes another model; the message lists the fields that differ.
  """
  run = _run(path)
  if pinned and run is not None and run.step is None:
    raise ValueError(
      "policy_checkpoint must name one checkpoint of the run, WORKDIR/checkpoints/STEP, with lora.rank: its newest one "
      f"may change; received {os.fspath(path)!r}."
    )
  found = read_config(path, dtype=wanted.dtype, param_dtype=wanted.param_dtype)
  different = [
    f"{field.name} is {getattr(wanted, field.name)!r} here and {getattr(found, field.name)!r} there"
    for field in dataclasses.fields(wanted)
    if field.compare and field.name not in HOW and getattr(wanted, field.name) != getattr(found, field.name)
  ]
  if different:
    raise ValueError(
      f"policy must be that of policy_checkpoint, {os.fspath(path)!r}: {'; '.join(different)}. "
      "`training.defaults.config_for` (the preset `chat`) takes it from the checkpoint."
    )


def key(seed: int, use: Use) -> jax.Array:
  """Returns a PRNG key derived from a run's seed and the use of it."""
  return jax.random.fold_in(jax.random.key(seed), get_args(Use).index(use))


def initial(path: str | os.PathLike[str] | None, config: ModelConfig, seed: int, placement: Placement) -> Params:
  """Returns the parameters that a run's policy starts from.

  Args:
    path: its `policy_checkpoint`; None: fresh parameters.
    config: the model.
    seed: of fresh parameters.
    placement: of the parameters.

  Raises:
    ValueError: a tensor of the checkpoint is missing or not supported.
  """
  if path is None:
    return placement.make(functools.partial(models.init_policy, config), key(seed, "policy"))
  return load(path, config, placement)


def load(path: str | os.PathLike[str], config: ModelConfig, placement: Placement) -> Params:
  """Loads the parameters behind a path, with the dtype of `config`, onto the learner's mesh.

  Raises:
    ValueError: a tensor is missing or not supported, or the run holds no checkpoint.
    CheckpointError: the checkpoint of the run is damaged, or of another model.
  """
  run = _run(path)
  if run is None:
    _, params = files.load(
      path, dtype=config.dtype, param_dtype=config.param_dtype, sharding=placement.parameter
    )
    return placement.put(params) if files.is_gguf(path) else params
  stored = _recorded_model(run)
  adapters = lora.LoraConfig(**run.config.get("lora", {}))
  make = functools.partial(lora.init_trained, stored, adapters)
  _, params = restore_policy(run.workdir, placement.shapes(make, jax.random.key(0)), step=run.step)
  if adapters.enabled:
    base = initial(run.config["policy_checkpoint"], stored, run.config["seed"], placement)
    params = placement.make(functools.partial(lora.merge_all, adapters), base, params)
  if stored.param_dtype == config.param_dtype:
    return params
  return placement.make(lambda tree: jax.tree.map(lambda x: x.astype(config.param_dtype), tree), params)


def restore_policy(workdir: str | os.PathLike[str], shapes: Params, *, step: int | None = None) -> tuple[int, Params]:
  """Restores the policy from a run's checkpoint, and nothing else; the adapters, if it has adapters.

  Args:
    workdir: the run's folder.
    shapes: shapes, dtypes and shardings of what the policy trains.
    step: of the checkpoint; None: the newest.

  Returns:
    `(step, parameters)`.

  Raises:
    ValueError: the workdir holds no checkpoint.
    CheckpointError: the checkpoint is missing, damaged, or of another model.
  """
  with Checkpointer(workdir, config={}, read_only=True) as checkpointer:
    restored = checkpointer.restore({"learner": {"policy": shapes}}, step=step, whole=False)
  if restored is None:
    raise ValueError(f"{os.fspath(workdir)} holds no checkpoint.")
  return restored.step, restored.state["learner"]["policy"]


def tokenizer_source(path: str | os.PathLike[str]) -> str | None:
  """Returns the published checkpoint that a path's tokenizer and chat template come from; None if there is none.

  For a run, that is the `checkpoint` of its task's options, or else what its policy started from.
  """
  run = _run(path)
  if run is None:
    return os.fspath(path)
  source = run.config["env"]["options"].get("checkpoint") or run.config["policy_checkpoint"]
  return None if source is None else tokenizer_source(source)


def _run(path: str | os.PathLike[str]) -> _Run | None:
  """Returns the run that a path names; None if it names a published checkpoint."""
  folder, step = pathlib.Path(path), None
  if folder.parent.name == "checkpoints" and folder.name.isdecimal():
    folder, step = folder.parent.parent, int(folder.name)
  file = folder / "config.json"
  if not file.is_file():
    return None
  config = untrusted_files.read_object(file)
  return _Run(folder, config, step) if {"policy", "learner"} <= config.keys() else None


def _recorded_model(run: _Run) -> ModelConfig:
  """Returns the `ModelConfig` that a run recorded as JSON."""
  values = dict(run.config["policy"])
  for field in dataclasses.fields(ModelConfig):
    value = values.get(field.name)
    if isinstance(value, dict):
      kind: Any = type(field.default)
      values[field.name] = kind(**value)
    elif isinstance(value, list):
      values[field.name] = tuple(value)
  return ModelConfig(**values)
