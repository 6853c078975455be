"""Several embedded engines, each on devices of its own, that look like one engine to the schedules.

Every engine runs on a thread of its own. Its samples depend on the episode, not on the engine, if all have one seed.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from sao_jax.rollout.engine.engine import Engine, ParamsFor, newest
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import Params, Trajectory

_POLL_S = 0.1


class _Stopped(Exception):
  """Ends an engine's `generate` whose results nobody wants any more."""


class EngineGroup:
  """Several engines behind the interface of one; see `engine.RolloutEngine`.

  Weights are a list with one entry per engine, since each engine holds its own copy. All engines get a version at once
  and take it before their next chunk. Requests of `run` go to the engine with the fewest live episodes, those of
  `generate` to the engines in turn. So what `generate` samples does not depend on the engines' speed. An exception of
  one engine ends the others, and is raised.

  Args:
    engines: at least one, all with the same seed and settings; closed with this object.
    devices: the default device of each engine's thread, so that its small arrays do not wait for other devices.
  """

  def __init__(self, engines: Sequence[Engine], devices: Sequence[jax.Device]):
    if not engines or len(engines) != len(devices):
      raise ValueError(f"engines and devices must be as many, and >= 1; received {len(engines)} and {len(devices)}.")
    self._engines = engines
    self._devices = devices
    self._driving = threading.Lock()

  def generate(
    self,
    weights: ParamsFor | WeightStore,
    requests: Iterable[EpisodeRequest],
    *,
    seed: int | None = None,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> Iterator[Trajectory]:
    """See `Engine.generate`. Trajectories come in order of completion. `weights` counts each engine's own chunks."""
    params_for = newest(weights) if isinstance(weights, WeightStore) else weights
    shared = _Shared(requests, len(self._engines))
    done: queue.SimpleQueue[Trajectory] = queue.SimpleQueue()
    ended = threading.Event()

    def drive(index: int, stop: threading.Event) -> None:
      def mine(chunk: int) -> tuple[Params, int]:
        if stop.is_set():
          raise _Stopped
        params, version = params_for(chunk)
        return params[index], version

      fail = None if on_failure is None else shared.locked(on_failure)
      for trajectory in self._engines[index].generate(mine, shared.in_turn(index), seed=seed, on_failure=fail):
        done.put(trajectory)

    with self._threads(drive, ended) as running:
      while running() or not done.empty():
        with contextlib.suppress(queue.Empty):
          yield done.get(timeout=_POLL_S if running() else 0.0)

  def run(
    self,
    weights: WeightStore,
    next_request: Callable[[], EpisodeRequest | None],
    emit: Callable[[Trajectory], None],
    stop: threading.Event,
    *,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> None:
    """See `Engine.run`. The three callables are called by one thread at a time."""
    shared = _Shared(iter(next_request, _NEVER), len(self._engines))

    def finish(index: int, trajectory: Trajectory) -> None:
      shared.end(index)
      emit(trajectory)

    def fail(index: int, request: EpisodeRequest) -> None:
      shared.end(index)
      if on_failure is not None:
        on_failure(request)

    def drive(index: int, stop: threading.Event) -> None:
      self._engines[index].run(
        _OneOf(weights, index),
        lambda: shared.for_least_busy(index),
        shared.locked(lambda trajectory: finish(index, trajectory)),
        stop,
        on_failure=shared.locked(lambda request: fail(index, request)),
      )

    with self._threads(drive, stop) as running:
      while running():
        stop.wait(_POLL_S)

  @contextlib.contextmanager
  def _threads(
    self, drive: Callable[[int, threading.Event], None], stop: threading.Event
  ) -> Iterator[Callable[[], bool]]:
    """Runs `drive` for every engine on a thread. Yields whether any still runs, which raises what one has raised."""
    if not self._driving.acquire(blocking=False):
      raise RuntimeError("EngineGroup.generate() or run() called while another call is still running.")
    errors: list[BaseException] = []

    def target(index: int) -> None:
      try:
        with jax.default_device(self._devices[index]):
          drive(index, stop)
      except _Stopped:
        pass  # by the caller, who is waiting for this thread to end
      except BaseException as error:  # noqa: BLE001 (raised on the caller's thread)
        errors.append(error)
        stop.set()

    names = range(len(self._engines))
    threads = [threading.Thread(target=target, args=(i,), name=f"sao_jax-engine{i}", daemon=True) for i in names]

    def running() -> bool:
      if errors:
        raise errors[0]
      return any(thread.is_alive() for thread in threads)

    try:
      for thread in threads:
        thread.start()
      yield running
    finally:
      stop.set()
      for thread in threads:
        thread.join()
      self._driving.release()
    running()

  @property
  def counters(self) -> dict[str, Any]:
    """Sums of the engines' counters; `busy_seconds` is their mean."""
    return sum_counters([engine.counters for engine in self._engines])

  def close(self) -> None:
    """Closes the engines."""
    with contextlib.ExitStack() as stack:
      for engine in self._engines:
        stack.callback(engine.close)


def sum_counters(counters: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
  """Adds up the counters of engines; of `busy_seconds`, the mean."""
  total = {name: sum(one[name] for one in counters) for name in counters[0] if name != "failed_by_kind"}
  total["busy_seconds"] /= len(counters)
  kinds = sum((collections.Counter(one["failed_by_kind"]) for one in counters), collections.Counter[str]())
  return {**total, "failed_by_kind": dict(kinds)}


_NEVER = object()
"""A value that no request equals."""


class _Shared:
  """Requests from one source for several engines; thread-safe.

  Args:
    source: the requests. `None`: none may start now.
    num_engines: number of engines.
  """

  def __init__(self, source: Iterable[EpisodeRequest | None], num_engines: int):
    self._source = iter(source)
    self._lock = threading.Lock()
    self._waiting = [collections.deque[EpisodeRequest]() for _ in range(num_engines)]
    """Requests by engine that it has not taken yet."""
    self._live = [0] * num_engines
    """Episodes of each engine, those that wait for it included."""
    self._turn = 0

  def locked(self, call: Callable[..., None]) -> Callable[..., None]:
    """Returns `call`, called by one thread at a time."""

    def locked_call(*args: Any) -> None:
      with self._lock:
        call(*args)

    return locked_call

  def end(self, index: int) -> None:
    """Counts an episode that ended; inside a `locked` call."""
    self._live[index] -= 1

  def for_least_busy(self, index: int) -> EpisodeRequest | None:
    """Returns the next request for an engine with a free slot; gives earlier ones to engines with fewer episodes."""
    with self._lock:
      while not self._waiting[index]:
        request = next(self._source)
        if request is None:
          return None
        target = min(range(len(self._live)), key=lambda i: (self._live[i], i != index))
        self._live[target] += 1
        self._waiting[target].append(request)
      return self._waiting[index].popleft()

  def in_turn(self, index: int) -> Iterator[EpisodeRequest]:
    """Yields every n-th request, from number `index` on."""
    while True:
      with self._lock:
        while not self._waiting[index]:
          request = next(self._source, None)
          if request is None:
            return
          self._waiting[self._turn].append(request)
          self._turn = (self._turn + 1) % len(self._waiting)
        request = self._waiting[index].popleft()
      yield request


class _OneOf(WeightStore):
  """One engine's part of the weights in a store."""

  def __init__(self, store: WeightStore, index: int):
    super().__init__()
    self._store, self._index = store, index

  def latest(self) -> tuple[Params, int]:
    params, version = self._store.latest()
    return params[self._index], version
