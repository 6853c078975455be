"""Exceptions out of a user's code: which of them are its own, and how they are told of."""

from __future__ import annotations

import threading
import traceback


def from_outside(error: BaseException) -> bool:
  """Whether an exception that came out of a user's code is not its own: a signal's, which only the main thread gets.

  All others fail the episode, those that are no `Exception` included (`asyncio.CancelledError`, `SystemExit`, panics of
  Rust extensions, ...): on a worker thread nobody else would hear of them.
  """
  return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def describe(value: object, *, most: int = 500) -> str:
  """`repr(value)` of a user's object: shortened, and whatever that `repr` does.

  >>> describe(RuntimeError("x" * 1000), most=20)
  "RuntimeError('xxxxxx... (1016 characters)"
  """
  try:
    text = repr(value)
  except BaseException as error:
    if from_outside(error):
      raise
    return f"{type(value).__name__} (its repr() raises {type(error).__name__})"
  return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def trace(error: BaseException, *, most: int = 2_000) -> str:
  """The traceback of an exception, each part of it (its message, say) shortened."""
  return "".join(part if len(part) <= most else f"{part[:most]}...\n" for part in traceback.format_exception(error))
