"""Checks of answers that the scorers of reasoning-gym would evaluate as Python.

Some `score_answer` methods of the package pass the text to `eval`, or to SymPy's `parse_expr`, which calls `eval`. An
answer could take over its process, block it for ever (`9**9**9**9`) or set its own reward. Scorers of those tasks get
only texts of the forms below, or parse literals instead. Other scorers accept NaN as right; they get finite numbers
only.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

LITERAL_TASKS = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""Tasks whose scorers call `eval` to read a list."""

_FUNCTIONS = frozenset(
  (
    "sin",
    "cos",
    "tan",
    "sec",
    "csc",
    "cot",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "tanh",
    "asinh",
    "acosh",
    "atanh",
    "log",
    "ln",
    "exp",
    "sqrt",
    "Abs",
    "pi",
  )
)
_FORMULA = re.compile(r"(?>\d+(?:\.\d*)?|[A-Za-z]+|\*\*|[-+*/()\s])*+")
_REFUSED = re.compile(r"\d{10}|\d[A-Za-z]|\b[A-Za-z]\s*\(")
"""Long numbers, numbers like 1e9, and calls of names of one letter."""
_POWER = re.compile(r"(\))?\s*\*\*\s*")
_EXPONENT = re.compile(
  r"(?:\d{1,2}|-?\d{0,2}\*?[a-z]\b|\(\s*-?\d{0,2}\s*\*?\s*(?:[a-z]|\d{1,2}(?:\s*/\s*\d{1,2})?)\s*\))(?![\w.(])"
)
_TERM = r"(?>\d{1,300}|[a-z](?:\*\*\d{1,3})?)(?>\*[a-z](?:\*\*\d{1,3})?)*+"
_EXPANDED = re.compile(rf"-?(?>{_TERM})(?>[-+]{_TERM})*+")
_MAX_EXPANDED_CHARS = 10_000
_MAX_CHARS, _MAX_LETTERS, _MAX_POWERS_OF_SUMS, _MAX_EXPONENT_OF_SUM = 1000, 4, 2, 12


def is_arithmetic(text: str) -> bool:
  """Whether a text holds only numbers, `+ - * /` and parentheses, without powers.

  >>> is_arithmetic("(8 - 4) * 6"), is_arithmetic("9**9"), is_arithmetic("exit()")
  (True, False, False)
  """
  return len(text) <= _MAX_CHARS and bool(re.fullmatch(r"[0-9+\-*/(). ]+", text)) and "**" not in text


def is_formula(text: str) -> bool:
  """Whether a text holds only numbers, a few one-letter variables, elementary functions and small powers.

  >>> is_formula("x**3/3 + sin(2*x) + C"), is_formula("9**9**9"), is_formula("open(x)")
  (True, False, False)
  """
  if len(text) > _MAX_CHARS or not _FORMULA.fullmatch(text) or _REFUSED.search(text):
    return False
  names = set(re.findall(r"[A-Za-z]+", text)) - _FUNCTIONS
  if len(names) > _MAX_LETTERS or any(len(name) > 1 for name in names):
    return False
  powers_of_sums = 0
  for power in _POWER.finditer(text):
    exponent = _EXPONENT.match(text, power.end())
    if exponent is None or re.match(r"\s*\*\*", text[exponent.end() :]):
      return False
    if power[1]:
      powers_of_sums += 1
      if any(int(number) > _MAX_EXPONENT_OF_SUM for number in re.findall(r"\d+", exponent[0])):
        return False
  return powers_of_sums <= _MAX_POWERS_OF_SUMS


def is_polynomial(text: str) -> bool:
  """Whether a text is a formula, or a sum of terms, which may be longer and have long coefficients.

  >>> is_polynomial("(x + 1)*y"), is_polynomial("-12345678901234567890*x**57 + y - 3"), is_polynomial("9**9**9")
  (True, True, False)
  """
  if is_formula(text):
    return True
  return len(text) <= _MAX_EXPANDED_CHARS and bool(_EXPANDED.fullmatch(re.sub(r"\s+", "", text)))


def is_finite(text: str) -> bool:
  """Whether a text has no NaN or infinity. The scorer would take the distance of NaN for the smallest.

  >>> is_finite("3 + 2i"), is_finite("nan"), is_finite("1 + INFj")
  (True, False, False)
  """
  return not re.search("nan|inf", text, re.IGNORECASE)


FORMS: Mapping[str, Callable[[str], bool]] = {
  "simple_integration": is_formula,
  "intermediate_integration": is_formula,
  "polynomial_multiplication": is_polynomial,
  "puzzle24": is_arithmetic,
  "countdown": is_arithmetic,
  "complex_arithmetic": is_finite,
}
"""The allowed form of answers by task, for scorers that call `parse_expr` or accept NaN."""


def may_be_scored(task: str, answer: str) -> bool:
  """Whether the task's scorer may see the answer."""
  form = FORMS.get(task)
  return form is None or form(answer.strip())


def read_literals(task: str, dataset: Any) -> None:
  """Replaces `eval` by `ast.literal_eval` in the module of a task in `LITERAL_TASKS`."""
  if task in LITERAL_TASKS:
    vars(sys.modules[type(dataset).__module__])["eval"] = ast.literal_eval
