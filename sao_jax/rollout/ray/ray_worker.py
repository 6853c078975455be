"""What runs in the process of a remote engine: the engine on a thread, its requests, and what has come out of it."""

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
"""Makes an engine in the process where it is called; leaving the context frees all it made. Must be picklable."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
  """What an engine has done since its last report."""

  trajectories: Sequence[Trajectory]
  failed: Sequence[EpisodeRequest]
  counters: Mapping[str, Any]
  """Of `Engine.counters`: totals."""


class EngineActor:
  """An engine behind methods that may be called from another process, on several threads at once.

  What goes wrong in the engine is raised by the next `collect` or `close`.

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
    """Makes the engine; returns where it is, for messages."""
    self._engine = self._resources.enter_context(self._make_engine())
    return f"process {os.getpid()} on {socket.gethostname()}"

  def publish(self, refs: Sequence[Any], version: int) -> None:
    """Fetches weights and hands them to the engine, which begins with the first ones.

    Args:
      refs: one reference into Ray's object store. In a list: Ray would else hold up later calls until it is here.
      version: of the weights, above every one before.
    """
    import ray

    # The copy that publish takes lives outside the object store, which can then let go of this version.
    self._weights.publish(ray.get(refs[0]), version)
    if self._thread is None:
      assert self._engine is not None, "open() comes first"
      self._thread = EngineThread(
        self._engine, weights=self._weights, next_request=self._next_request, emit=self._emit, on_failure=self._fail
      )
      self._thread.start()

  def submit(self, requests: Sequence[EpisodeRequest]) -> None:
    """Takes episodes to run."""
    with self._changed:
      self._requests.extend(requests)

  def collect(self, wait_s: float) -> Report:
    """Takes out what has ended; waits up to `wait_s` seconds for the first."""
    assert self._engine is not None, "open() comes first"
    with self._changed:
      self._changed.wait_for(lambda: self._trajectories or self._failed, wait_s)
      trajectories, self._trajectories = self._trajectories, []
      failed, self._failed = self._failed, []
    if self._thread is not None:
      self._thread.check()
    return Report(trajectories=trajectories, failed=failed, counters=self._engine.counters)

  def close(self) -> None:
    """Ends the engine and frees what belongs to it."""
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
