"""Grading of mathematical answers, usable from any thread.

`answer_kinds` holds the rules, and math-verify's parser reads the expressions. The work is done in a process that can
be killed, so that no expression holds a thread up for longer than the timeout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sao_jax.envs.grading.scoring_process import NoReplyError, WorkerError, WorkerPool
from sao_jax.utils.extras import MissingExtraError

_PLAIN_NUMBER = re.compile(r"\s*-?[0-9]+(?:\.[0-9]+)?\s*", re.ASCII)


class MathGrader:
  """Whether two texts state the same mathematical value. Safe to call from many threads.

  A process starts at the first call (a second or two) and again after a timeout; a few share the work.

  Args:
    timeout_s: seconds for one comparison; past it the answer counts as wrong.
    start_timeout_s: seconds for the process to start.
  """

  def __init__(self, *, timeout_s: float = 5.0, start_timeout_s: float = 60.0):
    if timeout_s <= 0 or start_timeout_s <= 0:
      raise ValueError(f"timeout_s and start_timeout_s must be positive; received {timeout_s!r}, {start_timeout_s!r}.")
    self._timeout_s = timeout_s
    self._workers = WorkerPool("sao_jax.envs.grading._math_worker", start_timeout_s=start_timeout_s)

  @property
  def timeouts(self) -> int:
    """Comparisons that took too long."""
    return self._workers.timeouts

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
    try:
      return bool(self._workers.call([gold, answer], timeout_s=self._timeout_s))
    except NoReplyError:  # Its process died of the expression or of the time it took: logged and counted there.
      return False
    except WorkerError as error:
      if error.kind not in ("ImportError", "ModuleNotFoundError"):
        raise
      raise MissingExtraError(
        f"math-verify with its LaTeX parser is not installed: pip install -e '.[envs]' ({error.message})"
      ) from error

  def unreadable(self, golds: Iterable[str]) -> list[str]:
    """The references that are not even right when they are given as the answer, each named once.

    Plain numbers are not sent to the process. Ten thousand other references took 16 s on a busy machine.
    """
    other = (gold for gold in dict.fromkeys(golds) if not _PLAIN_NUMBER.fullmatch(gold))
    return [gold for gold in other if not self.is_equal(gold, f"\\boxed{{{gold}}}")]

  def close(self) -> None:
    """Ends the processes."""
    self._workers.close()

  def __enter__(self) -> MathGrader:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()
