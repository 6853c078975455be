"""Table and plot of the suite `online`: what a change of the preference costs, and how soon success recovers."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import plots
from experiments.ablations import tables
from experiments.ablations.suites import Suite
from experiments.online.questions import STYLES
from experiments.online.simulation import SimulationConfig
from experiments.tasks.options import checked

WINDOW = 10
"""Learner steps over which training success is averaged."""
RECOVERED = 0.9
COLORS = {"academic": "#2f6db5", "cute": "#d9822b", "chuunibyou": "#7a5cb5", "classical": "#3d9a5f"}

Row = Mapping[str, Any]


def preferred(folder: pathlib.Path, step: int) -> str:
  """Returns the style that a run's users preferred at a learner step."""
  options = json.loads((folder / "config.json").read_bytes())["env"]["options"]
  return checked(SimulationConfig, options).preferred_at(step)


def success_curve(rows: Sequence[Row], arm: str, seed: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
  """Returns the steps, the success at each, and the last step before each change of the preference."""
  mine = [row for row in rows if row["arm"] == arm and row["seed"] == seed and "success_rate" in row]
  mine.sort(key=lambda row: row["step"])
  changes = [a["step"] for a, b in itertools.pairwise(mine) if a["preferred"] != b["preferred"]]
  return np.array([row["step"] for row in mine]), np.array([row["success_rate"] for row in mine]), changes


def recoveries(rows: Sequence[Row], arm: str, seed: int) -> list[int | None]:
  """Returns the learner steps from each change until success recovers to `RECOVERED` of its level before all changes.

  None stands for no recovery before the next change or the end. The level is the mean over the last `WINDOW` steps
  before the first change, since success may not have settled in later phases. Success at a step is the mean over the
  `WINDOW` steps up to it, all of them after the change.
  """
  steps, success, changes = success_curve(rows, arm, seed)
  level = level_before(rows, arm, seed)
  found: list[int | None] = []
  if level is None:
    return found
  for begin, end in zip(changes, [*changes[1:], int(steps[-1])], strict=True):
    after = success[(steps > begin) & (steps <= end)]
    means = np.convolve(after, np.ones(WINDOW) / WINDOW, "valid") if after.size >= WINDOW else np.zeros(0)
    back = np.flatnonzero(means >= RECOVERED * level)
    found.append(int(back[0]) + WINDOW if back.size else None)
  return found


def level_before(rows: Sequence[Row], arm: str, seed: int) -> float | None:
  """Returns the mean success over the last `WINDOW` steps before the first change; None without a change."""
  steps, success, changes = success_curve(rows, arm, seed)
  return float(success[steps <= changes[0]][-WINDOW:].mean()) if changes else None


def table(suite: Suite, rows: Sequence[Row]) -> str:
  """Makes a Markdown table of success over the whole run and the cost of each change, by arm.

  The level before the first change stands beside the steps to recover, since a low level is recovered soon.
  """

  def seeds(arm: str) -> list[int]:
    return sorted({row["seed"] for row in rows if row["arm"] == arm})

  def level(arm: str) -> str:
    levels = [level_before(rows, arm, seed) for seed in seeds(arm)]
    return ", ".join(f"{x:.3f}" for x in levels if x is not None)

  def after(change: int) -> Callable[[str], str]:
    def cell(arm: str) -> str:
      times = [recoveries(rows, arm, seed) for seed in seeds(arm)]
      return ", ".join("never" if x[change] is None else str(x[change]) for x in times if len(x) > change)

    return cell

  return tables.arms_table(
    suite,
    rows,
    success=lambda arm: {seed: float(success_curve(rows, arm, seed)[1].mean()) for seed in seeds(arm)},
    title="training success, all steps",
    more={
      "before the 1st change, by seed": level,
      "steps to recover, by seed: 1st change": after(0),
      "2nd change": after(1),
    },
  )


def plot(path: str | os.PathLike[str], suite: Suite, rows: Sequence[Row]) -> None:
  """Plots the accuracy of each style on held-out questions over the steps, one axis per arm (Figure 5 b)."""
  with mpl.rc_context(plots.STYLE):
    figure = Figure(figsize=(5.5 * len(suite.arms), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, arm in zip(figure.subplots(1, len(suite.arms), squeeze=False)[0], suite.arms, strict=True):
      mine = [row for row in rows if row["arm"] == arm.name]
      for style in STYLES:
        by_step: dict[int, list[float]] = {}
        for row in mine:
          if f"eval_accuracy_{style}" in row:
            by_step.setdefault(row["step"], []).append(row[f"eval_accuracy_{style}"])
        if not by_step:  # results of before there were academic answers
          continue
        steps = sorted(by_step)
        color = COLORS[style]
        axis.plot(steps, [np.mean(by_step[x]) for x in steps], color=color, label=style)
        axis.fill_between(
          steps,
          [min(by_step[x]) for x in steps],
          [max(by_step[x]) for x in steps],
          color=color,
          alpha=0.12,
          linewidth=0,
        )
      for seed in {row["seed"] for row in mine}:
        for change in success_curve(rows, arm.name, seed)[2]:
          axis.axvline(change, color="#888888", linewidth=0.8, linestyle=":")
      axis.set(title=f"{arm.name}: held-out accuracy by style", xlabel="learner steps", ylim=(0, 1))
    plots.legend_beside(axis)
    figure.savefig(path)
