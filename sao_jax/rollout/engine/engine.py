"""The rollout engine: continuous batching of episodes over slots, with weight updates in flight."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.live_episodes import LiveEpisodes
from sao_jax.rollout.engine.model_runner import ModelRunner, PreparedWeights, StepSpec
from sao_jax.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao_jax.rollout.failures import FailureLog
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import CachedPolicy, EnvironmentFactory, Params, Tokenizer, Trajectory

ParamsFor = Callable[[int], tuple[Params, int]]
"""`(number of decode steps so far) -> (params, version)`. A step decodes up to `chunk_steps` tokens per sequence."""

_IDLE_WAIT_S = 0.02
# Domains of sampling noise: keys for different kinds of calls never coincide.
SEEDED, COUNTED, RUN = range(3)


def newest(store: WeightStore) -> ParamsFor:
  """Returns a function that ignores the number of chunks and returns the store's newest weights."""
  return lambda _: store.latest()


class Engine:
  """Rollout engine: slots decode together in jitted chunks while environments run on threads.

  Between chunks the engine reads environment responses, starts new episodes in free slots, and takes new weights, also
  in the middle of a trajectory. Every action token keeps the log-prob and the version that it was sampled with. A
  failure ends only its own episode: it is counted by kind, the first of each kind is logged, and the slot continues
  with a fresh environment.

  The samples of an episode depend only on the engine's seed, the seed or number of the call, the episode id and the
  weights. They do not depend on its slot, on the other episodes or on the speed of the machine, apart from rounding in
  differently shaped programs and from the moments at which weights change.

  Limits: an episode that reaches the turn limit or a token limit ends 'truncated' and keeps its rewards so far. An
  action that reaches `max_action_tokens` or `max_len` is not passed to the environment and gets reward 0. With
  `truncated_reward`, that is the whole reward of the episode. A prompt that leaves no room for an action fails its
  episode before anything is sampled.

  Only one `generate` or `run` may be active at a time. Use as a context manager, or call `close`.

  Args:
    model: the policy with its KV cache.
    make_env: makes environments: one per live episode, reused by the next one.
    tokenizer: its `encode` and `decode` are called on the environment threads.
    config: settings.
    seed: seed of all sampling noise.
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
    spec = StepSpec(
      model=model,
      chunk_steps=config.chunk_steps,
      temperature=config.temperature,
      top_p=config.top_p,
      stop_ids=tuple(tokenizer.stop_ids),
    )
    prepared = PreparedWeights(spec)
    streams = config.num_streams
    runners = [
      ModelRunner(
        spec,
        num_slots=config.num_slots // streams,
        num_pages=config.num_pages // streams,
        page_size=config.page_size,
        max_pages=config.max_pages,
        token_budget=config.token_budget,
        prepared=prepared,
        threaded=streams > 1,
      )
      for _ in range(streams)
    ]
    self._live = LiveEpisodes(config=config, make_env=make_env, tokenizer=tokenizer, runners=runners)
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
    """Runs `requests` to completion on the caller's thread.

    Deterministic if the environments are deterministic and `env_workers == 0` or `wait_for_env`. The caller may stop
    early by closing the iterator.

    Args:
      weights: called before each chunk with the number of decode chunks of this call so far; returns `(params,
        version)`. Or a store, whose newest weights are used.
      requests: episodes to run; may be a lazy iterable. The next one is taken when a slot is free.
      seed: in [0, 2**32). Sampling noise is derived from (the engine's seed, this seed, episode id), so the same seed
        gives the same samples. None: the number of the call, so that repeated calls differ.
      on_failure: called with each request that failed; such requests yield nothing.

    Yields:
      Trajectories in order of completion.

    Raises:
      RuntimeError: another call is still running.
      TooManyFailuresError: more than `max_failed_share` of the recent episodes failed.
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
    """Generates until `stop` is set, which is checked between chunks. Exceptions propagate to the caller.

    Args:
      weights: store whose newest weights are used for each chunk.
      next_request: returns the next episode, or None if none may start now (no admission).
      emit: called with each finished trajectory; nothing is generated until it returns.
      stop: ends the loop; unfinished episodes are dropped.
      on_failure: called with each request that failed.

    Raises:
      RuntimeError: another call is still running.
      TooManyFailuresError: more than `max_failed_share` of the recent episodes failed.
    """
    key = self._call_key(RUN, None)
    for trajectory in self._drive(newest(weights), next_request, key, on_failure, stop=stop):
      emit(trajectory)

  def cut(self, request: EpisodeRequest) -> None:
    """Ends a running episode before the next chunk: it is 'truncated' with the tokens so far. Callable on any thread.

    An episode without sampled tokens fails with kind "cut". One that has ended, or is unknown, is ignored.
    """
    self._cuts.put(request)

  @property
  def counters(self) -> dict[str, Any]:
    """Totals since the engine was made; `busy_seconds` is the time during which device work was in flight."""
    names = (
      "tokens_generated",
      "prefill_tokens",
      "chunks",
      "prefills",
      "episodes_started",
      "episodes_finished",
      "episodes_answered",
      "failed_episodes",
      "reset_retries",
      "cache_recomputes",
      "weight_updates",
      "swapped_out",
      "swapped_in",
      "prefix_tokens_saved",
    )
    by_kind = dict(self._failures.by_kind)
    counts = {**self._counts, **self._live.counts, "failed_episodes": sum(by_kind.values())}
    return {
      **{name: counts.get(name, 0) for name in names},
      "failed_by_kind": by_kind,
      "busy_seconds": self._busy_seconds,
    }

  def close(self) -> None:
    """Closes the environments and ends their threads."""
    self._live.close()

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
    """Runs the loop of `run`, and of `generate` (`stop` is None: ends with the requests)."""
    if not self._driving.acquire(blocking=False):
      raise RuntimeError("Engine.generate() or run() called while another call is still running.")
    live = self._live
    version: int | None = None
    steps = stream = 0
    to_cut: set[EpisodeRequest] = set()
    try:
      live.reset()
      while stop is None or not stop.is_set():
        # One stream's turn. Host work done here overlaps with the steps of the other streams.
        params, new_version = weights(steps)
        if new_version != version:
          self._counts["weight_updates"] += version is not None
          version = new_version
        live.collect_responses(stream, stop)
        started = live.start_episodes(next_request)
        if started:
          live.collect_responses(stream, stop)
        while not self._cuts.empty():
          to_cut.add(self._cuts.get())
        if to_cut:
          to_cut = live.cut(to_cut)
        self._busy_since = self._busy_since or time.perf_counter()
        dispatched = live.dispatch(params, version, key, stream)
        steps += dispatched.decodes
        answered = -live.counts["episodes_answered"]
        finished, failures = live.take_finished()  # trajectories are built while the device works
        stream = (stream + 1) % live.num_streams
        busy = live.running
        live.collect_tokens(stream)
        self._record_busy(busy)
        self._failures.record_successes(answered + live.counts["episodes_answered"])
        yield from finished  # before the failures, which may end the run
        self._record_failures(failures, on_failure)
        if busy or dispatched.rows or started or finished or failures or live.ready:
          continue
        if live.waiting:
          live.wait(_IDLE_WAIT_S)
        elif stop is None:
          return
        else:
          stop.wait(_IDLE_WAIT_S)
    finally:
      try:
        live.abandon_all()
      finally:
        self._busy_since = None
        self._driving.release()

  def _record_busy(self, busy: bool) -> None:
    """Adds the time with device work in flight, once there is none left. `busy`: there was some until now."""
    if self._live.running:
      return
    if busy and self._busy_since is not None:
      self._busy_seconds += time.perf_counter() - self._busy_since
    self._busy_since = None

  def _record_failures(
    self,
    failures: list[tuple[EpisodeRequest, EpisodeFailure]],
    on_failure: Callable[[EpisodeRequest], None] | None,
  ) -> None:
    """Counts failures, and raises if there are too many."""
    for request, failure in failures:
      self._failures.record_failure(request, failure)
      if on_failure is not None:
        on_failure(request)
    if failures:
      self._failures.check(failures[-1][1])


class AsyncEngine(Protocol):
  """Interface between the asynchronous schedule and an engine: embedded, on a server, or a Ray cluster."""

  def run(
    self,
    weights: WeightStore,
    next_request: Callable[[], EpisodeRequest | None],
    emit: Callable[[Trajectory], None],
    stop: threading.Event,
    *,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> None:
    """See `Engine.run`."""
    ...

  @property
  def counters(self) -> dict[str, Any]:
    """See `Engine.counters`."""
    ...


class RolloutEngine(AsyncEngine, Protocol):
  """Interface between a run and its engine: embedded, or on a server."""

  def generate(
    self,
    weights: ParamsFor | WeightStore,
    requests: Iterable[EpisodeRequest],
    *,
    seed: int | None = None,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> Iterator[Trajectory]:
    """See `Engine.generate`."""
    ...

  def close(self) -> None:
    """See `Engine.close`."""
    ...


class EngineThread:
  """A daemon thread that calls `Engine.run`. Exceptions of the thread are raised by `check` and `stop`.

  Args:
    engine: the engine.
    **run_arguments: arguments of `Engine.run`, except `stop`.
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
    """Raises the exception that ended the thread, with its traceback; otherwise does nothing."""
    if self._error is not None:
      raise self._error

  @property
  def stopping(self) -> threading.Event:
    """Event that is set once `stop` was called."""
    return self._stop

  def stop(self, timeout: float = 60.0) -> None:
    """Stops the engine after its current chunk, and raises the exception that ended it, if any.

    Raises:
      TimeoutError: the engine did not stop within `timeout` seconds.
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
