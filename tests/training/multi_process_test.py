"""Settings that several processes cannot have."""

from __future__ import annotations

import pytest

from experiments.support import chaos_run
from sao_jax.training.multi_process import check_processes


def test_what_several_processes_cannot_do():
  config = chaos_run.make_config("lagged", num_steps=1)
  with pytest.raises(ValueError, match="schedule must be async or sync with 2 processes; received 'lagged'"):
    check_processes(config, 2)
  check_processes(config, 1)
