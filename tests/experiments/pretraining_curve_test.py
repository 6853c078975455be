"""The curve of value pretraining, on a tiny critic."""

from __future__ import annotations

import csv

from experiments import pretraining_curve
from sao_jax.io.console import Console
from sao_jax.training.components import Components
from tests.learner import tiny
from tests.tiny_domain import tiny_domain
from tests.training.loop_test import tiny_config


def test_a_curve_begins_at_zero_and_has_a_row_for_each_power_of_two(tmp_path):
  fitted, held_out = tiny.trajectories(24, seed=1), tiny.trajectories(16, seed=2)
  with Components(tiny_config(), tiny_domain()) as parts:
    rows = list(pretraining_curve.curve(parts, parts.init_policy(), fitted, held_out, 3, Console(quiet=True)))
  assert [row["updates"] for row in rows] == [0, 1, 2, 3]
  assert abs(rows[0]["explained_variance"]) < 1e-6  # a zero head
  assert rows[3]["explained_variance"] != rows[1]["explained_variance"]
  assert rows[3]["epochs"] == 3 * 16 / 24 and rows[3]["held_out"] == 16
  pretraining_curve.write(tmp_path / "curve.csv", rows)
  with open(tmp_path / "curve.csv", newline="") as file:
    assert [int(row["updates"]) for row in csv.DictReader(file)] == [0, 1, 2, 3]
  pretraining_curve.plot(tmp_path / "curve.png", rows)
  assert (tmp_path / "curve.png").stat().st_size > 1_000
