"""Trajectories as arrays: exact round trips; hostile arrays and files are refused by name."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.io import trajectory_arrays
from tests.io.trajectories_test import assert_same, make


def some():
  return [make(), make(actions=(False, True), ended="truncated", success=False, text="", episode_id=2**40)]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_round_trip_through_a_file_is_exact(tmp_path, count):
  path = tmp_path / "t.safetensors"
  trajectory_arrays.save(path, trajectory_arrays.to_arrays(some()[:count]))
  assert [x.name for x in tmp_path.iterdir()] == ["t.safetensors"]
  again = trajectory_arrays.from_arrays(trajectory_arrays.load(path))
  assert len(again) == count
  for a, b in zip(again, some(), strict=False):
    assert_same(a, b)


def changed(name, change):
  arrays = trajectory_arrays.to_arrays(some())
  arrays[name] = change(arrays[name].copy())
  return arrays


def put(index, value):
  def change(array):
    array[index] = value
    return array

  return change


@pytest.mark.parametrize(
  ("name", "change", "message"),
  [
    ("tokens", lambda x: x[:-1], r"array 'tokens' must be int32\[6\]; received int32\[5\]"),
    ("tokens", lambda x: x.astype(np.int64), r"received int64\[6\]"),
    ("tokens", lambda x: x[:, None], r"received int32\[6, 1\]"),
    ("tokens", put(0, -1), "trajectory 0: tokens must be >= 0"),
    ("action_mask", put(0, True), "trajectory 0: .*must have a prompt"),
    ("action_mask", put(1, False), "trajectory 0: "),
    ("behavior_logp", put(5, np.nan), "trajectory 1: .*needs a finite log-prob"),
    ("behavior_logp", put(1, 0.5), "1 are positive"),
    ("behavior_logp", put(0, -1.0), "behavior_logp must be NaN"),
    ("versions", put(1, -1), "needs the policy version"),
    ("rewards", put(1, np.inf), "rewards must be finite"),
    ("length", put(0, 5), r"array 'tokens' must be int32\[7\]"),
    ("length", put(0, -1), "array 'length' must be >= 0"),
    ("length", put(slice(None), 2**62), "array 'tokens' must be int32"),
    ("length", lambda x: x[None], "array 'length' must be a int64 vector"),
    ("success", lambda x: x.astype(np.int8), r"array 'success' must be bool\[2\]; received int8\[2\]"),
    ("num_turns", put(0, 3), "trajectory 0: num_turns must be in .1, 2.; received 3"),
    ("text", lambda x: np.full_like(x, 0xFF), "trajectory 0: .*utf-8"),
    (
      "action_mask",
      lambda x: (x * np.uint8(7)).view(np.bool_),
      "array 'action_mask' must hold 0 and 1; received 7",
    ),
    ("text_bytes", put(1, 1), "array 'text' must be uint8"),
  ],
)
def test_wrong_arrays_are_refused_by_name(name, change, message):
  with pytest.raises(ValueError, match=message):
    trajectory_arrays.from_arrays(changed(name, change))


def test_missing_and_unknown_arrays_are_listed():
  arrays = trajectory_arrays.to_arrays(some())
  del arrays["versions"]
  with pytest.raises(ValueError, match=r"missing arrays \['versions'\]"):
    trajectory_arrays.from_arrays(arrays)
  with pytest.raises(ValueError, match=r"unknown arrays \['more'\]"):
    trajectory_arrays.from_arrays(trajectory_arrays.to_arrays(some()) | {"more": np.zeros(1)})


def header(value) -> bytes:
  text = value if isinstance(value, bytes) else json.dumps(value).encode()
  return struct.pack("<Q", len(text)) + text


HUGE = {"tokens": {"dtype": "I32", "shape": [2**40], "data_offsets": [0, 2**42]}}
OVERLAP = {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in ("a", "b")}
TWICE = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
  "content",
  [
    b"", b"\x00" * 7, struct.pack("<Q", 2**63), struct.pack("<Q", 2**33) + b"{}", header(b"\xff\xfe"), header(b"[]"),
    header(b"[" * 100_000), header(HUGE), header(OVERLAP) + b"1234",
    header({"a": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}) + b"12",
    header({"a": {"dtype": "O", "shape": [1], "data_offsets": [0, 4]}}) + b"1234",
    header({"a": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 3]}}) + b"123",
    header({"a": {"dtype": "I32", "shape": [-1], "data_offsets": [0, 4]}}) + b"1234",
    header({"a": {"dtype": "I32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}) + b"1234",
    b"\x80\x04\x95",
  ],
)  # fmt: skip
def test_hostile_files_are_refused_by_path(tmp_path, content):
  path = tmp_path / "h.safetensors"
  path.write_bytes(content)
  with pytest.raises(ValueError, match=r"not a valid safetensors file: .*h\.safetensors"):
    trajectory_arrays.load(path)


def test_a_name_that_is_there_twice_gives_no_wrong_trajectory(tmp_path):
  path = tmp_path / "h.safetensors"
  path.write_bytes(header(TWICE) + b"1234")
  with pytest.raises(ValueError, match=r"not a valid safetensors file|missing arrays"):
    trajectory_arrays.from_arrays(trajectory_arrays.load(path))


@given(st.data())
def test_any_damage_is_refused_or_harmless(tmp_path_factory, data):
  """Whatever bytes change, what is read is a list of valid trajectories or a ValueError."""
  path = tmp_path_factory.mktemp("fuzz") / "t.safetensors"
  trajectory_arrays.save(path, trajectory_arrays.to_arrays(some()))
  content = bytearray(path.read_bytes())
  for _ in range(data.draw(st.integers(1, 3))):
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
  path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
  try:
    read = trajectory_arrays.from_arrays(trajectory_arrays.load(path))
  except ValueError:
    return
  for trajectory in read:
    assert np.isfinite(trajectory.behavior_logp[trajectory.action_mask]).all()
