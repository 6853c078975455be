"""Expert layers and attention under `shard_map`: no token is dropped at any imbalance, gradients included."""

from __future__ import annotations

import pytest

from tests.sharding import processes


@pytest.mark.timeout(600)
def test_layers_on_meshes_equal_layers_off_them():
  report = processes.finish(processes.start("tests.sharding.layers_program", devices=8), 570)
  assert len(report["experts"]) == 4
  for layer, cases in report.items():
    for case, difference in cases.items():
      assert difference < 1e-5, (layer, case, difference)
