"""Trajectories as JSON Lines: readable samples, and complete episodes that can be read back.

A row holds the fields of `types.Trajectory` and `step`, the learner step that used it (0: none). Per-token arrays are
lists of equal length; `behavior_logp` is null for tokens that are not actions. Files are untrusted: reading checks
every key, type and range and the consistency of the arrays, and error messages name the line and the key.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from sao_jax import types
from sao_jax.io import jsonl

_INTEGERS = ("task_index", "episode_id", "group_id", "num_turns")
_KEYS = frozenset(field.name for field in dataclasses.fields(types.Trajectory)) | {"step"}
_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT_MAX = 1.7976931348623157e308


def to_json(trajectory: types.Trajectory, *, step: int = 0) -> dict[str, Any]:
  """Converts a trajectory to a JSON object, from which `from_json` restores it bit for bit."""
  mask = trajectory.action_mask
  logps = trajectory.behavior_logp.tolist()
  return {
    "step": step,
    "episode_id": trajectory.episode_id,
    "task_index": trajectory.task_index,
    "group_id": trajectory.group_id,
    "success": trajectory.success,
    "ended": trajectory.ended,
    "num_turns": trajectory.num_turns,
    "text": trajectory.text,
    "tokens": trajectory.tokens.tolist(),
    "action_mask": mask.astype(np.int32).tolist(),
    "behavior_logp": [logp if action else None for logp, action in zip(logps, mask, strict=True)],
    "versions": trajectory.versions.tolist(),
    "rewards": trajectory.rewards.tolist(),
    "info": dict(trajectory.info),
  }


def from_json(row: Mapping[str, Any]) -> types.Trajectory:
  """Checks a JSON object and converts it to a trajectory.

  Raises:
    ValueError: a key is missing, unknown, of the wrong type or out of range, or the arrays are inconsistent.
  """
  if missing := sorted(_KEYS - {"info"} - row.keys()):  # files of version 0.3 have no info
    raise ValueError(f"missing keys {missing}")
  if unknown := sorted(row.keys() - _KEYS):
    raise ValueError(f"unknown keys {unknown[:5]}, {len(unknown)} in all")
  for key in (*_INTEGERS, "step"):
    _integer(key, row[key], -(2**63), 2**63 - 1)
  for key, kind in (("success", bool), ("ended", str), ("text", str)):
    if not isinstance(row[key], kind):
      raise ValueError(f"key {key!r} must be a {kind.__name__}; received {row[key]!r:.200}")
  if any("\ud800" <= character <= "\udfff" for character in row["text"]):
    raise ValueError("key 'text' must be valid Unicode, without lone surrogates")
  trajectory = types.Trajectory(
    tokens=_integers("tokens", row["tokens"], 0, 2**31 - 1),
    action_mask=_integers("action_mask", row["action_mask"], 0, 1).astype(np.bool_),
    behavior_logp=_floats("behavior_logp", row["behavior_logp"], null=math.nan),
    versions=_integers("versions", row["versions"], -1, 2**31 - 1),
    rewards=_floats("rewards", row["rewards"], null=None),
    ended=row["ended"],
    task_index=row["task_index"],
    episode_id=row["episode_id"],
    group_id=row["group_id"],
    num_turns=row["num_turns"],
    success=row["success"],
    text=row["text"],
    info=numbers_by_name("info", row.get("info", {})),
  )
  others = ~trajectory.action_mask
  if not np.isnan(trajectory.behavior_logp[others]).all():
    raise ValueError("key 'behavior_logp' must be null where 'action_mask' is 0")
  if (trajectory.versions[others] != -1).any():
    raise ValueError("key 'versions' must be -1 where 'action_mask' is 0")
  _integer("num_turns", trajectory.num_turns, 1, trajectory.num_actions)
  return trajectory


def numbers_by_name(key: str, value: Any) -> dict[str, float]:
  """Checks a JSON object of finite numbers.

  Raises:
    ValueError: it is something else; the message names `key`.
  """
  if not isinstance(value, dict):
    raise ValueError(f"key {key!r} must be an object; received {value!r:.200}")
  for name, number in value.items():
    if type(number) not in (int, float) or not abs(number) <= _FLOAT_MAX:
      raise ValueError(f"key {key!r}: {name!r:.200} must be a finite number; received {number!r:.200}")
  return {name: float(number) for name, number in value.items()}


class TrajectoryWriter:
  """Appends samples to `<workdir>/trajectories.jsonl`. On resume, drops those of later steps first."""

  def __init__(self, workdir: str | os.PathLike[str], *, restored_step: int = 0) -> None:
    path = pathlib.Path(workdir) / "trajectories.jsonl"
    jsonl.cut_after_step(path, restored_step)
    self._file = jsonl.JsonlFile(path)

  def write(self, step: int, trajectories: Iterable[types.Trajectory]) -> None:
    """Writes one line per trajectory of learner step `step`."""
    for trajectory in trajectories:
      self._file.append(to_json(trajectory, step=step))

  def close(self) -> None:
    self._file.close()


def write(path: str | os.PathLike[str], trajectories: Iterable[types.Trajectory], *, step: int = 0) -> None:
  """Appends trajectories to a file, one line each."""
  file = jsonl.JsonlFile(path)
  try:
    for trajectory in trajectories:
      file.append(to_json(trajectory, step=step))
  finally:
    file.close()


def read_samples(path: str | os.PathLike[str]) -> Iterator[tuple[int, types.Trajectory]]:
  """Yields `(step, trajectory)` of each line.

  Raises:
    ValueError: a line is not a valid trajectory; the message holds path, line number and key.
  """
  for number, row in jsonl.read_rows(path):
    try:
      trajectory = from_json(row)
    except ValueError as error:
      raise ValueError(f"{path}:{number}: {error}") from error
    yield row["step"], trajectory


def read(path: str | os.PathLike[str]) -> list[types.Trajectory]:
  """Reads all trajectories of a file; see `read_samples`."""
  return [trajectory for _, trajectory in read_samples(path)]


def _integer(key: str, value: Any, low: int, high: int) -> int:
  if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
    raise ValueError(f"key {key!r} must be an integer in [{low}, {high}]; received {value!r:.200}")
  return value


def _list(key: str, values: Any) -> list[Any]:
  if not isinstance(values, list):
    raise ValueError(f"key {key!r} must be a list; received {type(values).__name__}")
  return values


def _integers(key: str, values: Any, low: int, high: int) -> np.ndarray:
  for index, value in enumerate(_list(key, values)):
    _integer(f"{key}[{index}]", value, low, high)
  return np.asarray(values, np.int32)


def _floats(key: str, values: Any, *, null: float | None) -> np.ndarray:
  numbers = []
  for index, value in enumerate(_list(key, values)):
    if value is None and null is not None:
      value = null
    elif isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _FLOAT32_MAX:
      raise ValueError(f"key '{key}[{index}]' must be a float32 number; received {value!r:.200}")
    numbers.append(value)
  return np.asarray(numbers, np.float32)
