"""Launcher variables, and two real processes of 4 devices each against one process of 8."""

from __future__ import annotations

import numpy as np
import pytest

from sao_jax.parallel import distributed
from tests.parallel import processes

GOOD = {"SAO_COORDINATOR": "localhost:1234", "SAO_NUM_PROCESSES": "2", "SAO_PROCESS_ID": "1"}


def test_environment_is_read():
  assert distributed.launch_from_environment({"HOME": "/"}) is None
  assert distributed.launch_from_environment(GOOD) == ("localhost:1234", 2, 1)
  assert distributed.initialize_from_environment({}) is None


@pytest.mark.parametrize("name", list(GOOD))
def test_half_an_environment_is_refused(name):
  with pytest.raises(ValueError, match=rf"received .*, but not {name}\."):
    distributed.initialize_from_environment({k: v for k, v in GOOD.items() if k != name})


@pytest.mark.parametrize(
  ("name", "value"),
  [("SAO_COORDINATOR", "localhost"), ("SAO_NUM_PROCESSES", "two"), ("SAO_PROCESS_ID", "2"), ("SAO_PROCESS_ID", "-1")],
)
def test_senseless_values_are_refused(name, value):
  with pytest.raises(ValueError, match=name):
    distributed.launch_from_environment({**GOOD, name: value})


@pytest.mark.timeout(600)
def test_two_processes_do_what_one_does(tmp_path):
  program, one, two = "tests.parallel.distributed_program", str(tmp_path / "one.npz"), str(tmp_path / "two.npz")
  with processes.launches() as launches:
    pair = [processes.start(program, two, devices=4, **launch) for launch in launches]
    single = processes.start(program, one, devices=8)
    reports = [processes.finish(process, 570) for process in (*pair, single)]
  assert [report["processes"] for report in reports] == [2, 2, 1]
  assert [report["devices"] for report in reports] == [8, 8, 8]
  assert reports[0]["metrics"] == reports[1]["metrics"]
  for name, value in reports[2]["metrics"].items():
    np.testing.assert_allclose(reports[0]["metrics"][name], value, rtol=1e-5, atol=1e-5, err_msg=name)
  with np.load(one) as first, np.load(two) as second:
    assert first.files == second.files
    for name in first.files:
      np.testing.assert_allclose(second[name], first[name], rtol=0, atol=1e-5)
