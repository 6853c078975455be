"""Three schedules of one loop: where the learner's next batch comes from, and what happens to its new weights.

async    an engine thread generates all the time; weights are taken up in flight; staleness is bounded by the queue
lagged   one thread, deterministic: weights are a set number of versions old, and may change mid-trajectory
sync     lagged with a lag of 0: generate a batch, then train on it; on-policy
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from sao_jax.rollout.engine.engine import AsyncEngine, EngineThread, ParamsFor
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.requests import RequestStream
from sao_jax.rollout.trajectory_queue import TrajectoryQueue
from sao_jax.rollout.weight_sync import WeightStore, owned_copy
from sao_jax.types import Params, Trajectory

_POLL_S = 0.5
_STOP_S = 10.0
"""How long the engine's thread may take to end: with what follows, a signal must have ended the run within 30 s."""

_log = logging.getLogger(__name__)


def _nothing() -> None:
  """The default check."""


class Generates(Protocol):
  """An engine, or several that share out the requests among them."""

  def generate(self, weights: ParamsFor, requests: Sequence[EpisodeRequest], *, seed: int) -> Iterator[Trajectory]:
    """See `Engine.generate`."""
    ...


class BatchSource(Protocol):
  """What the training loop needs to know about a schedule."""

  def publish(self, params: Params, version: int) -> None:
    """Hands over the learner's weights (a copy is taken); called with version 0 or the restored one first."""
    ...

  runs_on_caller: bool
  """Whether `next_batch` generates on the caller's thread, where an exception of a signal may end it at any point."""

  def next_batch(self, version: int, check: Callable[[], None] = ...) -> list[Trajectory]:
    """The trajectories of the next learner step, taken by a learner at `version`.

    Args:
      version: the learner's.
      check: called every half second of a wait for another thread; what it raises ends the wait.
    """
    ...

  def counters(self) -> dict[str, int]:
    """`queue_size`, `dropped_stale`, `dropped_incomplete_group`."""
    ...

  def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
    """What a resume needs: JSON, and the trajectories that wait for the learner.

    It is that of the last `publish`: a batch that was taken since, or was being made, counts as not taken.
    """
    ...

  def old_weights(self) -> list[Params]:
    """Older versions of the policy that a resume needs, oldest first; how many depends on the config only."""
    ...

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory], old_weights: list[Params]) -> None:
    """Goes on from `state()` and `old_weights()`; called on a new source, before the first `publish`."""
    ...

  def close(self) -> None:
    """Ends what runs in the background; raises what it failed with."""
    ...


class LaggedSource:
  """Generates each batch to its end with weights of versions `version - lag ..`, on the caller's thread.

  Args:
    engine: the engine; deterministic if its environments are.
    requests: episodes to run.
    batch_size: trajectories per batch; a multiple of `group_size`.
    group_size: episodes that are compared with one another; incomplete groups are replaced by new ones.
    lag: how many versions old the weights are at the start of a batch; 0 is on-policy.
    switch_chunks: after so many decode chunks the engine goes on with the next version, up to the newest; None: never,
      so that a trajectory has one version.
    copy: copies published parameters to where the engine reads them.
  """

  runs_on_caller = True

  def __init__(
    self,
    *,
    engine: Generates,
    requests: RequestStream,
    batch_size: int,
    group_size: int,
    lag: int,
    switch_chunks: int | None,
    copy: Callable[[Params], Params] = owned_copy,
  ):
    if lag < 0:
      raise ValueError(f"lag must be >= 0; received {lag}.")
    if switch_chunks is not None and switch_chunks < 1:
      raise ValueError(f"switch_chunks must be >= 1 or None; received {switch_chunks}.")
    self._engine = engine
    self._requests = requests
    self._batch_size = batch_size
    self._group_size = group_size
    self._lag = lag
    self._switch_chunks = switch_chunks
    self._copy = copy
    self._history: collections.deque[tuple[Params, int]] = collections.deque(maxlen=lag + 1)
    self._dropped_incomplete_group = 0
    self._published = self._position()

  def publish(self, params: Params, version: int) -> None:
    self._history.append((self._copy(params), version))
    self._published = self._position()

  def next_batch(self, version: int, check: Callable[[], None] = _nothing) -> list[Trajectory]:
    batch: list[Trajectory] = []
    while len(batch) < self._batch_size:
      wanted = [self._requests.next() for _ in range(self._batch_size - len(batch))]
      # Seeded by its place in the run: the same whatever ran before in this process.
      done = list(self._engine.generate(self._weights, wanted, seed=wanted[0].episode_id))
      batch += self._complete_groups(done)
    return sorted(batch, key=lambda x: x.episode_id)

  def counters(self) -> dict[str, int]:
    return {"queue_size": 0, "dropped_stale": 0, "dropped_incomplete_group": self._dropped_incomplete_group}

  def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
    return {**self._published, "versions": [version for _, version in self._padded_history()]}, []

  def old_weights(self) -> list[Params]:
    return [params for params, _ in self._padded_history()]

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory], old_weights: list[Params]) -> None:
    if waiting:
      raise ValueError(f"a lagged schedule keeps no trajectories between steps; received {len(waiting)}.")
    self._requests.restore(state["requests"])
    self._dropped_incomplete_group = int(state["dropped_incomplete_group"])
    for version, params in zip(state["versions"], old_weights, strict=True):
      if not self._history or self._history[-1][1] != version:
        self._history.append((self._copy(params), int(version)))
    self._published = self._position()

  def close(self) -> None:
    pass

  def _position(self) -> dict[str, Any]:
    return {"requests": self._requests.state(), "dropped_incomplete_group": self._dropped_incomplete_group}

  def _padded_history(self) -> list[tuple[Params, int]]:
    """All but the newest weights, `lag` of them: the oldest is repeated while there are fewer."""
    history = list(self._history)
    return ([history[0]] * (self._lag + 1 - len(history)) + history)[:-1]

  def _weights(self, chunk: int) -> tuple[Params, int]:
    ahead = 0 if self._switch_chunks is None else chunk // self._switch_chunks
    return self._history[min(ahead, len(self._history) - 1)]

  def _complete_groups(self, trajectories: list[Trajectory]) -> list[Trajectory]:
    sizes = collections.Counter(x.group_id for x in trajectories)
    complete = [x for x in trajectories if sizes[x.group_id] == self._group_size]
    self._dropped_incomplete_group += len(trajectories) - len(complete)
    return complete


class AsyncSource:
  """An engine thread generates all the time; the queue bounds staleness; weights are taken up in flight.

  Args:
    engine: the engine, or a cluster of them; driven by a thread of this object from the first `publish` on.
    requests: episodes to run.
    queue: between the two.
    copy: copies published parameters to where the engine reads them.
  """

  runs_on_caller = False

  def __init__(
    self,
    *,
    engine: AsyncEngine,
    requests: RequestStream,
    queue: TrajectoryQueue,
    copy: Callable[[Params], Params] = owned_copy,
  ):
    self._requests = requests
    self._queue = queue
    self._weights = WeightStore(copy)
    self._version = 0
    self._in_hand: list[Trajectory] = []
    """The batch that the learner is at."""
    self._started = False
    self._starting = threading.Lock()
    self._thread = EngineThread(
      engine, weights=self._weights, next_request=self._next_request, emit=self._emit, on_failure=self._fail
    )

  def publish(self, params: Params, version: int) -> None:
    self._weights.publish(params, version)
    self._version = version
    self._in_hand = []
    if not self._started:
      self._started = True
      self._thread.start()

  def next_batch(self, version: int, check: Callable[[], None] = _nothing) -> list[Trajectory]:
    while True:
      self._thread.check()
      check()
      if batch := self._queue.get_batch(version, timeout=_POLL_S):
        self._in_hand = batch
        return batch

  def counters(self) -> dict[str, int]:
    counts = self._queue.counters
    return {
      "queue_size": self._queue.qsize(),
      "dropped_stale": counts["dropped_stale"],
      "dropped_incomplete_group": counts["dropped_incomplete_group"],
    }

  def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
    with self._starting:  # Every episode that was handed out is running, waiting or has ended.
      counters, waiting = self._queue.state()
      requests = self._requests.state(counters["running"])
    counters["used"] -= len(self._in_hand)
    return {"requests": requests, "queue": counters}, self._in_hand + waiting

  def old_weights(self) -> list[Params]:
    return []

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory], old_weights: list[Params]) -> None:
    self._requests.restore(state["requests"])
    self._queue.restore(state["queue"], waiting)

  def close(self) -> None:
    try:
      if self._started:
        self._thread.stop(_STOP_S)
    except TimeoutError as error:
      # An inline environment cannot be interrupted. Its thread ends with the process; nothing waits for it any more.
      _log.warning("%s It is left behind.", error)
    finally:
      self._queue.close()

  def _next_request(self) -> EpisodeRequest | None:
    if self._queue.admission(self._version) == 0:
      return None
    with self._starting:
      request = self._requests.next()
      self._queue.start(request)
    return request

  def _emit(self, trajectory: Trajectory) -> None:
    if not self._thread.stopping.is_set():  # or the queue may be closed
      self._queue.put(trajectory)

  def _fail(self, request: EpisodeRequest) -> None:
    self._queue.fail(request)
