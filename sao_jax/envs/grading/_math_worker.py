"""Grading in the process of `math_grading` (see `scoring_process`): a request is `[gold, answer]`, a reply a bool."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from typing import Any

_MAX_CHARS = 2000
"""Number of characters at the end of a text without a box that are searched for an answer."""
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK = re.compile(rf"(?P<box>{_BOX.pattern})|\\.|[{{}}]", re.DOTALL)
_JOIN = re.compile(r"(?:[^A-Za-z0-9.!?\\]|\\[A-Za-z]+|\\[^A-Za-z]|\b(?:and|or)\b)*")
"""Text between boxes or formulas that form one answer, as in `\\boxed{1}$ and $\\boxed{2}`: no words, no full stop."""
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:\s*\\?%)?|[-+]?\.\d+")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_WORD = re.compile(r"[A-Za-z]{2}")
_DIGIT = re.compile(r"[0-9]")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_ANSWER = re.compile(r".*\banswer\s*(?:is|:)+\s*(.+)", re.IGNORECASE | re.DOTALL)
_BEFORE = re.compile(r"(?:[A-Za-z'’,.;:!?()=\s-]*[\s(=:])?[$€£]?")
_AFTER = re.compile(r"(?!\s*[A-Za-z]\b)(?:[\s),.;:!?][A-Za-z'’,.;:!?()\s-]*)?")
"""Plain words around a number."""
_BOUND = re.compile(r"\b(?:than|least|most|over|under|below|above|nearly|almost)\s+[$€£]?\Z", re.IGNORECASE)
_MULTIPLE = re.compile(
  r"\s+(?:and\s+an?\b|(?:hundred|thousand|million|billion|trillion|dozen|factorial|squared|cubed)\b)", re.IGNORECASE
)
"""Words before a number, and after one, that make it another."""
_LAST_LINE = re.compile(r"(?:.*\n)?#{4}\s*([^\n]+)", re.DOTALL)
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_DENIAL = re.compile(r"\b(?:not|never|wrong|no|or|nor)\b|n't\b", re.IGNORECASE)


def last_box(text: str) -> str:
  """Returns the last box, or the last boxes if only commas, "and" and the like separate them.

  A text without boxes is returned unchanged. A box inside a box is part of the outer one. If the last box is not
  closed, or seems to be closed twice on its line, the result is empty.

  >>> last_box("\\\\boxed{71} no, \\\\boxed{70}."), last_box("$\\\\boxed{1}$ and $\\\\boxed{2}$"), last_box("It is 12.")
  ('\\\\boxed{70}', '\\\\boxed{1}, \\\\boxed{2}', 'It is 12.')
  """
  stray = -1  # position of the last closing brace without an opening one
  opened: list[tuple[bool, int, int]] = []  # (is a box, its start, start of its content)
  boxes: list[tuple[int, int, int]] = []  # (its start, start and end of its content)
  for mark in _MARK.finditer(text):
    if mark["box"] or mark[0] == "{":
      opened.append((bool(mark["box"]), mark.start(), mark.end()))
    elif mark[0] == "}" and opened:
      is_box, start, content = opened.pop()
      if is_box:
        while boxes and boxes[-1][0] > start:
          boxes.pop()
        boxes.append((start, content, mark.start()))
    elif mark[0] == "}":
      stray = mark.start()
  broken = max((start for is_box, start, _ in opened if is_box), default=-1)
  if not boxes or broken > boxes[-1][0]:
    return text if broken < 0 else ""
  if stray > boxes[-1][2] and "\n" not in text[boxes[-1][2] : stray]:
    return ""
  first = len(boxes) - 1
  while first and _JOIN.fullmatch(text, boxes[first - 1][2] + 1, boxes[first][0]):
    first -= 1
  contents = dict.fromkeys(_BOX.sub("{", text[content:end]) for _, content, end in boxes[first:])
  return ", ".join("\\boxed{" + content + "}" for content in contents)


def given_answers(text: str) -> list[str]:
  """Returns the candidates for the answer in a text. One of them must be right as a whole.

  A box is the only candidate, and so is a text without words. Otherwise the candidates are the text if it is a single
  line, and the last formula. Without formulas they are the end of "the answer is ...", and the numbers of the last
  sentence with numbers, from the first to the last.

  >>> given_answers("\\\\boxed{71} no, \\\\boxed{70}."), given_answers("It is 12."), given_answers("so 2+2=4")
  (['\\\\boxed{70}'], ['It is 12.', '12'], ['so 2+2=4', '2+2=4'])
  """
  boxed = last_box(text)
  if boxed != text or _BOX.search(text):
    return [boxed] if boxed else []
  text = text.strip()[-_MAX_CHARS:]
  if marked := _LAST_LINE.fullmatch(text) or _BOLD.fullmatch(text):  # As GSM8K's answers end, and in bold type.
    text = marked[1].strip()
  if not _WORD.search(_COMMAND.sub(" ", text)):
    return [text]
  whole = [text] if "\n" not in text else []
  formulas = list(_FORMULA.finditer(text))
  if formulas:
    first = len(formulas) - 1
    while first and _JOIN.fullmatch(text, formulas[first - 1].end(), formulas[first].start()):
      first -= 1
    return [*whole, ", ".join(dict.fromkeys(next(filter(None, x.groups())) for x in formulas[first:]))]
  text = text.replace("**", "")
  if answer := _ANSWER.match(text):
    whole.append(answer[1].strip())
  sentences = [x for x in _SENTENCE.split(text) if _DIGIT.search(x)]
  if sentences and not _DENIAL.search(sentences[-1]):
    numbers = list(_NUMBER.finditer(sentences[-1]))
    start, end = numbers[0].start(), numbers[-1].end()
    changed = _BOUND.search(sentences[-1], 0, start) or _MULTIPLE.match(sentences[-1], end)
    if not changed and _BEFORE.fullmatch(sentences[-1], 0, start) and _AFTER.fullmatch(sentences[-1], end):
      whole.append(sentences[-1][start:end])
  return whole


def equal(gold: str, answer: str) -> bool:
  """Whether an answer is right for a reference; see `answer_kinds`. An answer that cannot be parsed is wrong."""
  try:
    from sao_jax.envs.grading.answer_kinds import same_answer, same_tokens
    from sao_jax.envs.grading.answer_tokens import UnreadableError

    wanted, given = last_box(gold), given_answers(answer)
    for same in (same_tokens, same_answer):  # tokens first: values such as 10^{10^{10}} take long
      for found in given:
        with contextlib.suppress(UnreadableError):  # The next candidate may be right.
          if same(wanted, found):
            return True
  except Exception as error:  # noqa: BLE001 (out of memory, too deep, or a fault of the parser)
    logging.getLogger(__name__).debug("cannot parse an answer: %r", error)
  return False


def start() -> Callable[[Any], bool]:
  """Loads the packages for grading and returns the function that grades `[gold, answer]`."""
  import math_verify  # noqa: F401 (loaded before memory is limited)

  equal("2\\pi", "\\pi\\cdot 2")  # Some modules load at the first use.
  return lambda request: equal(*request)
