"""Outcomes of a suite's tuning runs: the training success of each arm at each learning rate."""

from __future__ import annotations

import csv
import pathlib
from collections.abc import Mapping

from experiments.ablations import tables
from experiments.ablations.suites import Suite
from sao_jax.io import metrics as metrics_io

Outcomes = Mapping[str, Mapping[float, float]]
"""arm -> learning rate -> mean training success over the end of the run."""


def end_success(folder: pathlib.Path, share: float) -> float:
  """Returns the mean training success over the last `share` of a tuning run's steps."""
  steps, _ = metrics_io.read_metrics(folder)
  rates = [row["success_rate"] for row in steps[-max(1, round(share * len(steps))) :]]
  return sum(rates) / len(rates)


def collect(suite: Suite, folder: pathlib.Path) -> Outcomes:
  """Collects the outcomes of the finished runs in the folders `ARM/RATE` below `folder`."""
  families = {arm.family.slug: arm.family.name for arm in suite.arms}
  return {
    name: {
      float(run.name): end_success(run, suite.tuning_end)
      for run in sorted((folder / slug).iterdir(), key=lambda run: float(run.name))
      if (run / "summary.json").exists()
    }
    for slug, name in families.items()
    if (folder / slug).is_dir()
  }


def write_csv(path: pathlib.Path, outcomes: Outcomes) -> None:
  """Writes one row per arm and learning rate."""
  with open(path, "w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(("arm", "learning_rate", "success_rate"))
    for arm, found in outcomes.items():
      writer.writerows((arm, f"{rate:g}", f"{success:.6g}") for rate, success in found.items())


def read_csv(path: pathlib.Path) -> Outcomes:
  """Reads a file of `write_csv`."""
  outcomes: dict[str, dict[float, float]] = {}
  with open(path, newline="", encoding="utf-8") as file:
    for row in csv.DictReader(file):
      outcomes.setdefault(row["arm"], {})[float(row["learning_rate"])] = float(row["success_rate"])
  return outcomes


def table(outcomes: Outcomes) -> str:
  """Makes a Markdown table with a row per arm and a column per learning rate."""
  rates = sorted({rate for found in outcomes.values() for rate in found})
  lines = [(arm, *(f"{found[rate]:.3f}" if rate in found else "" for rate in rates)) for arm, found in outcomes.items()]
  return tables.markdown(("training success of tuning runs", *(f"{rate:g}" for rate in rates)), lines)
