"""The pool of threads: abandoned tasks, and its end."""

from __future__ import annotations

import threading

from sao_jax.rollout.workers import Task, Workers
from tests.waiting import LONG_S, until


def test_queued_tasks_run_though_the_pool_is_closed():
  workers, release, ran = Workers(1), threading.Event(), threading.Event()
  workers.submit(Task(lambda: release.wait(LONG_S), lambda _: None))
  workers.submit(Task(ran.set, lambda _: None))
  workers.close()
  release.set()
  assert ran.wait(LONG_S)


def test_a_thread_whose_task_is_abandoned_is_replaced_and_ends():
  workers, release, late = Workers(1), threading.Event(), []
  threads: list[threading.Thread] = []

  def hang() -> str:
    threads.append(threading.current_thread())
    release.wait(LONG_S)
    return "late"

  stuck, queued = Task(hang, late.append), Task(lambda: threads.append(threading.current_thread()), lambda _: None)
  workers.submit(stuck)
  until(lambda: threads)
  workers.submit(queued)
  assert workers.abandon(stuck)
  until(lambda: queued.finished_at is not None)
  assert workers.poll(LONG_S) == [queued] and threads[0] is not threads[1]
  release.set()
  threads[0].join(LONG_S)
  assert late == ["late"] and not threads[0].is_alive() and threads[1].is_alive()
  workers.close()
  threads[1].join(LONG_S)
  assert not threads[1].is_alive()


def test_a_queued_task_that_is_abandoned_is_not_run_and_keeps_its_thread():
  workers, release, ran = Workers(1), threading.Event(), threading.Event()
  workers.submit(Task(lambda: release.wait(LONG_S), lambda _: None))
  skipped = Task(ran.set, lambda _: None)
  workers.submit(skipped)
  assert workers.abandon(skipped)
  release.set()
  last = Task(lambda: 5, lambda _: None)
  workers.submit(last)
  until(lambda: last.finished_at is not None)
  assert last.result == 5 and not ran.is_set() and len(workers._live) == 1
  workers.close()
