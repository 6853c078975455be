"""Exceptions raised by a user's code: telling them from interrupts, and formatting them safely."""

from __future__ import annotations

import threading
import traceback


def is_interrupt(error: BaseException) -> bool:
  """Whether an exception out of a user's code is an interrupt of this process and must propagate.

  Only a `KeyboardInterrupt` on the main thread is: a signal raised it. Every other exception fails the episode, also
  those that are no `Exception` (`asyncio.CancelledError`, `SystemExit`, panics of Rust extensions). On a worker thread
  they would otherwise be lost.
  """
  return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def describe(value: object, *, most: int = 500) -> str:
  """Returns `repr(value)` of a user's object, at most `most` characters of it, even if that `repr` raises.

  >>> describe(RuntimeError("x" * 1000), most=20)
  "RuntimeError('xxxxxx... (1016 characters)"
  """
  try:
    text = repr(value)
  except BaseException as error:
    if is_interrupt(error):
      raise
    return f"{type(value).__name__} (its repr() raises {type(error).__name__})"
  return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def format_traceback(error: BaseException, *, most: int = 2_000) -> str:
  """Formats the traceback of an exception; each part (its message, say) is cut to `most` characters."""
  return "".join(part if len(part) <= most else f"{part[:most]}...\n" for part in traceback.format_exception(error))
