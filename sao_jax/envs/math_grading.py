"""Grading of mathematical answers, usable from any thread.

`answer_kinds` holds the rules; expressions are read by math-verify's parser. The work is done in a process that can be
killed: no expression, however nasty, holds a thread up for longer than the timeout.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from sao_jax.extras import MissingExtraError

_PLAIN_NUMBER = re.compile(r"\s*-?[0-9]+(?:\.[0-9]+)?\s*", re.ASCII)


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

    The reference decides what kind of answer is right (see `answer_kinds`). The last box of the given answer counts, or
    the last boxes if no words and no full stop stand between them: they are a list. Without a box, an answer is a line
    of its own, the last formula in `$...$`, or the only number of the last sentence. It must be read as a whole: with
    anything beside it, such as another number (`\\boxed{71 \\to 70}`), it is wrong, and so is one that cannot be read.
    The order matters: the reference comes first.

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

  def unreadable(self, golds: Iterable[str]) -> list[str]:
    """The references that are not even right when they are given as the answer, each named once.

    Plain numbers are not sent to the process. Ten thousand other references took 16 s on a busy machine.
    """
    other = (gold for gold in dict.fromkeys(golds) if not _PLAIN_NUMBER.fullmatch(gold))
    return [gold for gold in other if not self.is_equal(gold, f"\\boxed{{{gold}}}")]

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
