"""Layers and log-probs under `shard_map`: no token is dropped at any imbalance, gradients included."""

from __future__ import annotations

import pytest

from tests.sharding import processes


@pytest.mark.timeout(600)
def test_layers_on_meshes_equal_layers_off_them():
  report = processes.finish(processes.start("tests.sharding.layers_program", devices=8), 570)
  assert len(report["experts"]) == 4
  assert [len(cases) for layer, cases in report.items() if "log-probs" in layer] == [4, 4, 1]
  for layer, cases in report.items():
    tolerance = 1e-2 if "bfloat16" in layer else 1e-5
    for case, difference in cases.items():
      assert difference < tolerance, (layer, case, difference)
