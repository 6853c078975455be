"""Layers and log-probs under `shard_map`: no token is dropped at any imbalance, gradients included."""

from __future__ import annotations

import pytest

from tests.parallel import processes


@pytest.mark.timeout(600)
def test_layers_on_meshes_equal_layers_off_them():
  report = processes.finish(processes.start("tests.parallel.layers_program", devices=8), 570)
  # Over context and tensor, over context alone, and whole: by what divides.
  assert report["residual"] == {"8": [4, 2, 16], "6": [4, 3, 16], "5": [4, 5, 16]}
  report = report["layers"]
  assert len(report["experts"]) == 4
  assert [len(cases) for layer, cases in report.items() if "log-probs" in layer] == [4, 4, 1]
  for layer, cases in report.items():
    tolerance = 1e-2 if "bfloat16" in layer else 1e-5
    for case, difference in cases.items():
      assert difference < tolerance, (layer, case, difference)
