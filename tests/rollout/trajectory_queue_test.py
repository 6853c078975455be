"""Admission, staleness, groups and bounds of the trajectory queue."""

from __future__ import annotations

import threading
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from sao_jax.rollout import EpisodeRequest, TrajectoryQueue
from sao_jax.types import Trajectory
from tests.waiting import LONG_S


def request(episode: int, group_size: int = 1) -> EpisodeRequest:
  return EpisodeRequest(task_index=0, episode_id=episode, group_id=episode // group_size)


def trajectory(episode: int, version: int = 0, group_size: int = 1, versions=None) -> Trajectory:
  versions = [-1, version, version] if versions is None else [-1, *versions]
  mask = np.array(versions) >= 0
  return Trajectory(
    tokens=np.ones(len(versions), np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, -1.0, np.nan).astype(np.float32),
    versions=np.array(versions, np.int32),
    rewards=np.zeros(len(versions), np.float32),
    ended="terminal",
    task_index=0,
    episode_id=episode,
    group_id=episode // group_size,
    num_turns=1,
    success=False,
  )


def make(batch_size=4, group_size=1, max_staleness=1, capacity=64) -> TrajectoryQueue:
  return TrajectoryQueue(batch_size=batch_size, group_size=group_size, max_staleness=max_staleness, capacity=capacity)


def put(queue: TrajectoryQueue, *trajectories: Trajectory, group_size: int = 1) -> None:
  for x in trajectories:
    queue.start(request(x.episode_id, group_size))
    queue.put(x)


def test_batches_are_oldest_first_and_complete():
  queue = make()
  put(queue, *(trajectory(i) for i in (5, 3, 9)))
  assert queue.get_batch(0, timeout=0.01) is None
  put(queue, trajectory(1), trajectory(2))
  assert [x.episode_id for x in queue.get_batch(0, timeout=0)] == [5, 3, 9, 1]
  assert queue.qsize() == 1


def test_staleness_counts_time_in_the_queue_and_the_oldest_token():
  # PITFALL 32: both waited while the learner went from version 2 to 4; one of them started at version 1.
  queue = make(batch_size=1, max_staleness=2)
  put(queue, trajectory(0, versions=[1, 2, 2]), trajectory(1, versions=[2, 3]))
  (kept,) = queue.get_batch(4, timeout=0)
  assert kept.episode_id == 1
  assert queue.counters["dropped_stale"] == 1
  # Dropped episodes free their place: of (4 + 2 + 1) admitted, one was used.
  assert queue.admission(4) == 6


def test_admission_bounds_what_can_become_stale():
  queue = make(batch_size=4, max_staleness=1)
  assert queue.admission(0) == 8
  for i in range(8):
    queue.start(request(i))
  assert queue.admission(0) == 0
  assert queue.admission(1) == 4
  queue.fail(request(0))
  assert queue.admission(0) == 1
  with pytest.raises(ValueError, match="not running"):
    queue.fail(request(0))
  with pytest.raises(ValueError, match="running already"):
    queue.start(request(1))


def test_a_trajectory_enters_once():
  queue = make()
  with pytest.raises(ValueError, match="not running"):
    queue.put(trajectory(0))
  put(queue, trajectory(0))
  with pytest.raises(ValueError, match="not running"):
    queue.put(trajectory(0))


def test_max_staleness_zero_alternates_without_deadlock():
  queue = make(batch_size=3, max_staleness=0)
  stop, version, episode = threading.Event(), [0], [0]

  def produce():
    while not stop.is_set():
      if queue.admission(version[0]) == 0:
        time.sleep(0.001)
        continue
      seen = version[0]
      queue.start(request(episode[0]))
      if episode[0] % 5 == 4:
        queue.fail(request(episode[0]))
      else:
        queue.put(trajectory(episode[0], version=seen))
      episode[0] += 1

  thread = threading.Thread(target=produce)
  thread.start()
  try:
    for step in range(20):
      batch = queue.get_batch(step, timeout=LONG_S)
      assert len(batch) == 3
      assert all(x.oldest_version == step for x in batch)
      version[0] = step + 1
  finally:
    stop.set()
    thread.join()
  assert queue.counters["dropped_stale"] == 0


def test_groups_wait_for_their_slowest_member():
  queue = make(batch_size=4, group_size=2)
  put(queue, *(trajectory(i, group_size=2) for i in (0, 2, 4)), group_size=2)
  assert queue.get_batch(0, timeout=0) is None
  put(queue, trajectory(5, group_size=2), trajectory(1, group_size=2), group_size=2)
  assert [x.episode_id for x in queue.get_batch(0, timeout=0)] == [4, 5, 0, 1]
  assert queue.qsize() == 1


def test_a_group_with_a_failed_member_is_dropped_and_refunded():
  queue = make(batch_size=4, group_size=4, max_staleness=0)
  for i in range(4):
    queue.start(request(i, 4))
  assert queue.admission(0) == 0
  queue.put(trajectory(0, group_size=4))
  queue.fail(request(1, 4))
  assert queue.counters["dropped_incomplete_group"] == 1
  assert queue.admission(0) == 2  # two members still run,
  assert queue.running() == []  # for nothing
  queue.put(trajectory(2, group_size=4))
  queue.put(trajectory(3, group_size=4))
  assert queue.counters["dropped_incomplete_group"] == 3
  assert queue.admission(0) == 4
  put(queue, *(trajectory(i, group_size=4) for i in range(4, 8)), group_size=4)
  assert len(queue.get_batch(0, timeout=0)) == 4


@pytest.mark.parametrize("resumed", [False, True])
def test_members_that_begin_after_another_one_failed_do_not_wait_for_it(resumed):
  queue = TrajectoryQueue(batch_size=3, group_size=3, max_staleness=0, capacity=3)
  queue.start(request(0, 3))
  queue.fail(request(0, 3))  # nobody of its group has begun yet
  queue.start(request(1, 3))
  if resumed:  # episode 1 is not started again
    state, waiting = queue.state()
    assert state["running"] == [] and state["dead_groups"] == {"0": 1}
    queue = TrajectoryQueue(batch_size=3, group_size=3, max_staleness=0, capacity=3)
    queue.restore(state, waiting)
  else:
    queue.put(trajectory(1, group_size=3))
  queue.start(request(2, 3))
  queue.put(trajectory(2, group_size=3))
  assert queue.qsize() == 0 and queue.admission(0) == 3  # otherwise the learner would starve
  assert queue.state()[0]["dead_groups"] == {} and queue._dead_groups == {}
  for episode in (3, 4, 5):
    queue.start(request(episode, 3))
    queue.put(trajectory(episode, group_size=3))
  assert len(queue.get_batch(0, timeout=0)) == 3


def test_a_full_queue_admits_nothing_and_accepts_running_episodes():
  queue = make(batch_size=2, capacity=2, max_staleness=5)
  put(queue, trajectory(0))
  queue.start(request(1))
  queue.start(request(2))
  assert queue.admission(0) == 12 - 3
  queue.put(trajectory(1))
  assert queue.admission(0) == 0
  queue.put(trajectory(2))
  assert queue.admission(0) == 0 and queue.qsize() == 3
  assert [x.episode_id for x in queue.get_batch(0, timeout=0)] == [0, 1]
  assert queue.admission(1) == 14 - 3


def test_close_releases_the_short_rest():
  queue = make(batch_size=4, group_size=2)
  put(queue, *(trajectory(i, group_size=2) for i in (0, 1, 2)), group_size=2)
  waiting = []
  thread = threading.Thread(target=lambda: waiting.append(queue.get_batch(0)))
  thread.start()
  queue.close()
  queue.close()
  thread.join(LONG_S)
  assert [x.episode_id for x in waiting[0]] == [0, 1]
  assert queue.get_batch(0) == []
  assert queue.counters["dropped_incomplete_group"] == 1
  assert queue.admission(0) == 0
  with pytest.raises(RuntimeError, match="after close"):
    queue.put(trajectory(3, group_size=2))


def test_state_round_trip():
  queue = make(batch_size=2, group_size=2, max_staleness=1)
  put(queue, *(trajectory(i, group_size=2) for i in range(5)), group_size=2)
  queue.start(request(7, 2))
  queue.get_batch(0, timeout=0)
  counters, waiting = queue.state()
  assert counters["running"] == [7]
  other = make(batch_size=2, group_size=2, max_staleness=1)
  other.restore(counters, waiting)
  # The running episode counts as never started.
  assert other.admission(3) == queue.admission(3) + 1
  assert [x.episode_id for x in other.get_batch(0, timeout=0)] == [2, 3]
  put(other, trajectory(5, group_size=2), group_size=2)
  assert [x.episode_id for x in other.get_batch(0, timeout=0)] == [4, 5]
  with pytest.raises(ValueError, match="counters must be"):
    other.restore({"started": 1}, [])


@pytest.mark.parametrize(
  "arguments", [{"batch_size": 3, "group_size": 2}, {"max_staleness": -1}, {"capacity": 3}, {"batch_size": 0}]
)
def test_bad_settings(arguments):
  with pytest.raises(ValueError, match="received"):
    make(**arguments)


@hypothesis.given(
  events=st.lists(
    st.tuples(st.sampled_from(["start", "put", "fail", "get", "learn"]), st.integers(0, 50)), max_size=80
  ),
  group_size=st.sampled_from([1, 2]),
  max_staleness=st.integers(0, 2),
)
def test_counters_balance_for_any_sequence_of_events(events, group_size, max_staleness):
  queue = make(batch_size=4, group_size=group_size, max_staleness=max_staleness)
  version, next_episode, running, used = 0, 0, {}, []
  for kind, pick in events:
    if kind == "start" and queue.admission(version) > 0:
      queue.start(request(next_episode, group_size))
      running[next_episode] = version
      next_episode += 1
    elif kind in ("put", "fail") and running:
      episode = sorted(running)[pick % len(running)]
      began = running.pop(episode)
      if kind == "put":
        queue.put(trajectory(episode, version=began, group_size=group_size))
      else:
        queue.fail(request(episode, group_size))
    elif kind == "learn":
      version += 1
    elif kind == "get":
      batch = queue.get_batch(version, timeout=0)
      if batch is not None:
        assert len(batch) == 4
        assert all(0 <= version - x.oldest_version <= max_staleness for x in batch)
        used += [x.episode_id for x in batch]
    counts = queue.counters
    assert counts["started"] == counts["finished"] + counts["failed"] + len(running)
    dropped = counts["dropped_stale"] + counts["dropped_incomplete_group"]
    assert counts["finished"] == counts["used"] + dropped + queue.qsize()
    outstanding = counts["started"] - counts["failed"] - dropped
    assert outstanding <= (version + max_staleness + 1) * 4
  assert len(used) == len(set(used)) == queue.counters["used"]
