"""The end of a command's process, whatever threads are left in it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

_PATIENCE_S = 3.0
_OURS = "sao_jax-"
"""Threads of this library are daemons: what hangs in an environment, or in the compiler, is left behind."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def whatever_is_left() -> Iterator[None]:
  """Around a command's `main`: the process ends with it, with its exit code, though threads are still running.

  Python waits for threads that are no daemons (an environment may have begun some), and it ends the others in a way
  that aborts the process if they are in C++ (compiling, say). Nor does it take every object apart at the end, for which
  a loaded machine needs longer than a signal leaves it. What is registered with `atexit` is done, unless a thread is
  left: it may wait for that.
  """
  try:
    yield
  finally:
    code = _tell(sys.exc_info()[1])
    if names := _left():
      _log.warning("Threads still run at the end and are given up: %s", ", ".join(names))
    else:
      atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError):
        stream.flush()
    os._exit(code)


def _left() -> list[str]:
  """Names of the threads that are in the way, after a while."""
  until = time.monotonic() + _PATIENCE_S
  while True:
    me = threading.current_thread()
    left = [x.name for x in threading.enumerate() if x is not me and (not x.daemon or x.name.startswith(_OURS))]
    if not left or time.monotonic() > until:
      return left
    time.sleep(0.05)


def _tell(error: BaseException | None) -> int:
  """Prints an exception as the interpreter would; returns the exit code that goes with it."""
  if error is None:
    return 0
  if not isinstance(error, SystemExit):
    sys.excepthook(type(error), error, error.__traceback__)
    return 130 if isinstance(error, KeyboardInterrupt) else 1
  if error.code is None or isinstance(error.code, int):
    return error.code or 0
  print(error.code, file=sys.stderr)
  return 1
