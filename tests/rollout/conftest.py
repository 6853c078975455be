"""For all tests of rollouts."""

from __future__ import annotations

import pytest

from sao_jax.rollout.engine import sampler


@pytest.fixture(autouse=True)
def copies_that_pay_for_policies_of_few_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
  """Else nothing would be copied: feeding again costs them next to nothing."""
  monkeypatch.setattr(sampler, "_CPU_COPY", {"host": (0.0, 20.0), "device": (0.0, 20.0)})
