"""Runs with low-rank adapters on meshes, and with an engine on devices of its own, against one device."""

from __future__ import annotations

import pytest

from tests.parallel import processes

LIMIT = 600


@pytest.mark.timeout(LIMIT)
def test_a_mesh_trains_the_adapters_of_one_device() -> None:
  reports = processes.finish(processes.start("tests.parallel.adapted_program", devices=4), LIMIT)
  assert reports.keys() == {"one", "sharded", "split"}
  for report in reports.values():
    assert abs(report["ratio_mean"] - 1) < 1e-5 and report["logprob_error"] < 1e-5
    assert report["difference"] < 1e-3
    for name in ("policy_loss", "value_loss"):
      assert report[name] == pytest.approx(reports["one"][name], rel=1e-3, abs=1e-5)
