"""The environment wait policy: the wait with the largest gain."""

from __future__ import annotations

import numpy as np
import pytest

from sao_jax.rollout.engine.env_wait_policy import EnvWaitPolicy


def make_policy(*seconds: float) -> EnvWaitPolicy:
  policy = EnvWaitPolicy()
  for x in seconds:
    policy.record(x)
  return policy


def test_fast_environments_are_waited_for_and_slow_tools_are_not():
  assert make_policy(*[0.001] * 50).limit(fresh=2, ready=14, chunk_s=0.03) == 0.001
  assert make_policy(*[0.5] * 50).limit(fresh=2, ready=14, chunk_s=0.03) == 0.0


@pytest.mark.parametrize("empty", ["responses", "fresh", "ready"])
def test_without_a_gain_there_is_no_wait(empty):
  policy = make_policy(*([] if empty == "responses" else [0.001]))
  assert policy.limit(fresh=0 if empty == "fresh" else 3, ready=0 if empty == "ready" else 3, chunk_s=1.0) == 0.0


def test_the_wait_has_the_largest_gain():
  rng = np.random.default_rng(0)
  for _ in range(50):
    seconds, fresh, ready = rng.lognormal(-4, 1.5, 40), int(rng.integers(1, 9)), int(rng.integers(1, 17))
    gains = {t: (seconds <= t).mean() * fresh * 0.05 - t * ready for t in [0.0, *seconds]}
    chosen = make_policy(*seconds).limit(fresh=fresh, ready=ready, chunk_s=0.05)
    assert gains[chosen] == max(gains.values())


def test_only_recent_responses_count():
  policy = make_policy(*[0.5] * 300, *[0.001] * 256)
  assert policy.limit(fresh=1, ready=1, chunk_s=0.1) == 0.001
