"""Trajectories as JSON lines: exact round trips, and every kind of wrong input refused by line and key."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax import types
from sao_jax.io import jsonl, trajectories


def make(actions=(False, True, True, False), **changes) -> types.Trajectory:
  mask = np.asarray(actions, np.bool_)
  fields = {
    "tokens": np.arange(len(mask), dtype=np.int32),
    "action_mask": mask,
    "behavior_logp": np.where(mask, -0.1, math.nan).astype(np.float32),
    "versions": np.where(mask, 3, -1).astype(np.int32),
    "rewards": np.where(mask, 0.3, 0.0).astype(np.float32),
    "ended": "terminal",
    "task_index": 5,
    "episode_id": 8,
    "group_id": 8,
    "num_turns": 1,
    "success": True,
    "text": "Frage: 1 + 1 = ?\n\u2192 \u201e2\u201c",
  }
  return types.Trajectory(**fields | changes)


def assert_same(a: types.Trajectory, b: types.Trajectory) -> None:
  for name in vars(a):
    x, y = getattr(a, name), getattr(b, name)
    if isinstance(x, np.ndarray):
      assert x.dtype == y.dtype, name
      np.testing.assert_array_equal(x, y, err_msg=name)
    else:
      assert type(x) is type(y) and x == y, name


@given(
  st.lists(st.floats(-(2.0**100), 0, width=32), min_size=1, max_size=8),
  st.floats(width=32, allow_nan=False, allow_infinity=False),
  st.text(),
)
def test_round_trip_is_exact(logps, reward, text):
  mask = np.asarray([False] + [True] * len(logps))
  rewards = np.zeros(len(mask), np.float32)
  rewards[-1] = reward
  logp = np.asarray([math.nan, *logps], np.float32)
  trajectory = make(mask, behavior_logp=logp, rewards=rewards, text=text, ended="truncated", success=False)
  line = json.dumps(trajectories.to_json(trajectory), allow_nan=False)
  assert_same(trajectories.from_json(json.loads(line)), trajectory)


def test_files_append_and_read_back(tmp_path):
  path = tmp_path / "some.jsonl"
  trajectories.write(path, [make(), make((False, True))])
  trajectories.write(path, [make(episode_id=9)], step=4)
  read = trajectories.read(path)
  assert [t.episode_id for t in read] == [8, 8, 9]
  assert_same(read[1], make((False, True)))
  assert [step for step, _ in trajectories.read_samples(path)] == [0, 0, 4]
  assert len(path.read_text().splitlines()) == 3


def test_resume_drops_samples_of_later_steps(tmp_path):
  writer = trajectories.TrajectoryWriter(tmp_path)
  for step in (1, 2, 3):
    writer.write(step, [make(episode_id=step)])
  writer.close()
  writer = trajectories.TrajectoryWriter(tmp_path, restored_step=2)
  writer.write(3, [make(episode_id=30)])
  writer.close()
  assert [t.episode_id for t in trajectories.read(tmp_path / "trajectories.jsonl")] == [1, 2, 30]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"tokens": None}, "key 'tokens' must be a list; received NoneType"),
    ({"tokens": [0, 1.5, 2, 3]}, r"key 'tokens\[1\]' must be an integer in \[0, 2147483647\]; received 1.5"),
    ({"tokens": [0, 1, 2, 2**31]}, r"key 'tokens\[3\]'"),
    ({"tokens": [0, -1, 2, 3]}, r"key 'tokens\[1\]'"),
    ({"tokens": [0, True, 2, 3]}, r"key 'tokens\[1\]'"),
    ({"tokens": [0, 1, 2]}, "action_mask must be"),
    ({"action_mask": [0, 2, 1, 0]}, r"key 'action_mask\[1\]'"),
    ({"action_mask": [0, 0, 0, 0]}, "at least one action token"),
    ({"behavior_logp": [None, -0.1, None, None]}, "needs a finite log-prob"),
    ({"behavior_logp": [None, -0.1, 0.2, None]}, "1 are positive"),
    ({"behavior_logp": [-1.0, -0.1, -0.1, None]}, "'behavior_logp' must be null where"),
    ({"behavior_logp": [None, "x", -0.1, None]}, r"key 'behavior_logp\[1\]' must be a float32 number; received 'x'"),
    ({"behavior_logp": [None, -1e300, -0.1, None]}, r"key 'behavior_logp\[1\]'"),
    ({"behavior_logp": [None, -(10**400), -0.1, None]}, r"key 'behavior_logp\[1\]'"),
    ({"versions": [-1, 3, -1, -1]}, "needs the policy version"),
    ({"versions": [0, 3, 3, -1]}, "'versions' must be -1 where"),
    ({"rewards": [0, 0, None, 0]}, r"key 'rewards\[2\]'"),
    ({"rewards": [1, 0, 0, 0]}, "0 except on action tokens"),
    ({"ended": "ran away"}, "ended must be 'terminal' or 'truncated'"),
    ({"ended": 1}, "key 'ended' must be a str"),
    ({"success": 1}, "key 'success' must be a bool"),
    ({"episode_id": "8"}, "key 'episode_id' must be an integer"),
    ({"text": "\ud800"}, "key 'text' must be valid Unicode"),
    ({"success": "x" * 10_000}, "key 'success' must be a bool; received 'x{199}$"),
    ({"surprise": 1}, r"unknown keys \['surprise'\]"),
  ],
)
def test_bad_rows_name_line_and_key(tmp_path, change, message):
  path = tmp_path / "t.jsonl"
  trajectories.write(path, [make()])
  with open(path, "a") as file:
    file.write(json.dumps(trajectories.to_json(make()) | change) + "\n")
  with pytest.raises(ValueError, match=rf"t\.jsonl:2: .*{message}"):
    trajectories.read(path)


def test_many_keys_of_which_one_is_twice_are_read_in_linear_time(tmp_path):
  keys = b",".join(b'"k%d":0' % i for i in range(100_000))
  (tmp_path / "t.jsonl").write_bytes(b"{" + keys + b',"k99999":1}\n')
  with pytest.raises(ValueError, match="key 'k99999' occurs twice"):
    trajectories.read(tmp_path / "t.jsonl")


def test_missing_keys_are_listed():
  row = trajectories.to_json(make())
  del row["versions"], row["step"]
  with pytest.raises(ValueError, match=r"missing keys \['step', 'versions'\]"):
    trajectories.from_json(row)


LINE = json.dumps(trajectories.to_json(make())).encode()


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (LINE.replace(b'"text": "', b'"text": "\xff\xfe'), "not valid JSON: .*utf-8"),
    (LINE[:-1] + b', "step": 3}', "key 'step' occurs twice"),
    (LINE.replace(b"-0.1", b"NaN", 1), "NaN is not valid JSON"),
    (LINE.replace(b"-0.1", b"-1e999", 1), r"-1e999\d* is out of range for a float"),
    (LINE.replace(b"-0.1", b"-Infinity", 1), "-Infinity is not valid JSON"),
    (LINE.replace(b'"text": "', b'"text": ' + b"[" * 100_000), "not valid JSON"),
    (LINE.replace(b"[0, 1, 2, 3]", b"[" + b"9" * 5000 + b"]"), "not valid JSON"),
    (LINE.replace(b"[0, 1, 2, 3]", b"[[[0]], 1, 2, 3]"), r"key 'tokens\[0\]' must be an integer"),
    (LINE.replace(b'"num_turns": 1', b'"num_turns": 1000000'), "key 'num_turns' must be an integer in .1, 2."),
    (LINE.replace(b'"num_turns": 1', b'"num_turns": 0'), "key 'num_turns' must be an integer in .1, 2."),
    (b"[1, 2]", "a line must be a JSON object; received list"),
    (b'{"__class__": "os.system"}', "missing keys"),
    (b"\x80\x04\x95", "not valid JSON"),
  ],
)
def test_hostile_lines_are_refused_by_number(tmp_path, line, message):
  path = tmp_path / "h.jsonl"
  path.write_bytes(LINE + b"\n" + line + b"\n")
  with pytest.raises(ValueError, match=rf"h\.jsonl:2: .*{message}"):
    trajectories.read(path)


@given(st.data())
def test_any_damage_to_a_line_is_refused_or_harmless(tmp_path_factory, data):
  content = bytearray(LINE)
  for _ in range(data.draw(st.integers(1, 3))):
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
  path = tmp_path_factory.mktemp("fuzz") / "h.jsonl"
  path.write_bytes(bytes(content) + b"\n")
  try:
    read = trajectories.read(path)
  except ValueError as error:
    assert "h.jsonl:" in str(error)
    return
  for trajectory in read:
    logp = trajectory.behavior_logp[trajectory.action_mask]
    assert np.isfinite(logp).all() and (logp <= 0).all()


def test_a_huge_line_is_refused_before_it_is_held(tmp_path):
  path = tmp_path / "t.jsonl"
  path.write_bytes(b"x" * 2000)
  with pytest.raises(ValueError, match=r"t\.jsonl:1: a line must have at most 1000 bytes"):
    list(jsonl.read_rows(path, max_line_bytes=1000))
