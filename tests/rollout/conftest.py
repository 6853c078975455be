"""Fixtures for all tests of rollouts."""

from __future__ import annotations

import pytest

from sao_jax.rollout.engine import model_runner


@pytest.fixture(autouse=True)
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes copies of pages cheap. Otherwise the tiny policies of these tests would always recompute them."""
  monkeypatch.setattr(model_runner, "_COPY_COST", {"cpu": (0.0, 10.0)})
