"""From the folders of runs to one CSV, from the CSV to tables and plots."""

from __future__ import annotations

import csv
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import plots
from experiments.ablations import online, tables, tuning
from experiments.ablations.statistics import bootstrap_mean
from experiments.ablations.suites import Arm, Suite
from sao_jax.io import metrics as metrics_io

COLUMNS = (
  "suite", "arm", "lag", "learning_rate", "seed", "step", "success_rate", "eval_success_rate", "eval_n",
  "staleness_mean",
  "dis_masked_fraction", "dis_masked_low", "dis_masked_high", "ratio_mean", "approx_kl", "entropy", "policy_grad_norm",
  "advantage_std", "value_loss", "critic_grad_norm", "explained_variance", "explained_variance_before",
  "turns_mean", "tokens_mean", "time_s",
  "observation_fraction", "advantage_snr", "masked_fraction_positive_adv", "masked_fraction_negative_adv",
  "preferred", "eval_accuracy_academic", "eval_accuracy_cute", "eval_accuracy_chuunibyou", "eval_accuracy_classical",
)  # fmt: skip
"""One row per learner step, and one per evaluation (with `eval_success_rate`); what a row lacks is empty."""
COLORS = ("#2f6db5", "#d9822b", "#3d9a5f", "#b5492f", "#7a5cb5", "#888888", "#b59a2f", "#4aa6b5", "#b54a8c")
LAST_SHARE = 0.1
"""Share of the steps, at the end, over which the training success of the table is averaged."""
MADE = "Made by:\n\n"
COLLAPSED = 0.7
"""A run has collapsed when its training success stays under this share of its best for its last tenth, at least."""

Row = Mapping[str, Any]


def collect(
  name: str,
  suite: Suite,
  folder_of: Callable[[Arm, int], pathlib.Path],
  rate_of: Callable[[Arm], float],
  seeds: Sequence[int],
) -> list[dict[str, Any]]:
  """Rows of every run that has ended, from its folder, with the arm's learning rate."""
  rows = []
  for arm in suite.arms:
    common = {"suite": name, "arm": arm.name, "lag": arm.lag, "learning_rate": rate_of(arm)}
    for seed in seeds:
      folder = folder_of(arm, seed)
      if not (folder / "summary.json").exists():
        continue
      steps, evaluations = metrics_io.read_metrics(folder)
      for found in (*steps, *evaluations):
        known = {key: found[key] for key in COLUMNS if key in found}
        if suite.simulation:
          # An evaluation asks for what is preferred in the step to come.
          known["preferred"] = online.preferred(folder, found["step"] + ("eval_n" in found))
        rows.append({**common, "seed": seed, **known})
  return rows


def write_csv(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
  """Writes the rows; NaN as `nan`, what is not there as nothing."""
  with open(path, "w", newline="", encoding="utf-8") as file:
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    for row in rows:
      writer.writerow({key: _short(value) for key, value in row.items()})


def read_csv(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads what `write_csv` wrote."""
  with open(path, newline="", encoding="utf-8") as file:
    return [{key: _parsed(key, text) for key, text in row.items() if text} for row in csv.DictReader(file)]


def _short(value: Any) -> Any:
  return f"{value:.6g}" if isinstance(value, float) else value


def _parsed(key: str, text: str) -> Any:
  if key in ("suite", "arm", "preferred"):
    return text
  return int(text) if key in ("lag", "seed", "step", "eval_n") else float(text)


def final_success(rows: Sequence[Row], arm: str) -> dict[int, float]:
  """Held-out success after RL, by seed."""
  ends: dict[int, Row] = {}
  for row in rows:
    if row["arm"] == arm and "eval_success_rate" in row and row["step"] >= ends.get(row["seed"], row)["step"]:
      ends[row["seed"]] = row
  return {seed: row["eval_success_rate"] for seed, row in ends.items()}


def last_mean(rows: Sequence[Row], arm: str, key: str) -> dict[int, float]:
  """Mean of a metric over the last `LAST_SHARE` of the learner's steps, by seed; NaN steps are left out."""
  by_seed: dict[int, list[tuple[int, float]]] = {}
  for row in rows:
    if row["arm"] == arm and key in row and "eval_success_rate" not in row:
      by_seed.setdefault(row["seed"], []).append((row["step"], row[key]))
  means = {}
  for seed, found in by_seed.items():
    from_step = max(step for step, _ in found) * (1 - LAST_SHARE)
    values = [value for step, value in found if step > from_step and math.isfinite(value)]
    if values:
      means[seed] = float(np.mean(values))
  return means


def collapses(rows: Sequence[Row], arm: str) -> dict[int, int | None]:
  """By seed: the step at which training success fell below `COLLAPSED` of its best for good; None: it never did.

  Success is a running mean over 11 steps; less than `LAST_SHARE` of the steps is not for good.
  """
  by_seed: dict[int, list[tuple[int, float]]] = {}
  for row in rows:
    if row["arm"] == arm and "success_rate" in row:
      by_seed.setdefault(row["seed"], []).append((row["step"], row["success_rate"]))
  found: dict[int, int | None] = {}
  for seed, curve in by_seed.items():
    steps, values = zip(*sorted(curve), strict=True)
    smooth = _smooth(values)
    high = int(np.flatnonzero(smooth >= COLLAPSED * smooth.max())[-1])
    found[seed] = steps[high + 1] if len(steps) - 1 - high >= max(1.0, LAST_SHARE * len(steps)) else None
  return found


def table(suite: Suite, rows: Sequence[Row]) -> str:
  """Markdown: each arm's mean over seeds with its interval, and the paired difference to SAO's."""
  if suite.simulation:
    return online.table(suite, rows)

  def end(key: str, digits: int = 3) -> Callable[[str], str]:
    return lambda arm: _mean(last_mean(rows, arm, key), digits=digits)

  def fallen(arm: str) -> str:
    steps = [str(step) for step in collapses(rows, arm).values() if step is not None]
    return f"{len(steps)} ({', '.join(steps)})" if steps else "0"

  more = {
    "training success, last tenth": end("success_rate"),
    "EV before fits, last tenth": end("explained_variance_before"),
    "masked, last tenth": end("dis_masked_fraction", 4),
    "collapsed (at step)": fallen,
  }
  if "critic_grad_norm" in suite.curves:
    more["critic's gradient norm before clipping, mean (largest)"] = lambda arm: _mean_and_largest(
      rows, arm, "critic_grad_norm"
    )
  return tables.arms_table(
    suite, rows, success=lambda arm: final_success(rows, arm), title="held-out success", more=more
  )


def _mean_and_largest(rows: Sequence[Row], arm: str, key: str) -> str:
  found = [row[key] for row in rows if row["arm"] == arm and math.isfinite(row.get(key, math.nan))]
  return f"{np.mean(found):.3f} ({max(found):.3f})" if found else ""


def _mean(by_seed: Mapping[int, float], *, digits: int = 3) -> str:
  return f"{bootstrap_mean(list(by_seed.values())).mean:.{digits}f}" if by_seed else ""


def plot(path: str | os.PathLike[str], suite: Suite, rows: Sequence[Row]) -> None:
  """Draws the suite's curves: mean over seeds as a line, least and greatest as a band, smoothed over steps.

  A suite at several lags has a row of axes for each, and a first one of success and masked tokens by lag.
  """
  lags = sorted({arm.lag for arm in suite.arms if arm.lag is not None})
  groups = [[arm for arm in suite.arms if arm.lag == lag] for lag in lags] or [list(suite.arms)]
  per_row = 2 if len(groups) == 1 else len(suite.curves)
  num_rows = len(groups) * math.ceil(len(suite.curves) / per_row) + bool(lags)
  with mpl.rc_context(plots.STYLE):
    figure = Figure(figsize=((5.5 if per_row == 2 else 4.0) * per_row, 3.4 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_rows, per_row).ravel().tolist()
    if lags:
      _draw_by_lag(axes, suite, rows)
      for axis in axes[2:per_row]:
        axis.set_axis_off()
      axes[2].legend(*axes[0].get_legend_handles_labels(), loc="upper left")
      axes = axes[per_row:]
    for group in groups:
      for axis, metric in zip(axes, suite.curves, strict=False):
        _draw_curve(axis, group, rows, metric)
      plots.legend_beside(axes[per_row - 1], of=axes[0])
      axes = axes[len(suite.curves) :]
    figure.savefig(path)


def _draw_by_lag(axes: Sequence[Axes], suite: Suite, rows: Sequence[Row]) -> None:
  """Held-out success and masked share of tokens over the lag, a line per family of arms."""
  families = list(dict.fromkeys(arm.family.name for arm in suite.arms))
  for i, family in enumerate(families):
    found = []
    for arm in suite.arms:
      if arm.family.name == family and arm.lag is not None and (success := final_success(rows, arm.name)):
        masked = last_mean(rows, arm.name, "dis_masked_fraction").values()
        found.append((arm.lag, bootstrap_mean(list(success.values())), float(np.mean(list(masked)))))
    if found:
      x = [lag for lag, _, _ in found]
      mean = [estimate.mean for _, estimate, _ in found]
      axes[0].plot(x, mean, "o-", color=COLORS[i], label=family)
      if all(estimate.n > 1 for _, estimate, _ in found):
        band = [estimate.low for _, estimate, _ in found], [estimate.high for _, estimate, _ in found]
        axes[0].fill_between(x, *band, color=COLORS[i], alpha=0.12, linewidth=0)
      axes[1].plot(x, [masked for _, _, masked in found], "o-", color=COLORS[i], label=family)
  lags = sorted({arm.lag for arm in suite.arms if arm.lag is not None})
  for axis, title in zip(axes, ("held-out success", "masked fraction, last tenth"), strict=False):
    axis.set(title=title, xlabel="lag (policy versions)", xscale="symlog")
    axis.set_xticks(lags, [str(lag) for lag in lags])
    axis.minorticks_off()


def _draw_curve(axis: Axes, arms: Sequence[Arm], rows: Sequence[Row], metric: str) -> None:
  for i, arm in enumerate(arms):
    by_seed: dict[int, dict[int, float]] = {}
    for row in rows:
      if row["arm"] == arm.name and metric in row and "eval_success_rate" not in row:
        by_seed.setdefault(row["seed"], {})[row["step"]] = row[metric]
    if not by_seed:
      continue
    steps = sorted(set.intersection(*(set(found) for found in by_seed.values())))
    curves = np.array([_smooth([found[step] for step in steps]) for found in by_seed.values()])
    color = COLORS[i % len(COLORS)]
    axis.plot(steps, curves.mean(axis=0), color=color, linewidth=1.6, label=arm.name, linestyle=_dash(i))
    axis.fill_between(steps, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.12, linewidth=0)
  lag = "" if arms[0].lag is None else f", lag {arms[0].lag}"
  axis.set(title=metric.replace("_", " ") + lag, xlabel="learner steps")


def _dash(i: int) -> str:
  return ("-", "--", ":", "-.")[i // len(COLORS) % 4]


def _smooth(values: Sequence[float], width: int = 11) -> np.ndarray:
  """Running mean of the finite values, over fewer of them at the ends."""
  x = np.asarray(values, np.float64)
  half = min(width, x.size - 1) // 2  # a window longer than the values would lengthen them
  return plots.running_mean(np.where(np.isfinite(x), x, np.nan), 2 * half + 1)


def versions() -> str:
  """Library versions and settings behind the results."""
  import jax

  from sao_jax.version import __version__

  return json.dumps({"sao_jax": __version__, "jax": jax.__version__, "device": jax.devices()[0].device_kind})


def write_all(
  folder: pathlib.Path, name: str, suite: Suite, rows: Sequence[Row], outcomes: tuning.Outcomes, command: str
) -> None:
  """Writes `NAME.csv`, `NAME.md` and `NAME.png`; tables and plot are made from the CSV files as they are read back.

  Where learning rates were tuned, `NAME_tuning.csv` holds what that found.
  """
  folder.mkdir(parents=True, exist_ok=True)
  write_csv(folder / f"{name}.csv", rows)
  if outcomes:
    tuning.write_csv(folder / f"{name}_tuning.csv", outcomes)
  made = f"    {command}\n\n{versions()}\n"
  draw_all(folder, name, suite, made)


def draw_all(folder: pathlib.Path, name: str, suite: Suite, made: str) -> None:
  """Writes `NAME.md` and `NAME.png` from `NAME.csv`; `made` says how that was made."""
  rows = read_csv(folder / f"{name}.csv")
  tuned = folder / f"{name}_tuning.csv"
  tables_of = table(suite, rows) + (f"\n{tuning.table(tuning.read_csv(tuned))}" if tuned.exists() else "")
  text = f"# {suite.title}\n\n{tables_of}\n{MADE}{made}"
  (folder / f"{name}.md").write_text(text, encoding="utf-8")
  plot(folder / f"{name}.png", suite, rows)
  if suite.simulation:
    online.plot(folder / f"{name}_styles.png", suite, rows)
