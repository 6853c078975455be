"""Plots of synthetic runs: every file is there and is a picture, with and without a critic, from one row to many."""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import plots
from sao_jax import types
from sao_jax.io import metrics, trajectories


def write_run(workdir, num_steps: int, *, critic: bool = True, more: bool = True) -> None:
  rng = np.random.default_rng(0)
  with metrics.MetricsWriter(workdir) as writer:
    writer.write_evaluation(0, success_rate=0.42, n=256)
    for step in range(1, num_steps + 1):
      row = dict.fromkeys(metrics.LEARNER_KEYS[1:], 0.0)
      success = 0.45 + 0.4 * (1 - math.exp(-step / 40)) + rng.normal(0, 0.04)
      row |= {
        "success_rate": success, "reward_mean": success, "trajectories": 128, "action_tokens": 128 * (40 + step / 10),
        "explained_variance": 0.6 - math.exp(-step / 20) + rng.normal(0, 0.05) if critic and step != 5 else math.nan,
        "critic_grad_norm": 2 + rng.gamma(2.0, 0.5) if critic else math.nan,
        "dis_masked_low": 0.002 + rng.gamma(1.0, 0.001), "dis_masked_high": 1e-4, "staleness_mean": rng.gamma(3.0, 0.4),
        "staleness_max": rng.integers(2, 7), "rollout_tokens_per_s": rng.normal(5000, 300),
        "engine_busy_fraction": 0.9, "learner_busy_fraction": rng.uniform(0.6, 0.8),
      }  # fmt: skip
      row["dis_masked_fraction"] = row["dis_masked_low"] + row["dis_masked_high"]
      if more:
        row["turns_mean"] = 2.0 + step / 200
      writer.write(step, row)
    writer.write_evaluation(num_steps, success_rate=0.81, n=256)


def sample(num_turns: int) -> types.Trajectory:
  """Turns of one action token, each after a token of the environment's."""
  return types.Trajectory(
    tokens=np.array([1, 2] * num_turns, np.int32), action_mask=np.array([False, True] * num_turns),
    behavior_logp=np.array([math.nan, -1.0] * num_turns, np.float32),
    versions=np.array([-1, 0] * num_turns, np.int32), rewards=np.array([0.0, 1.0] * num_turns, np.float32),
    ended="terminal", task_index=0, episode_id=0, group_id=0, num_turns=num_turns, success=True,
  )  # fmt: skip


ALL = ["critic_gradient_norm", "explained_variance", "lengths", "masked_fraction", "reward", "staleness", "throughput"]


@pytest.mark.parametrize("num_steps", [1, 30])
def test_every_plot_is_drawn(tmp_path, num_steps):
  write_run(tmp_path, num_steps)
  trajectories.write(tmp_path / "trajectories.jsonl", [sample(n) for n in (1, 2, 2, 5)])
  written = plots.plot_run(tmp_path)
  assert sorted(path.stem for path in written) == ALL
  for path in written:
    assert path.parent == tmp_path / "plots"
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_a_run_without_critic_or_samples_or_turns(tmp_path):
  write_run(tmp_path, 12, critic=False, more=False)
  names = {path.stem for path in plots.plot_run(tmp_path)}
  assert names == set(ALL) - {"critic_gradient_norm", "explained_variance"}


def test_several_runs_are_drawn_into_the_same_axes(tmp_path):
  for name, critic in (("a", True), ("b", False), ("other/a", True)):
    (tmp_path / name).mkdir(parents=True)
    write_run(tmp_path / name, 12, critic=critic)
  written = plots.compare_runs([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
  assert [path.stem for path in written] == list(plots.COMPARED)
  assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in written)
  names = plots._labels([tmp_path / "a", tmp_path / "other" / "a"])
  assert names == [str(tmp_path / "a"), str(tmp_path / "other" / "a")]
  (tmp_path / "empty").mkdir()
  metrics.MetricsWriter(tmp_path / "empty").close()
  with pytest.raises(ValueError, match="no learner row yet"):
    plots.compare_runs([tmp_path / "a", tmp_path / "empty"], tmp_path / "out")


def test_nothing_to_plot_is_an_error(tmp_path):
  metrics.MetricsWriter(tmp_path).close()
  with pytest.raises(ValueError, match="no learner row yet"):
    plots.plot_run(tmp_path)


def test_running_mean_skips_missing_numbers():
  values = np.array([1.0, math.nan, 3.0, 5.0])
  np.testing.assert_allclose(plots.running_mean(values, 3), [1.0, 2.0, 4.0, 4.0])


def test_a_reward_that_is_not_success_has_a_curve_of_its_own():
  rows = [{"step": i, "reward_mean": i - 3.0, "success_rate": 0.5, "reward/brevity": 0.1 * i} for i in (1, 2, 3)]
  figure = Figure()
  assert plots.draw_reward_curve(figure, rows, [{"step": 0, "eval_reward_mean": -2.0}])
  labels = [line.get_label() for line in figure.axes[0].lines]
  assert [label for label in labels if label[0] != "_"] == ["reward", "brevity", "held-out reward"]
  same = [{"step": 1, "reward_mean": 0.5, "success_rate": 0.5}]
  assert not plots.draw_reward_curve(Figure(), same, [])
