"""Engines on meshes of their own, beside the learner's or over its devices, against an engine on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.parallel import processes

PROGRAM = "tests.parallel.split_program"
TWO_ENGINES = "data=4:placement=split,num_engines=2,tensor=2"
ONE_EACH = "data=1:placement=split,data=1"
EIGHT = (TWO_ENGINES, ONE_EACH, "fsdp=2:data=1,expert=2", "fsdp=2,expert=2:placement=split,data=2,expert=2")
TWELVE = ("fsdp=3:placement=split,data=1,tensor=3,expert=2",)
LIMIT = 600


@pytest.fixture(scope="module")
def reports() -> dict[str, Any]:
  found = {}
  for devices, placements in ((1, ["data=1"]), (8, EIGHT), (12, TWELVE)):
    found |= processes.finish(processes.start(PROGRAM, *placements, devices=devices), LIMIT)
  return found


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize("placement", [*EIGHT, *TWELVE])
def test_an_engine_on_a_mesh_samples_like_one_on_a_device(reports: dict[str, Any], placement: str) -> None:
  wanted, got = reports["data=1"]["episodes"], reports[placement]["episodes"]
  assert len(wanted) == 20 and got.keys() == wanted.keys()
  for episode, (tokens, logp) in wanted.items():
    assert got[episode][0] == tokens
    np.testing.assert_allclose(got[episode][1], logp, atol=1e-5)
  assert reports[placement]["arrived"] and reports["data=1"]["arrived"]


@pytest.mark.timeout(3 * LIMIT)
def test_engines_beside_the_learner_decode_while_it_holds_its_devices(reports: dict[str, Any]) -> None:
  split = [placement for placement in (*EIGHT, *TWELVE) if "split" in placement]
  assert all(reports[placement]["overlaps"] for placement in split)
  assert not reports["fsdp=2:data=1,expert=2"]["overlaps"]


@pytest.mark.timeout(3 * LIMIT)
def test_devices_are_disjoint_and_contiguous(reports: dict[str, Any]) -> None:
  assert reports[TWO_ENGINES]["devices"] == [[4, 5], [6, 7]]
  assert reports[ONE_EACH]["devices"] == [[1]]
  assert reports[TWELVE[0]]["devices"] == [[3, 4, 5, 6, 7, 8]]
  assert reports["fsdp=2:data=1,expert=2"]["devices"] == [[0, 1]]


@pytest.mark.timeout(3 * LIMIT)
def test_the_loop_trains_on_what_two_engines_generate(reports: dict[str, Any]) -> None:
  row = reports["loop"]
  assert row["step"] == 2 and row["trajectories"] == 16 and row["failed_episodes"] == 0
  assert 0 < row["learner_busy_fraction"] <= 1


@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.parametrize(("tensor", "heads"), [(3, 2), (4, 6)])
def test_steps_over_pages_sample_like_one_device(reports: dict[str, Any], tensor: int, heads: int) -> None:
  """Six key/value heads: three devices hold two each, and each of four devices holds all."""
  wanted, got = reports["pages"]["1"], reports["pages"][str(tensor)]
  assert got["heads_per_device"] == heads and wanted["num_sampled"] == got["num_sampled"] == [[0, 4], [4]]
  assert got["tokens"][1] == wanted["tokens"][1]
  np.testing.assert_allclose(np.array(got["logp"][1]), np.array(wanted["logp"][1]), atol=1e-5)
  assert np.array(got["tokens"][0])[:, 1].tolist() == np.array(wanted["tokens"][0])[:, 1].tolist()
