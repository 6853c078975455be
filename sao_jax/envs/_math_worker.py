"""The grading process of `math_grading`, run as a program: JSON lines in, JSON lines out.

First it says whether it could start (null, or the error), then it answers every `[gold, answer]` by true or false. It
imports nothing of this library, whose own imports would cost more than the rest of the start.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import signal
import sys
from typing import TextIO

_MEMORY_BYTES = 1 << 30

_DELIMITER = re.compile(r"(?<!\\)\$|\\[(\[]|\\boxed\b")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?\s*(?:\\?%)?")
_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3}|[A-Za-z]{2}\s+[A-Za-z]{2}|\b(?:pi|ln)\b|\*\*")
"""What a bare LaTeX expression does not hold, its commands apart: words, and the powers of programs."""
_MAX_CHARS = 1000


def delimited(text: str) -> str:
  """A bare expression between dollar signs, where math-verify looks for LaTeX; all other texts as they are.

  Without them it takes the last number for the whole: `3\\sqrt{13}` would be 3, and `2k + 2` would be 2.

  >>> delimited("3\\\\sqrt{13}"), delimited("(1, 2)"), delimited("It is 12."), delimited("0.5")
  ('$3\\\\sqrt{13}$', '$(1, 2)$', 'It is 12.', '0.5')
  """
  bare = text.strip()
  if not bare or len(bare) > _MAX_CHARS or "\n" in bare or _DELIMITER.search(bare) or _NUMBER.fullmatch(bare):
    return text
  return text if _WORD.search(_COMMAND.sub(" ", bare)) else f"${bare}$"


def equal(gold: str, answer: str) -> bool:
  """Whether both can be read and math-verify finds them equal."""
  import math_verify

  try:
    parsed = [math_verify.parse(text, parsing_timeout=None) for text in map(delimited, (gold, answer))]
    return all(parsed) and bool(math_verify.verify(*parsed, timeout_seconds=None))
  except Exception as error:  # noqa: BLE001 (out of memory, too deep, or a fault of the parser: it cannot be read)
    logging.getLogger(__name__).debug("an answer could not be read: %r", error)
    return False


def _limit_memory() -> None:
  """An answer like 10^(10^10) ends in a MemoryError, not in all of the machine's memory (where /proc tells its use)."""
  with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))


def _own_output() -> TextIO:
  """Standard output, which from here on leads nowhere for everything else that prints."""
  output = os.fdopen(os.dup(1), "w", buffering=1, encoding="ascii")
  os.dup2(2, 1)
  return output


def main(limit_s: float) -> None:
  """Answers until the other end closes; a comparison of more than `limit_s` seconds ends the process."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # An interrupt of the terminal is for the grader, who closes the pipe.
  output = _own_output()
  try:
    import math_verify  # noqa: F401 (before the memory is limited)

    # It warns that its timeouts are off: they are meant to be.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    equal("1", "1")  # What it loads at its first use.
  except ImportError as error:
    output.write(json.dumps(str(error)) + "\n")
    return
  _limit_memory()
  output.write("null\n")
  for line in sys.stdin:
    # The grader kills this process well before that, unless it was itself killed: then nothing else would.
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    reply = equal(*json.loads(line))
    signal.setitimer(signal.ITIMER_REAL, 0)
    output.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
  main(float(sys.argv[1]))
