"""Any published checkpoint by its path, a Hugging Face directory or a GGUF file: `read_config` and `load`."""

from __future__ import annotations

import dataclasses
import os
import pathlib

from sao_jax.models.checkpoints.gguf import load_gguf, read_gguf_config
from sao_jax.models.checkpoints.huggingface import ShardingOf, load_hf, read_config_file
from sao_jax.models.config import ModelConfig
from sao_jax.types import Params


def is_gguf(path: str | os.PathLike[str]) -> bool:
  """Whether the name is that of a GGUF file; any other checkpoint is a Hugging Face directory."""
  return pathlib.Path(path).suffix == ".gguf"


def read_config(
  path: str | os.PathLike[str], *, dtype: str = "float32", param_dtype: str | None = None
) -> ModelConfig:
  """Reads the architecture of a checkpoint, and none of its weights.

  Args:
    path: a Hugging Face directory or a GGUF file.
    dtype: dtype of activations and matmuls.
    param_dtype: dtype of the parameters. None takes that of `config.json`; for a GGUF file, float32.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: the architecture is not supported; the message names what is not.
  """
  if is_gguf(path):
    return read_gguf_config(path, dtype=dtype, param_dtype=param_dtype or "float32")
  config = read_config_file(pathlib.Path(path) / "config.json")
  return dataclasses.replace(config, dtype=dtype, param_dtype=param_dtype or config.param_dtype)


def load(
  path: str | os.PathLike[str], *, dtype: str, param_dtype: str, sharding: ShardingOf | None = None
) -> tuple[ModelConfig, Params]:
  """Loads a checkpoint; see `load_hf` and `load_gguf`. The parameters of a GGUF file are not sharded."""
  if is_gguf(path):
    return load_gguf(path, dtype=dtype, param_dtype=param_dtype)
  return load_hf(path, dtype=dtype, param_dtype=param_dtype, sharding=sharding)
