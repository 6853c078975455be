"""Reader of SWE-Bench files and of files in the same format."""

from __future__ import annotations

import ast
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweBenchInstance:
  """One row of SWE-Bench. Other keys (`difficulty`, `image_name`, ...) are ignored."""

  instance_id: str
  repo: str
  base_commit: str
  patch: str
  test_patch: str
  problem_statement: str
  fail_to_pass: tuple[str, ...]
  """Names of the tests that must pass once the problem is solved; `FAIL_TO_PASS` in the files."""
  pass_to_pass: tuple[str, ...]
  """Names of the tests that must go on passing."""
  version: str = ""
  environment_setup_commit: str = ""
  hints_text: str = ""
  created_at: str = ""

  @classmethod
  def from_row(cls, row: Mapping[str, Any]) -> SweBenchInstance:
    """Checks a row and converts it.

    Lists of tests may also be strings that hold a list, as JSON (in SWE-Bench) or Python. Keys may be in lower case.
    Null means that a field is missing.
    """
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
      tests = field.name.endswith("_to_pass")
      key = field.name.upper() if tests and field.name not in row else field.name
      value = row.get(key)
      if value is None:
        if field.default is dataclasses.MISSING:
          raise ValueError(f"SWE-Bench instance {row.get('instance_id', '?')!r} lacks the key {key!r}.")
        continue
      if tests:
        value = _test_names(key, value)
      elif not isinstance(value, str):
        raise ValueError(f"{key} must be a string; received {value!r}.")
      values[field.name] = value
    return cls(**values)


def read_swe_bench(path: str | pathlib.Path) -> list[SweBenchInstance]:
  """Reads a file of SWE-Bench instances: one JSON object per line, or one JSON list of them.

  Raises:
    ValueError: a row is not an instance, or two rows have the same `instance_id`; the message names the place.
  """
  instances: dict[str, SweBenchInstance] = {}
  for place, text_or_row in _rows(pathlib.Path(path)):
    try:
      row = json.loads(text_or_row) if isinstance(text_or_row, str) else text_or_row
      if not isinstance(row, dict):
        raise ValueError(f"a row must be an object; received {type(row).__name__}")
      instance = SweBenchInstance.from_row(row)
      if instance.instance_id in instances:
        raise ValueError(f"instance_id {instance.instance_id!r} occurs twice")
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}, {place}: {error}") from error
    instances[instance.instance_id] = instance
  return list(instances.values())


def _rows(path: pathlib.Path) -> Iterator[tuple[str, Any]]:
  text = path.read_text(encoding="utf-8-sig")
  if text.lstrip().startswith("["):
    try:
      rows = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"{path}: the list is not valid JSON: {error}") from error
    for number, row in enumerate(rows):
      yield f"entry {number}", row
    return
  # Not splitlines: a JSON string may hold other line separators.
  for number, line in enumerate(text.split("\n"), 1):
    if line.strip():
      yield f"line {number}", line


def _test_names(key: str, value: Any) -> tuple[str, ...]:
  names = value
  if isinstance(value, str):
    try:
      names = json.loads(value)
    except ValueError:
      try:
        names = ast.literal_eval(value)
      except (ValueError, SyntaxError, MemoryError, RecursionError):
        names = None
  if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
    raise ValueError(f"{key} must be a list of test names; received {value!r}.")
  return tuple(names)
