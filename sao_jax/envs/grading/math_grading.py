"""Grading of mathematical answers with math-verify, usable from any thread.

math-verify's own timeouts use signals, which only work in the main thread. They are switched off here, and the work is
done in a process that can be killed: no expression, however nasty, holds a thread up for longer than the timeout.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from sao_jax.utils.extras import MissingExtraError


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
    self._process: subprocess.Popen[str] | None = None
    self.timeouts = 0
    """Comparisons that took too long."""

  def is_equal(self, gold: str, answer: str) -> bool:
    """Compares a reference answer with a given one.

    Both may be a bare LaTeX expression, or text that holds one in `$...$` or `\\boxed{...}`; of a text without either,
    the last number counts. Of several boxes the last counts; those that only commas or "and" separate are one list. An
    answer that cannot be read is wrong, as is one with another number beside the right one (`\\boxed{71 \\to 70}`). The
    order matters: the reference comes first.

    Raises:
      RuntimeError: the grading process does not start (is math-verify installed?).
    """
    line = json.dumps([gold, answer]) + "\n"
    with self._lock:
      if self._process is not None and self._process.poll() is not None:  # It was killed since the last call.
        self._stop()
      process = self._process or self._start()
      reply = ""
      try:
        with _killed_after(process, self._timeout_s) as expired:
          reply = _exchange(process, line)
        self.timeouts += expired.is_set() and not reply
      finally:
        if not reply:  # It died of the expression or of the time it took; or an interrupt left a reply under way.
          self._stop()
      return reply == "true\n"

  def close(self) -> None:
    """Ends the process."""
    with self._lock:
      self._stop()

  def __enter__(self) -> MathGrader:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def _start(self) -> subprocess.Popen[str]:
    # A program of its own, not multiprocessing: that imports the caller's main module again, which a script without a
    # guard and a notebook do not survive. -P: the modules that lie next to the program are not for it.
    program = pathlib.Path(__file__).with_name("_math_worker.py")
    self._process = process = subprocess.Popen(
      [sys.executable, "-P", str(program), str(2 * self._timeout_s + 10)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="ascii",
    )  # fmt: skip
    said = ""
    try:
      with _killed_after(process, self._start_timeout_s) as expired:
        said = _exchange(process)
    finally:
      if said != "null\n":
        self._stop()
    if said == "null\n":
      return process
    reason = f"it took more than {self._start_timeout_s:g} s" if expired.is_set() else "it ended"
    if said:
      raise MissingExtraError(
        f"math-verify with its LaTeX parser is not installed: pip install -e '.[envs]' ({json.loads(said)})"
      )
    raise RuntimeError(f"the grading process did not start: {reason}.")

  def _stop(self) -> None:
    if self._process is not None:
      self._process.kill()
      self._process.wait()
      for pipe in (self._process.stdin, self._process.stdout):
        if pipe is not None:
          with contextlib.suppress(BrokenPipeError):  # What it was never able to read.
            pipe.close()
    self._process = None


def _exchange(process: subprocess.Popen[str], line: str = "") -> str:
  """Says a line, if any, and returns the process's next one; empty when the process has ended."""
  assert process.stdin is not None and process.stdout is not None
  try:
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()
  except BrokenPipeError:
    return ""


@contextlib.contextmanager
def _killed_after(process: subprocess.Popen[str], seconds: float) -> Iterator[threading.Event]:
  """Kills the process, which ends every wait for it, when the block takes longer; the event tells whether it did."""
  expired = threading.Event()

  def expire() -> None:
    expired.set()
    process.kill()

  timer = threading.Timer(seconds, expire)
  timer.daemon = True
  timer.start()
  try:
    yield expired
  finally:
    timer.cancel()
