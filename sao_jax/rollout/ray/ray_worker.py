"""Ray worker with a rollout engine: the engine on a thread, its requests, and its results."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from sao_jax.rollout.engine.engine import Engine, EngineThread
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import Trajectory

EngineFactory: TypeAlias = Callable[[], contextlib.AbstractContextManager[Engine]]
"""Makes an engine in the process in which it is called; leaving the context frees everything. Must be picklable."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """Results of an engine since its last report."""

  trajectories: Sequence[Trajectory]
  """Finished episodes."""
  failed: Sequence[EpisodeRequest]
  """Failed episodes."""
  counters: Mapping[str, Any]
  """Totals, see `Engine.counters`."""


class EngineWorker:
  """Rollout engine with methods for remote calls, on several threads at once.

  An exception in the engine is raised by the next `collect` or `close`.

  Args:
    make_engine: makes the engine, in `open`.
  """

  def __init__(self, make_engine: EngineFactory):
    self._make_engine = make_engine
    self._resources = contextlib.ExitStack()
    self._weights = WeightStore()
    self._changed = threading.Condition()
    self._requests: collections.deque[EpisodeRequest] = collections.deque()
    self._trajectories: list[Trajectory] = []
    self._failed: list[EpisodeRequest] = []
    self._engine: Engine | None = None
    self._thread: EngineThread | None = None

  def open(self) -> str:
    """Makes the engine. Returns its process and host as text, for messages."""
    self._engine = self._resources.enter_context(self._make_engine())
    return f"process {os.getpid()} on {socket.gethostname()}"

  def update_weights(self, refs: Sequence[Any], version: int) -> None:
    """Fetches weights and publishes them to the engine, which starts with the first version.

    Args:
      refs: one reference into Ray's object store. It is in a list because Ray would otherwise fetch the object before
        the call, and delay later calls.
      version: policy version, above all earlier ones.
    """
    import ray

    # `publish` copies the weights out of the object store, which can then free this version.
    self._weights.publish(ray.get(refs[0]), version)
    if self._thread is None:
      assert self._engine is not None, "open() comes first"
      self._thread = EngineThread(
        self._engine, weights=self._weights, next_request=self._next_request, emit=self._emit, on_failure=self._fail
      )
      self._thread.start()

  def submit(self, requests: Sequence[EpisodeRequest]) -> None:
    """Queues episodes."""
    with self._changed:
      self._requests.extend(requests)

  def collect(self, wait_s: float) -> Report:
    """Returns the results since the last call; waits up to `wait_s` seconds for the first one."""
    assert self._engine is not None, "open() comes first"
    with self._changed:
      self._changed.wait_for(lambda: self._trajectories or self._failed, wait_s)
      trajectories, self._trajectories = self._trajectories, []
      failed, self._failed = self._failed, []
    if self._thread is not None:
      self._thread.check()
    return Report(trajectories=trajectories, failed=failed, counters=self._engine.counters)

  def close(self) -> None:
    """Stops the engine and frees its resources."""
    with self._resources:
      if self._thread is not None:
        self._thread.stop()

  def _next_request(self) -> EpisodeRequest | None:
    with self._changed:
      return self._requests.popleft() if self._requests else None

  def _emit(self, trajectory: Trajectory) -> None:
    with self._changed:
      self._trajectories.append(trajectory)
      self._changed.notify_all()

  def _fail(self, request: EpisodeRequest) -> None:
    with self._changed:
      self._failed.append(request)
      self._changed.notify_all()
