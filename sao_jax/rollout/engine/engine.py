"""The rollout engine: continuous batching of episodes over slots, with weights taken up in flight."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.sampler import Sampler, SamplerSpec
from sao_jax.rollout.engine.scheduler import Scheduler
from sao_jax.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao_jax.rollout.failures import FailureLog
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import CachedPolicy, EnvironmentFactory, Params, Tokenizer, Trajectory

ParamsFor = Callable[[int], tuple[Params, int]]
"""`(number of decode chunks so far) -> (params, version)`."""

_IDLE_WAIT_S = 0.02
# Domains of sampling noise: keys of different kinds of calls never meet.
SEEDED, COUNTED, RUN = range(3)


def newest(store: WeightStore) -> ParamsFor:
  """A store's newest weights, whatever the number of chunks."""
  return lambda _: store.latest()


class Engine:
  """Generates trajectories: S slots decode together in jitted chunks, environments run on threads meanwhile.

  Between chunks the engine takes in environments' answers, refills free slots, and takes up new weights, also in the
  middle of a trajectory: every action token keeps the log-prob and the version that it was sampled with. An episode
  fails alone: it is counted by kind, the first of each kind is logged, and its slot goes on with a fresh environment.

  What an episode samples depends on (seed of the engine, seed or number of the call, episode id, weights) only, not on
  its slot, its neighbours or the speed of the machine (up to the rounding of differently shaped programs, and to when
  weights change).

  Limits: the turn limit and the token limits end an episode 'truncated'. Rewards booked so far stay, and an action cut
  at `max_action_tokens` or `max_len` never reaches the environment and gets 0, unless `truncated_reward` is given: then
  that is the whole reward. A prompt that leaves no room for an action fails its episode before anything is sampled.

  One `generate` or `run` at a time. Use as a context manager, or call `close`.

  Args:
    model: the policy, with its cache.
    make_env: makes environments; one per slot, reused by the slot's next episode.
    tokenizer: its `encode` and `decode` are called on the environment threads.
    config: settings.
    seed: base of all sampling noise.
  """

  def __init__(
    self,
    *,
    model: CachedPolicy,
    make_env: EnvironmentFactory,
    tokenizer: Tokenizer,
    config: EngineConfig,
    seed: int = 0,
  ):
    self._config = config
    self._key = jax.random.key(seed, impl="threefry2x32")
    self._calls = collections.Counter[int]()
    spec = SamplerSpec(
      model=model,
      chunk_steps=config.chunk_steps,
      temperature=config.temperature,
      top_p=config.top_p,
      stop_ids=tuple(tokenizer.stop_ids),
    )
    sampler = Sampler(spec, num_slots=config.num_slots, max_len=config.max_len, num_streams=config.num_streams)
    self._slots = Scheduler(config=config, make_env=make_env, tokenizer=tokenizer, sampler=sampler)
    self._cuts: queue.SimpleQueue[EpisodeRequest] = queue.SimpleQueue()
    self._driving = threading.Lock()
    self._counts = collections.Counter[str]()
    self._failures = FailureLog(config.max_failed_share)
    self._busy_seconds = 0.0
    self._busy_since: float | None = None

  def generate(
    self,
    weights: ParamsFor | WeightStore,
    requests: Iterable[EpisodeRequest],
    *,
    seed: int | None = None,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> Iterator[Trajectory]:
    """Runs `requests` (which may be a lazy iterable) to completion on the caller's thread.

    Deterministic when environments are, and `env_workers == 0` or `wait_for_env`. Trajectories come in order of
    completion; the caller may stop early by closing the iterator.

    Args:
      weights: gives `(params, version)` before each chunk, from the number of decode chunks of this call so far; or the
        store whose newest weights are taken.
      requests: episodes to run; the next is taken when a slot is free.
      seed: sampling noise is that of (engine's seed, this, episode id): same value, same samples. None: the number of
        the call, so that repeated calls differ.
      on_failure: told of each request that failed (it yields nothing).
    """
    key = self._call_key(COUNTED, None) if seed is None else self._call_key(SEEDED, seed)
    source = iter(requests)

    def next_request() -> EpisodeRequest | None:
      return next(source, None)

    params_for = newest(weights) if isinstance(weights, WeightStore) else weights
    return self._drive(params_for, next_request, key, on_failure, stop=None)

  def run(
    self,
    weights: WeightStore,
    next_request: Callable[[], EpisodeRequest | None],
    emit: Callable[[Trajectory], None],
    stop: threading.Event,
    *,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> None:
    """The asynchronous loop: generates until `stop` is set (checked between chunks); exceptions leave through here.

    Args:
      weights: newest weights are taken before every chunk.
      next_request: the next episode, or None to wait (admission says no).
      emit: takes a finished trajectory; nothing is generated until it returns.
      stop: ends the loop; unfinished episodes are discarded.
      on_failure: told of each request that failed.
    """
    key = self._call_key(RUN, None)
    for trajectory in self._drive(newest(weights), next_request, key, on_failure, stop=stop):
      emit(trajectory)

  def cut(self, request: EpisodeRequest) -> None:
    """Asks for an end of a running episode before the next chunk, from any thread: 'truncated', with what is there.

    One that has not sampled anything yet fails (kind "cut"); one that is over, or not known, is not touched.
    """
    self._cuts.put(request)

  @property
  def counters(self) -> dict[str, Any]:
    """Totals since the engine was made; `busy_seconds` is the time with device work in flight."""
    names = (
      "tokens_generated",
      "prefill_tokens",
      "chunks",
      "prefills",
      "episodes_started",
      "episodes_finished",
      "failed_episodes",
      "reset_retries",
      "cache_recomputes",
      "weight_updates",
      "swapped_out",
      "swapped_in",
      "prefix_tokens_saved",
    )
    counts = {**self._counts, **self._slots.counts}
    return {
      **{name: counts.get(name, 0) for name in names},
      "failed_by_kind": dict(self._failures.by_kind),
      "busy_seconds": self._busy_seconds,
    }

  def close(self) -> None:
    """Closes the environments and lets their threads end."""
    self._slots.close()

  def __enter__(self) -> Engine:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _call_key(self, domain: int, seed: int | None) -> jax.Array:
    if seed is None:
      seed = self._calls[domain]
      self._calls[domain] += 1
    if not 0 <= seed < 2**32:
      raise ValueError(f"seed must be in [0, 2**32); received {seed}.")
    return jax.random.fold_in(jax.random.fold_in(self._key, domain), seed)

  def _drive(
    self,
    weights: ParamsFor,
    next_request: Callable[[], EpisodeRequest | None],
    key: jax.Array,
    on_failure: Callable[[EpisodeRequest], None] | None,
    stop: threading.Event | None,
  ) -> Iterator[Trajectory]:
    """The loop behind `generate` (stop is None: ends when requests do) and `run`."""
    if not self._driving.acquire(blocking=False):
      raise RuntimeError("Engine.generate() or run() called while another call is still running.")
    slots = self._slots
    config = self._config
    version: int | None = None
    chunk = stream = 0
    to_cut: set[EpisodeRequest] = set()
    try:
      slots.reset()
      while stop is None or not stop.is_set():
        # One stream's turn: what the host does here, the other streams' chunks hide.
        params, new_version = weights(chunk)
        if new_version != version:
          self._counts["weight_updates"] += version is not None
          version = new_version
          slots.set_version(version)
        slots.collect(stream=stream, wait_all=config.wait_for_env, stop=stop)
        started = slots.refill(next_request)
        if started:
          slots.collect(stream=stream, wait_all=config.wait_for_env, stop=stop)
        while not self._cuts.empty():
          to_cut.add(self._cuts.get())
        if to_cut:
          to_cut = slots.cut(to_cut)
        self._busy_since = self._busy_since or time.perf_counter()
        prefilled = slots.prefill(params, stream)
        dispatched = slots.dispatch(params, key, stream)
        chunk += dispatched
        finished, failures = slots.take_finished()  # trajectories are built while the device works
        stream = (stream + 1) % slots.num_streams
        busy = slots.decoding
        slots.absorb(stream)
        self._note_busy(busy)
        self._failures.succeeded(len(finished))
        yield from finished  # before the failures, which may end the run
        self._note_failures(failures, on_failure)
        if busy or prefilled or started or finished or failures or slots.to_prefill:
          continue
        if slots.waiting:
          slots.collect(wait_s=_IDLE_WAIT_S)
        elif stop is None:
          return
        else:
          stop.wait(_IDLE_WAIT_S)
    finally:
      slots.abandon_all()
      self._busy_since = None
      self._driving.release()

  def _note_busy(self, busy: bool) -> None:
    """Counts the time with device work in flight once there is none any more; `busy`: there was some until now."""
    if self._slots.decoding:
      return
    if busy and self._busy_since is not None:
      self._busy_seconds += time.perf_counter() - self._busy_since
    self._busy_since = None

  def _note_failures(
    self,
    failures: list[tuple[EpisodeRequest, EpisodeFailure]],
    on_failure: Callable[[EpisodeRequest], None] | None,
  ) -> None:
    """Counts failures, and stops the engine when there are too many."""
    for request, failure in failures:
      self._failures.failed(request, failure)
      self._counts["failed_episodes"] += 1
      if on_failure is not None:
        on_failure(request)
    if failures:
      self._failures.judge(*failures[-1])


class AsyncEngine(Protocol):
  """What the asynchronous schedule needs of an engine, here or elsewhere."""

  def run(
    self,
    weights: WeightStore,
    next_request: Callable[[], EpisodeRequest | None],
    emit: Callable[[Trajectory], None],
    stop: threading.Event,
    *,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> None:
    """As `Engine.run`."""
    ...

  @property
  def counters(self) -> dict[str, Any]:
    """As `Engine.counters`."""
    ...


class RolloutEngine(AsyncEngine, Protocol):
  """What a whole run needs of an engine: the embedded one, or one on a server."""

  def generate(
    self,
    weights: ParamsFor | WeightStore,
    requests: Iterable[EpisodeRequest],
    *,
    seed: int | None = None,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> Iterator[Trajectory]:
    """As `Engine.generate`."""
    ...

  def close(self) -> None:
    """As `Engine.close`."""
    ...


class EngineThread:
  """Runs an engine's `run` on a thread of its own, and brings its exceptions back.

  Args:
    engine: the engine.
    **run_arguments: as for `Engine.run`, without `stop`.
  """

  def __init__(self, engine: AsyncEngine, **run_arguments: Any):
    self._engine = engine
    self._arguments = run_arguments
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._thread = threading.Thread(target=self._run, name="sao_jax-engine", daemon=True)

  def start(self) -> None:
    """Starts generating."""
    self._thread.start()

  def check(self) -> None:
    """Raises what ended the engine's thread, with its traceback; else does nothing."""
    if self._error is not None:
      raise self._error

  @property
  def stopping(self) -> threading.Event:
    """Set once the engine must end."""
    return self._stop

  def stop(self, timeout: float = 60.0) -> None:
    """Ends the engine (within a chunk) and raises what it raised.

    Raises:
      TimeoutError: it did not end within `timeout` seconds.
    """
    self._stop.set()
    self._thread.join(timeout)
    if self._thread.is_alive():
      raise TimeoutError(f"the rollout engine did not stop within {timeout} s.")
    self.check()

  def _run(self) -> None:
    try:
      self._engine.run(stop=self._stop, **self._arguments)
    except BaseException as error:  # noqa: BLE001 (handed to the thread that calls check() or stop())
      self._error = error
