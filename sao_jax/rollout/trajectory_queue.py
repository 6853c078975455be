"""The bounded queue between rollouts and learner; it decides admission, staleness and groups."""

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

  An episode is `start`ed when it is handed to an engine and then either `put` (finished) or `fail`ed, exactly once.
  `admission` says how many may start. What is dropped or failed is given back to admission, so a replacement can start:
  neither `max_staleness=0` nor a failed sibling can starve the learner.

  Groups (`group_size > 1`) are released when their last member arrives. If a member fails, or is too stale, the whole
  group is discarded: members that are here are counted as dropped, members still running are dropped when they arrive.

  Args:
    batch_size: trajectories of one learner step; a multiple of `group_size`.
    group_size: episodes that share a `group_id`; 1 for single rollouts.
    max_staleness: largest allowed learner version at use minus oldest version among a trajectory's action tokens.
    capacity: while so many wait, no more episodes may start; at least `batch_size`. Those that run then are still taken
      in: a long one among them must not stand still because the learner is slow. So no more than this and the running
      ones wait (two for each slot: the engine refills a slot before it hands over what ended in it). Members of
      incomplete groups do not count (their number is bounded by what admission let start).
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
    self._dead_groups: dict[int, int] = {}  # have a failed member -> members that have not ended, or not begun
    self._counts = dict.fromkeys(_COUNTERS, 0)
    self._closed = False

  def admission(self, version: int) -> int:
    """How many more episodes may start while the learner is at `version`.

    started - dropped - failed <= (version + max_staleness + 1) * batch_size (the rule of AReaL, arXiv 2505.24298): an
    episode beyond that could only be used by a learner that is more than `max_staleness` versions ahead. 0 while the
    queue is full.
    """
    with self._changed:
      if self._closed or len(self._ready) * self._group_size >= self._capacity:
        return 0
      outstanding = self._counts["used"] + self._waiting() + len(self._running)
      return max(0, (version + self._max_staleness + 1) * self._batch_size - outstanding)

  def start(self, request: EpisodeRequest) -> None:
    """Notes that an episode was handed out.

    Raises:
      ValueError: the same episode is running already.
    """
    with self._changed:
      if request.episode_id in self._running:
        raise ValueError(f"episode {request.episode_id} is running already.")
      self._running[request.episode_id] = request.group_id
      self._counts["started"] += 1

  def fail(self, request: EpisodeRequest) -> None:
    """Notes that a started episode ended without a trajectory; its group can no longer become complete."""
    with self._changed:
      group_id = self._end_running(request.episode_id)
      self._counts["failed"] += 1
      dropped = len(self._partial.pop(group_id, ()))
      self._counts["dropped_incomplete_group"] += dropped
      self._dead_groups.setdefault(group_id, self._group_size - dropped)
      self._end_in_dead_group(group_id)
      self._changed.notify_all()

  def put(self, trajectory: Trajectory) -> None:
    """Takes a finished trajectory.

    Raises:
      ValueError: its episode is not running: never started, or it was put or failed before.
      RuntimeError: the queue is closed.
    """
    with self._changed:
      if self._closed:
        raise RuntimeError("TrajectoryQueue.put() called after close().")
      group_id = self._end_running(trajectory.episode_id)
      if group_id != trajectory.group_id:
        raise ValueError(f"trajectory {trajectory.episode_id}: group {trajectory.group_id}, started in {group_id}.")
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
    """Takes `batch_size` trajectories for the learner at `version`, oldest first; drops and counts the too stale.

    Returns:
      None if `timeout` seconds passed first. After `close()` what is left, however short, and then an empty list.
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
    """No more episodes will come: wakes who waits, and discards incomplete groups. Can be called twice."""
    with self._changed:
      self._closed = True
      self._counts["dropped_incomplete_group"] += sum(len(x) for x in self._partial.values())
      self._partial.clear()
      self._changed.notify_all()

  def qsize(self) -> int:
    """Trajectories waiting, members of incomplete groups included."""
    with self._changed:
      return self._waiting()

  @property
  def counters(self) -> dict[str, int]:
    """A copy of the counts: started, finished, failed, used, dropped_stale, dropped_incomplete_group."""
    with self._changed:
      return dict(self._counts)

  def running(self) -> list[int]:
    """Numbers of the episodes that were started and have not ended, and may still be used."""
    with self._changed:
      return self._wanted()

  def state(self) -> tuple[dict[str, Any], list[Trajectory]]:
    """Counters with the numbers of the `running` episodes (JSON-able), and the waiting trajectories: of one moment.

    A group that is incomplete is kept: its other members are among the running ones, or must be started anew.
    """
    with self._changed:
      waiting = [x for group in (*self._ready, *self._partial.values()) for x in group]
      return {**self._counts, "running": self._wanted(), "dead_groups": self._not_begun()}, waiting

  def restore(self, counters: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
    """Sets a new queue to what `state` returned. Episodes that were running then count as never started.

    Raises:
      ValueError: unknown or missing counters, or an episode twice.
    """
    if set(counters) - {"running", "dead_groups"} != set(_COUNTERS):
      raise ValueError(f"counters must be {sorted(_COUNTERS)}; received {sorted(counters)}.")
    ids = [x.episode_id for x in trajectories]
    if len(set(ids)) != len(ids):
      raise ValueError(f"each episode may wait once; received {sorted(ids)}.")
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
      raise ValueError(f"episode {episode_id} is not running: it was never started, or has ended before.")
    return self._running.pop(episode_id)

  def _end_in_dead_group(self, group_id: int) -> None:
    """Forgets a dead group with its last member: one that begins later must not wait for those that are gone."""
    self._dead_groups[group_id] -= 1
    if not self._dead_groups[group_id]:
      del self._dead_groups[group_id]

  def _not_begun(self) -> dict[str, int]:
    """Members of dead groups that have not begun: those that run are not started again by a resumed run."""
    running = collections.Counter(self._running.values())
    left = {group: count - running[group] for group, count in self._dead_groups.items()}
    return {str(group): count for group, count in left.items() if count}

  def _drop_stale(self, version: int) -> None:
    fresh = [g for g in self._ready if version - min(x.oldest_version for x in g) <= self._max_staleness]
    if len(fresh) < len(self._ready):
      self._counts["dropped_stale"] += (len(self._ready) - len(fresh)) * self._group_size
      self._ready = collections.deque(fresh)
      self._changed.notify_all()
