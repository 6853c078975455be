"""More live episodes than slots, few pages, shared prefixes, long prompts, and caches keyed by policy version."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from sao_jax.rollout.engine.cache_manager import CacheManager
from sao_jax.rollout.engine.model_runner import ModelRunner
from sao_jax.rollout.engine.scheduler import Scheduler
from tests.rollout.engine.engine_test import PARAMS, engine, fixed, requests, same
from tests.rollout.fakes import MARK, Echo, assert_logps_true, log_softmax, make_params, reference_logits
from tests.waiting import LONG_S

SHARED = "cdefghijklmnopqrs" * 2
"""A prefix of 34 tokens: four pages and two tokens."""


class Slow(Echo):
  """Prompts of 2 to 6 tokens, after `prefix`. Response times depend on the task."""

  prefix = ""

  def reset(self, task_index):
    return self.prefix + super().reset(task_index)

  def step(self, action):
    time.sleep(0.004 * (1 + self.task % 4))
    return super().step(action)


class SlowShared(Slow):
  prefix = SHARED


def switching(chunk: int):
  version = min(chunk // 3, max(PARAMS))
  return PARAMS[version], version


SETTINGS = {"num_slots": 2, "num_episodes": 9, "env_workers": 9, "max_len": 96, "token_budget": 64}
"""The cache has room for two long sequences."""
WIDE = {"num_slots": 9, "max_len": 96}
PAGE = 8


def prefilled(trajectories) -> int:
  """Counts the prefilled tokens without swapping: all that were not sampled, except for the last of each context."""
  return sum(int((~x.action_mask).sum()) - 1 for x in trajectories)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_slot_that_waits_for_its_tool_keeps_its_cache(streams):
  with engine(lambda: Slow(4), env_workers=4, num_slots=4, num_streams=streams) as e:
    done = list(e.generate(fixed, requests(24)))
    assert max(x.num_turns for x in done) > 2
    assert e.counters["prefill_tokens"] == prefilled(done)
    assert e.counters["swapped_out"] == 0


def test_more_episodes_than_slots_sample_the_same():
  with engine(lambda: Slow(3), **WIDE) as e:
    want = list(e.generate(fixed, requests(18), seed=3))
  with engine(lambda: Slow(3), **{**SETTINGS, "cache_tokens": 96}) as e:
    done = list(e.generate(fixed, requests(18), seed=3))
    counters = e.counters
  assert same(want, done)
  assert 0 < counters["swapped_in"] <= counters["swapped_out"]  # Short contexts may be recomputed instead.
  for x in done:
    assert_logps_true(x, PARAMS)


def test_episodes_are_live_although_all_slots_are_taken():
  """With one slot, nine environments run at the same time."""
  at_work, most = set(), [0]
  lock, all_in = threading.Lock(), threading.Event()

  class Meets(Echo):
    def step(self, action):
      with lock:
        at_work.add(self.task)
        most[0] = max(most[0], len(at_work))
        if len(at_work) == 9:
          all_in.set()
      all_in.wait(LONG_S)
      return super().step(action)

  eager = make_params(0, stop_bias=50.0)
  with engine(lambda: Meets(1), **{**SETTINGS, "num_slots": 1}) as e:
    done = list(e.generate(lambda _: (eager, 0), requests(9)))
  assert len(done) == 9 and most[0] == 9


@pytest.mark.parametrize("changes", [{}, {"num_streams": 3}, {"num_episodes": 15, "env_workers": 15}])
def test_a_shared_prefix_is_computed_once_and_changes_no_number(changes, monkeypatch):
  def run():
    with engine(lambda: SlowShared(2), **{**WIDE, "num_slots": 3, **changes}) as e:
      return list(e.generate(fixed, requests(15), seed=1)), e.counters

  done, counters = run()
  monkeypatch.setattr(CacheManager, "register", lambda *_: None)
  want, whole = run()
  assert same(want, done)
  for x in done:
    assert_logps_true(x, PARAMS)
  assert whole["prefix_tokens_saved"] == 0
  # Each stream computes it once, even if all its sequences start together.
  saved = (15 - changes.get("num_streams", 1)) * 4 * PAGE
  assert counters["prefix_tokens_saved"] >= saved
  if not changes.get("num_episodes"):
    assert counters["prefix_tokens_saved"] == saved
    assert counters["prefill_tokens"] == prefilled(done) - saved


def test_a_shared_prefix_is_prefilled_once_per_version():
  counts = []
  for every in (1000, 6):
    with engine(lambda: SlowShared(2), **{**WIDE, "num_slots": 3}) as e:
      done = list(e.generate(lambda chunk, n=every: (PARAMS[chunk // n], chunk // n), requests(15), seed=1))
      counts.append(e.counters)
    assert len(done) == 15
  fixed_weights, changing = counts
  assert changing["weight_updates"] > 2
  assert 0 < changing["prefix_tokens_saved"] < fixed_weights["prefix_tokens_saved"]


@pytest.mark.parametrize("env", [Slow, SlowShared])
@pytest.mark.parametrize("streams", [1, 2])
def test_no_token_is_sampled_from_a_cache_of_another_version(env, streams):
  """The policy samples only MARK when it reads an entry of other weights than its own."""
  scarce = {**SETTINGS, "cache_tokens": 96 * streams}
  with engine(lambda: env(4), recompute_cache_on_update=True, num_streams=streams, **scarce) as e:
    done = list(e.generate(switching, requests(24)))
    counters = e.counters
  assert len(done) == 24 and any(x.mixed_versions for x in done)
  for x in done:
    assert not (x.tokens[x.action_mask] == MARK).any()
    assert_logps_true(x, PARAMS)
  assert counters["swapped_out"] > 0 and counters["cache_recomputes"] > 0
  assert (counters["prefix_tokens_saved"] > 0) == (env is SlowShared)


FAULTS = {
  "own pages": (Scheduler, "_stale", lambda self, sequence: False),
  "shared pages": (CacheManager, "forget_prefixes", lambda self: None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_test_above_would_notice(fault, monkeypatch):
  monkeypatch.setattr(*FAULTS[fault])
  if fault == "shared pages":  # their keys contain the version, too
    page_keys = CacheManager.page_keys
    monkeypatch.setattr(CacheManager, "page_keys", lambda self, tokens, version: page_keys(self, tokens, 0))
  with engine(lambda: SlowShared(4), recompute_cache_on_update=True, **SETTINGS) as e:
    done = list(e.generate(switching, requests(24)))
  assert any((x.tokens[x.action_mask] == MARK).any() for x in done)


def test_kept_caches_record_the_log_probs_that_were_used():
  with engine(lambda: SlowShared(4), **SETTINGS) as e:
    done = list(e.generate(switching, requests(24)))
    assert e.counters["cache_recomputes"] == 0 and e.counters["swapped_out"] > 0
  marked = 0
  for x in done:
    for t in np.flatnonzero(x.action_mask):
      true = log_softmax(reference_logits(PARAMS[int(x.versions[t])], x.tokens[:t]))[x.tokens[t]]
      from_mixed = x.tokens[t] == MARK and x.behavior_logp[t] == 0.0
      marked += from_mixed
      assert from_mixed or abs(x.behavior_logp[t] - true) < 1e-4
  assert marked > 0


def test_the_prompt_of_a_group_is_prefilled_once():
  """Its length is a multiple of the page, so the shared prefix is one page shorter."""

  class Same(Echo):
    def reset(self, task_index):
      super().reset(task_index)
      return SHARED[: 4 * PAGE]

  with engine(lambda: Same(1), **{**WIDE, "num_slots": 3}) as e:
    done = list(e.generate(fixed, requests(9), seed=1))
    assert e.counters["prefix_tokens_saved"] == 8 * 3 * PAGE
  for x in done:
    assert_logps_true(x, PARAMS)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cheap_copies", [False, True])
def test_running_out_of_pages_changes_no_number(recompute, cheap_copies, monkeypatch):
  """All sequences decode, and their pages do not fit: the last in line gives up its own, and continues later."""
  endless = {v: make_params(v, stop_bias=-99.0) for v in range(40)}
  versions = lambda step: (endless[step // 40], step // 40) if recompute else (endless[0], 0)  # noqa: E731
  settings = {"num_slots": 4, "max_len": 64, "max_action_tokens": 99, "recompute_cache_on_update": recompute}
  monkeypatch.setattr(ModelRunner, "swap_is_cheaper", lambda *_: cheap_copies)
  with engine(lambda: Echo(2), **settings, cache_tokens=80) as e:
    done = list(e.generate(versions, requests(6), seed=2))
    counters = e.counters
  assert [len(x.tokens) for x in done] == [64] * 6
  assert counters["swapped_out"] > 0 and (counters["swapped_in"] > 0) == cheap_copies
  for x in done:
    assert_logps_true(x, endless)
  if not recompute:
    with engine(lambda: Echo(2), **settings) as e:
      assert same(done, list(e.generate(versions, requests(6), seed=2)))
      assert e.counters["swapped_out"] == 0


def test_others_decode_while_a_long_prompt_is_computed():
  """A prompt of 900 tokens takes 57 steps of 16 tokens; the other sequences decode in each of them."""
  endless = make_params(0, stop_bias=-99.0)

  class LongLater(Echo):
    def reset(self, task_index):
      return super().reset(task_index) + ("cde" * 300 if task_index == 3 else "")

  progress = []
  settings = {"num_slots": 4, "max_len": 1024, "max_action_tokens": 400, "chunk_steps": 4}
  with engine(LongLater, **settings) as e:

    def weights(step):
      progress.append((e.counters["prefill_tokens"], e.counters["tokens_generated"]))
      return endless, 0

    done = list(e.generate(weights, requests(4)))
  assert_logps_true(max(done, key=lambda x: len(x.tokens)), {0: endless})
  prefilled, generated = np.diff(np.array(progress), axis=0).T
  busy = np.flatnonzero(prefilled)[1:-1]
  assert len(busy) >= 55 and prefilled.max() <= 16 + 1
  assert (generated[busy] == 3 * 4).all()  # three others, four tokens each
