"""JSON Lines files that survive a kill: complete lines of strict JSON, cut back to a step on resume."""

from __future__ import annotations

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from sao_jax.io import workdir as workdir_lib
from sao_jax.utils import untrusted_files


class JsonlFile:
  """Appends rows to a file. Each row is one `write` of one line, so a kill never mixes two rows."""

  def __init__(self, path: str | os.PathLike[str]) -> None:
    self._path = path
    self._file = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)

  def append(self, row: Mapping[str, Any]) -> None:
    """Writes one row.

    Raises:
      ValueError: the row holds NaN or an infinity, which strict JSON lacks.
    """
    line = json.dumps(row, allow_nan=False, separators=(", ", ": ")) + "\n"
    rest = memoryview(line.encode("utf-8"))
    with workdir_lib.named_errors(self._path):
      while rest:  # one write, unless a signal or a full disk cuts it short; the latter then raises
        rest = rest[self._file.write(rest) :]

  def close(self) -> None:
    self._file.close()


def read_rows(path: str | os.PathLike[str], *, max_line_bytes: int = 1 << 26) -> Iterator[tuple[int, dict[str, Any]]]:
  """Yields `(line number, row)`. Skips a last line without a newline, which is still being written.

  Args:
    path: the file.
    max_line_bytes: limit on the length of a line; longer ones are refused before they are read into memory.

  Raises:
    ValueError: a line is too long or not a JSON object; the message holds path and line number.
  """
  untrusted_files.check_regular(path)
  with open(path, "rb") as file:
    number = 0
    while line := file.readline(max_line_bytes + 1):
      number += 1
      if len(line) > max_line_bytes:
        raise ValueError(f"{path}:{number}: a line must have at most {max_line_bytes} bytes.")
      if not line.endswith(b"\n"):
        return
      try:
        row = json.loads(line, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_no_key_twice)
      except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}:{number}: not valid JSON: {error}.") from error
      if not isinstance(row, dict):
        raise ValueError(f"{path}:{number}: a line must be a JSON object; received {type(row).__name__}.")
      yield number, row


def cut_after_step(path: str | os.PathLike[str], step: int) -> list[dict[str, Any]]:
  """Drops every row whose `step` is greater than `step`, and a partly written last line; returns the other rows.

  The file is replaced atomically: a kill leaves the old file or the new one.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  kept = []
  for number, row in read_rows(path):
    check_step(path, number, row)
    if row["step"] <= step:
      kept.append(row)
  text = "".join(json.dumps(row, allow_nan=False, separators=(", ", ": ")) + "\n" for row in kept)
  workdir_lib.atomic_write(path, text.encode("utf-8"))
  return kept


def check_step(path: str | os.PathLike[str], number: int, row: Mapping[str, Any]) -> None:
  """Raises ValueError unless a row has an integer `step`."""
  if type(row.get("step")) is not int:
    raise ValueError(f"{path}:{number}: key 'step' must be an integer; received {row.get('step')!r:.200}.")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  row = dict(pairs)
  if len(row) < len(pairs):
    seen: set[str] = set()
    twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    raise ValueError(f"key {twice!r:.200} occurs twice")
  return row


def _finite(number: str) -> float:
  """Python reads 1e999 as infinity."""
  value = float(number)
  if math.isinf(value):
    raise ValueError(f"{number:.50} is out of range for a float")
  return value


def _refuse_constant(name: str) -> None:
  raise ValueError(f"{name} is not valid JSON")
