"""Event loop on a thread: its end."""

from __future__ import annotations

import asyncio
import threading

from sao_jax.rollout.remote.event_loop import LoopThread
from tests.waiting import LONG_S


def test_close_lets_running_tasks_release_what_they_hold():
  held, released = threading.Event(), threading.Event()

  async def hold() -> None:
    try:
      held.set()
      await asyncio.sleep(LONG_S)
    finally:
      await asyncio.sleep(0)  # closing a connection also takes a step of the loop
      released.set()

  loop = LoopThread()
  caller = threading.Thread(target=lambda: loop.call(hold(), stop=held), daemon=True)
  caller.start()
  assert held.wait(LONG_S)
  caller.join(LONG_S)
  loop.close()
  assert released.is_set()


def test_close_does_not_interrupt_the_clean_up_of_a_task():
  cleaning, go_on, released = threading.Event(), asyncio.Event(), threading.Event()

  async def hold() -> None:
    try:
      await asyncio.sleep(LONG_S)
    finally:
      cleaning.set()
      await go_on.wait()
      released.set()

  async def main() -> None:
    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.1, go_on.set)

  loop = LoopThread()
  loop.call(main())
  assert cleaning.wait(LONG_S)
  loop.close()
  assert released.is_set()


def test_close_twice():
  loop = LoopThread()
  loop.close()
  loop.close()
