"""Latent attention and the indexer on meshes that split everything: the numbers of one device."""

from __future__ import annotations

import pytest

from tests.parallel import processes

MESHES = ("fsdp=2,tensor=2,context=2", "expert=2,context=4")


@pytest.mark.timeout(600)
def test_meshes_change_no_number():
  report = processes.finish(processes.start("tests.parallel.latent_program", *MESHES, devices=8), 570)
  assert set(MESHES) < set(report)
  for mesh, differences in report.items():
    for what, difference in differences.items():
      assert difference < 2e-5, (mesh, what, difference)
