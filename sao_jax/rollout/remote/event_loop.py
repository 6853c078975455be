"""Event loop on a thread, on which the episodes of a `RemoteEngine` run, and a clock of its requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.types import Trajectory

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_POLL_S = 0.02
_CLOSE_S = 10.0


class BusyClock:
  """Clock of the time during which at least one `with` block is active. Not thread-safe."""

  def __init__(self) -> None:
    self._open = 0
    self._since = 0.0
    self._seconds = 0.0

  @property
  def seconds(self) -> float:
    return self._seconds + (time.perf_counter() - self._since if self._open else 0.0)

  def __enter__(self) -> None:
    if not self._open:
      self._since = time.perf_counter()
    self._open += 1

  def __exit__(self, *_: object) -> None:
    self._open -= 1
    if not self._open:
      self._seconds += time.perf_counter() - self._since


class LoopThread:
  """Event loop on its own thread."""

  def __init__(self) -> None:
    self._loop = asyncio.new_event_loop()
    self._tasks: set[asyncio.Task[None]] = set()
    self._thread = threading.Thread(target=self._run, name="sao_jax-remote", daemon=True)
    self._thread.start()

  def _run(self) -> None:
    """Runs the loop until `close` stops it, then ends what still runs, as `asyncio.run` does.

    A task that is dropped instead keeps its connection open until it is garbage.
    """
    self._loop.run_forever()
    if left := asyncio.all_tasks(self._loop):
      for task in left:
        if not task.cancelling():  # A second cancellation would interrupt its clean-up.
          task.cancel()
      self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    self._loop.run_until_complete(self._loop.shutdown_asyncgens())
    self._loop.close()

  def start(
    self,
    coroutine: Coroutine[Any, Any, tuple[Trajectory, bool]],
    request: EpisodeRequest,
    outcomes: queue.SimpleQueue[tuple[EpisodeRequest, tuple[Trajectory, bool] | BaseException]],
  ) -> None:
    """Starts an episode; its result or exception is put into `outcomes`."""

    async def episode() -> None:
      try:
        outcomes.put((request, await coroutine))
      except Exception as error:  # noqa: BLE001 (raised by `_drive`)
        outcomes.put((request, error))

    def begin() -> None:
      task = self._loop.create_task(episode())
      self._tasks.add(task)
      task.add_done_callback(self._tasks.discard)

    self._loop.call_soon_threadsafe(begin)

  def call(
    self, coroutine: Coroutine[Any, Any, _T], *, stop: threading.Event | None = None, timeout: float | None = None
  ) -> _T | None:
    """Runs a coroutine and waits for its result; None if `stop` was set first.

    Raises:
      TimeoutError: it took longer than `timeout` seconds; the coroutine is cancelled.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    while stop is not None and not future.done():
      if stop.wait(_POLL_S):
        future.cancel()
        return None
    try:
      return future.result(timeout)
    except TimeoutError:
      future.cancel()
      raise

  def cancel_all(self) -> None:
    """Cancels all episodes and waits for their clean-up, a few seconds at most."""
    if self._loop.is_closed():
      return

    async def cancel() -> None:
      tasks = list(self._tasks)
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)

    try:
      self.call(cancel(), timeout=_CLOSE_S)
    except TimeoutError:
      _log.error("Episodes did not end within %s s of their cancellation; they are left behind.", _CLOSE_S)

  def close(self) -> None:
    """Cancels what still runs, and ends the thread. A thread that does not end in time is left behind."""
    with contextlib.suppress(RuntimeError):  # closed before
      self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(_CLOSE_S)
