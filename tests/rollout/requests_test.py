"""The order of episodes; a resumed run neither skips nor repeats one."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.rollout.requests import RequestStream


def take(stream: RequestStream, n: int) -> list[tuple[int, int, int]]:
  return [(r.episode_id, r.group_id, r.task_index) for r in (stream.next() for _ in range(n))]


def test_every_pass_holds_every_task_once_in_another_order() -> None:
  rows = take(RequestStream(num_tasks=10, group_size=1, seed=3), 30)
  assert [row[0] for row in rows] == list(range(30)) == [row[1] for row in rows]
  passes = [[row[2] for row in rows[i : i + 10]] for i in (0, 10, 20)]
  assert all(sorted(tasks) == list(range(10)) for tasks in passes)
  assert passes[0] != passes[1] != passes[2]
  assert rows == take(RequestStream(num_tasks=10, group_size=1, seed=3), 30)
  assert rows != take(RequestStream(num_tasks=10, group_size=1, seed=4), 30)


def test_a_group_shares_a_task() -> None:
  rows = take(RequestStream(num_tasks=5, group_size=4, seed=0), 40)
  tasks = collections.defaultdict(set)
  for episode, group, task in rows:
    assert group == episode // 4
    tasks[group].add(task)
  assert all(len(x) == 1 for x in tasks.values()) and len(tasks) == 10


@given(st.integers(0, 30), st.data())
def test_a_restored_stream_starts_with_the_running_episodes(before: int, data: st.DataObject) -> None:
  stream = RequestStream(num_tasks=7, group_size=1, seed=1)
  first = take(stream, before)
  running = data.draw(st.sets(st.sampled_from(range(before)))) if before else set()
  restored = RequestStream(num_tasks=7, group_size=1, seed=1)
  restored.restore(stream.state(running))
  again = take(restored, len(running))
  assert again == [first[i] for i in sorted(running)]
  assert take(restored, 5) == take(stream, 5)


def test_episodes_that_wait_for_their_rerun_survive_a_second_restore() -> None:
  stream = RequestStream(num_tasks=7, group_size=1, seed=1)
  take(stream, 6)
  second = RequestStream(num_tasks=7, group_size=1, seed=1)
  second.restore(stream.state([2, 4]))
  assert second.next().episode_id == 2
  third = RequestStream(num_tasks=7, group_size=1, seed=1)
  third.restore(second.state([2]))
  assert [third.next().episode_id for _ in range(3)] == [2, 4, 6]


@pytest.mark.parametrize(("num_tasks", "group_size"), [(0, 1), (1, 0)])
def test_bad_settings(num_tasks: int, group_size: int) -> None:
  with pytest.raises(ValueError, match=f"received {num_tasks}, {group_size}"):
    RequestStream(num_tasks=num_tasks, group_size=group_size, seed=0)
