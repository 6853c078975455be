"""Rollouts from a server: the episodes of the embedded engine, their actions written elsewhere over HTTP."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import pathlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.engine import COUNTED, RUN, SEEDED, ParamsFor, newest
from sao_jax.rollout.environment_runner import EnvironmentHolder
from sao_jax.rollout.episodes import Episode, EpisodeFailure, EpisodeRequest
from sao_jax.rollout.failures import FailureLog
from sao_jax.rollout.remote.client import ServerClient
from sao_jax.rollout.remote.config import RemoteConfig
from sao_jax.rollout.remote.protocols import VLLM, Sampling, SGLang
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.rollout.workers import Task, Workers
from sao_jax.types import Ended, EnvironmentFactory, Params, Tokenizer, Trajectory

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_POLL_S = 0.02
_CLOSE_S = 10.0
_KEPT_VERSIONS = 2
"""Folders of weights that stay: the newest, which a restarted server is given, and the one it may still be reading."""


class RemoteEngine:
  """Does what `Engine` does, with the sampling on a server (see `protocols.py` for which).

  Up to `config.num_slots` episodes run at once. The prompt of every action is the whole episode so far, as token ids;
  a server with a prefix cache reads only what is new. An update of weights aborts what the server writes, and each
  episode goes on behind what it had: so one trajectory has tokens of several versions, each with the log-prob that the
  server reported and the version of the weights that it named. Keys and values are always those of the new weights.

  A server that fails or restarts holds the episodes up and loses none: an action is asked for again until
  `RemoteConfig.max_attempts` are used up, which ends the run with an error. An answer that lacks what a trajectory
  needs fails its episode, as `bad_response`.

  Of the settings in `EngineConfig` those of the device (chunks, prefill, buckets, cache) are the server's business.

  Args:
    remote: the server.
    save_weights: writes parameters into a folder as a Hugging Face checkpoint.
    make_env: makes environments; one per running episode.
    tokenizer: its `encode` and `decode` are called on the environment threads.
    config: settings.
    seed: base of all sampling noise.
  """

  def __init__(
    self,
    *,
    remote: RemoteConfig,
    save_weights: Callable[[Params, pathlib.Path], None],
    make_env: EnvironmentFactory,
    tokenizer: Tokenizer,
    config: EngineConfig,
    seed: int = 0,
  ):
    if remote.url is None or remote.weights_dir is None:
      raise ValueError(f"RemoteConfig.url and weights_dir must be given; received {remote.url}, {remote.weights_dir}.")
    if remote.protocol == "vllm" and config.temperature != 1.0:
      raise ValueError(
        "EngineConfig.temperature must be 1 with RemoteConfig.protocol 'vllm', whose log-probs are those of the "
        f"distribution before the temperature by default; received {config.temperature}."
      )
    if config.top_p != 1.0:
      raise ValueError(
        "EngineConfig.top_p must be 1 with a RemoteConfig: the servers' log-probs are by default those of the "
        f"distribution before the truncation; received {config.top_p}."
      )
    self._remote = remote
    self._save_weights = save_weights
    self._folder = pathlib.Path(remote.weights_dir).resolve()
    self._config = config
    self._tokenizer = tokenizer
    self._new_holder = functools.partial(EnvironmentHolder, make_env, tokenizer, config)
    self._seed = seed
    self._sampling = Sampling(
      vocab_size=tokenizer.vocab_size, stop_ids=tuple(tokenizer.stop_ids), temperature=config.temperature
    )
    self._workers = Workers(config.env_workers)
    self._idle: list[EnvironmentHolder] = []
    self._given_up: set[EnvironmentHolder] = set()
    """Their threads close them, when they return."""
    self._loop = _LoopThread()
    self._client = ServerClient(remote, SGLang() if remote.protocol == "sglang" else VLLM(), self._sampling)
    self._published: tuple[Params, int] | None = None
    self._folders: collections.deque[pathlib.Path] = collections.deque()
    self._calls = collections.Counter[int]()
    self._driving = threading.Lock()
    self._counts = collections.Counter[str]()
    self._failures = FailureLog(config.max_failed_share)
    self._busy = _BusyClock()

  def generate(
    self,
    weights: ParamsFor | WeightStore,
    requests: Iterable[EpisodeRequest],
    *,
    seed: int | None = None,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> Iterator[Trajectory]:
    """As `Engine.generate`. A function `weights` is called with 0: what a server decodes is not counted in chunks."""
    call = self._call(COUNTED) if seed is None else (SEEDED, seed)
    source = iter(requests)
    params_for = newest(weights) if isinstance(weights, WeightStore) else weights
    return self._drive(params_for, lambda: next(source, None), call, on_failure, stop=None)

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
    for trajectory in self._drive(newest(weights), next_request, self._call(RUN), on_failure, stop=stop):
      emit(trajectory)

  @property
  def counters(self) -> dict[str, Any]:
    """Totals since this object was made; `busy_seconds` is the time with a request at the server."""
    names = (
      "tokens_generated", "server_requests", "episodes_started", "episodes_finished", "failed_episodes",
      "reset_retries", "weight_updates",
    )  # fmt: skip
    return {
      **{name: self._counts[name] for name in names},
      "failed_attempts": self._client.counts["failed_attempts"],
      "failed_by_kind": dict(self._failures.by_kind),
      "busy_seconds": self._busy.seconds,
    }

  def close(self) -> None:
    """Closes environments and connections, and removes the weights that were written.

    What does not end within some seconds is left behind, and told in the log.
    """
    closing = [Task(holder.close, lambda _: None) for holder in self._idle]
    self._idle.clear()
    for task in closing:
      self._workers.submit(task)
    deadline = time.monotonic() + _CLOSE_S
    while (left := sum(task.finished_at is None for task in closing)) and time.monotonic() < deadline:
      time.sleep(_POLL_S)
    if left:
      _log.error("%d of the environments did not close within %s s: left behind, with their threads.", left, _CLOSE_S)
    try:
      self._loop.call(self._client.close(), timeout=_CLOSE_S)
    except TimeoutError:
      _log.error("Connections to %s did not close within %s s: left behind.", self._remote.url, _CLOSE_S)
    self._loop.close()
    self._workers.close()
    for folder in self._folders:
      shutil.rmtree(folder, ignore_errors=True)

  def __enter__(self) -> RemoteEngine:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _call(self, domain: int) -> tuple[int, int]:
    self._calls[domain] += 1
    return domain, self._calls[domain] - 1

  def _drive(
    self,
    weights: ParamsFor,
    next_request: Callable[[], EpisodeRequest | None],
    call: tuple[int, int],
    on_failure: Callable[[EpisodeRequest], None] | None,
    stop: threading.Event | None,
  ) -> Iterator[Trajectory]:
    """The loop behind `generate` (stop is None: ends when requests do) and `run`; episodes run on the loop's thread."""
    if not self._driving.acquire(blocking=False):
      raise RuntimeError("RemoteEngine.generate() or run() called while another call is still running.")
    outcomes: queue.SimpleQueue[tuple[EpisodeRequest, Trajectory | BaseException]] = queue.SimpleQueue()
    live = 0
    try:
      while stop is None or not stop.is_set():
        self._publish_if_new(*weights(0), stop=stop)
        while live < self._config.num_slots and (request := next_request()) is not None:
          self._loop.start(self._episode(request, (*call, request.episode_id)), request, outcomes)
          self._counts["episodes_started"] += 1
          live += 1
        if not live and stop is None:
          return
        try:
          request, outcome = outcomes.get(timeout=_POLL_S)
        except queue.Empty:
          continue  # time to look at weights, requests and `stop`
        live -= 1
        if isinstance(outcome, Trajectory):
          self._counts["episodes_finished"] += 1
          self._failures.succeeded(1)
          yield outcome
        elif isinstance(outcome, EpisodeFailure):
          self._note_failure(request, outcome, on_failure)
        else:
          raise outcome
    finally:
      self._loop.cancel_all()
      self._driving.release()

  def _note_failure(
    self, request: EpisodeRequest, failure: EpisodeFailure, on_failure: Callable[[EpisodeRequest], None] | None
  ) -> None:
    self._failures.failed(request, failure)
    self._counts["failed_episodes"] += 1
    if on_failure is not None:
      on_failure(request)
    self._failures.judge(request, failure)

  def _publish_if_new(self, params: Params, version: int, *, stop: threading.Event | None) -> None:
    """Writes weights that the server does not have, and waits until it has them."""
    if self._published is not None and params is self._published[0] and version == self._published[1]:
      return
    self._counts["weight_updates"] += self._published is not None
    folder = self._folder / f"version-{version}-{time.time_ns()}"
    self._save_weights(params, folder)
    self._folders.append(folder)
    self._loop.call(self._client.publish(folder, version), stop=stop)
    if stop is not None and stop.is_set():
      return  # it may not have been waited for
    self._published = params, version
    while len(self._folders) > _KEPT_VERSIONS:
      shutil.rmtree(self._folders.popleft())

  async def _episode(self, request: EpisodeRequest, seeds: tuple[int, ...]) -> Trajectory:
    """One episode, from its prompt to its trajectory."""
    holder = self._idle.pop() if self._idle else self._new_holder()
    try:
      prompt = await self._ask(holder, functools.partial(holder.reset, request.task_index), request)
      self._counts["reset_retries"] += prompt.retries
      episode = Episode(request, prompt)
      ended: Ended | None = None
      while ended is None:
        stopped = await self._act(episode, seeds)
        action = episode.end_action()
        if stopped:
          text, answer = await self._ask(holder, functools.partial(holder.step, action), request)
          ended = episode.take_response(text, answer, self._config)
        else:
          episode.cut_action, ended = action, "truncated"
      decode, reward = self._tokenizer.decode, self._config.truncated_reward
      trajectory = episode.finish(ended, decode, truncated_reward=reward)
    except BaseException:
      if holder not in self._given_up:
        self._dispose(holder)  # its state is unknown
      self._given_up.discard(holder)
      raise
    self._idle.append(holder)
    return trajectory

  async def _act(self, episode: Episode, seeds: tuple[int, ...]) -> bool:
    """Has one action written, in pieces if weights change meanwhile; returns whether it ended with a stop id."""
    while (budget := episode.budget(self._config)) > 0:
      prompt = episode.tokens().tolist()
      # A seed of its own for every piece: an engine may begin each request at the start of the seed's noise.
      noise = np.random.SeedSequence((self._seed, *seeds, len(prompt))).generate_state(1)[0] & 0x7FFFFFFF
      with self._busy:
        done, version = await self._client.generate(prompt, max_tokens=budget, seed=int(noise))
      self._counts["server_requests"] += 1
      self._counts["tokens_generated"] += done.tokens.size
      episode.add_sampled(done.tokens, done.logp, version)
      if done.finish != "abort":
        return done.finish == "stop"
    return False

  async def _ask(self, holder: EnvironmentHolder, call: Callable[[], _T], request: EpisodeRequest) -> _T:
    """An environment's answer, from a worker thread; one that hangs is given up with its thread."""
    loop = asyncio.get_running_loop()
    started = asyncio.Event()
    result: asyncio.Future[_T] = loop.create_future()

    def deliver(value: _T | None, error: BaseException | None) -> None:
      if not result.done():
        result.set_exception(error) if error is not None else result.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
      loop.call_soon_threadsafe(started.set)
      try:
        value, error = call(), None
      except BaseException as caught:  # noqa: BLE001 (handed to the episode)
        value, error = None, caught
      loop.call_soon_threadsafe(deliver, value, error)

    task = Task(run, holder.close)
    self._workers.submit(task)
    try:
      await started.wait()  # a queue in front of the workers is not a hanging environment
      async with asyncio.timeout(self._config.env_timeout_s):
        return await result
    except TimeoutError as error:
      self._give_up(holder, task)
      what = f"the environment did not answer within env_timeout_s = {self._config.env_timeout_s}"
      raise EpisodeFailure("timeout", f"task {request.task_index}: {what}") from error
    except asyncio.CancelledError:
      self._give_up(holder, task)
      raise
    finally:
      self._workers.poll()  # answers are delivered above

  def _dispose(self, holder: EnvironmentHolder) -> None:
    """Closes an environment on a worker, which is given up if that hangs."""
    task = Task(holder.close, lambda _: None)
    self._workers.submit(task)
    if (limit := self._config.env_timeout_s) is not None:
      asyncio.get_running_loop().call_later(limit, self._end_closing, task, limit)

  def _end_closing(self, task: Task, limit: float) -> None:
    if task.finished_at is not None:
      return
    left = limit if task.started_at is None else task.started_at + limit - time.monotonic()
    if left > 0:  # it waited for a worker
      asyncio.get_running_loop().call_later(left, self._end_closing, task, limit)
    else:
      self._workers.abandon(task)

  def _give_up(self, holder: EnvironmentHolder, task: Task) -> None:
    if self._workers.abandon(task):
      self._given_up.add(holder)


class _BusyClock:
  """Time during which at least one block is open; blocks open and close on one thread."""

  def __init__(self) -> None:
    self._open = 0
    self._since = 0.0
    self._seconds = 0.0

  @property
  def seconds(self) -> float:
    return self._seconds + (time.perf_counter() - self._since if self._open else 0.0)

  def __enter__(self) -> None:
    if not self._open:
      self._since = time.perf_counter()
    self._open += 1

  def __exit__(self, *_: object) -> None:
    self._open -= 1
    if not self._open:
      self._seconds += time.perf_counter() - self._since


class _LoopThread:
  """An event loop on a thread of its own."""

  def __init__(self) -> None:
    self._loop = asyncio.new_event_loop()
    self._tasks: set[asyncio.Task[None]] = set()
    self._thread = threading.Thread(target=self._loop.run_forever, name="sao_jax-remote", daemon=True)
    self._thread.start()

  def start(
    self,
    coroutine: Coroutine[Any, Any, Trajectory],
    request: EpisodeRequest,
    outcomes: queue.SimpleQueue[tuple[EpisodeRequest, Trajectory | BaseException]],
  ) -> None:
    """Runs an episode; what it returns or raises is put into `outcomes`."""

    async def episode() -> None:
      try:
        outcomes.put((request, await coroutine))
      except Exception as error:  # noqa: BLE001 (raised by whoever drives)
        outcomes.put((request, error))

    def begin() -> None:
      task = self._loop.create_task(episode())
      self._tasks.add(task)
      task.add_done_callback(self._tasks.discard)

    self._loop.call_soon_threadsafe(begin)

  def call(
    self, coroutine: Coroutine[Any, Any, _T], *, stop: threading.Event | None = None, timeout: float | None = None
  ) -> _T | None:
    """Waits for the result of a coroutine; None if `stop` was set first.

    Raises:
      TimeoutError: there was none `timeout` seconds later; the coroutine is cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    while stop is not None and not future.done():
      if stop.wait(_POLL_S):
        future.cancel()
        return None
    try:
      return future.result(timeout)
    except TimeoutError:
      future.cancel()
      raise

  def cancel_all(self) -> None:
    """Ends all episodes."""
    if self._loop.is_closed():
      return

    async def cancel() -> None:
      tasks = list(self._tasks)
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

    self.call(cancel())

  def close(self) -> None:
    """Ends the thread."""
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_CLOSE_S)
    with contextlib.suppress(RuntimeError):  # still running: its thread is a daemon
      self._loop.close()
