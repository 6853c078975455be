"""Rollout schedules: the order in which batches are generated and used.

async    an engine thread generates all the time and takes new weights in flight; the queue bounds staleness
lagged   one thread, deterministic: weights are a set number of versions old and may change within a trajectory
sync     lagged with a lag of 0: generate a batch, then train on it; on-policy
"""

from __future__ import annotations

import collections
import dataclasses
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
"""Seconds that the engine's thread gets to stop. After a signal the whole run must end within 30 s."""
_FIRST_EVALUATION_EPISODE = 2**30
"""Episodes of evaluations in a running engine have numbers that no training episode has."""

_log = logging.getLogger(__name__)


class Generator(Protocol):
  """An engine, or several engines that split the requests among them."""

  def generate(self, weights: ParamsFor, requests: Sequence[EpisodeRequest], *, seed: int) -> Iterator[Trajectory]:
    """See `Engine.generate`."""
    ...


class RolloutSchedule(Protocol):
  """Interface between the training loop and a schedule."""

  runs_on_caller: bool
  """Whether `next_batch` generates on the caller's thread, so that a signal handler's exception may interrupt it."""

  def next_batch(self, version: int) -> list[Trajectory]:
    """Returns the trajectories of the next learner step, for a learner at policy version `version`."""
    ...

  def evaluate(self, requests: Sequence[EpisodeRequest], *, seed: int) -> list[Trajectory]:
    """Runs episodes with the newest published weights and returns their trajectories; failed ones are missing.

    Training batches stay as they would be without it, apart from the order of completion in asynchronous schedules.

    Args:
      requests: numbered from 0.
      seed: of their sampling noise; ignored by schedules whose engine is running, which has its own.
    """
    ...

  def counters(self) -> dict[str, int]:
    """Returns `queue_size`, `dropped_stale` and `dropped_incomplete_group`, in trajectories."""
    ...

  def state(self, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
    """Returns the state after `step` learner steps: JSON values, and the trajectories that wait for the learner.

    A batch that `next_batch` returned for a later step counts as still waiting.
    """
    ...

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory]) -> None:
    """Continues from `state()`; called on a new schedule, before the first `next_batch`."""
    ...

  def close(self) -> None:
    """Stops background threads, and raises the exception that ended them, if any."""
    ...


class LaggedSchedule:
  """Schedule that generates each batch on the caller's thread, with weights up to `lag` versions old.

  Args:
    engine: the engine; deterministic if its environments are.
    requests: episodes to run.
    weights: the published versions; a batch starts with the oldest one.
    batch_size: trajectories per batch; a multiple of `group_size`.
    group_size: episodes per group; incomplete groups are replaced by new ones.
    switch_chunks: number of decode chunks, >= 1, after which the engine takes the next version, up to the newest. None:
      a batch is generated with one version.

  Raises:
    ValueError: `switch_chunks` is below 1.
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
    self._batch_version = -1
    """The learner's version when it took its last batch."""
    self._before_batch = self._position()

  def next_batch(self, version: int) -> list[Trajectory]:
    self._before_batch, self._batch_version = self._position(), version
    batch: list[Trajectory] = []
    while len(batch) < self._batch_size:
      wanted = [self._requests.next() for _ in range(self._batch_size - len(batch))]
      # The seed depends on the position in the run only, so that a resumed run samples the same.
      done = list(self._engine.generate(self._params_for, wanted, seed=wanted[0].episode_id))
      batch += self._complete_groups(done)
    return sorted(batch, key=lambda x: x.episode_id)

  def evaluate(self, requests: Sequence[EpisodeRequest], *, seed: int) -> list[Trajectory]:
    newest = self._weights.newest()
    return list(self._engine.generate(lambda _: newest, requests, seed=seed))

  def counters(self) -> dict[str, int]:
    return {"queue_size": 0, "dropped_stale": 0, "dropped_incomplete_group": self._dropped_incomplete_group}

  def state(self, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
    return self._position() if step > self._batch_version else self._before_batch, []

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory]) -> None:
    if waiting:
      raise ValueError(
        f"waiting must be empty, since a lagged schedule keeps no trajectories between steps; received {len(waiting)}."
      )
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
  """Schedule whose engine generates all the time on a thread of its own. The queue bounds staleness.

  The engine takes new weights in flight, also in the middle of a trajectory.

  Args:
    engine: the engine, or a cluster of them. The thread runs it from the first `next_batch` on.
    requests: episodes to run.
    queue: holds finished trajectories for the learner.
    weights: the newest version; one must be published before the first `next_batch`.
    on_wait: called every half second while `next_batch` waits. An exception that it raises ends the wait.
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
    self._last_batch: tuple[int, list[Trajectory]] = (-1, [])
    """The learner's version when it took its last batch, and that batch."""
    self._started = False
    self._starting = threading.Lock()
    self._evaluation: _Evaluation | None = None
    self._thread = EngineThread(
      engine, weights=weights, next_request=self._next_request, emit=self._emit, on_failure=self._fail
    )

  def start(self) -> None:
    """Starts generating, unless it has started; `next_batch` calls this too."""
    if not self._started:
      self._started = True
      self._thread.start()

  def next_batch(self, version: int) -> list[Trajectory]:
    self.start()
    while True:
      self._thread.check()
      self._on_wait()
      if batch := self._queue.get_batch(version, timeout=_POLL_S):
        self._last_batch = version, batch
        return batch

  def evaluate(self, requests: Sequence[EpisodeRequest], *, seed: int) -> list[Trajectory]:
    """See `RolloutSchedule.evaluate`. The engine keeps running: these episodes take the next free slots.

    The caller publishes no weights meanwhile, so that all their tokens are of the newest version. Training episodes
    that were running go on, and the queue takes them.
    """
    del seed
    self.start()
    evaluation = self._evaluation = _Evaluation(requests, self._weights.latest()[1])
    try:
      while not evaluation.ended.wait(_POLL_S):
        self._thread.check()
        self._on_wait()
    finally:
      self._evaluation = None
    return sorted(evaluation.done, key=lambda x: x.episode_id)

  def counters(self) -> dict[str, int]:
    counts = self._queue.counters
    return {
      "queue_size": self._queue.qsize(),
      "dropped_stale": counts["dropped_stale"],
      "dropped_incomplete_group": counts["dropped_incomplete_group"],
    }

  def state(self, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
    with self._starting:  # now every started episode is running, waiting or has ended
      counters, waiting = self._queue.state()
      requests = self._requests.state(counters["running"])
    version, batch = self._last_batch
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
      # An inline environment cannot be interrupted. The thread is a daemon and ends with the process.
      _log.warning("%s The thread is left behind.", error)
    finally:
      self._queue.close()

  def _next_request(self) -> EpisodeRequest | None:
    if (evaluation := self._evaluation) is not None and evaluation.waiting:
      return evaluation.next()
    if self._queue.admission(self._weights.latest()[1]) == 0:
      return None
    with self._starting:
      request = self._requests.next()
      self._queue.start(request)
    return request

  def _emit(self, trajectory: Trajectory) -> None:
    if trajectory.episode_id >= _FIRST_EVALUATION_EPISODE:
      if (evaluation := self._evaluation) is not None:  # otherwise a signal has ended it
        evaluation.add(trajectory)
      return
    if not self._thread.stopping.is_set():  # otherwise the queue may be closed already
      self._queue.put(trajectory)

  def _fail(self, request: EpisodeRequest) -> None:
    if request.episode_id < _FIRST_EVALUATION_EPISODE:
      self._queue.fail(request)
    elif (evaluation := self._evaluation) is not None:
      evaluation.fail()


class _Evaluation:
  """Episodes of an evaluation in a running engine. The engine's thread takes and returns them.

  Args:
    requests: numbered from 0.
    version: of the newest weights. An episode with a token of an older version is run again.
  """

  def __init__(self, requests: Sequence[EpisodeRequest], version: int):
    first = _FIRST_EVALUATION_EPISODE
    self.waiting = collections.deque(
      dataclasses.replace(x, episode_id=first + x.episode_id, group_id=first + x.group_id) for x in requests
    )
    self.done: list[Trajectory] = []
    self.ended = threading.Event()
    self._by_id = {x.episode_id: x for x in self.waiting}
    self._version = version
    self._failed = 0
    self._asked = False
    self._check()

  def next(self) -> EpisodeRequest | None:
    """Returns the next episode. The first call returns None, so that the engine reads the newest weights before it."""
    if not self._asked:
      self._asked = True
      return None
    return self.waiting.popleft()

  def add(self, trajectory: Trajectory) -> None:
    if trajectory.oldest_version < self._version:  # an engine in another process took the weights after the episode
      self.waiting.append(self._by_id[trajectory.episode_id])
      return
    self.done.append(trajectory)
    self._check()

  def fail(self) -> None:
    self._failed += 1
    self._check()

  def _check(self) -> None:
    if len(self.done) + self._failed == len(self._by_id):
      self.ended.set()
