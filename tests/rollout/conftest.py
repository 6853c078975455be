"""Fixtures for all tests of rollouts."""

from __future__ import annotations

import pytest

from sao_jax.rollout.engine import sampler


@pytest.fixture(autouse=True)
def cheap_copies(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes copies of cache rows cheap. Otherwise the tiny policies of these tests would always recompute them."""
  monkeypatch.setattr(sampler, "_CPU_COPY", {"host": (0.0, 20.0), "device": (0.0, 20.0)})
