"""Waiting for environments: as long as it pays, no longer."""

from __future__ import annotations

import numpy as np
import pytest

from sao_jax.rollout.engine.env_wait_policy import EnvWaitPolicy


def patience(*seconds: float) -> EnvWaitPolicy:
  made = EnvWaitPolicy()
  for x in seconds:
    made.record(x)
  return made


def test_fast_environments_are_waited_for_and_slow_tools_are_not():
  assert patience(*[0.001] * 50).limit(fresh=2, ready=14, chunk_s=0.03) == 0.001
  assert patience(*[0.5] * 50).limit(fresh=2, ready=14, chunk_s=0.03) == 0.0


@pytest.mark.parametrize("empty", ["answers", "fresh", "ready"])
def test_nothing_to_gain_is_no_wait(empty):
  made = patience(*([] if empty == "answers" else [0.001]))
  assert made.limit(fresh=0 if empty == "fresh" else 3, ready=0 if empty == "ready" else 3, chunk_s=1.0) == 0.0


def test_the_wait_is_the_best_of_all():
  rng = np.random.default_rng(0)
  for _ in range(50):
    seconds, fresh, ready = rng.lognormal(-4, 1.5, 40), int(rng.integers(1, 9)), int(rng.integers(1, 17))
    gains = {t: (seconds <= t).mean() * fresh * 0.05 - t * ready for t in [0.0, *seconds]}
    chosen = patience(*seconds).limit(fresh=fresh, ready=ready, chunk_s=0.05)
    assert gains[chosen] == max(gains.values())


def test_only_the_last_answers_count():
  made = patience(*[0.5] * 300, *[0.001] * 256)
  assert made.limit(fresh=1, ready=1, chunk_s=0.1) == 0.001
