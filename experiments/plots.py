"""Plots of a run, from its workdir's `metrics.jsonl` and `trajectories.jsonl` into `plots/*.png`.

    python -m experiments.plots --workdir=runs/...
    python -m experiments.plots --workdir=runs/a,runs/b --out=comparison

The second command draws one line per run into the same axes, `OUT/*.png`.

Thin lines are the learner steps, thick ones a running mean over `SMOOTHING` of them.
"""

from __future__ import annotations

import itertools
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from absl import app, flags
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from experiments.support import command
from sao_jax.io import metrics as metrics_io
from sao_jax.io import trajectories as trajectory_io
from sao_jax.training.intervals import wilson_interval
from sao_jax.types import Trajectory

SMOOTHING = 9
"""Learner steps in the running mean (odd; fewer in short runs)."""

STYLE: dict[Any, Any] = {
  "axes.axisbelow": True,
  "axes.edgecolor": "#888888",
  "axes.grid": True,
  "axes.labelcolor": "#333333",
  "axes.spines.right": False,
  "axes.spines.top": False,
  "axes.titlelocation": "left",
  "axes.titlesize": 11,
  "font.size": 9.5,
  "grid.color": "#e6e6e6",
  "legend.frameon": False,
  "savefig.dpi": 130,
  "xtick.color": "#666666",
  "ytick.color": "#666666",
}
BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9822b", "#3d9a5f", "#888888"

Rows = Sequence[dict[str, Any]]


def plot_run(workdir: str | os.PathLike[str]) -> list[pathlib.Path]:
  """Draws all plots that the run's metrics allow (one without a critic has no explained variance, say).

  Args:
    workdir: a run's folder; `metrics.jsonl` must have at least one learner row.

  Returns:
    The files written.
  """
  workdir = pathlib.Path(workdir)
  learner, evaluation = metrics_io.read_metrics(workdir)
  if not learner:
    raise ValueError(f"{workdir / 'metrics.jsonl'} has no learner row yet: nothing to plot.")
  samples_path = workdir / "trajectories.jsonl"
  samples = trajectory_io.read(samples_path) if samples_path.exists() else []
  folder = workdir / "plots"
  folder.mkdir(exist_ok=True)
  draws: dict[str, Callable[[Figure], bool]] = {
    "reward": lambda figure: draw_reward(figure, learner, evaluation),
    "reward_curve": lambda figure: draw_reward_curve(figure, learner, evaluation),
    "explained_variance": lambda figure: draw_explained_variance(figure, learner),
    "masked_fraction": lambda figure: draw_masked_fraction(figure, learner),
    "critic_gradient_norm": lambda figure: draw_critic_gradient_norm(figure, learner),
    "staleness": lambda figure: draw_staleness(figure, learner),
    "lengths": lambda figure: draw_lengths(figure, learner, samples),
    "throughput": lambda figure: draw_throughput(figure, learner),
  }
  written = []
  with mpl.rc_context(STYLE):
    for name, draw in draws.items():
      figure = Figure(figsize=(8.2, 3.6), layout="constrained")
      FigureCanvasAgg(figure)
      if draw(figure):
        figure.savefig(folder / f"{name}.png")
        written.append(folder / f"{name}.png")
  return written


COMPARED: Mapping[str, tuple[str, str]] = {
  "success_rate": ("Training success", "fraction of episodes"),
  "reward_mean": ("Mean reward", "reward of an episode"),
  "explained_variance": ("Explained variance of the critic", "1 − Var(R − V) / Var(R)"),
  "dis_masked_fraction": ("Action tokens masked by DIS", "fraction of action tokens"),
  "entropy": ("Entropy of the policy", "nats per token"),
  "approx_kl": ("KL from the rollouts' policy", "nats per token"),
}
"""Title and unit of the metrics that `compare_runs` draws."""


def compare_runs(workdirs: Sequence[pathlib.Path], out: pathlib.Path) -> list[pathlib.Path]:
  """Draws each metric of `COMPARED` with a line per run, and held-out success where it was measured.

  Args:
    workdirs: the runs' folders, two or more; their names label the lines.
    out: folder of the pictures; made if needed.

  Returns:
    The files written.

  Raises:
    ValueError: a run has no learner row yet.
  """
  runs = {}
  for workdir, name in zip(workdirs, _labels(workdirs), strict=True):
    runs[name] = metrics_io.read_metrics(workdir)
    if not runs[name][0]:
      raise ValueError(f"{workdir / 'metrics.jsonl'} has no learner row yet: nothing to plot.")
  out.mkdir(parents=True, exist_ok=True)
  colors = mpl.colormaps["tab10"].colors  # type: ignore[attr-defined]
  written = []
  with mpl.rc_context(STYLE):
    for key, (title, unit) in COMPARED.items():
      figure = Figure(figsize=(8.2, 3.6), layout="constrained")
      FigureCanvasAgg(figure)
      axes = _axes(figure, title, "learner step", unit)
      drawn = [_line(axes, rows, key, colors[i % 10], name) for i, (name, (rows, _)) in enumerate(runs.items())]
      if key == "success_rate":
        for i, (_, evaluation) in enumerate(runs.values()):
          steps, rates = [x["step"] for x in evaluation], [x["eval_success_rate"] for x in evaluation]
          axes.plot(steps, rates, "o", color=colors[i % 10], markersize=6)
        axes.set_title("Training success (lines) and held-out success (dots)")
      if any(drawn):
        legend_beside(axes)
        figure.savefig(out / f"{key}.png")
        written.append(out / f"{key}.png")
  return written


def _labels(workdirs: Sequence[pathlib.Path]) -> list[str]:
  """Returns the folders' names, or their paths if two names are equal."""
  names = [workdir.name for workdir in workdirs]
  return names if len(set(names)) == len(names) else [str(workdir) for workdir in workdirs]


def draw_reward(figure: Figure, learner: Rows, evaluation: Rows) -> bool:
  """Training success per step; held-out success with its 95 % interval."""
  axes = _axes(figure, "Success", "learner step", "fraction of episodes")
  _line(axes, learner, "success_rate", BLUE, "training success")
  if evaluation:
    rates = np.array([row["eval_success_rate"] for row in evaluation])
    bounds = np.array([_interval(row) for row in evaluation])
    errors = np.abs(bounds.T - rates)
    steps = [row["step"] for row in evaluation]
    form = {"fmt": "o-" if len(steps) > 2 else "o", "markersize": 5, "capsize": 3}
    axes.errorbar(steps, rates, errors, color=ORANGE, label="held-out success (95 %)", **form)
  axes.set_ylim(0.0, 1.0)
  legend_beside(axes)
  return True


def draw_reward_curve(figure: Figure, learner: Rows, evaluation: Rows) -> bool:
  """Mean reward, its parts and the held-out mean, on their own scale; False where the reward is the success."""
  if not _differ(learner, "reward_mean", "success_rate"):
    return False
  axes = _axes(figure, "Reward", "learner step", "mean over trajectories")
  _line(axes, learner, "reward_mean", BLUE, "reward")
  parts = sorted({key for row in learner for key in row if key.startswith("reward/")})
  for key, color in zip(parts, itertools.cycle((GREEN, GREY, "#8a5fb0", "#b0413e"))):
    _line(axes, learner, key, color, key.removeprefix("reward/"))
  steps = [row["step"] for row in evaluation if "eval_reward_mean" in row]
  held_out = [row["eval_reward_mean"] for row in evaluation if "eval_reward_mean" in row]
  axes.plot(steps, held_out, "o", color=ORANGE, markersize=5, label="held-out reward")
  legend_beside(axes)
  return True


def _interval(row: dict[str, Any]) -> tuple[float, float]:
  """The interval of an evaluation. Rows of other programs may lack it; Wilson's is right if no problem repeats."""
  if "eval_low" in row and "eval_high" in row:
    return row["eval_low"], row["eval_high"]
  return wilson_interval(row["eval_success_rate"] * row["eval_n"], row["eval_n"])


def draw_explained_variance(figure: Figure, learner: Rows) -> bool:
  """1 - Var(return - value) / Var(return) on action tokens, below -0.2 cut off."""
  axes = _axes(figure, "Explained variance of the critic", "learner step", "1 − Var(R − V) / Var(R)")
  if not _line(axes, learner, "explained_variance", BLUE):
    return False
  axes.axhline(0.0, color=GREY, linewidth=0.8)
  values = _column(learner, "explained_variance")
  axes.set_ylim(max(-0.2, min(-0.02, np.nanmin(values))), 1.0)
  return True


def draw_masked_fraction(figure: Figure, learner: Rows) -> bool:
  """Share of action tokens outside the DIS interval, by side."""
  axes = _axes(figure, "Action tokens masked by DIS", "learner step", "% of action tokens")
  drawn = _line(axes, learner, "dis_masked_fraction", BLUE, "all", scale=100.0)
  _line(axes, learner, "dis_masked_low", ORANGE, "ratio too low", scale=100.0)
  _line(axes, learner, "dis_masked_high", GREEN, "ratio too high", scale=100.0)
  axes.set_ylim(bottom=0.0)
  if drawn:
    legend_beside(axes)
  return drawn


def draw_critic_gradient_norm(figure: Figure, learner: Rows) -> bool:
  axes = _axes(figure, "Gradient norm of the critic", "learner step", "global L2 norm before clipping")
  drawn = _line(axes, learner, "critic_grad_norm", BLUE)
  axes.set_ylim(bottom=0.0)
  return drawn


def draw_staleness(figure: Figure, learner: Rows) -> bool:
  """Over the steps, and as a histogram of the steps' means weighted by their trajectories."""
  left, right = figure.subplots(1, 2, width_ratios=(3, 2))
  _label(left, "Staleness of trajectories", "learner step", "policy versions")
  _line(left, learner, "staleness_mean", BLUE, "mean of the batch")
  _line(left, learner, "staleness_max", ORANGE, "largest of the batch")
  left.set_ylim(bottom=0.0)
  legend_beside(left)
  means, counts = _column(learner, "staleness_mean"), _column(learner, "trajectories")
  edges = np.arange(0.0, max(1.0, math.ceil(np.nanmax(means) * 2 + 1)) + 1) / 2 - 0.25
  right.hist(means, bins=edges, weights=counts, color=BLUE, rwidth=0.9)
  _label(right, "", "mean staleness (policy versions)", "trajectories")
  right.grid(axis="x", visible=False)
  return True


def draw_lengths(figure: Figure, learner: Rows, samples: Sequence[Trajectory]) -> bool:
  """Turns and action tokens per trajectory over the steps, and the turns of the sampled trajectories."""
  tokens, turns, sampled = figure.subplots(1, 3)
  _label(tokens, "Action tokens", "learner step", "tokens per trajectory")
  per_trajectory = [row | {"tokens": row["action_tokens"] / max(row["trajectories"], 1)} for row in learner]
  _line(tokens, per_trajectory, "tokens", BLUE)
  tokens.set_ylim(bottom=0.0)
  _label(turns, "Turns", "learner step", "turns per trajectory")
  if _line(turns, learner, "turns_mean", BLUE):
    turns.set_ylim(bottom=0.0)
  else:
    turns.remove()
  _label(sampled, "Turns of samples", "turns", "sampled trajectories")
  if samples:
    counts = np.bincount([sample.num_turns for sample in samples])
    sampled.bar(np.arange(1, len(counts)), counts[1:], color=BLUE, width=0.8)
    sampled.grid(axis="x", visible=False)
    sampled.locator_params(integer=True)
  else:
    sampled.remove()
  return True


def draw_throughput(figure: Figure, learner: Rows) -> bool:
  """Rollout speed, and how busy either side is."""
  left, right = figure.subplots(1, 2)
  _label(left, "Rollout speed", "learner step", "sampled tokens per second")
  drawn = _line(left, learner, "rollout_tokens_per_s", BLUE)
  left.set_ylim(bottom=0.0)
  _label(right, "Busy time", "learner step", "fraction of time")
  _line(right, learner, "engine_busy_fraction", BLUE, "engine")
  _line(right, learner, "learner_busy_fraction", ORANGE, "learner")
  right.set_ylim(0.0, 1.02)
  legend_beside(right)
  return drawn


def legend_beside(axes: Axes, *, of: Axes | None = None) -> None:
  """Draws a legend at the right of the axes, where it covers no line; `of`: the axes whose lines it names."""
  axes.legend(*(of or axes).get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _axes(figure: Figure, title: str, x: str, y: str) -> Axes:
  axes: Axes = figure.subplots()
  _label(axes, title, x, y)
  return axes


def _label(axes: Axes, title: str, x: str, y: str) -> None:
  axes.set_title(title)
  axes.set_xlabel(x)
  axes.set_ylabel(y)
  if x == "learner step":
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _column(rows: Rows, key: str) -> np.ndarray:
  return np.array([row.get(key, math.nan) for row in rows], np.float64)


def _differ(rows: Rows, key: str, other: str) -> bool:
  return not np.allclose(_column(rows, key), _column(rows, other), atol=1e-3, equal_nan=True)


def _line(axes: Axes, rows: Rows, key: str, color: str, label: str | None = None, *, scale: float = 1.0) -> bool:
  """Draws a metric and its running mean; False where no row has a number for it."""
  values = _column(rows, key) * scale
  if np.isnan(values).all():
    return False
  steps = [row["step"] for row in rows]
  window = min(SMOOTHING, len(rows) - 1 + len(rows) % 2)
  if window < 3:
    axes.plot(steps, values, color=color, linewidth=1.6, marker="o", markersize=3, label=label)
    return True
  axes.plot(steps, values, color=color, linewidth=0.8, alpha=0.35)
  axes.plot(steps, running_mean(values, window), color=color, linewidth=1.8, label=label)
  return True


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
  """Mean of the numbers in a centred window; NaN where there is none. Windows are cut off at the ends."""
  valid = ~np.isnan(values)
  kernel = np.ones(window)
  sums = np.convolve(np.where(valid, values, 0.0), kernel, mode="same")
  counts = np.convolve(valid.astype(np.float64), kernel, mode="same")
  return np.where(counts > 0, sums / np.maximum(counts, 1.0), math.nan)


def main(argv: Sequence[str]) -> None:
  del argv
  workdirs = [pathlib.Path(name) for name in flags.FLAGS.workdir]
  if not workdirs:
    raise app.UsageError("--workdir is required: the folder of a run, or of several.")
  if len(workdirs) > 1 and flags.FLAGS.out is None:
    raise app.UsageError("--out is required with several workdirs: the folder of the pictures.")
  if len(workdirs) == 1 and flags.FLAGS.out is not None:
    raise app.UsageError("--out needs several workdirs: the plots of one run are in its workdir.")
  for path in plot_run(workdirs[0]) if len(workdirs) == 1 else compare_runs(workdirs, pathlib.Path(flags.FLAGS.out)):
    print(path)


if __name__ == "__main__":
  # Not at import: train.py, which has a --workdir of its own, imports this module.
  flags.DEFINE_list("workdir", [], "The folder of a run, or of several, separated by commas.")
  flags.DEFINE_string("out", None, "With several workdirs, the folder of the pictures.")
  command.run(main)
