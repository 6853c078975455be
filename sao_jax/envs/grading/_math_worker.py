"""The rules of `math_grading`, in the process that grades (see `scoring_process`): `[gold, answer]` in, a bool out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

_DELIMITER = re.compile(r"(?<!\\)\$|\\[(\[]|\\boxed\b")
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?\s*(?:\\?%)?")
_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}|\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{3}|[A-Za-z]{2}\s+[A-Za-z]{2}|\b(?:pi|ln)\b|\*\*")
"""What a bare LaTeX expression does not hold, its commands apart: words, and the powers of programs."""
_MAX_CHARS = 1000
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK = re.compile(rf"(?P<box>{_BOX.pattern})|\\.|[{{}}]", re.DOTALL)
_JOIN = re.compile(r"(?:[\s$,;]|\\[\[\]()]|\band\b|\bor\b|\\text\s*\{\s*(?:and|or)\s*\})*")
"""Between boxes that together are one answer: `\\boxed{1}$ and $\\boxed{2}`."""
_CANDIDATES = re.compile(
  r"\\(?:equiv|(?:[Ll]ong)?[Rr]ightarrow|to|implies|iff|mid|sim|lor|vee|land|wedge|cup|cap|in)\b|[=&?]|\.\s|\s\|\s"
)
"""What stands between candidates; of some of these math-verify reads one side only."""
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}")
_DIGITS = re.compile(r"-?\d+(?:\.\d+)?")


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


def last_box(text: str) -> str:
  """The last box, or boxes if only commas, "and" and the like stand between them; a text without boxes as it is.

  A box inside a box is a part of it. A last box that does not end leaves nothing that could be read.

  >>> last_box("\\\\boxed{71} no, \\\\boxed{70}."), last_box("$\\\\boxed{1}$ and $\\\\boxed{2}$"), last_box("It is 12.")
  ('\\\\boxed{70}', '\\\\boxed{1}, \\\\boxed{2}', 'It is 12.')
  """
  opened: list[tuple[bool, int, int]] = []  # whether it is a box, where it begins, where its content does
  boxes: list[tuple[int, int, int]] = []  # where it begins, where its content does, where that ends
  for mark in _MARK.finditer(text):
    if mark["box"] or mark[0] == "{":
      opened.append((bool(mark["box"]), mark.start(), mark.end()))
    elif mark[0] == "}" and opened:
      is_box, start, content = opened.pop()
      if is_box:
        while boxes and boxes[-1][0] > start:
          boxes.pop()
        boxes.append((start, content, mark.start()))
  broken = max((start for is_box, start, _ in opened if is_box), default=-1)
  if not boxes or broken > boxes[-1][0]:
    return text if broken < 0 else ""
  first = len(boxes) - 1
  while first and _JOIN.fullmatch(text, boxes[first - 1][2] + 1, boxes[first][0]):
    first -= 1
  return ", ".join("\\boxed{" + _BOX.sub("{", text[content:end]) + "}" for _, content, end in boxes[first:])


def equal(gold: str, answer: str) -> bool:
  """Whether both can be read and math-verify finds them equal; of a number, that no other one stands beside it."""
  import math_verify

  def parse(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)

  def same(found: list[Any]) -> bool:
    return bool(math_verify.verify(wanted, found, timeout_seconds=None))

  try:
    answer = last_box(answer)
    wanted, found = parse(delimited(last_box(gold))), parse(delimited(answer))
    if not wanted or not found or not same(found):
      return False
    if not getattr(wanted[0], "is_number", False):
      return True
    # "71 \\to 70" would be read as 70: every number that stands by itself must be the one that is wanted.
    others = [f"${part}$" for part in _CANDIDATES.split(str(found[-1]))]
    others = others if len(others) > 1 else []
    others += [digits for part in _TEXT.findall(answer) for digits in _DIGITS.findall(part)]
    return all(same(x) for x in map(parse, others) if x and getattr(x[0], "is_number", False))
  except Exception as error:  # noqa: BLE001 (out of memory, too deep, or a fault of the parser: it cannot be read)
    logging.getLogger(__name__).debug("an answer could not be read: %r", error)
    return False


def start() -> Callable[[Any], bool]:
  """Loads what grading needs; the function grades `[gold, answer]`."""
  import math_verify  # noqa: F401 (before the memory is limited)

  # It warns that its timeouts are off: they are meant to be.
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  equal("1", "1")  # What it loads at its first use.
  return lambda request: equal(*request)
