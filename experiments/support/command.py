"""How every command here ends: what cannot be done as it was asked for is told in one line, a bug with its traceback.

`python -X dev -m experiments.NAME` shows the traceback of everything.
"""

from __future__ import annotations

import linecache
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from absl import app


def run(main: Callable[[list[str]], Any], *, flags_parser: Callable[[Sequence[str]], list[str]] | None = None) -> None:
  """`absl.app.run` for a `main` that takes flags only; `one_line` errors end the program with exit code 1."""

  def told(argv: list[str]) -> Any:
    try:
      if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
      return main(argv)
    except Exception as error:
      line = one_line(error)
      if line is None or sys.flags.dev_mode:
        raise
      sys.exit(f"{pathlib.Path(argv[0]).stem}: {line}")

  app.run(told, **({} if flags_parser is None else {"flags_parser": flags_parser}))


def one_line(error: BaseException) -> str | None:
  """What to tell of an exception that is an answer to what was asked for; None for a bug, which needs its traceback.

  Answers are a `UsageError`, this project's own exceptions, an operating system's error that names a file, and an error
  about a value, a file or a package whose traceback ends at a `raise` statement of this project: there its message says
  what was received and what is allowed. What `int("x")` raises in this project, or another package, is a bug.
  """
  if isinstance(error, OSError) and error.filename is not None:
    paths = repr(error.filename) if error.filename2 is None else f"{error.filename!r} -> {error.filename2!r}"
    return f"cannot read or write {paths}: {error.strerror}"
  if isinstance(error, app.UsageError) or _is_ours(type(error).__module__):
    return str(error)
  about_input = isinstance(error, ValueError | TypeError | OSError | ImportError)
  return str(error) if about_input and _ends_at_our_raise(error) else None


def _ends_at_our_raise(error: BaseException) -> bool:
  steps = list(traceback.walk_tb(error.__traceback__))
  if not steps:
    return False
  frame, line = steps[-1]
  source = linecache.getline(frame.f_code.co_filename, line)
  return _is_ours(frame.f_globals.get("__package__")) and source.split()[:1] == ["raise"]


def _is_ours(module: str | None) -> bool:
  return (module or "").partition(".")[0] in ("sao_jax", "experiments")
