"""What value pretraining reports."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from sao_jax.io.console import Console
from sao_jax.training import stages

FACTS = {"seconds": 1.0, "updates": 8, "held_out_trajectories": 64}


@pytest.mark.parametrize(
  ("facts", "printed", "warned"),
  [
    ({**FACTS, "explained_variance": 0.4}, "explained variance 0.40 on 64 held-out trajectories after 8 updates", None),
    ({**FACTS, "explained_variance": 0.05}, "explained variance 0.05", "reached an explained variance of 0.05"),
    ({**FACTS, "explained_variance": None}, None, "do not vary"),
    ({"seconds": 0.0}, None, None),  # no value pretraining, or the checkpoint of an older release
  ],
)
def test_low_explained_variance_is_a_warning(
  facts: dict[str, Any], printed: str | None, warned: str | None, caplog: Any, capsys: Any
) -> None:
  with caplog.at_level(logging.WARNING):
    stages._report_values(Console(), facts)
  out = capsys.readouterr().out
  assert (printed in out) if printed else out == ""
  assert (warned in caplog.text) if warned else caplog.text == ""


def test_one_trajectory_in_eight_is_held_out_and_at_most_a_batch() -> None:
  made: Any = list(range(100))
  assert stages.hold_out(made, 64) == (made[:88], made[88:])
  assert stages.hold_out(made, 8) == (made[:92], made[92:])
  assert stages.hold_out(made[:7], 8) == (made[:7], [])
