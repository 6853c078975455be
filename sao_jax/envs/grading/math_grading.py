"""Thread-safe grading of mathematical answers.

`answer_kinds` defines the rules, and the parser of math-verify reads expressions. Grading runs in a process that can be
killed, so no expression blocks a thread for longer than the timeout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from sao_jax.envs.grading.scoring_process import NoReplyError, WorkerError, WorkerPool
from sao_jax.utils.extras import MissingExtraError

_PLAIN_NUMBER = re.compile(r"\s*-?[0-9]+(?:\.[0-9]+)?\s*", re.ASCII)


class MathGrader:
  """A grader that compares answers with references. Thread-safe.

  A few processes share the work. A process starts at the first call, which takes a second or two, and again after a
  timeout.

  Args:
    timeout_s: seconds for one comparison. After that the answer counts as wrong.
    start_timeout_s: seconds for a process to start.
  """

  def __init__(self, *, timeout_s: float = 5.0, start_timeout_s: float = 60.0):
    if timeout_s <= 0 or start_timeout_s <= 0:
      raise ValueError(f"timeout_s and start_timeout_s must be positive; received {timeout_s!r}, {start_timeout_s!r}.")
    self._timeout_s = timeout_s
    self._workers = WorkerPool("sao_jax.envs.grading._math_worker", start_timeout_s=start_timeout_s)

  @property
  def timeouts(self) -> int:
    """Number of comparisons that took too long."""
    return self._workers.timeouts

  def is_equal(self, gold: str, answer: str) -> bool:
    """Whether an answer is right for a reference. The reference is the first argument.

    The reference decides which kind of answer is right (see `answer_kinds`). The last box of the given answer counts,
    or a list of the last boxes if no words and no full stop separate them. Without a box, the answer is a line of its
    own, the last formula in `$...$`, or the only number of the last sentence. All of it must be right: with anything
    else in it, such as another number (`\\boxed{71 \\to 70}`), it is wrong. An answer that cannot be parsed is wrong.

    Raises:
      MissingExtraError: math-verify is not installed.
      RuntimeError: the process does not start.
    """
    try:
      return bool(self._workers.call([gold, answer], timeout_s=self._timeout_s))
    except NoReplyError:  # The pool logs and counts it.
      return False
    except WorkerError as error:
      if error.kind not in ("ImportError", "ModuleNotFoundError"):
        raise
      raise MissingExtraError(
        f"math-verify with its LaTeX parser is not installed: pip install -e '.[envs]' ({error.message})"
      ) from error

  def unreadable(self, golds: Iterable[str]) -> list[str]:
    """Returns the references that cannot be parsed: they are not even right as their own answer. Each occurs once.

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
