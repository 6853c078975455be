"""The checkpointing benchmark at a size that takes seconds."""

from __future__ import annotations

from experiments.benchmarks import checkpointing
from tests.bare_run import bare, busy_domain


def test_it_reports_what_a_save_costs(tmp_path):
  result = checkpointing.measure(bare(), busy_domain(), tmp_path, steps=3, rounds=2)
  assert 0 < result["stall_ms"] <= result["stall_ms_most"]
  assert result["stall_share"] > 0 and result["write_ms"] > 0
  assert 0 < result["checkpoint_mb"] < 5
  # One save first, then each round three (every step) and one (sometimes), then three alone; three are kept.
  assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir())[-1] == 1 + 2 * 4 + 3
