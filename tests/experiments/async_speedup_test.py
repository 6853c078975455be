"""The benchmark of asynchrony runs at a tiny size and prints the documented keys."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np

from experiments.benchmarks import async_speedup
from experiments.benchmarks.async_speedup import Replay, SlowTool, Span
from experiments.simulator.workload import Episode


def test_run(monkeypatch):
  make_config = async_speedup.make_config

  def shallow(schedule: str, **sizes: Any) -> Any:
    """One layer instead of two: compilation takes most of the time here."""
    config = make_config(schedule, **sizes)
    return dataclasses.replace(config, policy=dataclasses.replace(config.policy, num_layers=1))

  monkeypatch.setattr(async_speedup, "make_config", shallow)
  result = async_speedup.run(batch_size=8, slots=8, steps=4, warmup_steps=1)  # more than a full queue holds
  assert {
    "trajectories_per_s", "speedup_async_over_sync", "speedup_async_over_group", "simulated_speedup",
    "share_of_simulated", "share_of_separate", "staleness_mean",
  } <= set(result)  # fmt: skip
  speed = result["trajectories_per_s"]
  assert set(speed) == {"sync", "group", "async"} and min(speed.values()) > 0
  np.testing.assert_allclose(result["speedup_async_over_sync"], speed["async"] / speed["sync"])
  np.testing.assert_allclose(
    result["share_of_simulated"], result["speedup_async_over_sync"] / result["simulated_speedup"]
  )
  assert result["staleness_mean"]["sync"] == 0.0


def test_tool_is_that_of_the_task(monkeypatch):
  """Same task, same turns and latencies, whichever environment runs it; the span holds the tool's time."""
  slept_s: list[float] = []  # a clock that only sleeping moves, since a real one also counts the load of the machine
  clock = types.SimpleNamespace(perf_counter=lambda: sum(slept_s), sleep=slept_s.append)
  monkeypatch.setattr(async_speedup, "time", clock)
  spans: list[dict[int, Span]] = [{}, {}]
  turns = []
  for found in spans:
    env = SlowTool(0, found)
    env.reset(5)
    count = 1
    while not env.step("x").done:
      count += 1
    turns.append(count)
  assert turns[0] == turns[1] > 1
  rng = np.random.default_rng((5, 0))
  rng.integers(1, 7)
  slept = sum(float(async_speedup.TOOL_S.draw(rng, 1)[0]) for _ in range(turns[0] - 1))
  for found in spans:
    assert abs(found[5].tool_s - slept) < 1e-9 and slept > 0
    assert abs(found[5].other_s) < 1e-9


def test_replay_starts_over():
  episodes = [Episode(tokens=i, turns=1) for i in (1, 2)]
  replay = Replay(episodes)
  rng = np.random.default_rng(0)
  assert [replay.draw(rng).tokens for _ in range(5)] == [1, 2, 1, 2, 1]
