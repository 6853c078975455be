"""The engine's episodes: turns, limits, new episodes in free slots, determinism, weight updates, recomputed caches."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from sao_jax.rollout import Engine, EngineConfig, EngineThread, EpisodeRequest, WeightStore
from sao_jax.types import Step
from tests.rollout.fakes import (
  MARK,
  POLICY,
  STOP,
  CharTokenizer,
  Echo,
  assert_logps_true,
  make_params,
)
from tests.waiting import LONG_S, until

PARAMS = {v: make_params(v, mark=True) for v in range(40)}


def config(**changes) -> EngineConfig:
  settings = {
    # Few compiled shapes of each program for nearly all tests.
    "num_slots": 4,
    "max_len": 48,
    "max_action_tokens": 20,
    "max_turns": 4,
    "chunk_steps": 4,
    "token_budget": 16,
    "page_size": 8,
    "env_workers": 0,
  }
  return EngineConfig(**{**settings, **changes})


def engine(make_env=Echo, seed=0, **changes) -> Engine:
  return Engine(model=POLICY, make_env=make_env, tokenizer=CharTokenizer(), config=config(**changes), seed=seed)


def requests(n: int, first: int = 0) -> list[EpisodeRequest]:
  return [EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(first, first + n)]


def fixed(_chunk: int):
  return PARAMS[0], 0


def switching(chunk: int):
  version = min(chunk // 2, max(PARAMS))
  return PARAMS[version], version


def same(a, b) -> bool:
  key = lambda x: x.episode_id  # noqa: E731
  return len(a) == len(b) and all(
    np.array_equal(x.tokens, y.tokens)
    and np.array_equal(x.versions, y.versions)
    and np.allclose(x.behavior_logp, y.behavior_logp, equal_nan=True, atol=1e-5)
    for x, y in zip(sorted(a, key=key), sorted(b, key=key), strict=True)
  )


def test_log_probs_are_true_across_turns_refills_and_slots():
  with engine(lambda: Echo(3)) as e:
    done = list(e.generate(fixed, requests(25)))
  assert sorted(x.episode_id for x in done) == list(range(25))
  for x in done:
    assert_logps_true(x, PARAMS)
    assert x.ended == ("terminal" if x.num_turns == 3 and x.tokens[-1] == STOP else "truncated")
    assert len(x.tokens) <= 48 and x.num_turns <= 4
    # One reward per complete action, on its last token, the stop token; a limit truncates the others.
    assert (x.tokens[x.rewards != 0] == STOP).all()
    assert x.total_reward == (x.tokens[x.action_mask] == STOP).sum()
    assert (x.versions[x.action_mask] == 0).all() and (x.versions[~x.action_mask] == -1).all()
  assert e.counters["tokens_generated"] == sum(x.num_actions for x in done)
  assert {x.ended for x in done} == {"terminal", "truncated"}


def test_text_and_tokens_agree():
  with engine(lambda: Echo(2)) as e:
    for x in e.generate(fixed, requests(6)):
      assert x.text.startswith(CharTokenizer().decode(x.tokens))
      prompt = "cdefg"[: 1 + x.task_index % 5] + "h"
      assert CharTokenizer().decode(x.tokens[: np.argmax(x.action_mask)]) == prompt


def test_results_depend_on_seed_and_episode_not_on_slots_or_chunks():
  with engine(lambda: Echo(3)) as e:
    first = list(e.generate(fixed, requests(10), seed=5))
    again = list(e.generate(fixed, requests(10), seed=5))
    other = list(e.generate(fixed, requests(10), seed=6))
    counted = [list(e.generate(fixed, requests(10))) for _ in range(2)]
  assert same(first, again)
  assert not same(first, other)
  # PITFALL 28: calls without a seed never repeat one another.
  assert not same(*counted) and not same(first, counted[0])
  for streams in (1, 2):
    shapes = {"chunk_steps": 7, "page_size": 4, "token_budget": 5, "num_streams": streams}
    with engine(lambda: Echo(3), **shapes) as e:
      assert same(first, list(e.generate(fixed, requests(10), seed=5)))
  with engine(lambda: Echo(3), seed=1) as e:
    assert not same(first, list(e.generate(fixed, requests(10), seed=5)))


def test_weights_switch_mid_trajectory_deterministically():
  with engine(lambda: Echo(3)) as e:
    done = list(e.generate(switching, requests(12), seed=0))
    assert same(done, list(e.generate(switching, requests(12), seed=0)))
  assert any(x.mixed_versions for x in done)
  for x in done:
    assert (np.diff(x.versions[x.action_mask]) >= 0).all()
  # The cache was kept: some tokens were sampled with keys of older weights, which this policy marks.
  assert any((x.tokens[x.action_mask] == MARK).any() for x in done)
  assert e.counters["weight_updates"] > 2


@pytest.mark.parametrize("env_workers", [0, 3])
def test_recompute_never_samples_from_a_cache_of_other_weights(env_workers):
  with engine(lambda: Echo(3), recompute_cache_on_update=True, env_workers=env_workers) as e:
    done = list(e.generate(switching, requests(12)))
  assert any(x.mixed_versions for x in done)
  for x in done:
    assert not (x.tokens[x.action_mask] == MARK).any()
    assert_logps_true(x, PARAMS)
  assert e.counters["cache_recomputes"] > 0


def test_long_contexts_are_prefilled_in_pieces_between_chunks():
  class Long(Echo):
    def reset(self, task_index):
      super().reset(task_index)
      return "cdefghij" * 3 + "k" * (task_index % 7)

  with engine(Long, max_len=64) as e:
    for x in e.generate(fixed, requests(8)):
      assert_logps_true(x, PARAMS)


def test_threads_give_the_same_as_inline_when_it_waits_for_them():
  class Slow(Echo):
    def step(self, action):
      time.sleep(0.001 * (len(action) % 3))
      return super().step(action)

  with engine(lambda: Echo(3)) as e:
    inline = list(e.generate(switching, requests(10), seed=1))
  with engine(lambda: Slow(3), env_workers=3, wait_for_env=True) as e:
    assert [x.episode_id for x in inline] == [x.episode_id for x in e.generate(switching, requests(10), seed=1)]


def test_a_slow_environment_holds_up_only_its_own_slot():
  release = threading.Event()

  class OneSlow(Echo):
    def reset(self, task_index):
      self.slow = task_index == 0
      return super().reset(task_index)

    def step(self, action):
      if self.slow:
        assert release.wait(LONG_S)
      return super().step(action)

  with engine(OneSlow, env_workers=4) as e:
    order = []
    for x in e.generate(fixed, requests(12)):
      order.append(x.episode_id)
      if len(order) == 11 - order.count(0):
        release.set()
  assert sorted(order) == list(range(12))
  if 0 in order[:-1]:  # unless its first action was truncated before it reached the environment
    assert order.index(0) < 11


def test_turn_limit_keeps_the_last_reward():
  params = make_params(0, stop_bias=3.0)  # short actions
  with engine(lambda: Echo(99, reward=0.25), max_turns=2) as e:
    done = list(e.generate(lambda _: (params, 0), requests(8)))
  turned = [x for x in done if x.num_turns == 2 and x.tokens[-1] == STOP]
  assert turned
  for x in turned:
    assert x.ended == "truncated" and x.total_reward == 0.5 and x.rewards[-1] == 0.25


def test_an_action_without_an_end_is_truncated_with_reward_zero():
  params = make_params(0, stop_bias=-99.0)

  class Never(Echo):
    def step(self, action):
      raise AssertionError("must not be called")

  with engine(Never, max_action_tokens=7) as e:
    for x in e.generate(lambda _: (params, 3), requests(5)):
      assert (x.ended, x.num_actions, x.total_reward, x.success) == ("truncated", 7, 0.0, False)
      assert x.text == CharTokenizer().decode(x.tokens)
  with engine(Never, max_action_tokens=999) as e:
    assert {len(x.tokens) for x in e.generate(lambda _: (params, 3), requests(5))} == {48}


def test_an_observation_that_does_not_fit_ends_the_episode():
  class Wordy(Echo):
    def step(self, action):
      return Step(observation="o" * 100, reward=2.0)

  with engine(Wordy) as e:
    for x in e.generate(fixed, requests(5)):
      assert x.ended == "truncated" and x.num_turns == 1
      assert x.total_reward == (2.0 if x.tokens[-1] == STOP else 0.0)


def test_one_token_prompts_and_empty_observations():
  class Terse(Echo):
    def reset(self, task_index):
      super().reset(task_index)
      return "c"

    def step(self, action):
      return Step(done=super().step(action).done, info={"success": True})

  with engine(lambda: Terse(3)) as e:
    for x in e.generate(fixed, requests(8)):
      assert_logps_true(x, PARAMS)
      assert not x.action_mask[0] and x.action_mask[1:].all()
      assert x.success == (x.num_turns > 1 or x.ended == "terminal")


def test_lazy_requests_and_early_close():
  with engine() as e:
    iterator = e.generate(fixed, (requests(1, i)[0] for i in itertools.count()))
    got = [next(iterator) for _ in range(10)]
    with pytest.raises(RuntimeError, match="still running"):
      next(e.generate(fixed, requests(1)))
    iterator.close()
    assert len({x.episode_id for x in got}) == 10
    assert len(list(e.generate(fixed, requests(3)))) == 3
    assert list(e.generate(fixed, [])) == []


def test_run_takes_new_weights_in_flight_and_stops():
  store = WeightStore()
  store.publish(PARAMS[0], 0)
  done, ids, version = [], itertools.count(), 0
  with engine(lambda: Echo(3), env_workers=2) as e:
    thread = EngineThread(
      e,
      weights=store,
      next_request=lambda: requests(1, next(ids))[0] if len(done) < 30 or version < 20 else None,
      emit=done.append,
    )
    thread.start()
    while version < 20:  # each version gets the time to sample something
      tokens = e.counters["tokens_generated"]
      until(lambda tokens=tokens: thread.check() or e.counters["tokens_generated"] > tokens, every_s=0.001)
      version += 1
      store.publish(PARAMS[version], version)
    until(lambda: thread.check() or len(done) >= 30)
    thread.stop(timeout=LONG_S)
  assert len(done) >= 30
  assert any(x.mixed_versions for x in done)
  assert e.counters["busy_seconds"] > 0


def test_an_exception_in_the_thread_surfaces():
  store = WeightStore()
  store.publish(PARAMS[0], 0)

  def emit(_):
    raise ZeroDivisionError("in emit")

  with engine() as e:
    thread = EngineThread(e, weights=store, next_request=lambda: requests(1)[0], emit=emit)
    thread.start()
    with pytest.raises(ZeroDivisionError, match="in emit") as caught:
      thread._thread.join(LONG_S)
      thread.check()
    assert any(entry.name == "emit" for entry in caught.traceback)
    with pytest.raises(ZeroDivisionError):
      thread.stop()


@pytest.mark.parametrize(
  "changes",
  [
    {"temperature": 0.0},
    {"top_p": 0.0},
    {"top_p": 1.01},
    {"num_slots": 0},
    {"token_budget": 0},
    {"page_size": 0},
    {"cache_tokens": 47},
    {"max_len": 1},
    {"env_workers": -1},
    {"env_timeout_s": 0.0},
    {"max_failed_share": 2.0},
    {"num_episodes": 3},
    {"num_streams": 3},
    {"num_streams": 0},
  ],
)
def test_bad_settings(changes):
  with pytest.raises(ValueError, match="received"):
    config(**changes)


@pytest.mark.parametrize("name", ["prefill_rows", "prefill_tokens", "live_buckets", "prefix_rows"])
def test_a_removed_setting_names_what_replaces_it(name):
  with pytest.raises(TypeError, match=rf"no field '{name}' any more: .*(token_budget|Delete)"):
    config(**{name: 8})


def test_bad_seed_and_requests():
  with engine() as e, pytest.raises(ValueError, match="seed must be"):
    e.generate(fixed, [], seed=-1)
  with pytest.raises(ValueError, match="episode_id"):
    EpisodeRequest(task_index=0, episode_id=2**31, group_id=0)
