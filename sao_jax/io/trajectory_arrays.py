"""Trajectories as a few flat arrays, for checkpoints and bad batches, where JSON would be large.

The per-token arrays of all trajectories are concatenated. Files are in `safetensors` format; nothing is pickled. Files
are untrusted: reading checks every array, dtype, length and value, as `trajectories.py` does for JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from sao_jax import types
from sao_jax.io import workdir as workdir_lib
from sao_jax.io.trajectories import numbers_by_name
from sao_jax.utils import untrusted_files

PER_TOKEN: Mapping[str, Any] = {
  "tokens": np.int32,
  "action_mask": np.bool_,
  "behavior_logp": np.float32,
  "versions": np.int32,
  "rewards": np.float32,
}
_PER_TRAJECTORY: Mapping[str, Any] = {
  "length": np.int64,
  "text_bytes": np.int64,
  "task_index": np.int64,
  "episode_id": np.int64,
  "group_id": np.int64,
  "num_turns": np.int64,
  "success": np.bool_,
  "truncated": np.bool_,
}
_NAMES = frozenset({*PER_TOKEN, *_PER_TRAJECTORY, "text"})
_INFO = "info"
"""The environments' numbers: a JSON array of one object per trajectory, in UTF-8. Files of version 0.3 lack it."""


def to_arrays(trajectories: Sequence[types.Trajectory]) -> dict[str, np.ndarray]:
  """Concatenates trajectories; `from_arrays` restores them bit for bit."""
  texts = [trajectory.text.encode("utf-8") for trajectory in trajectories]
  columns: dict[str, list[Any]] = {
    "length": [len(trajectory.tokens) for trajectory in trajectories],
    "text_bytes": [len(text) for text in texts],
    "truncated": [trajectory.ended == "truncated" for trajectory in trajectories],
  }
  for name in ("task_index", "episode_id", "group_id", "num_turns", "success"):
    columns[name] = [getattr(trajectory, name) for trajectory in trajectories]
  arrays = {name: np.array(columns[name], dtype) for name, dtype in _PER_TRAJECTORY.items()}
  for name, dtype in PER_TOKEN.items():
    arrays[name] = np.concatenate([np.empty(0, dtype), *(getattr(x, name) for x in trajectories)], dtype=dtype)
  arrays["text"] = np.frombuffer(b"".join(texts), np.uint8)
  info = json.dumps([dict(trajectory.info) for trajectory in trajectories], allow_nan=False)
  arrays[_INFO] = np.frombuffer(info.encode("utf-8"), np.uint8)
  return arrays


def from_arrays(arrays: Mapping[str, np.ndarray]) -> list[types.Trajectory]:
  """Checks arrays and converts them to trajectories.

  Raises:
    ValueError: an array is missing, unknown or of the wrong dtype or length, or a trajectory is inconsistent; the
      message names the array or the trajectory's number.
  """
  if missing := sorted(_NAMES - arrays.keys()):
    raise ValueError(f"missing arrays {missing}")
  if unknown := sorted(arrays.keys() - _NAMES - {_INFO}):
    raise ValueError(f"unknown arrays {unknown}")
  count = len(arrays["length"]) if arrays["length"].ndim == 1 else -1
  for name, dtype in _PER_TRAJECTORY.items():
    _check(name, arrays[name], dtype, count)
  for name in ("length", "text_bytes"):
    if (arrays[name] < 0).any():
      raise ValueError(f"array {name!r} must be >= 0; received {int(arrays[name].min())}")
  lengths, text_bytes = (_total(name, arrays[name]) for name in ("length", "text_bytes"))
  for name, dtype in PER_TOKEN.items():
    _check(name, arrays[name], dtype, lengths)
  _check("text", arrays["text"], np.uint8, text_bytes)
  ends, text_ends = np.cumsum(arrays["length"]), np.cumsum(arrays["text_bytes"])
  info = _info(arrays[_INFO], count) if _INFO in arrays else [{}] * count
  made = []
  for i in range(count):
    tokens = slice(int(ends[i] - arrays["length"][i]), int(ends[i]))
    text = slice(int(text_ends[i] - arrays["text_bytes"][i]), int(text_ends[i]))
    try:
      made.append(_one(arrays, i, tokens, text, info[i]))
    except ValueError as error:
      raise ValueError(f"trajectory {i}: {error}") from error
  return made


def save(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
  """Writes named arrays to a safetensors file, which gets its name when it is complete."""
  path = pathlib.Path(path)
  partial = path.with_name(f"{path.name}.partial")
  with workdir_lib.named_errors(partial), open(partial, "wb") as file:
    file.write(safetensors.numpy.save(dict(arrays)))
    file.flush()
    os.fsync(file.fileno())
  partial.replace(path)


def load(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Reads a safetensors file.

  Raises:
    ValueError: it is not a valid safetensors file. Its header is checked against its size before memory is allocated.
  """
  untrusted_files.check_regular(path)
  try:
    return safetensors.numpy.load_file(path)
  except (safetensors.SafetensorError, KeyError, TypeError, struct.error) as error:
    raise ValueError(f"not a valid safetensors file: {path}: {error!r}") from error


def read(path: str | os.PathLike[str]) -> list[types.Trajectory]:
  """Reads the trajectories of a file.

  Raises:
    ValueError: it is not a safetensors file of valid trajectories; the message names the file.
  """
  arrays = load(path)
  try:
    return from_arrays(arrays)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def _info(array: np.ndarray, count: int) -> list[dict[str, float]]:
  if array.ndim != 1:
    raise ValueError(f"array {_INFO!r} must be a uint8 vector; received {array.dtype.name}{list(array.shape)}")
  _check(_INFO, array, np.uint8, len(array))
  try:
    rows = json.loads(array.tobytes())
  except (ValueError, RecursionError) as error:
    raise ValueError(f"array {_INFO!r} must hold JSON: {error}") from error
  if not isinstance(rows, list) or len(rows) != count:
    raise ValueError(f"array {_INFO!r} must hold a JSON array of {count} objects; received {rows!r:.200}")
  return [numbers_by_name(_INFO, row) for row in rows]


def _one(
  arrays: Mapping[str, np.ndarray], i: int, tokens: slice, text: slice, info: Mapping[str, float]
) -> types.Trajectory:
  trajectory = types.Trajectory(
    **{name: arrays[name][tokens].copy() for name in PER_TOKEN},
    ended="truncated" if arrays["truncated"][i] else "terminal",
    task_index=int(arrays["task_index"][i]),
    episode_id=int(arrays["episode_id"][i]),
    group_id=int(arrays["group_id"][i]),
    num_turns=int(arrays["num_turns"][i]),
    success=bool(arrays["success"][i]),
    text=arrays["text"][text].tobytes().decode("utf-8"),
    info=info,
  )
  if (trajectory.tokens < 0).any():
    raise ValueError(f"tokens must be >= 0; received {int(trajectory.tokens.min())}")
  others = ~trajectory.action_mask
  if not np.isnan(trajectory.behavior_logp[others]).all() or (trajectory.versions[others] != -1).any():
    raise ValueError("behavior_logp must be NaN, and versions -1, where action_mask is False")
  if not 1 <= trajectory.num_turns <= trajectory.num_actions:
    raise ValueError(f"num_turns must be in [1, {trajectory.num_actions}]; received {trajectory.num_turns}")
  return trajectory


def _check(name: str, array: np.ndarray, dtype: Any, length: int) -> None:
  if array.dtype != dtype or array.shape != (length,):
    wanted = f"{np.dtype(dtype).name}[{length}]" if length >= 0 else f"a {np.dtype(dtype).name} vector"
    raise ValueError(f"array {name!r} must be {wanted}; received {array.dtype.name}{list(array.shape)}")
  # NumPy keeps a file's bytes as they are: a "True" of 7 would count as 7 in a sum.
  if array.dtype == np.bool_ and (array.view(np.uint8) > 1).any():
    raise ValueError(f"array {name!r} must hold 0 and 1; received {int(array.view(np.uint8).max())}")


def _total(name: str, sizes: np.ndarray) -> int:
  """Returns the sum as a Python integer, which untrusted sizes cannot overflow."""
  return sum(int(size) for size in sizes)
