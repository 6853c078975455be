"""A pool of threads for environment calls. A call that hangs can be abandoned together with its thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from sao_jax.rollout.user_errors import is_interrupt


class Task:
  """One call on a worker thread. `result` or `error` is set once it has ended.

  Args:
    call: the call, without arguments.
    on_abandoned: called with the result if the task was abandoned before it ended.
  """

  def __init__(self, call: Callable[[], Any], on_abandoned: Callable[[Any], None]):
    self.result: Any = None
    self.error: BaseException | None = None
    self.submitted_at = time.monotonic()
    self.started_at: float | None = None
    self.finished_at: float | None = None
    self._call = call
    self._on_abandoned = on_abandoned
    self._lock = threading.Lock()
    self._done = False
    self._abandoned = False

  def run(self) -> bool:
    """Runs the call. Returns False if the task was abandoned."""
    self.started_at = time.monotonic()
    if not self._abandoned:
      try:
        self.result = self._call()
      except BaseException as error:
        if is_interrupt(error):
          raise
        self.error = error  # raised by a user's code: it fails its own episode
    self.finished_at = time.monotonic()
    with self._lock:
      self._done = True
      if not self._abandoned:
        return True
    self._on_abandoned(self.result)
    return False

  def abandon(self) -> bool:
    """Marks the call as abandoned: its thread calls `on_abandoned(result)` when it returns. False if it has ended."""
    with self._lock:
      self._abandoned = not self._done
      return self._abandoned


class Workers:
  """A pool of daemon threads.

  `concurrent.futures` does not fit: it joins its threads at exit, so one hung environment would keep the process alive,
  and a hung thread would occupy the pool for ever.

  Args:
    num_threads: number of threads; 0 runs each task inside `submit`.
  """

  def __init__(self, num_threads: int):
    self._num_threads = num_threads
    self._todo: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    self._finished: queue.SimpleQueue[Task] = queue.SimpleQueue()
    self._live: set[threading.Thread] = set()
    self._busy: dict[Task, threading.Thread] = {}
    self._closed = False

  def submit(self, task: Task) -> None:
    """Queues a task, or runs it at once if there are no threads."""
    if self._num_threads == 0:
      if task.run():
        self._finished.put(task)
      return
    self._todo.put(task)
    if len(self._live) < self._num_threads:
      self._start_thread()

  def poll(self, timeout: float = 0.0) -> list[Task]:
    """Returns the tasks that ended since the last poll. Waits up to `timeout` seconds for the first of them."""
    done: list[Task] = []
    try:
      done.append(self._finished.get(timeout=timeout) if timeout > 0 else self._finished.get_nowait())
      while True:
        done.append(self._finished.get_nowait())
    except queue.Empty:
      return done

  def abandon(self, task: Task) -> bool:
    """Abandons a task and the thread that is stuck in it; a new thread replaces it. False if the task has ended."""
    if not task.abandon():
      return False
    if (thread := self._busy.pop(task, None)) is not None:
      self._live.discard(thread)
    # Queued tasks need a thread now: there may be no further `submit` to start one.
    if not self._closed and not self._todo.empty() and len(self._live) < self._num_threads:
      self._start_thread()
    return True

  def close(self) -> None:
    """Ends the threads once they have run the queued tasks. Does not wait for them."""
    self._closed = True
    for _ in self._live:
      self._todo.put(None)
    self._live.clear()

  def _start_thread(self) -> None:
    thread = threading.Thread(target=self._loop, name="sao_jax-env", daemon=True)
    self._live.add(thread)
    thread.start()

  def _loop(self) -> None:
    thread = threading.current_thread()
    while True:
      task = self._todo.get()
      if task is None:
        return
      self._busy[task] = thread
      if task.run():
        self._finished.put(task)
      if self._busy.pop(task, None) is None:
        return  # It was abandoned, and replaced, while it hung.
