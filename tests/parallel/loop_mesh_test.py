"""The whole loop on meshes of 8 virtual devices, and in two processes, against the loop on one device."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import pytest

from sao_jax.io.metrics import read_metrics
from tests.parallel import processes

TIMES = {"time_s", "rollout_tokens_per_s", "learner_busy_fraction", "engine_busy_fraction", "eval_seconds"}
PROGRAM = "tests.parallel.loop_program"
MESH = "fsdp=2,tensor=2,expert=2"
LIMIT = 900


def rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
  learner, evaluations = read_metrics(workdir)
  return learner + evaluations


def assert_close(got: list[dict[str, Any]], want: list[dict[str, Any]], tolerance: float) -> None:
  """Every metric but times: what is counted is the same, what is computed is close."""
  assert [row["step"] for row in got] == [row["step"] for row in want]
  for left, right in zip(got, want, strict=True):
    assert left.keys() == right.keys()
    for name in left.keys() - TIMES:
      a, b = left[name], right[name]
      same = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(a) and math.isnan(b))
      assert same, (left["step"], name, a, b)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """Folders of all runs: one device; 8 devices, the last step and an async run on another mesh; two processes of 4
  devices each. Runs on the same mesh share what is compiled."""
  root = tmp_path_factory.mktemp("runs")
  folder = str(root)
  one = processes.start(PROGRAM, folder, "one:data=1:sync:3", devices=1)
  eight = processes.start(
    PROGRAM, folder, f"eight:{MESH}:sync:2", "eight:tensor=4,context=2:sync:3", "async:tensor=4,context=2:async:2",
    devices=8,
  )  # fmt: skip
  reports = [processes.finish(process, LIMIT) for process in (one, eight)]
  runs = (f"two:{MESH}:sync:2", f"two_async:{MESH}:async:2")
  with processes.launches() as launches:
    pair = [processes.start(PROGRAM, folder, *runs, devices=4, **launch) for launch in launches]
    reports += [processes.finish(process, LIMIT) for process in pair]
  assert [report["devices"] for report in reports] == [1, 8, 8, 8]
  assert [report["processes"] for report in reports] == [1, 1, 2, 2]
  assert reports[2]["summaries"] == reports[3]["summaries"]
  return root


@pytest.mark.timeout(2 * LIMIT)
def test_a_mesh_trains_like_one_device_and_goes_on_on_another_mesh(root: pathlib.Path) -> None:
  """Steps 1 and 2 on one mesh; step 3, after a restore, on another with two devices to each key/value head. The
  evaluations are of the first run's end too."""
  want, got = read_metrics(root / "one"), read_metrics(root / "eight")
  assert any(row["policy_grad_norm"] > 0 for row in want[0]) and len(want[0]) == 3
  assert_close(got[0], want[0], 1e-4)
  assert [row["step"] for row in got[1]] == [0, 2, 3]
  assert_close([got[1][0], got[1][2]], want[1], 1e-4)


@pytest.mark.timeout(2 * LIMIT)
def test_two_processes_train_like_one(root: pathlib.Path) -> None:
  want, got = read_metrics(root / "eight"), read_metrics(root / "two")
  assert_close(got[0], want[0][:2], 1e-5)
  assert_close(got[1], want[1][:2], 1e-5)
  assert sorted(path.name for path in (root / "two" / "checkpoints").iterdir()) == ["2"]


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("name", ["async", "two_async"])
def test_the_asynchronous_schedule_runs(root: pathlib.Path, name: str) -> None:
  learner, _ = read_metrics(root / name)
  assert [row["step"] for row in learner] == [1, 2]
  for row in learner:
    assert row["trajectories"] == 16 and row["failed_episodes"] == 0 and row["staleness_max"] <= 8
    assert row["rollout_tokens_per_s"] >= 0 and math.isfinite(row["policy_loss"])
  assert sum(row["rollout_tokens_per_s"] for row in learner) > 0  # A batch may have waited for the learner.
