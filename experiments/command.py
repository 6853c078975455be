"""How every command here ends: what cannot be done as it was asked for is told in one line, a bug with its traceback.

`python -X dev -m experiments.NAME` shows the traceback of everything.
"""

from __future__ import annotations

import dis
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import app

_OURS = frozenset({"sao_jax", "experiments"})


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

  Answers are a `UsageError`, this project's own exceptions, an operating system's error that names a file, and what the
  project raises on purpose about a value, a file or a package: the message says what was received and what is allowed.
  """
  own = isinstance(error, app.UsageError) or type(error).__module__.partition(".")[0] in _OURS
  if own or (isinstance(error, OSError) and error.filename is not None):
    return str(error)
  about_input = isinstance(error, ValueError | TypeError | OSError | ImportError)
  return str(error) if about_input and _raised_on_purpose(error) else None


def _raised_on_purpose(error: BaseException) -> bool:
  """Whether it comes from a `raise` in this project; what `int("x")` there raises, or another package, does not."""
  trace = error.__traceback__
  while trace is not None and trace.tb_next is not None:
    trace = trace.tb_next
  if trace is None:
    return False
  module = trace.tb_frame.f_globals
  name = module["__spec__"].name if module.get("__spec__") else module.get("__name__", "")  # a command is `__main__`
  raises = trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]
  return raises and name.partition(".")[0] in _OURS
