"""Several engines that look like one: fair distribution, one version order, summed counters, and failures."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any

import jax
import pytest

from sao_jax.rollout.engine_group import EngineGroup
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.weight_sync import WeightStore

DEVICE = jax.devices()[0]


class FakeEngine:
  """Runs up to 4 episodes at once, each for one chunk; "trajectories" are (episode, engine, weights, version)."""

  def __init__(
    self, name: str, *, breaks_at: int | None = None, chunk_s: float = 0.001, start: threading.Barrier | None = None
  ):
    self.name, self.breaks_at, self.chunk_s, self.start = name, breaks_at, chunk_s, start
    self.counters: dict[str, Any] = {"chunks": 0, "busy_seconds": 2.0, "failed_by_kind": {}}
    self.closed = False

  def generate(self, weights, requests, *, seed=None, on_failure=None):
    source = iter(requests)
    yield from self._drive(weights, lambda: next(source, None), None)

  def run(self, weights, next_request, emit, stop, *, on_failure=None):
    for done in self._drive(lambda _: weights.latest(), next_request, stop):
      emit(done)

  def close(self):
    self.closed = True

  def _drive(self, weights, next_request, stop):
    if self.start is not None:
      self.start.wait(30.0)
    while stop is None or not stop.is_set():
      params, version = weights(self.counters["chunks"])
      live = [request for _ in range(4) if (request := next_request()) is not None]
      if stop is None and not live:
        return
      time.sleep(self.chunk_s)
      self.counters["chunks"] += 1
      if self.counters["chunks"] == self.breaks_at:
        self.counters["failed_by_kind"] = {"bug": 1}
        raise ArithmeticError("the engine broke")
      for request in live:
        yield request.episode_id, self.name, params, version


def requests(count):
  return [EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(count)]


def pair(a_s=0.02, b_s=0.02):
  """Two engines that start together, with the times of their chunks. A busy machine stalls one for tens of ms."""
  start = threading.Barrier(2)
  return group_of(FakeEngine("a", start=start, chunk_s=a_s), FakeEngine("b", start=start, chunk_s=b_s))


def group_of(*engines):
  return EngineGroup(engines, [DEVICE] * len(engines))


def run_until(group, *, admit, count, publish=None):
  """Runs a group that may have `admit` episodes in flight, until `count` have ended; returns what it emitted."""
  store, stop, done = WeightStore(lambda weights: weights), threading.Event(), []
  store.publish(["a0", "b0"], 0)
  waiting = iter(requests(10_000))
  started = 0

  def next_request():
    nonlocal started
    if started - len(done) >= admit:
      return None
    started += 1
    return next(waiting)

  def emit(trajectory):
    done.append(trajectory)
    if publish is not None and len(done) == publish:
      store.publish(["a1", "b1"], 1)
    if len(done) >= count:
      stop.set()

  group.run(store, next_request, emit, stop)
  return done


def test_scarce_requests_are_shared_evenly():
  """At most 4 episodes may run, which one engine could take all by itself."""
  done = run_until(pair(), admit=4, count=200)
  share = collections.Counter(name for _, name, _, _ in done)
  assert min(share.values()) > 60, share
  assert len({episode for episode, *_ in done}) == len(done)


def test_a_slow_engine_takes_less_and_none_waits_for_it():
  done = run_until(pair(0.005, 0.2), admit=1_000, count=300)
  share = collections.Counter(name for _, name, _, _ in done)
  assert share["a"] > 2 * share["b"], share


def test_every_engine_takes_its_own_copy_of_a_version():
  done = run_until(pair(), admit=8, count=200, publish=100)
  assert {(name, params, version) for _, name, params, version in done} == {
    ("a", "a0", 0), ("b", "b0", 0), ("a", "a1", 1), ("b", "b1", 1),
  }  # fmt: skip


def test_requests_of_generate_go_to_the_engines_in_turn():
  group = group_of(FakeEngine("a"), FakeEngine("b", chunk_s=0.01))
  done = sorted(group.generate(lambda _: (["x", "y"], 3), iter(requests(23))))
  assert done == [(i, "ab"[i % 2], "xy"[i % 2], 3) for i in range(23)]
  assert group.counters == {"chunks": 6, "busy_seconds": 2.0, "failed_by_kind": {}}


def test_an_engine_that_breaks_ends_the_others():
  group = group_of(FakeEngine("a"), FakeEngine("b", breaks_at=5))
  with pytest.raises(ArithmeticError, match="the engine broke"):
    run_until(group, admit=8, count=10_000)
  assert group.counters["failed_by_kind"] == {"bug": 1}
  with pytest.raises(ArithmeticError, match="the engine broke"):
    list(group_of(FakeEngine("a"), FakeEngine("b", breaks_at=2)).generate(lambda _: ("xy", 0), requests(50)))


def test_an_iterator_closed_early_stops_the_threads():
  first, second = FakeEngine("a"), FakeEngine("b")
  group = group_of(first, second)
  episodes = group.generate(lambda _: ("xy", 0), iter(requests(10_000)))
  next(episodes)
  with pytest.raises(RuntimeError, match="another call is still running"):
    next(group.generate(lambda _: ("xy", 0), requests(1)))
  episodes.close()
  chunks = first.counters["chunks"], second.counters["chunks"]
  assert sum(chunks) < 5_000 and len(list(group.generate(lambda _: ("xy", 0), requests(8)))) == 8
  group.close()
  assert first.closed and second.closed


def test_as_many_devices_as_engines():
  with pytest.raises(ValueError, match="must be as many, and >= 1; received 1 and 0"):
    EngineGroup([FakeEngine("a")], [])
