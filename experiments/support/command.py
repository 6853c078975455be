"""Runs a command: an error about its input ends it with one line, a bug with a traceback.

`python -X dev -m experiments.NAME` shows the traceback of every error.
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
  """Runs `main`, which takes flags only, with `absl.app.run`. An error with a `one_line` message gives exit code 1."""

  def checked_main(argv: list[str]) -> Any:
    try:
      if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
      return main(argv)
    except Exception as error:
      line = one_line(error)
      if line is None or sys.flags.dev_mode:
        raise
      sys.exit(f"{pathlib.Path(argv[0]).stem}: {line}")

  app.run(checked_main, **({} if flags_parser is None else {"flags_parser": flags_parser}))


def one_line(error: BaseException) -> str | None:
  """Returns the message for an error about the user's input, or None for a bug, which needs its traceback.

  Errors about input are a `UsageError`, this project's own exceptions, errors of the operating system that name a file,
  and errors about a value, a file or a package whose traceback ends at a `raise` statement of this project. The message
  of such a statement shows what was received and what is allowed. An error raised by `int("x")` or by another package
  is a bug.
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
