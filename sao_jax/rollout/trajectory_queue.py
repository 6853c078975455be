"""Bounded queue between rollouts and learner, with admission control, a staleness limit and groups."""

from __future__ import annotations

import collections
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.types import Trajectory

_COUNTERS = ("started", "finished", "failed", "used", "dropped_stale", "dropped_incomplete_group")


class TrajectoryQueue:
  """Finished trajectories on their way to the learner; thread-safe.

  Call `start` when an episode is given to an engine, then exactly one of `put` (it finished) and `fail`. `admission`
  returns how many episodes may start. Dropped and failed episodes free their place in it, so that replacements can
  start: neither `max_staleness=0` nor a failed group member can starve the learner.

  With groups (`group_size > 1`) a group becomes available when its last member arrives. If a member fails or is too
  stale, the whole group is dropped: waiting members at once, running ones when they arrive.

  >>> queue = TrajectoryQueue(batch_size=4, group_size=1, max_staleness=1, capacity=16)
  >>> queue.admission(version=0)  # two batches: for the learner at versions 0 and 1
  8
  >>> request = EpisodeRequest(task_index=0, episode_id=0, group_id=0)
  >>> queue.start(request)
  >>> queue.admission(version=0), queue.admission(version=1)
  (7, 11)
  >>> queue.fail(request)
  >>> queue.admission(version=0)
  8

  Args:
    batch_size: trajectories per learner step; a multiple of `group_size`.
    group_size: episodes that share a `group_id`, >= 1; 1 for single rollouts.
    max_staleness: largest allowed staleness, >= 0: the learner's version at use minus the oldest version among a
      trajectory's action tokens.
    capacity: no episode may start while this many trajectories wait; at least `batch_size`. Running episodes are still
      accepted, because a long one must not stall while the learner is slow. So at most this many and the running ones
      wait (two per slot: the engine refills a slot before it emits the episode that ended there). Members of incomplete
      groups do not count; admission bounds their number.

  Raises:
    ValueError: an argument is out of range.
  """

  def __init__(self, *, batch_size: int, group_size: int, max_staleness: int, capacity: int):
    if batch_size < 1 or group_size < 1 or batch_size % group_size:
      raise ValueError(f"batch_size must be a positive multiple of group_size; received {batch_size}, {group_size}.")
    if max_staleness < 0:
      raise ValueError(f"max_staleness must be >= 0; received {max_staleness}.")
    if capacity < batch_size:
      raise ValueError(f"capacity must be >= batch_size = {batch_size}; received {capacity}.")
    self._batch_size = batch_size
    self._group_size = group_size
    self._max_staleness = max_staleness
    self._capacity = capacity
    self._changed = threading.Condition()
    self._ready: collections.deque[list[Trajectory]] = collections.deque()  # complete groups, oldest first
    self._partial: dict[int, list[Trajectory]] = {}
    self._running: dict[int, int] = {}  # episode_id -> group_id
    self._dead_groups: dict[int, int] = {}  # group with a failed member -> its members that have not ended or started
    self._counts = dict.fromkeys(_COUNTERS, 0)
    self._closed = False

  def admission(self, version: int) -> int:
    """Returns how many more episodes may start while the learner is at `version`; 0 while the queue is full or closed.

      started - dropped - failed <= (version + max_staleness + 1) * batch_size

    This is the rule of AReaL (arXiv 2505.24298). An episode beyond it could only be used by a learner that is more than
    `max_staleness` versions ahead.
    """
    with self._changed:
      if self._closed or len(self._ready) * self._group_size >= self._capacity:
        return 0
      outstanding = self._counts["used"] + self._waiting() + len(self._running)
      return max(0, (version + self._max_staleness + 1) * self._batch_size - outstanding)

  def start(self, request: EpisodeRequest) -> None:
    """Records that an episode was given to an engine.

    Raises:
      ValueError: the episode is already running.
    """
    with self._changed:
      if request.episode_id in self._running:
        raise ValueError(f"episode {request.episode_id} is running already.")
      self._running[request.episode_id] = request.group_id
      self._counts["started"] += 1

  def fail(self, request: EpisodeRequest) -> None:
    """Records that a started episode ended without a trajectory. Its group is dropped: it can no longer be complete.

    Raises:
      ValueError: the episode is not running.
    """
    with self._changed:
      group_id = self._end_running(request.episode_id)
      self._counts["failed"] += 1
      dropped = len(self._partial.pop(group_id, ()))
      self._counts["dropped_incomplete_group"] += dropped
      self._dead_groups.setdefault(group_id, self._group_size - dropped)
      self._end_in_dead_group(group_id)
      self._changed.notify_all()

  def put(self, trajectory: Trajectory) -> None:
    """Adds the trajectory of a finished episode.

    Raises:
      ValueError: the episode is not running (never started, or already put or failed), or has another group.
      RuntimeError: the queue is closed.
    """
    with self._changed:
      if self._closed:
        raise RuntimeError("TrajectoryQueue.put() called after close().")
      group_id = self._end_running(trajectory.episode_id)
      if group_id != trajectory.group_id:
        raise ValueError(
          f"group_id of episode {trajectory.episode_id} must be {group_id}, as when it was started; received "
          f"{trajectory.group_id}."
        )
      self._counts["finished"] += 1
      if group_id in self._dead_groups:
        self._counts["dropped_incomplete_group"] += 1
        self._end_in_dead_group(group_id)
      else:
        members = self._partial.setdefault(group_id, [])
        members.append(trajectory)
        if len(members) == self._group_size:
          self._ready.append(self._partial.pop(group_id))
      self._changed.notify_all()

  def get_batch(self, version: int, timeout: float | None = None) -> list[Trajectory] | None:
    """Takes a batch for the learner at `version`, in order of arrival. Trajectories that are too stale are dropped.

    Args:
      version: the learner's policy version.
      timeout: seconds to wait for a full batch; None: no limit.

    Returns:
      `batch_size` trajectories, or None if there were not enough within `timeout`. After `close()` the rest, which may
      be shorter, then an empty list.
    """
    groups = self._batch_size // self._group_size

    def enough() -> bool:
      self._drop_stale(version)
      return self._closed or len(self._ready) >= groups

    with self._changed:
      if not self._changed.wait_for(enough, timeout):
        return None
      batch = [x for _ in range(min(groups, len(self._ready))) for x in self._ready.popleft()]
      self._counts["used"] += len(batch)
      self._changed.notify_all()
      return batch

  def close(self) -> None:
    """Closes the queue: wakes waiting readers and drops incomplete groups. May be called twice."""
    with self._changed:
      self._closed = True
      self._counts["dropped_incomplete_group"] += sum(len(x) for x in self._partial.values())
      self._partial.clear()
      self._changed.notify_all()

  def qsize(self) -> int:
    """Returns the number of waiting trajectories, members of incomplete groups included."""
    with self._changed:
      return self._waiting()

  @property
  def counters(self) -> dict[str, int]:
    """Numbers of episodes: started, finished, failed, used, dropped_stale, dropped_incomplete_group."""
    with self._changed:
      return dict(self._counts)

  def running(self) -> list[int]:
    """Returns the ids of the running episodes that may still be used."""
    with self._changed:
      return self._wanted()

  def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
    """Returns a consistent snapshot: counters and ids of running episodes as JSON values, and waiting trajectories.

    Members of incomplete groups are included. The other members of their groups are running, or must be started again.
    """
    with self._changed:
      waiting = [x for group in (*self._ready, *self._partial.values()) for x in group]
      return {**self._counts, "running": self._wanted(), "dead_groups": self._not_begun()}, waiting

  def restore(self, counters: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
    """Restores what `state` returned, in a new queue. Episodes that were running then count as never started.

    Raises:
      ValueError: a counter is unknown or missing, or an episode occurs twice.
    """
    if set(counters) - {"running", "dead_groups"} != set(_COUNTERS):
      raise ValueError(f"counters must be {sorted(_COUNTERS)}; received {sorted(counters)}.")
    ids = [x.episode_id for x in trajectories]
    if len(set(ids)) != len(ids):
      raise ValueError(f"episode ids of trajectories must be unique; received {sorted(ids)}.")
    with self._changed:
      self._counts = {name: int(counters[name]) for name in _COUNTERS}
      self._counts["started"] = self._counts["finished"] + self._counts["failed"]
      self._ready.clear()
      self._partial.clear()
      self._dead_groups = {int(group): int(count) for group, count in counters.get("dead_groups", {}).items()}
      for trajectory in trajectories:
        members = self._partial.setdefault(trajectory.group_id, [])
        members.append(trajectory)
        if len(members) == self._group_size:
          self._ready.append(self._partial.pop(trajectory.group_id))
      self._changed.notify_all()

  def _wanted(self) -> list[int]:
    return sorted(episode for episode, group in self._running.items() if group not in self._dead_groups)

  def _waiting(self) -> int:
    return len(self._ready) * self._group_size + sum(len(x) for x in self._partial.values())

  def _end_running(self, episode_id: int) -> int:
    if episode_id not in self._running:
      raise ValueError(f"episode {episode_id} is not running: it was never started, or has already ended.")
    return self._running.pop(episode_id)

  def _end_in_dead_group(self, group_id: int) -> None:
    """Counts the end of a member of a dead group. The group is remembered until its last member, to drop later ones."""
    self._dead_groups[group_id] -= 1
    if not self._dead_groups[group_id]:
      del self._dead_groups[group_id]

  def _not_begun(self) -> dict[str, int]:
    """Counts members of dead groups that have not started. A resumed run does not start the running ones again."""
    running = collections.Counter(self._running.values())
    left = {group: count - running[group] for group, count in self._dead_groups.items()}
    return {str(group): count for group, count in left.items() if count}

  def _drop_stale(self, version: int) -> None:
    fresh = [g for g in self._ready if version - min(x.oldest_version for x in g) <= self._max_staleness]
    if len(fresh) < len(self._ready):
      self._counts["dropped_stale"] += (len(self._ready) - len(fresh)) * self._group_size
      self._ready = collections.deque(fresh)
      self._changed.notify_all()
