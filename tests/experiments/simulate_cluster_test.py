"""The command: rows, the JSON line, plots; splits of chips; recorded episodes."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from experiments import simulate_cluster
from experiments.simulator import workload
from sao_jax import types
from sao_jax.io import trajectories

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = dataclasses.replace(
  simulate_cluster.PAPER, num_engines=2, slots=4, token_s=0.01, turn_s=0.0, batch_size=8, train_s=4.0,
  train_token_s=0.0, transfer_s=0.0,
)  # fmt: skip
EPISODES = workload.Distributions(
  turns=workload.LogNormal(median=3), tokens=workload.LogNormal(median=100),
  tool_s=workload.LogNormal(median=1, sigma=1), max_turns=5, max_tokens=400,
)  # fmt: skip


def test_the_best_split_balances_both_sides():
  constant = workload.Distributions(
    turns=workload.LogNormal(median=1), tokens=workload.LogNormal(median=1000), tool_s=workload.LogNormal(median=1),
    max_turns=5, max_tokens=4000,
  )  # fmt: skip
  # An engine of one chip makes 4 / 10 trajectories a second; a trainer of n chips takes 8 of them in 40 / n seconds.
  config = dataclasses.replace(SMALL, train_s=10.0, max_staleness=50)
  splits = simulate_cluster.best_split(
    config, constant, chips=18, chips_per_engine=1, reference_trainer_chips=4, num_steps=40
  )
  best = splits[0]
  assert (best.num_engines, best.trainer_chips) == (6, 12)
  assert best.result.trajectories_per_s == pytest.approx(2.4, rel=0.05)
  assert splits[-1].result.trajectories_per_s < 1.0
  with pytest.raises(ValueError, match="chips must be at least chips_per_engine"):
    simulate_cluster.best_split(config, constant, chips=4, chips_per_engine=4, reference_trainer_chips=1)


def test_single_rollouts_in_flight_are_the_fastest_variant():
  results = simulate_cluster.compare(SMALL, EPISODES, num_steps=20)
  assert set(results) == set(simulate_cluster.VARIANTS)
  assert results["async_in_flight"].trajectories_per_s > results["sync"].trajectories_per_s


def test_recorded_trajectories_give_the_lengths(tmp_path):
  mask = np.array([False, True, True, False, True])
  trajectory = types.Trajectory(
    tokens=np.arange(5, dtype=np.int32), action_mask=mask,
    behavior_logp=np.where(mask, -1, math.nan).astype(np.float32), versions=np.where(mask, 0, -1).astype(np.int32),
    rewards=np.zeros(5, np.float32), ended="terminal", task_index=0, episode_id=0, group_id=0, num_turns=2,
    success=False,
  )  # fmt: skip
  path = tmp_path / "t.jsonl"
  trajectories.write(path, [trajectory])
  recorded = workload.Recorded.read(path, tool_s=workload.LogNormal(median=3.0))
  assert recorded.draw(np.random.default_rng(0)) == workload.Episode(tokens=3, turns=2, waits_s=(3.0,))
  path.write_text("")
  with pytest.raises(ValueError, match="holds no trajectory"):
    workload.Recorded.read(path, tool_s=workload.LogNormal(median=3.0))


def test_the_command(tmp_path):
  command = [
    sys.executable, "-m", "experiments.simulate_cluster", "--steps=3", "--num_engines=2", "--chips=32",
    "--batch_size=16", "--slots=64", "--train_s=1", "--max_staleness=2",
  ]  # fmt: skip
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=True)
  lines = done.stdout.splitlines()
  assert lines[0].split()[:3] == ["schedule", "traj/s", "speed-up"] and len(lines) == 8
  assert "best split of 32 chips" in done.stdout
  summary = json.loads(lines[-1])
  assert summary["staleness_mean"]["sync"] == 0 and summary["best_split"]["num_engines"] in (1, 2, 3)


def test_plots(tmp_path):
  results = simulate_cluster.compare(SMALL, EPISODES, num_steps=4)
  rates = simulate_cluster.sweep_engines(SMALL, EPISODES, [1, 2, 4], num_steps=3)
  simulate_cluster.plot_sweep(tmp_path / "a.png", [1, 2, 4], rates)
  simulate_cluster.plot_comparison(tmp_path / "b.png", results)
  for name in ("a.png", "b.png"):
    assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
