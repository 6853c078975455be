"""Grading of mathematical answers with math-verify, usable from any thread.

math-verify's own timeouts use signals, which only work in the main thread. They are switched off here, and the work is
done in a process that can be killed: no expression, however nasty, holds a thread up for longer than the timeout.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import resource
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

_MEMORY_BYTES = 1 << 30


def _serve(connection: Connection) -> None:
  """The grading process: `(gold, answer)` in, `bool` out, until the other end closes."""
  import math_verify  # noqa: F401 (before the memory is limited)

  logging.getLogger("math_verify").setLevel(logging.ERROR)  # It warns that its timeouts are off: they are meant to be.
  _limit_memory()
  with contextlib.suppress(EOFError, OSError):  # The grader was closed, or died.
    while True:
      gold, answer = connection.recv()
      connection.send(_equal(gold, answer))


def _equal(gold: str, answer: str) -> bool:
  import math_verify

  try:
    parsed = [math_verify.parse(text, parsing_timeout=None) for text in (gold, answer)]
    return all(parsed) and bool(math_verify.verify(*parsed, timeout_seconds=None))
  except Exception as error:  # noqa: BLE001 (out of memory, too deep, or a fault of the parser: it cannot be read)
    logging.getLogger(__name__).debug("an answer could not be read: %r", error)
    return False


def _limit_memory() -> None:
  """An answer like 10^(10^10) ends in a MemoryError, not in all of the machine's memory (where /proc tells its use)."""
  with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))


class MathGrader:
  """Whether two texts state the same mathematical value. Safe to call from many threads (one comparison at a time).

  The process starts at the first call (a second or two) and again after a timeout.

  Args:
    timeout_s: seconds for one comparison; past it the answer counts as wrong.
    start_timeout_s: seconds for the process to start.
  """

  def __init__(self, *, timeout_s: float = 5.0, start_timeout_s: float = 60.0):
    if timeout_s <= 0 or start_timeout_s <= 0:
      raise ValueError(f"timeout_s and start_timeout_s must be positive; received {timeout_s!r}, {start_timeout_s!r}.")
    self._timeout_s = timeout_s
    self._start_timeout_s = start_timeout_s
    self._lock = threading.Lock()
    self._process: BaseProcess | None = None
    self._connection: Connection | None = None
    self.timeouts = 0
    """Comparisons that took too long."""

  def is_equal(self, gold: str, answer: str) -> bool:
    """Compares a reference answer with a given one; both may be LaTeX in `$...$`, `\\boxed{...}` or plain expressions.

    An answer that cannot be read is wrong. The order matters: the reference comes first.

    Raises:
      RuntimeError: the grading process does not start (is math-verify installed?).
    """
    with self._lock:
      try:
        connection = self._start()
        connection.send((gold, answer))
      except OSError:  # It was killed since the last call.
        self._stop()
        connection = self._start()
        connection.send((gold, answer))
      if connection.poll(self._timeout_s):
        with contextlib.suppress(EOFError, OSError):  # It died of the expression.
          return bool(connection.recv())
      else:
        self.timeouts += 1
      self._stop()
      return False

  def close(self) -> None:
    """Ends the process."""
    with self._lock:
      self._stop()

  def __enter__(self) -> MathGrader:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _start(self) -> Connection:
    if self._connection is None:
      context = multiprocessing.get_context("spawn")  # Forking a process that has threads is not safe.
      self._connection, theirs = context.Pipe()
      self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
      self._process.start()
      theirs.close()
      try:
        self._connection.send(("1", "1"))
        started = self._connection.poll(self._start_timeout_s) and self._connection.recv()
      except (EOFError, OSError):
        started = False
      if not started:
        self._stop()
        raise RuntimeError("the grading process did not start; it needs the package math-verify with its LaTeX parser.")
    return self._connection

  def _stop(self) -> None:
    if self._process is not None:
      self._process.kill()
      self._process.join()
    if self._connection is not None:
      self._connection.close()
    self._process = self._connection = None
