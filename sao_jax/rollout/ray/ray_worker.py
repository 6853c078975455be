"""Ray worker with a rollout engine: the engine on a thread, its requests, and its results."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeAlias

import jax

from sao_jax.rollout.engine.engine import Engine, EngineThread
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.ray import weight_transfer as transfer
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import Params, Trajectory
from sao_jax.utils.priority import yield_to_others

EngineFactory: TypeAlias = Callable[[], contextlib.AbstractContextManager[Engine]]
"""Makes an engine in the process in which it is called; leaving the context frees everything. Must be picklable."""

Shardings: TypeAlias = Callable[[Params], Params]
"""Called in the engine's process with a pytree of `jax.ShapeDtypeStruct`: returns the shardings of the weights there.
Must be picklable."""


def one_device(shapes: Params) -> Params:
  """Returns shardings that place weights on JAX's default device."""
  place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.tree.map(lambda _: place, shapes)


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

  Weights come in groups, which wait on the host until all are there. A thread of lower priority fetches them, while the
  engine decodes with its old weights. It takes the new ones between two steps. An exception in the engine is raised by
  the next `collect` or `close`.

  Args:
    make_engine: makes the engine, in `open`.
    shardings: of the engine's weights.
  """

  def __init__(self, make_engine: EngineFactory, shardings: Shardings = one_device):
    self._make_engine = make_engine
    self._shardings = shardings
    self._resources = contextlib.ExitStack()
    self._weights = WeightStore(copy=lambda params: params)  # they are the engine's own
    self._groups: dict[Any, list[transfer.Piece]] = {}
    """Weights of the engine, on the host."""
    self._arrived: dict[Any, list[transfer.Piece]] = {}
    """Weights of the version that is on its way."""
    self._fetcher = futures.ThreadPoolExecutor(1, "sao_jax-weights", initializer=yield_to_others)
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

  def receive_weights(self, key: Any, full: Sequence[Any], delta: Sequence[Any] | None, checksum: int) -> bool:
    """Fetches a group of weights from Ray's object store.

    Args:
      key: of the group.
      full: reference to its pieces; used if `delta` is None.
      delta: reference to what changed in them since the version that the engine has; empty if nothing did.
      checksum: of the group's values.

    Returns:
      Whether the values have this checksum. If not, they are dropped.
    """
    return self._fetcher.submit(self._receive, key, full, delta, checksum).result()

  def _receive(self, key: Any, full: Sequence[Any], delta: Sequence[Any] | None, checksum: int) -> bool:
    import ray

    if delta is None:
      pieces = [piece._replace(values=transfer.copied(piece.values)) for piece in ray.get(full[0])]
    elif not delta:
      pieces = self._groups[key]
    else:
      changes = ray.get(delta[0])
      pieces = [
        piece._replace(values=transfer.apply(change, piece.values))
        for piece, change in zip(self._groups[key], changes, strict=True)
      ]
    if transfer.checksum(piece.values for piece in pieces) != checksum:
      return False
    self._arrived[key] = pieces
    return True

  def drop_weights(self) -> None:
    """Drops the groups that have arrived."""
    self._arrived.clear()

  def swap_weights(self, shapes: Params, version: int) -> None:
    """Publishes the weights that have arrived to the engine, which starts with the first version.

    Args:
      shapes: pytree of `jax.ShapeDtypeStruct`.
      version: policy version, above all earlier ones.
    """
    placed = self._fetcher.submit(lambda: transfer.place(shapes, self._shardings(shapes), self._arrived.values()))
    params = placed.result()
    self._weights.publish(params, version)
    self._groups, self._arrived = self._arrived, {}
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
    self._fetcher.shutdown(wait=False)
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
