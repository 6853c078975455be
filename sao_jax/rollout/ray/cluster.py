"""Rollout engines in Ray workers, on one or many machines, with the `run` of the embedded engine.

Every engine is an `EngineWorker` in its own process. The learner's process sends it requests and receives trajectories.
Each process of the learner puts its shards of each version of the weights into Ray's object store once. Engines fetch
them while they decode with their old weights. They may have different versions: each action token carries the version
that sampled it, and the queue bounds staleness.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.ray.connection import RayConnection
from sao_jax.rollout.ray.engine_weights import METHODS, EngineWeights
from sao_jax.rollout.ray.hub import HubAddress, HubReader
from sao_jax.rollout.ray.ray_worker import EngineFactory, EngineWorker, Report, Shardings, one_device
from sao_jax.rollout.ray.weight_sender import Outbox, WeightSender
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import Trajectory

_POLL_S = 0.02
_SENDING_POLL_S = 0.002
"""The same while weights are being put into the object store."""
_REPORT_S = 1.0
"""Longest time that an engine waits for a result to report, in seconds."""
_CLOSE_S = 6.0
"""Seconds for engines to stop by themselves before they are killed."""
_LONGEST_TICK_S = 1.0
_SUSPECT_DEATHS = 2

_ALWAYS_COUNTED = (
  "tokens_generated", "episodes_answered", "failed_episodes", "engine_restarts", "weight_transfers",
  "full_weight_transfers", "weight_bytes", "weight_bytes_sent", "weight_checksum_mismatches",
)  # fmt: skip

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _EngineHandle:
  """State of one engine, in the learner's process."""

  index: int
  worker: Any
  """Ray's handle of the `EngineWorker`."""
  weights: EngineWeights
  silent_s: float = 0.0
  """Seconds since its last response, or its start."""
  restarts: int = 0
  """Number of restarts since an episode last ended in it."""
  location: str = ""
  """Process and host; empty until the engine has started."""
  warned: bool = False
  """Whether its slow start was logged."""
  running: dict[int, EpisodeRequest] = dataclasses.field(default_factory=dict)
  counters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class EngineCluster:
  """Rollout engines in Ray workers, with the `run` of `Engine`.

  An engine whose process or machine dies, or that does not respond, is replaced. Its unfinished episodes run again
  under their old numbers, on any engine with free slots. So for the queue each of them ends exactly once. Samples are
  derived from (seed, episode, position) as in the embedded engine. So no two episodes share noise, wherever they run,
  if `make_engine` gives every engine the same seed.

  An episode fails, with kind "engine_died", after `config.max_restarts` engines died with it. After the second one it
  runs apart from other suspects, so that an episode that kills its engine fails alone. An exception that an engine
  raises ends `run`, with the traceback of its process.

  `run` starts the engines and stops them at its end. Use as a context manager, or call `close`. The constructor
  connects to Ray, or starts it, unless the process is already connected.

  Args:
    make_engine: makes an engine in the worker's process.
    config: number of engines, resources and time limits.
    slots_per_engine: maximum number of episodes that an engine runs at once.
    shardings: of the weights on the engine's devices; called in the worker's process.
    num_senders: processes of the learner; each but this one has a `hub.RemoteSender`.

  Raises:
    ValueError: `config.num_engines` is 0.
    ConnectionError: Ray cannot be reached or started in time.
  """

  def __init__(
    self,
    make_engine: EngineFactory,
    config: ClusterConfig,
    *,
    slots_per_engine: int,
    shardings: Shardings = one_device,
    num_senders: int = 1,
  ):
    if config.num_engines < 1:
      raise ValueError(f"ClusterConfig.num_engines must be >= 1 for a cluster; received {config.num_engines}.")
    self._worker_arguments: tuple[Any, ...] = (make_engine, shardings)
    self._config = config
    self._slots = slots_per_engine
    self._driving = threading.Lock()
    self._closed = threading.Event()
    self._engines: list[_EngineHandle] = []
    self._calls: dict[Any, tuple[_EngineHandle, str]] = {}
    """Running remote calls: Ray's reference to the result -> (engine, name of the method)."""
    self._lost: collections.deque[EpisodeRequest] = collections.deque()
    """Unfinished episodes of dead engines."""
    self._deaths = collections.Counter[int]()
    """Episode id -> number of engines that died with it."""
    self._outbox = Outbox(num_senders)
    self._past_counters: list[Mapping[str, Any]] = []
    """Counters of engines that were stopped or replaced."""
    self._counting = threading.Lock()
    self._connection = RayConnection(config)
    self._ray = self._connection.ray
    self._worker_class = self._ray.remote(EngineWorker)
    self._hub = HubReader(self._connection) if num_senders > 1 else None

  @property
  def hub_address(self) -> HubAddress:
    """Address for the learner's other processes; there must be some."""
    assert self._hub is not None, "num_senders must be > 1"
    return self._hub.address

  def run(
    self,
    weights: WeightStore,
    next_request: Callable[[], EpisodeRequest | None],
    emit: Callable[[Trajectory], None],
    stop: threading.Event,
    *,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> None:
    """Starts the engines, generates until `stop` is set, and stops them. Arguments as for `Engine.run`.

    Raises:
      RuntimeError: an engine died more than `max_restarts` times in a row, or another call is still running.
      TimeoutError: an engine did not start within `start_timeout_s`; the cluster may lack free resources.
      ConnectionError: the cluster's head was unreachable for `head_timeout_s`.
      Exception: any exception that an engine raised.
    """
    if not self._driving.acquire(blocking=False):
      raise RuntimeError("EngineCluster.run() called while another call is still running.")
    fail = on_failure or (lambda request: None)
    errors: list[BaseException] = []
    sender = WeightSender(weights, self._ray.put, self._outbox.add)
    try:
      sender.start()
      if self._hub is not None:
        self._hub.start(self._outbox)
      for index in range(self._config.num_engines):
        self._engines.append(self._start_engine(index))
      last = time.monotonic()
      while not stop.is_set() and not self._closed.is_set():
        sender.check()
        if self._hub is not None:
          self._hub.check()
        self._send_weights()
        self._send_requests(next_request)
        for report in self._collect_reports(fail):
          for request in report.failed:
            fail(request)
          for trajectory in report.trajectories:
            emit(trajectory)
        now = time.monotonic()
        # Time in `emit`, or while this process was suspended, does not count as silence of the engines.
        seconds = min(now - last, _LONGEST_TICK_S)
        self._connection.check(seconds)
        self._check_silence(seconds, fail)
        last = now
    finally:
      try:
        sender.stop(_CLOSE_S)
        errors = self._stop_engines()
      finally:
        if self._connection.lost:
          self._connection.close()  # otherwise Ray would end this process before it has written a checkpoint
        self._driving.release()
    if errors:
      raise errors[0]

  @property
  def counters(self) -> dict[str, Any]:
    """Sums of `Engine.counters` over all engines, including replaced ones, and of what the cluster counts itself.

    These are `engine_restarts`, `weight_transfers`, of which `full_weight_transfers` sent no delta, `weight_bytes` (of
    the versions transferred), `weight_bytes_sent` (with deltas), and `weight_checksum_mismatches`.

    `busy_seconds` is the mean over the engines, so that its growth per second is a fraction in [0, 1], as for `Engine`.
    """
    with self._counting:
      each = [*self._past_counters, *[{**engine.counters, **engine.weights.counters} for engine in self._engines]]
    total: dict[str, Any] = dict.fromkeys(_ALWAYS_COUNTED, 0)
    by_kind = collections.Counter[str]()
    for counters in each:
      by_kind.update(counters.get("failed_by_kind", {}))
      for name in counters.keys() - {"failed_by_kind", "busy_seconds"}:
        total[name] = total.get(name, 0) + counters[name]
    busy_seconds = sum(counters.get("busy_seconds", 0.0) for counters in each)
    return {**total, "failed_by_kind": dict(by_kind), "busy_seconds": busy_seconds / self._config.num_engines}

  def close(self) -> None:
    """Stops a `run` that is still active, and disconnects from Ray if this object has connected."""
    self._closed.set()
    if not self._driving.acquire(timeout=2 * _CLOSE_S):
      # A call to Ray after its shutdown would start it again. It ends with this process.
      _log.warning("the thread that runs the rollout engines does not stop; Ray is left running.")
      return
    if self._hub is not None:
      self._hub.stop()
    self._connection.close()
    self._driving.release()

  def __enter__(self) -> EngineCluster:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _start_engine(self, index: int, *, restarts: int = 0) -> _EngineHandle:
    """Starts a worker process for engine number `index`, without waiting."""
    config = self._config
    env_vars = {"NPROC": str(max(1, math.ceil(config.num_cpus)))}  # XLA's number of threads
    if "JAX_PLATFORMS" in os.environ:
      env_vars["JAX_PLATFORMS"] = os.environ["JAX_PLATFORMS"]
    worker = self._worker_class.options(
      num_cpus=config.num_cpus,
      num_gpus=config.num_gpus,
      resources=dict(config.resources),
      max_concurrency=6,  # so that weights, submit and close do not wait for collect
      max_restarts=0,
      max_task_retries=0,
      scheduling_strategy="SPREAD",
      runtime_env={"env_vars": env_vars | dict(config.env_vars)},
    ).remote(*self._worker_arguments)
    engine = _EngineHandle(index, worker, EngineWeights(f"rollout engine {index}"), restarts=restarts)
    self._call(engine, "open")
    return engine

  def _call(self, engine: _EngineHandle, method: str, *arguments: Any) -> None:
    self._calls[getattr(engine.worker, method).remote(*arguments)] = engine, method

  def _send_weights(self) -> None:
    """Sends references to new weights to the engines that are ready for them."""
    for engine in self._engines:
      if engine.location:
        for call in engine.weights.next_calls(self._outbox.newest):
          self._call(engine, *call)

  def _send_requests(self, next_request: Callable[[], EpisodeRequest | None]) -> None:
    """Fills the engines, the emptiest first; lost episodes come before new ones."""
    sent = collections.defaultdict[int, list[EpisodeRequest]](list)
    while free := [engine for engine in self._engines if engine.location and len(engine.running) < self._slots]:
      unsuspected = [engine for engine in free if not any(map(self._is_suspect, engine.running))]
      again = next((x for x in self._lost if unsuspected or not self._is_suspect(x.episode_id)), None)
      request = again or next_request()
      if request is None:
        break
      if again:
        self._lost.remove(again)
      engine = min(unsuspected if self._is_suspect(request.episode_id) else free, key=lambda x: len(x.running))
      engine.running[request.episode_id] = request
      sent[engine.index].append(request)
    for index, requests in sent.items():
      self._call(self._engines[index], "submit", requests)

  def _is_suspect(self, episode: int) -> bool:
    """Whether more engines died with an episode than chance explains."""
    return self._deaths[episode] >= _SUSPECT_DEATHS

  def _collect_reports(self, fail: Callable[[EpisodeRequest], None]) -> Iterator[Report]:
    """Waits a moment for remote calls to end. Yields the reports of engines, and replaces engines that died."""
    calls, newest = list(self._calls), self._outbox.newest
    wait_s = _POLL_S if newest is None or newest.complete else _SENDING_POLL_S
    if not self._ray.wait(calls, num_returns=1, timeout=wait_s)[0]:
      return
    for ref in self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]:
      engine, method = self._calls.pop(ref, (None, ""))
      if engine is None:
        continue  # a call to an engine that was just replaced
      try:
        result = self._ray.get(ref)
      except self._ray.exceptions.RayTaskError:
        raise  # an exception in the engine, with its traceback
      except self._ray.exceptions.RayError as error:
        if getattr(error, "actor_init_failed", False):
          raise  # the process could not unpickle make_engine; a replacement could not either
        self._replace(engine, error, fail)
        continue
      engine.silent_s = 0.0
      if method == "open":
        engine.location = result
      elif method in METHODS:
        engine.weights.returned(method, result)
      elif method == "collect":
        yield self._record_report(engine, result)
      if method in ("open", "collect"):
        self._call(engine, "collect", _REPORT_S)

  def _record_report(self, engine: _EngineHandle, report: Report) -> Report:
    """Records the episodes that ended in an engine and its counters. Returns the report with owned arrays."""
    trajectories = [_owned(trajectory) for trajectory in report.trajectories]
    for episode in [x.episode_id for x in trajectories] + [x.episode_id for x in report.failed]:
      del engine.running[episode]
      self._deaths.pop(episode, None)
      engine.restarts = 0
    engine.counters = report.counters
    return dataclasses.replace(report, trajectories=trajectories)

  def _replace(self, engine: _EngineHandle, error: BaseException, fail: Callable[[EpisodeRequest], None]) -> None:
    """Replaces a dead engine. Its unfinished episodes run again, or fail if too many engines died with them."""
    where = f"rollout engine {engine.index} ({engine.location or 'not started yet'})"
    self._kill(engine)
    limit = self._config.max_restarts
    self._deaths.update(list(engine.running))
    again = [request for request in engine.running.values() if self._deaths[request.episode_id] < limit]
    failed = [request for request in engine.running.values() if self._deaths[request.episode_id] >= limit]
    if engine.restarts >= limit:
      raise RuntimeError(
        f"{where} died {engine.restarts + 1} times in a row without finishing an episode, more than "
        f"ClusterConfig.max_restarts = {limit}; the last time: {error}"
      ) from error
    _log.warning("%s died; %d of its episodes run again: %s", where, len(again), error)
    counts = {"engine_restarts": 1, "failed_episodes": len(failed)}
    with self._counting:
      self._past_counters.append({**counts, "failed_by_kind": {"engine_died": len(failed)} if failed else {}})
    self._lost.extend(again)
    for request in failed:
      died = self._deaths.pop(request.episode_id)
      _log.warning("episode %d failed (engine_died): %d engines died while they ran it.", request.episode_id, died)
      fail(request)
    self._engines[engine.index] = self._start_engine(engine.index, restarts=engine.restarts + 1)

  def _kill(self, engine: _EngineHandle) -> None:
    """Kills an engine's process, drops its running calls, and keeps its counters."""
    self._ray.kill(engine.worker)
    self._calls = {ref: call for ref, call in self._calls.items() if call[0] is not engine}
    engine.location = ""
    with self._counting:
      self._past_counters.append({**engine.counters, **engine.weights.counters})
      engine.counters = {}
      engine.weights.counters.clear()

  def _check_silence(self, seconds: float, fail: Callable[[EpisodeRequest], None]) -> None:
    """Replaces engines that hang. Raises if an engine does not start, unless it is a replacement and others run."""
    config = self._config
    for engine in list(self._engines):
      engine.silent_s += seconds
      limit = config.silence_timeout_s if engine.location else config.start_timeout_s
      if engine.silent_s <= limit:
        continue
      if engine.location:
        self._replace(engine, TimeoutError(f"no response within ClusterConfig.silence_timeout_s = {limit}."), fail)
      elif not engine.restarts or not any(other.location for other in self._engines):
        raise TimeoutError(
          f"rollout engine {engine.index} of {config.num_engines} did not start within ClusterConfig.start_timeout_s = "
          f"{limit}. Each engine needs num_cpus = {config.num_cpus}, num_gpus = {config.num_gpus}, resources = "
          f"{dict(config.resources)}; the cluster has {self._ray.cluster_resources()}, and free are "
          f"{self._ray.available_resources()}."
        )
      elif not engine.warned:
        engine.warned = True
        message = "the replacement of rollout engine %d has not started after %g s; still waiting."
        _log.warning(message, engine.index, limit)

  def _stop_engines(self) -> list[BaseException]:
    """Stops all engines and ends their processes. Returns the exceptions that they raised."""
    closing = {engine.worker.close.remote(): engine for engine in self._engines if engine.location}
    if closing:
      self._ray.wait(list(closing), num_returns=len(closing), timeout=_CLOSE_S)
    errors: list[BaseException] = []
    for ref, engine in closing.items():
      try:
        self._ray.get(ref, timeout=0)
      except self._ray.exceptions.RayTaskError as error:
        errors.append(error)
      except self._ray.exceptions.RayError as error:
        _log.warning("rollout engine %d (%s) did not close: %s", engine.index, engine.location, error)
    for engine in self._engines:
      self._kill(engine)
    self._engines.clear()
    self._lost.clear()
    self._deaths.clear()
    self._outbox.clear()
    return errors


def _owned(trajectory: Trajectory) -> Trajectory:
  """Copies the arrays of a trajectory out of Ray's object store, whose memory they would keep. Validates them again."""
  return dataclasses.replace(
    trajectory,
    tokens=np.array(trajectory.tokens),
    action_mask=np.array(trajectory.action_mask),
    behavior_logp=np.array(trajectory.behavior_logp),
    versions=np.array(trajectory.versions),
    rewards=np.array(trajectory.rewards),
  )
