"""Rollout schedules: where the learner's next batch comes from.

async    an engine thread generates all the time and takes up new weights in flight; the queue bounds staleness
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
from sao_jax.rollout.weight_sync import WeightHistory, WeightStore
from sao_jax.types import Params, Trajectory

_POLL_S = 0.5
_STOP_S = 10.0
"""Seconds that the engine's thread has to end. With what follows, a signal must end the run within 30 s."""

_log = logging.getLogger(__name__)


class Generator(Protocol):
  """An engine, or several engines that share the requests."""

  def generate(self, weights: ParamsFor, requests: Sequence[EpisodeRequest], *, seed: int) -> Iterator[Trajectory]:
    """See `Engine.generate`."""
    ...


class RolloutSchedule(Protocol):
  """The training loop's view of a schedule."""

  runs_on_caller: bool
  """Whether `next_batch` generates on the caller's thread, where an exception of a signal may end it at any point."""

  def next_batch(self, version: int) -> list[Trajectory]:
    """The trajectories of the next learner step, for a learner at `version`."""
    ...

  def counters(self) -> dict[str, int]:
    """`queue_size`, `dropped_stale`, `dropped_incomplete_group`."""
    ...

  def state(self, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
    """What a resume after `step` learner steps needs: JSON, and the trajectories that wait for the learner.

    A batch that was handed out for a later step counts as not handed out.
    """
    ...

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory]) -> None:
    """Continues from `state()`; called on a new schedule, before the first `next_batch`."""
    ...

  def close(self) -> None:
    """Ends what runs in the background, and raises what it failed with."""
    ...


class LaggedSchedule:
  """Generates each batch to its end on the caller's thread, with weights up to `lag` versions old.

  Args:
    engine: the engine; deterministic if its environments are.
    requests: episodes to run.
    weights: the published versions; a batch begins with the oldest.
    batch_size: trajectories per batch; a multiple of `group_size`.
    group_size: episodes that are compared with one another; incomplete groups are replaced by new ones.
    switch_chunks: decode chunks after which the engine takes up the next version, up to the newest. None: it does not,
      so that a trajectory has one version.
  """

  runs_on_caller = True

  def __init__(
    self,
    *,
    engine: Generator,
    requests: RequestStream,
    weights: WeightHistory,
    batch_size: int,
    group_size: int,
    switch_chunks: int | None,
  ):
    if switch_chunks is not None and switch_chunks < 1:
      raise ValueError(f"switch_chunks must be >= 1 or None; received {switch_chunks}.")
    self._engine = engine
    self._requests = requests
    self._weights = weights
    self._batch_size = batch_size
    self._group_size = group_size
    self._switch_chunks = switch_chunks
    self._dropped_incomplete_group = 0
    self._handed_out_at = -1
    self._before_batch = self._position()

  def next_batch(self, version: int) -> list[Trajectory]:
    self._before_batch, self._handed_out_at = self._position(), version
    batch: list[Trajectory] = []
    while len(batch) < self._batch_size:
      wanted = [self._requests.next() for _ in range(self._batch_size - len(batch))]
      # Seeded by its place in the run: the same whatever ran before in this process.
      done = list(self._engine.generate(self._params_for, wanted, seed=wanted[0].episode_id))
      batch += self._complete_groups(done)
    return sorted(batch, key=lambda x: x.episode_id)

  def counters(self) -> dict[str, int]:
    return {"queue_size": 0, "dropped_stale": 0, "dropped_incomplete_group": self._dropped_incomplete_group}

  def state(self, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
    return self._position() if step > self._handed_out_at else self._before_batch, []

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory]) -> None:
    if waiting:
      raise ValueError(f"a lagged schedule keeps no trajectories between steps; received {len(waiting)}.")
    self._requests.restore(state["requests"])
    self._dropped_incomplete_group = int(state["dropped_incomplete_group"])

  def close(self) -> None:
    pass

  def _position(self) -> dict[str, Any]:
    return {"requests": self._requests.state(), "dropped_incomplete_group": self._dropped_incomplete_group}

  def _params_for(self, chunk: int) -> tuple[Params, int]:
    return self._weights.ahead(0 if self._switch_chunks is None else chunk // self._switch_chunks)

  def _complete_groups(self, trajectories: list[Trajectory]) -> list[Trajectory]:
    sizes = collections.Counter(x.group_id for x in trajectories)
    complete = [x for x in trajectories if sizes[x.group_id] == self._group_size]
    self._dropped_incomplete_group += len(trajectories) - len(complete)
    return complete


class AsyncSchedule:
  """An engine thread generates all the time; the queue bounds staleness; weights are taken up in flight.

  Args:
    engine: the engine, or a cluster of them. A thread of this object drives it from the first `next_batch` on.
    requests: episodes to run.
    queue: between the engine and the learner.
    weights: the newest version; something must be published before the first `next_batch`.
    on_wait: called every half second while `next_batch` waits; what it raises ends the wait.
  """

  runs_on_caller = False

  def __init__(
    self,
    *,
    engine: AsyncEngine,
    requests: RequestStream,
    queue: TrajectoryQueue,
    weights: WeightStore,
    on_wait: Callable[[], None] = lambda: None,
  ):
    self._requests = requests
    self._queue = queue
    self._weights = weights
    self._on_wait = on_wait
    self._handed_out: tuple[int, list[Trajectory]] = (-1, [])
    """The learner's version when it took its last batch, and that batch."""
    self._started = False
    self._starting = threading.Lock()
    self._thread = EngineThread(
      engine, weights=weights, next_request=self._next_request, emit=self._emit, on_failure=self._fail
    )

  def start(self) -> None:
    """Starts to generate; `next_batch` does it if nobody else has."""
    if not self._started:
      self._started = True
      self._thread.start()

  def next_batch(self, version: int) -> list[Trajectory]:
    self.start()
    while True:
      self._thread.check()
      self._on_wait()
      if batch := self._queue.get_batch(version, timeout=_POLL_S):
        self._handed_out = version, batch
        return batch

  def counters(self) -> dict[str, int]:
    counts = self._queue.counters
    return {
      "queue_size": self._queue.qsize(),
      "dropped_stale": counts["dropped_stale"],
      "dropped_incomplete_group": counts["dropped_incomplete_group"],
    }

  def state(self, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
    with self._starting:  # Every episode that was handed out is running, waiting or has ended.
      counters, waiting = self._queue.state()
      requests = self._requests.state(counters["running"])
    version, batch = self._handed_out
    unused = [] if step > version else batch
    counters["used"] -= len(unused)
    return {"requests": requests, "queue": counters}, unused + waiting

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory]) -> None:
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
    if self._queue.admission(self._weights.latest()[1]) == 0:
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
