"""Rollout engines as Ray actors, on one machine or many, behind the `run` of the embedded engine.

The learner's process hands out requests, puts each version of the weights into Ray's object store once, and takes
trajectories; every engine is an `EngineActor` in a process of its own. Engines may be at different versions: each
action token says which one sampled it, and the queue's rules do the rest.
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

import jax
import numpy as np

from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.ray.connection import RayConnection
from sao_jax.rollout.ray.ray_worker import EngineActor, EngineFactory, Report
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import Trajectory

_POLL_S = 0.02
_REPORT_S = 1.0
"""How long an engine waits for something to report; at most."""
_CLOSE_S = 6.0
"""How long engines have to end by themselves before they are killed."""
_LONGEST_TICK_S = 1.0
_SUSPECT_DEATHS = 2

_log = logging.getLogger(__name__)


@dataclasses.dataclass(eq=False)
class _Remote:
  """An engine as the learner's process sees it."""

  index: int
  actor: Any
  silent_s: float = 0.0
  """Since its last answer, or its start."""
  restarts: int = 0
  """In a row: since an episode last ended in it."""
  place: str = ""
  """Where it runs; empty until it is up."""
  version: int = -1
  """Of the weights that it was last sent."""
  fetching: bool = False
  warned: bool = False
  running: dict[int, EpisodeRequest] = dataclasses.field(default_factory=dict)
  counters: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class EngineCluster:
  """Engines in Ray actors; `run` does what `Engine.run` does.

  An engine whose process or machine dies, or that does not answer, is replaced. Its unfinished episodes are run again
  under their old numbers (by whichever engine has room), so that the queue sees each of them end exactly once; what
  they sample is derived from (seed, episode, position) as in the embedded engine, so no two episodes share noise
  wherever they run, given that `make_engine` gives every engine the same seed. An episode that was on
  `config.max_restarts` dying engines fails, as `engine_died`; after the second it is run apart from other suspects, so
  that an episode that kills its engines fails alone. An exception that an engine raises ends `run`, with the traceback
  of its process.

  A call of `run` starts the engines and ends them. Use as a context manager, or call `close`. When made it connects to
  Ray, or starts it, if the process has not done so.

  Args:
    make_engine: makes an engine in the actor's process.
    config: how many, where and with what.
    slots_per_engine: episodes that an engine is given at once.
  """

  def __init__(self, make_engine: EngineFactory, config: ClusterConfig, *, slots_per_engine: int):
    if config.num_engines < 1:
      raise ValueError(f"ClusterConfig.num_engines must be >= 1 for a cluster; received {config.num_engines}.")
    self._make_engine = make_engine
    self._config = config
    self._slots = slots_per_engine
    self._driving = threading.Lock()
    self._closed = threading.Event()
    self._engines: list[_Remote] = []
    self._calls: dict[Any, tuple[_Remote, str]] = {}
    """Calls without an answer yet, by Ray's reference to the answer: which engine, which method."""
    self._lost: collections.deque[EpisodeRequest] = collections.deque()
    self._deaths = collections.Counter[int]()
    """By episode: engines that died with it."""
    self._weights: tuple[Any, int] = (None, -1)
    self._past_counters: list[Mapping[str, Any]] = []
    """Of engines that are no more."""
    self._counting = threading.Lock()
    self._connection = RayConnection(config)
    self._ray = self._connection.ray
    self._actor_class = self._ray.remote(EngineActor)

  def run(
    self,
    weights: WeightStore,
    next_request: Callable[[], EpisodeRequest | None],
    emit: Callable[[Trajectory], None],
    stop: threading.Event,
    *,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> None:
    """As `Engine.run`: starts the engines, generates until `stop` is set, and ends them.

    Raises:
      RuntimeError: an engine died more than `max_restarts` times in a row.
      TimeoutError: an engine was not up within `start_timeout_s`: no room in the cluster, perhaps.
      ConnectionError: the cluster's head was out of reach for `head_timeout_s`.
      Exception: what an engine raised.
    """
    if not self._driving.acquire(blocking=False):
      raise RuntimeError("EngineCluster.run() called while another call is still running.")
    fail = on_failure or (lambda request: None)
    errors: list[BaseException] = []
    try:
      for index in range(self._config.num_engines):
        self._engines.append(self._start_engine(index))
      last = time.monotonic()
      while not stop.is_set() and not self._closed.is_set():
        self._send_weights(weights)
        self._hand_out(next_request)
        for report in self._answers(fail):
          for request in report.failed:
            fail(request)
          for trajectory in report.trajectories:
            emit(trajectory)
        now = time.monotonic()
        # Time that `emit` waited, or that this process was suspended, is not held against the engines.
        seconds = min(now - last, _LONGEST_TICK_S)
        self._connection.check(seconds)
        self._check_silence(seconds, fail)
        last = now
    finally:
      try:
        errors = self._end_engines()
      finally:
        if self._connection.lost:
          self._connection.close()  # at once: Ray would end this process before it has saved anything
        self._driving.release()
    if errors:
      raise errors[0]

  @property
  def counters(self) -> dict[str, Any]:
    """Those of `Engine.counters`, added up over all engines, replaced ones included, and `engine_restarts`.

    `busy_seconds` is the mean over the engines, so that its growth per second is a share of the time here too.
    """
    with self._counting:
      each = [*self._past_counters, *[engine.counters for engine in self._engines]]
    total: dict[str, Any] = dict.fromkeys(("tokens_generated", "failed_episodes", "engine_restarts"), 0)
    by_kind = collections.Counter[str]()
    for counters in each:
      by_kind.update(counters.get("failed_by_kind", {}))
      for name in counters.keys() - {"failed_by_kind", "busy_seconds"}:
        total[name] = total.get(name, 0) + counters[name]
    busy_seconds = sum(counters.get("busy_seconds", 0.0) for counters in each)
    return {**total, "failed_by_kind": dict(by_kind), "busy_seconds": busy_seconds / self._config.num_engines}

  def close(self) -> None:
    """Ends a `run` that is still under way, and Ray if this object has started it."""
    self._closed.set()
    if not self._driving.acquire(timeout=2 * _CLOSE_S):
      # Any call of Ray's after its shutdown would start it anew. It ends with this process.
      _log.warning("the thread that runs the rollout engines does not end; Ray is left running.")
      return
    self._connection.close()
    self._driving.release()

  def __enter__(self) -> EngineCluster:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _start_engine(self, index: int, *, restarts: int = 0) -> _Remote:
    """Asks Ray for a process for engine number `index`; others go on meanwhile."""
    config = self._config
    env_vars = {"NPROC": str(max(1, math.ceil(config.num_cpus)))}  # XLA's number of threads
    if "JAX_PLATFORMS" in os.environ:
      env_vars["JAX_PLATFORMS"] = os.environ["JAX_PLATFORMS"]
    actor = self._actor_class.options(
      num_cpus=config.num_cpus,
      num_gpus=config.num_gpus,
      resources=dict(config.resources),
      max_concurrency=4,  # collect waits; publish, submit and close must not wait for it
      max_restarts=0,
      max_task_retries=0,
      scheduling_strategy="SPREAD",
      runtime_env={"env_vars": env_vars | dict(config.env_vars)},
    ).remote(self._make_engine)
    engine = _Remote(index, actor, restarts=restarts)
    self._call(engine, "open")
    return engine

  def _call(self, engine: _Remote, method: str, *arguments: Any) -> None:
    self._calls[getattr(engine.actor, method).remote(*arguments)] = engine, method

  def _send_weights(self, store: WeightStore) -> None:
    """Puts new weights into the object store, and tells the engines that do not fetch older ones just now."""
    params, version = store.latest()
    if version != self._weights[1]:
      # The reference before is forgotten: Ray frees that version once no engine is fetching it.
      self._weights = self._ray.put(jax.device_get(params)), version
    ref, version = self._weights
    for engine in self._engines:
      if engine.place and not engine.fetching and engine.version != version:
        engine.fetching, engine.version = True, version
        self._call(engine, "publish", [ref], version)

  def _hand_out(self, next_request: Callable[[], EpisodeRequest | None]) -> None:
    """Fills the engines, the emptiest first; lost episodes go before new ones."""
    given = collections.defaultdict[int, list[EpisodeRequest]](list)
    while free := [engine for engine in self._engines if engine.place and len(engine.running) < self._slots]:
      unsuspected = [engine for engine in free if not any(map(self._is_suspect, engine.running))]
      again = next((x for x in self._lost if unsuspected or not self._is_suspect(x.episode_id)), None)
      request = again or next_request()
      if request is None:
        break
      if again:
        self._lost.remove(again)
      engine = min(unsuspected if self._is_suspect(request.episode_id) else free, key=lambda x: len(x.running))
      engine.running[request.episode_id] = request
      given[engine.index].append(request)
    for index, requests in given.items():
      self._call(self._engines[index], "submit", requests)

  def _is_suspect(self, episode: int) -> bool:
    """Whether it was on more engines that died than chance explains."""
    return self._deaths[episode] >= _SUSPECT_DEATHS

  def _answers(self, fail: Callable[[EpisodeRequest], None]) -> Iterator[Report]:
    """Waits a moment for calls to be answered; yields what engines report, and replaces those that died."""
    calls = list(self._calls)
    if not self._ray.wait(calls, num_returns=1, timeout=_POLL_S)[0]:
      return
    for ref in self._ray.wait(calls, num_returns=len(calls), timeout=0)[0]:
      engine, method = self._calls.pop(ref, (None, ""))
      if engine is None:
        continue  # of an engine that was found dead a moment ago
      try:
        answer = self._ray.get(ref)
      except self._ray.exceptions.RayTaskError:
        raise  # the engine's own exception, its traceback included
      except self._ray.exceptions.RayError as error:
        if getattr(error, "actor_init_failed", False):
          raise  # the process could not so much as unpickle make_engine: no other will
        self._replace(engine, error, fail)
        continue
      engine.silent_s = 0.0
      if method == "open":
        engine.place = answer
      elif method == "publish":
        engine.fetching = False
      elif method == "collect":
        yield self._received(engine, answer)
      if method in ("open", "collect"):
        self._call(engine, "collect", _REPORT_S)

  def _received(self, engine: _Remote, report: Report) -> Report:
    """Books a report; each episode in it was running in that engine."""
    trajectories = [_owned(trajectory) for trajectory in report.trajectories]
    for episode in [x.episode_id for x in trajectories] + [x.episode_id for x in report.failed]:
      del engine.running[episode]
      self._deaths.pop(episode, None)
      engine.restarts = 0
    engine.counters = report.counters
    return dataclasses.replace(report, trajectories=trajectories)

  def _replace(self, engine: _Remote, error: BaseException, fail: Callable[[EpisodeRequest], None]) -> None:
    """Starts another engine in the place of a dead one, and keeps its episodes to be run again."""
    where = f"rollout engine {engine.index} ({engine.place or 'not up yet'})"
    self._retire(engine)
    limit = self._config.max_restarts
    self._deaths.update(list(engine.running))
    again = [request for request in engine.running.values() if self._deaths[request.episode_id] < limit]
    given_up = [request for request in engine.running.values() if self._deaths[request.episode_id] >= limit]
    if engine.restarts >= limit:
      raise RuntimeError(
        f"{where} died {engine.restarts + 1} times in a row without finishing an episode; ClusterConfig.max_restarts "
        f"= {limit}. The last time: {error}"
      ) from error
    _log.warning("%s died; its %d episodes are run again: %s", where, len(again), error)
    counts = {"engine_restarts": 1, "failed_episodes": len(given_up)}
    with self._counting:
      self._past_counters.append({**counts, "failed_by_kind": {"engine_died": len(given_up)} if given_up else {}})
    self._lost.extend(again)
    for request in given_up:
      died = self._deaths.pop(request.episode_id)
      _log.warning("episode %d failed (engine_died): %d engines died with it.", request.episode_id, died)
      fail(request)
    self._engines[engine.index] = self._start_engine(engine.index, restarts=engine.restarts + 1)

  def _retire(self, engine: _Remote) -> None:
    """Makes sure that nothing comes from an engine any more, and keeps its counters."""
    self._ray.kill(engine.actor)
    self._calls = {ref: call for ref, call in self._calls.items() if call[0] is not engine}
    engine.place = ""
    with self._counting:
      self._past_counters.append(engine.counters)
      engine.counters = {}

  def _check_silence(self, seconds: float, fail: Callable[[EpisodeRequest], None]) -> None:
    """Replaces engines that hang; one that never came up ends the run, unless it is a replacement that others cover."""
    config = self._config
    for engine in list(self._engines):
      engine.silent_s += seconds
      limit = config.silence_timeout_s if engine.place else config.start_timeout_s
      if engine.silent_s <= limit:
        continue
      if engine.place:
        self._replace(engine, TimeoutError(f"no answer within ClusterConfig.silence_timeout_s = {limit}."), fail)
      elif not engine.restarts or not any(other.place for other in self._engines):
        raise TimeoutError(
          f"rollout engine {engine.index} of {config.num_engines} was not up within ClusterConfig.start_timeout_s = "
          f"{limit}; each wants num_cpus = {config.num_cpus}, num_gpus = {config.num_gpus}, resources = "
          f"{dict(config.resources)}; the cluster has {self._ray.cluster_resources()}, of which are free "
          f"{self._ray.available_resources()}."
        )
      elif not engine.warned:
        engine.warned = True
        _log.warning("the replacement of rollout engine %d is not up after %g s; waiting on.", engine.index, limit)

  def _end_engines(self) -> list[BaseException]:
    """Closes all engines and ends their processes; returns what they raised."""
    closing = {engine.actor.close.remote(): engine for engine in self._engines if engine.place}
    if closing:
      self._ray.wait(list(closing), num_returns=len(closing), timeout=_CLOSE_S)
    errors: list[BaseException] = []
    for ref, engine in closing.items():
      try:
        self._ray.get(ref, timeout=0)
      except self._ray.exceptions.RayTaskError as error:
        errors.append(error)
      except self._ray.exceptions.RayError as error:
        _log.warning("rollout engine %d (%s) did not close: %s", engine.index, engine.place, error)
    for engine in self._engines:
      self._retire(engine)
    self._engines.clear()
    self._lost.clear()
    self._deaths.clear()
    self._weights = None, -1
    return errors


def _owned(trajectory: Trajectory) -> Trajectory:
  """A copy outside the object store, whose memory the arrays of an answer would keep; checked anew on the way."""
  return dataclasses.replace(
    trajectory,
    tokens=np.array(trajectory.tokens),
    action_mask=np.array(trajectory.action_mask),
    behavior_logp=np.array(trajectory.behavior_logp),
    versions=np.array(trajectory.versions),
    rewards=np.array(trajectory.rewards),
  )
