"""The safetensors files of a checkpoint: a single file, or the shards that an index names."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping

import numpy as np
import safetensors.numpy

from sao_jax.utils import untrusted_files

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")


def shard_name(number: int, count: int) -> str:
  """Returns the name of shard `number` (from 1) of `count`.

  >>> shard_name(1, 1), shard_name(2, 12)
  ('model.safetensors', 'model-00002-of-00012.safetensors')
  """
  return SINGLE_FILE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def save(tensors: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
  """Writes a safetensors file that all users can read, such as a server's."""
  safetensors.numpy.save_file(dict(tensors), path, metadata={"format": "pt"})
  path.chmod(0o644)  # The library writes for its owner alone.


def weight_files(folder: pathlib.Path) -> list[str]:
  """Lists the files in `folder` that are named like weights of a checkpoint, including left-over ones."""
  return sorted(path.name for path in folder.iterdir() if _WEIGHTS.fullmatch(path.name))


def find(folder: pathlib.Path) -> tuple[list[str], Mapping[str, str]]:
  """Finds the files of a checkpoint.

  Weights of two saves in one folder are an error, since nothing tells which of them to load.

  Returns:
    The names of the files, and the file of each tensor (empty without an index).

  Raises:
    FileNotFoundError: the folder holds no weights.
    ValueError: the index is invalid, names a missing file, or leaves out weights that are in the folder.
  """
  present = weight_files(folder)
  if (folder / INDEX_FILE).exists():
    weight_map = _read_index(folder / INDEX_FILE)
    named, source = sorted(set(weight_map.values())), INDEX_FILE
  elif not present:
    raise FileNotFoundError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}.")
  else:
    weight_map, named, source = {}, [SINGLE_FILE], "a checkpoint without an index"
  if missing := [name for name in named if not (folder / name).exists()]:
    raise ValueError(f"{folder}: {source} needs files that are not there: {_some(missing)}; found {present[:5]}.")
  if others := sorted(set(present) - set(named)):
    raise ValueError(
      f"{folder}: weights of two saves are there: {source} needs {_some(named)}, but the folder also holds "
      f"{_some(others)}. Remove the files that do not belong to the checkpoint."
    )
  return named, weight_map


def _some(names: list[str]) -> str:
  return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_index(path: pathlib.Path) -> Mapping[str, str]:
  """Reads the file name of each tensor. All files must be beside the index."""
  weight_map = untrusted_files.read_object(path).get("weight_map")
  if not isinstance(weight_map, dict):
    raise ValueError(f"{path}: 'weight_map' must be an object; received {type(weight_map).__name__}.")
  for name, file in weight_map.items():
    if not isinstance(file, str) or pathlib.PurePath(file).name != file or not file.endswith(".safetensors"):
      raise ValueError(f"{path}: tensor {name!r} must name a .safetensors file of the same folder; received {file!r}.")
  return weight_map
