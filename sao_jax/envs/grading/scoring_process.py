"""A pool of processes that evaluate a model's text. They can be killed, so no answer can stall training.

Each process runs `_scoring_worker.py` with one module, whose `start()` returns the function that answers requests.
Requests and replies are JSON values. All processes have the same hash seed, so that their results agree.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from sao_jax.utils.extras import MissingExtraError
from sao_jax.utils.limited_process import LineProcess

_BUSY_WAIT_S = 1.0
"""Time to wait for a busy worker before starting another one. Most requests take milliseconds."""
_RAISED_AS: Mapping[str, type[Exception]] = {"ValueError": ValueError, "MissingExtraError": MissingExtraError}
_SETTINGS: Mapping[str, str] = {
  "PYTHONHASHSEED": "0", "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip


class NoReplyError(RuntimeError):
  """A worker gave no reply: it took too long and was killed, or it crashed."""

  def __init__(self, message: str, *, timed_out: bool):
    super().__init__(message)
    self.timed_out = timed_out


class WorkerError(RuntimeError):
  """An exception in a worker. `kind` is the name of its class. A ValueError is raised as itself."""

  def __init__(self, kind: str, message: str):
    super().__init__(f"{kind}: {message}")
    self.kind = kind
    self.message = message


class Workers(Protocol):
  """Protocol of `WorkerPool`."""

  def call(self, request: Any, *, timeout_s: float) -> Any:
    """Sends a request and returns the reply; see `WorkerPool.call`."""


class WorkerPool:
  """A few processes that answer requests. Thread-safe.

  The first request starts a process. Another one starts when all have been busy for a second. A process that was
  killed starts again with the next request.

  Args:
    module: name of the module that answers requests. Its `start()` returns the function `request -> reply`.
    max_workers: largest number of processes, at least 1.
    memory_bytes: memory that a process may use beyond its size after the start.
    start_timeout_s: seconds for a process to start.
  """

  def __init__(self, module: str, *, max_workers: int = 3, memory_bytes: int = 1 << 30, start_timeout_s: float = 120.0):
    if max_workers < 1:
      raise ValueError(f"max_workers must be at least 1; received {max_workers!r}.")
    self._module = module
    self._max_workers = max_workers
    self._memory_bytes = memory_bytes
    self._start_timeout_s = start_timeout_s
    self._changed = threading.Condition()
    self._num_workers = 0
    self._idle: list[_Worker] = []
    self.timeouts = 0
    """Number of requests that took too long."""

  def call(self, request: Any, *, timeout_s: float) -> Any:
    """Sends a request to a process and returns the reply.

    Args:
      request: a JSON value.
      timeout_s: seconds to wait for the reply before the process is killed. The start of a process does not count.

    Raises:
      NoReplyError: the reply took too long, or the process ended.
      ValueError: the function in the process raised it.
      WorkerError: the function raised another exception.
      MissingExtraError: the function needs packages that are not installed.
      RuntimeError: the process does not start.
    """
    line = json.dumps([timeout_s, request]).encode() + b"\n"
    worker = self._take()
    try:
      reply = worker.exchange(line, timeout_s)
    except NoReplyError as error:
      with self._changed:
        self.timeouts += error.timed_out
      logging.getLogger(__name__).warning("%s", error)
      raise
    finally:
      with self._changed:
        self._idle.append(worker)
        self._changed.notify_all()  # `close` waits for all workers, and `_take` for one.
    return _value(reply)

  def close(self) -> None:
    """Waits for pending requests and ends the processes. A later request starts one again."""
    with self._changed:
      self._changed.wait_for(lambda: len(self._idle) == self._num_workers)
      for worker in self._idle:
        worker.stop()
      self._idle, self._num_workers = [], 0
      self._changed.notify_all()

  def _take(self) -> _Worker:
    with self._changed:
      wait_s = _BUSY_WAIT_S if self._num_workers else 0.0
      if not self._changed.wait_for(lambda: self._idle, wait_s) and self._num_workers == self._max_workers:
        self._changed.wait_for(lambda: self._idle or self._num_workers < self._max_workers)
      if self._idle:
        return self._idle.pop()
      self._num_workers += 1
      return _Worker(self._module, self._memory_bytes, self._start_timeout_s)


def shared_pool(module: str, *, max_workers: int = 3, memory_bytes: int = 1 << 30) -> WorkerPool:
  """Returns the worker pool of `module`, shared by all environments of this process. Its workers end with it.
  """
  return _shared_pool(module, max_workers, memory_bytes, os.getpid())


@functools.cache
def _shared_pool(module: str, max_workers: int, memory_bytes: int, pid: int) -> WorkerPool:
  del pid  # A forked process must not write to the pipes of its parent.
  return WorkerPool(module, max_workers=max_workers, memory_bytes=memory_bytes)


class _Worker:
  """One process, used by one thread at a time. It starts at the first request, and again after it ended."""

  def __init__(self, module: str, memory_bytes: int, start_timeout_s: float):
    self._module = module
    self._memory_bytes = memory_bytes
    self._start_timeout_s = start_timeout_s
    self.process: LineProcess | None = None

  def exchange(self, line: bytes, timeout_s: float) -> bytes:
    if self.process is None or not self.process.is_alive:
      self.stop()
      self.process = self._start()
    return self._ask(self.process, line, timeout_s)

  def stop(self) -> None:
    if self.process is not None:
      self.process.stop()
    self.process = None

  def _start(self) -> LineProcess:
    program = pathlib.Path(__file__).with_name("_scoring_worker.py")
    process = LineProcess(program, self._module, str(self._memory_bytes), environment=_SETTINGS)
    try:
      _value(self._ask(process, b"", self._start_timeout_s))
    except NoReplyError as error:
      raise RuntimeError(f"the process did not start: {error}") from error
    except BaseException:
      process.stop()
      raise
    return process

  def _ask(self, process: LineProcess, line: bytes, timeout_s: float) -> bytes:
    try:
      return process.exchange(line, timeout_s)
    except TimeoutError:
      raise NoReplyError(f"{self._module} gave no reply: it took more than {timeout_s:g} s", timed_out=True) from None
    except EOFError as error:
      raise NoReplyError(f"{self._module} gave no reply: its process ended", timed_out=False) from error


def _value(reply: bytes) -> Any:
  outcome, *content = json.loads(reply)
  if outcome == "reply":
    return content[0]
  kind, message = content
  if kind in _RAISED_AS:
    raise _RAISED_AS[kind](message)
  raise WorkerError(kind, message)
