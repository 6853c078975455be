"""Requests with their own token limit, and episodes ended by `Engine.cut`."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sao_jax.rollout import EngineThread, EpisodeRequest, WeightStore
from tests.rollout.engine.engine_test import PARAMS, engine, fixed, requests
from tests.rollout.fakes import Echo, assert_logps_true, make_params
from tests.waiting import LONG_S, until

ENDLESS = make_params(0, stop_bias=-99.0)


def limited(n: int, limit: int) -> list[EpisodeRequest]:
  return [EpisodeRequest(task_index=i, episode_id=i, group_id=i, max_action_tokens=limit + i) for i in range(n)]


def test_a_request_may_allow_fewer_tokens_but_not_more():
  with engine(Echo, max_action_tokens=9) as e:
    done = list(e.generate(lambda _: (ENDLESS, 0), limited(9, 3)))
  assert sorted((x.episode_id, x.num_actions) for x in done) == [(i, min(3 + i, 9)) for i in range(9)]
  with pytest.raises(ValueError, match=r"max_action_tokens must be >= 1 or None; received 0"):
    limited(1, 0)


def test_a_cut_episode_ends_with_what_it_has_and_the_others_go_on():
  store = WeightStore()
  store.publish(ENDLESS, 0)
  wanted, done, failed = requests(6), [], []
  with engine(Echo, max_len=4096, max_action_tokens=4096, num_slots=3) as e:
    todo = list(reversed(wanted))
    thread = EngineThread(
      e, weights=store, next_request=lambda: todo.pop() if todo else None, emit=done.append, on_failure=failed.append
    )
    thread.start()
    for i, request in enumerate(wanted):
      tokens = e.counters["tokens_generated"]
      until(lambda n=tokens + 30: thread.check() or e.counters["tokens_generated"] >= n, every_s=0.001)
      e.cut(request)
      e.cut(EpisodeRequest(task_index=77, episode_id=77, group_id=77))  # unknown: not an error
      until(lambda i=i: thread.check() or len(done) > i, every_s=0.001)
    thread.stop()
  assert [x.episode_id for x in done] == [0, 1, 2, 3, 4, 5] and not failed
  for x in done:
    assert x.ended == "truncated" and 1 <= x.num_actions < 4000
    assert x.total_reward == 0.0 and x.num_turns == 1
    assert_logps_true(x, {0: ENDLESS})


def test_cut_before_the_first_token_fails_and_cut_in_the_environment_waits_for_it():
  release = threading.Event()

  class Waits(Echo):
    def reset(self, task_index):
      assert release.wait(LONG_S)
      return super().reset(task_index)

  first, second = requests(2)
  failed = []
  with engine(Waits, env_workers=2) as e:
    e.cut(first)
    threading.Timer(0.2, release.set).start()
    done = list(e.generate(fixed, [first, second], on_failure=failed.append))
    assert e.counters["failed_by_kind"] == {"cut": 1}
  assert failed == [first] and [x.episode_id for x in done] == [1]
  assert_logps_true(done[0], PARAMS)
  assert np.isfinite(done[0].behavior_logp[done[0].action_mask]).all()
