"""JSONL and CSV files of problems with short answers, the usual formats of published data sets."""

from __future__ import annotations

import csv
import io
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args

from absl import logging

from sao_jax.envs.grading.math_grading import MathGrader

T = TypeVar("T")
OnUnreadable: TypeAlias = Literal["error", "drop"]
_MAX_NAMED = 20


HELD_OUT = 10
"""Without a file of held-out problems, one of this many is held out."""


def rows(path: str) -> Iterator[tuple[int, Any]]:
  """Yields `(line number, row)` of a file in UTF-8 with or without a byte order mark. Empty lines are left out.

  Args:
    path: a CSV file with a header (`.csv`; a row is a dictionary of texts), or else JSONL.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: a line is not JSON, or a row of a CSV file has not as many fields as the header.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    what = f"there is no {path!r}" if path else "train is not given"
    raise FileNotFoundError(f"env.options train, held_out and demonstrations must name JSONL or CSV files; {what}.")
  text = file.read_text(encoding="utf-8-sig")
  if file.suffix == ".csv":
    reader = csv.DictReader(io.StringIO(text, newline=""))
    for row in reader:
      if None in row or None in row.values():
        raise ValueError(f"{path}, line {reader.line_num}: a row must have the fields {reader.fieldnames}.")
      yield reader.line_num, row
    return
  # str.splitlines would also split at other line separators, which a JSON string may hold.
  for number, line in enumerate(text.split("\n"), 1):
    if line.strip():
      try:
        yield number, json.loads(line)
      except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} must be a JSON object; received {line[:80]!r}.") from error


def split(path: str, problems: Sequence[T]) -> tuple[list[T], list[T]]:
  """Returns the training problems and the held-out ones, every tenth.

  Raises:
    ValueError: there are fewer than two problems.
  """
  if len(problems) < 2:
    raise ValueError(f"{path} must hold 2 problems or more if held_out is None; received {len(problems)}.")
  step = min(HELD_OUT, len(problems))
  held_out = [problem for i, problem in enumerate(problems, 1) if i % step == 0]
  return [problem for i, problem in enumerate(problems, 1) if i % step], held_out


def read(path: str, question_field: str, answer_field: str) -> list[tuple[str, str]]:
  """Reads problems and their answers in the order of the file. Problems that occur twice are kept, with a warning.

  Args:
    path: the file.
    question_field: name of the field with the problem.
    answer_field: name of the field with the answer, text or a number.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: a line lacks the fields, a problem or answer is empty, an answer is not finite, or there is no problem.
  """
  problems: list[tuple[str, str]] = []
  first: dict[str, int] = {}
  again: list[tuple[int, int]] = []
  for number, row in rows(path):
    try:
      question, answer = row[question_field], row[answer_field]
    except (TypeError, KeyError) as error:
      expected = f"an object with {question_field!r} and {answer_field!r}"
      raise ValueError(f"{path}, line {number} must be {expected}; received {str(row)[:80]}.") from error
    if not _is_problem(question, answer):
      raise ValueError(
        f"{path}, line {number}: {question_field!r} must be text and {answer_field!r} text or a finite number, neither "
        f"of them empty; received {question!r} and {answer!r}."
      )
    if question in first:
      again.append((first[question], number))
    first.setdefault(question, number)
    problems.append((question, str(answer)))
  if not problems:
    raise ValueError(f"{path} holds no problem.")
  if again:
    message = "%s: %d of %d problems are duplicates (line %d repeats line %d, for example). Each line counts."
    logging.warning(message, path, len(again), len(problems), again[0][1], again[0][0])
  return problems


def read_rows(path: str, question_field: str) -> list[dict[str, Any]]:
  """Reads the lines of a file as they are, for reward functions of one's own.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: a line is no JSON object, or has no text in `question_field`, or there is no line.
  """
  found = []
  for number, row in rows(path):
    try:
      question = row[question_field]
    except (TypeError, KeyError) as error:
      expected = f"an object with {question_field!r}"
      raise ValueError(f"{path}, line {number} must be {expected}; received {str(row)[:80]}.") from error
    if not isinstance(row, dict) or not isinstance(question, str) or not question.strip():
      raise ValueError(f"{path}, line {number}: {question_field!r} must be text; received {question!r:.200}.")
    found.append(row)
  if not found:
    raise ValueError(f"{path} holds no problem.")
  return found


def gradable(
  path: str, problems: list[tuple[str, str]], grader: MathGrader, on_unreadable: OnUnreadable
) -> list[tuple[str, str]]:
  """Returns the problems whose answers the grader finds equal to themselves. No answer to the others could be right.

  Args:
    path: the file, for messages.
    problems: problems and their answers.
    grader: the grader of the task.
    on_unreadable: "error" to reject a file with other problems, "drop" to leave these out with a warning.

  Raises:
    ValueError: `on_unreadable` has another value, an answer is unreadable with "error", or no answer is readable.
  """
  if on_unreadable not in get_args(OnUnreadable):
    raise ValueError(f"on_unreadable must be one of {', '.join(get_args(OnUnreadable))}; received {on_unreadable!r}.")
  unreadable = frozenset(grader.unreadable(answer for _, answer in problems))
  left = [(question, answer) for question, answer in problems if answer not in unreadable]
  num_bad = len(problems) - len(left)
  if not num_bad:
    return problems
  named = ", ".join(repr(answer[:60]) for answer in sorted(unreadable)[:_MAX_NAMED])
  named += f" and {len(unreadable) - _MAX_NAMED} others" if len(unreadable) > _MAX_NAMED else ""
  message = f"{path}: {num_bad} of {len(problems)} problems have an answer that cannot be graded: {named}."
  if on_unreadable == "error" or not left:
    raise ValueError(f"{message} Correct them, or set on_unreadable='drop' to leave these problems out.")
  logging.warning("%s They are left out.", message)
  return left


def _is_problem(question: Any, answer: Any) -> bool:
  if not isinstance(question, str) or not question.strip() or isinstance(answer, bool):
    return False
  if isinstance(answer, str):  # some programs write "nan" for a missing value
    return answer.strip().lower() not in ("", "nan")
  return isinstance(answer, int) or (isinstance(answer, float) and math.isfinite(answer))
