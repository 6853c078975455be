"""More live episodes than slots, shared prefixes of prompts, and caches keyed by policy version."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from sao_jax.rollout.engine.kv_cache_manager import KVCacheManager
from sao_jax.rollout.engine.prefix_cache import BLOCK, PrefixStore
from tests.rollout.engine.engine_test import PARAMS, engine, fixed, requests, same
from tests.rollout.fakes import MARK, Echo, assert_logps_true, log_softmax, make_params, reference_logits
from tests.waiting import LONG_S

SHARED = "cdefghijklmnopqrs" * 2
"""A prefix of 34 tokens: two blocks and two tokens."""


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


SETTINGS = {"num_slots": 2, "num_episodes": 9, "env_workers": 9, "max_len": 96, "live_buckets": (96,)}
WIDE = {"num_slots": 9, "max_len": 96, "live_buckets": (96,)}


def prefilled(trajectories) -> int:
  """Counts the prefilled tokens without swapping: all that were not sampled, except for the last of each context."""
  return sum(int((~x.action_mask).sum()) - 1 for x in trajectories)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_slot_that_waits_for_its_tool_keeps_its_cache(streams):
  with engine(lambda: Slow(4), env_workers=4, prefix_rows=0, num_slots=4, num_streams=streams) as e:
    done = list(e.generate(fixed, requests(24)))
    assert max(x.num_turns for x in done) > 2
    assert e.counters["prefill_tokens"] == prefilled(done)
    assert e.counters["swapped_out"] == 0


def test_more_episodes_than_slots_sample_the_same():
  with engine(lambda: Slow(3), **WIDE) as e:
    want = list(e.generate(fixed, requests(18), seed=3))
  with engine(lambda: Slow(3), **SETTINGS) as e:
    done = list(e.generate(fixed, requests(18), seed=3))
    counters = e.counters
  assert same(want, done)
  # Both happened: short contexts were recomputed, long ones swapped in.
  assert 0 < counters["swapped_in"] < counters["swapped_out"]
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


def shared_counts(**changes):
  settings = {**WIDE, "num_slots": 3, **changes}
  with engine(lambda: SlowShared(2), **settings) as e:
    return list(e.generate(fixed, requests(15), seed=1)), e.counters


@pytest.mark.parametrize("changes", [{}, {"num_streams": 3}, {"num_episodes": 15, "env_workers": 15}])
def test_a_shared_prefix_is_prefilled_once_and_changes_no_number(changes):
  want, whole = shared_counts(prefix_rows=0, **changes)
  done, counters = shared_counts(**changes)
  assert same(want, done)
  assert whole["prefix_tokens_saved"] == 0
  # The first two prompts show the shared prefix, which is kept from the second on.
  assert counters["prefix_tokens_saved"] >= 13 * 2 * BLOCK
  if not changes.get("num_episodes"):
    assert counters["prefix_tokens_saved"] == 13 * 2 * BLOCK
    assert counters["prefill_tokens"] == prefilled(done) - 13 * 2 * BLOCK


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
  with engine(lambda: env(4), recompute_cache_on_update=True, num_streams=streams, **SETTINGS) as e:
    done = list(e.generate(switching, requests(24)))
    counters = e.counters
  assert len(done) == 24 and any(x.mixed_versions for x in done)
  for x in done:
    assert not (x.tokens[x.action_mask] == MARK).any()
    assert_logps_true(x, PARAMS)
  assert counters["swapped_out"] > 0 and counters["cache_recomputes"] > 0
  assert (counters["prefix_tokens_saved"] > 0) == (env is SlowShared)


STALE = {
  "swapped in": (KVCacheManager, "_stale", lambda self, sequence: False),
  "prefix": (PrefixStore, "get", lambda self, version, prefix: next(iter(self._rows.values()), None)),
}


@pytest.mark.parametrize("fault", STALE)
def test_the_test_above_would_notice(fault, monkeypatch):
  owner, name, wrong = STALE[fault]
  monkeypatch.setattr(owner, name, wrong)
  monkeypatch.setattr(PrefixStore, "clear_rows", lambda self: None)
  monkeypatch.setattr(PrefixStore, "put", lambda self, version, prefix, row: self._rows.setdefault((0, b""), row))
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


def prompt(*pieces) -> np.ndarray:
  return np.concatenate([np.full(n, value, np.int32) for value, n in pieces])


def test_prefix_store_finds_the_longest_and_evicts_the_oldest():
  store = PrefixStore[str](2)
  store.note(prompt((1, 40), (2, 9)))
  assert store.match(prompt((1, 60))) is None
  store.note(prompt((1, 40), (3, 9)))
  system = store.match(prompt((1, 60)))
  assert len(system) == 32 and store.match(prompt((1, 32))) is None  # a token must be left
  store.put(4, system, "four")
  assert (store.get(4, system), store.get(5, system)) == ("four", None)
  store.note(prompt((1, 40), (3, 30)))
  longer = store.match(prompt((1, 40), (3, 99)))
  assert len(longer) == 48
  store.put(5, longer, "five")
  assert store.get(4, system) is None and store.get(5, longer) == "five"
  for value in (7, 8):  # two others: both are evicted
    store.note(prompt((value, 20)))
    store.note(prompt((value, 20)))
  assert store.match(prompt((1, 60))) is None and store.get(5, longer) is None
  assert len(store.match(prompt((8, 20)))) == 16


def test_prefix_store_of_no_rows_remembers_nothing():
  store = PrefixStore[str](0)
  for _ in range(3):
    store.note(prompt((1, 40)))
  assert store.match(prompt((1, 60))) is None


@pytest.mark.parametrize("length", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_repeated_prompt_is_shared_except_for_its_end(length):
  store = PrefixStore[str](2)
  again = np.arange(length, dtype=np.int32)
  store.note(again)
  store.note(again)
  assert len(store.match(again)) == (length - 1) // BLOCK * BLOCK


def test_the_prompt_of_a_group_is_prefilled_once():
  """Its length is a multiple of the block, so the shared prefix is one block shorter."""

  class Same(Echo):
    def reset(self, task_index):
      super().reset(task_index)
      return SHARED[: 2 * BLOCK]

  with engine(lambda: Same(1), **{**WIDE, "num_slots": 3}) as e:
    done = list(e.generate(fixed, requests(9), seed=1))
    assert e.counters["prefix_tokens_saved"] == 7 * BLOCK
  for x in done:
    assert_logps_true(x, PARAMS)
