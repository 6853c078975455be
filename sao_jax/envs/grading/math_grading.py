"""Grading of mathematical answers with math-verify, usable from any thread.

math-verify's own timeouts use signals, which only work in the main thread. They are switched off here, and the work is
done in a process that can be killed: no expression, however nasty, holds a thread up for longer than the timeout.
"""

from __future__ import annotations

from typing import Any

from sao_jax.envs.grading.scoring_process import NoReplyError, WorkerError, WorkerPool
from sao_jax.utils.extras import MissingExtraError


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

    Both may be a bare LaTeX expression, or text that holds one in `$...$` or `\\boxed{...}`; of a text without either,
    the last number counts. Of several boxes the last counts; those that only commas or "and" separate are one list. An
    answer that cannot be read is wrong, as is one with another number beside the right one (`\\boxed{71 \\to 70}`). The
    order matters: the reference comes first.

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

  def close(self) -> None:
    """Ends the processes."""
    self._workers.close()

  def __enter__(self) -> MathGrader:
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()
