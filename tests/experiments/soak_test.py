"""The soak detects growth, starvation and failed recovery, and nothing else; one short run of the mixed scenario."""

from __future__ import annotations

import json
import random

import pytest

from experiments import soak
from experiments.tasks.overload import Scenario, Times
from sao_jax.rollout import TrajectoryQueue, schedules

TIMES = Times(minutes=0.08, slow_tool_s=0.3, stall_every_s=2.0, stall_s=0.3, env_timeout_s=2.0)


def rows(**changed):
  noise = random.Random(0)
  return [
    {"seconds": float(t)} | {name: 100.0 + noise.uniform(-2, 2) for name in soak.GROWTH}
    | {name: 100.0 + change(t) for name, change in changed.items()}
    for t in range(60)
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("changed", "growing"),
  [
    ({}, set()),
    ({"fds": lambda t: t}, {"fds"}),
    ({"threads": lambda t: 0.5 * t, "rss_mb": lambda t: 2.0 * t}, {"threads", "rss_mb"}),
    ({"rss_mb": lambda t: 500.0 * (t < 15)}, set()),  # during compilation
    ({"threads": lambda t: 40.0 * (t % 10 == 0)}, set()),  # short bursts
    ({"children": lambda t: t // 10}, {"children"}),
    ({"live_arrays": lambda t: 2.0 * max(0, t - 30)}, {"live_arrays"}),
  ],
)
def test_only_what_grows_is_said_to_grow(changed, growing):
  assert {name for name, row in soak.growth(rows(**changed)).items() if row["grows"]} == growing


def batches(rate_after: float) -> list[float]:
  """Makes one batch per 0.1 s, none in a stall (2 of 10 seconds), and another rate after the first stall."""
  times, t = [], 0.0
  while t < 50.0:
    t += 0.1 if t < 10.0 else 0.1 / rate_after
    if t < 10.0 or t % 10.0 > 2.0:
      times.append(t)
  return times


def test_throughput_that_does_not_come_back_is_told():
  times = Times(minutes=1, slow_tool_s=1, stall_every_s=10.0, stall_s=2.0, env_timeout_s=1)
  assert soak.recovery(batches(1.0), 0.0, times) == pytest.approx(1.0, abs=0.1)
  assert soak.recovery(batches(0.4), 0.0, times) == pytest.approx(0.4, abs=0.1)
  assert soak.recovery([1.0, 2.0], 0.0, times) is None


@pytest.fixture
def put_back(monkeypatch):
  """The soak wraps methods of the queue and of the schedule for the rest of its process."""
  for owner, methods in ((TrajectoryQueue, ("start", "put", "fail")), (schedules.AsyncSchedule, ("next_batch",))):
    for method in methods:
      monkeypatch.setattr(owner, method, getattr(owner, method))


def test_a_short_run_with_slow_raising_hanging_and_flooding_tools(put_back, tmp_path, capsys):
  scenario = Scenario(learner_s=0.05, tool_s=0.002, slow_share=0.02, faults=True, stalls=True)
  result = soak.soak(scenario, TIMES, tmp_path, sample_s=0.25)
  assert json.loads(json.dumps(result)) == result
  assert result["trajectories"] >= 64 and result["failed_episodes"] > 0 and result["samples"] > 5
  assert 16 <= result["most_waiting"] <= 64
  assert 0 < result["longest"]["episode_s"] < 60
  expected = ("grows", "after stalls", "too few")  # a run of seconds can show neither growth nor recovery
  assert not [fault for fault in result["faults"] if not any(part in fault for part in expected)]
  assert "rss_mb" in capsys.readouterr().out
