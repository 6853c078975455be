"""Step times from stated rates: by hand, and through the command."""

from __future__ import annotations

import dataclasses
import json

import pytest

from experiments import simulate_cluster
from experiments.presets.model_configs import MODELS
from experiments.simulator import step_times
from experiments.simulator.step_times import Chip

MODEL = dataclasses.replace(MODELS["tiny_moe"](), dtype="bfloat16")
REPORT = {"moved_bytes_per_device": 4e9, "collective_bytes": 3e8}


def test_times_follow_from_the_rates():
  attention = 4 * 100 * 8 * 16  # scores and sums, 2 FLOPs each, of 100 tokens on average, in 8 heads of 16
  embeddings = 2 * 512 * 64
  layer = 4 * 64 * 128 + 64 * 8 + 2 * (3 * 64 * 32) + 2 * 64 + 2 * 16
  active = embeddings + 2 * layer + 64
  forward = 2 * active + 2 * attention
  assert step_times.forward_flops(MODEL, context=200) == pytest.approx(forward, rel=1e-6)
  assert step_times.training_flops(MODEL, context=200, critic_updates=2) == pytest.approx(13 * forward, rel=1e-6)
  chip = Chip(memory_bytes_per_s=1e12, interconnect_bytes_per_s=1e11, peak_flops=1e14)
  times = step_times.step_times(REPORT, MODEL, chip, chips_per_engine=4, context=200, observation=10)
  assert times.token_s == pytest.approx(4e-3 + 3e-3)
  assert times.turn_s == pytest.approx(10 * forward / (4 * 0.4 * 1e14))
  assert times.train_chip_s == pytest.approx(13 * forward / (0.4 * 1e14))
  assert 0 < times.transfer_s < 1e-4


def test_a_report_is_the_last_line(tmp_path):
  path = tmp_path / "report.txt"
  path.write_text("rows\n" + json.dumps({"slots": 8, "decode": REPORT}) + "\n")
  assert step_times.read_report(path) == {**REPORT, "slots": 8}
  for text in ("", "rows\n", json.dumps({"slots": 8, "decode": None})):
    path.write_text(text)
    with pytest.raises(ValueError, match="must end with the JSON object of a compile_report of 'decode'"):
      step_times.read_report(path)


def test_a_trainer_that_does_not_fit_on_fewer_chips_gets_them():
  config = dataclasses.replace(simulate_cluster.PAPER, train_s=1.0, train_token_s=0.0)
  splits = simulate_cluster.best_split(
    config, simulate_cluster.PAPER_WORKLOAD, chips=40, chips_per_engine=8, reference_trainer_chips=8,
    min_trainer_chips=16, num_steps=1,
  )  # fmt: skip
  assert min(split.trainer_chips for split in splits) >= 16
