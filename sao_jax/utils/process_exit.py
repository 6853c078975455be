"""Exit of a command's process, even if threads are still running in it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

_TIMEOUT_S = 3.0
"""Time that threads have to end."""
_OURS = "sao_jax-"
"""Name prefix of this library's threads. They are daemons, so one that hangs in an environment or in the compiler does
not keep the process alive."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def exit_after_main() -> Iterator[None]:
  """Wraps a command's `main`: the process exits when it returns, with its exit code, even if threads still run.

  A normal exit of Python waits for threads that are not daemons, which an environment may have started. It stops daemon
  threads in a way that aborts the process if they are in C++ (compiling, for example), and it destroys every object,
  which on a loaded machine takes longer than the time between two signals. Functions registered with `atexit` run
  unless a thread is left, as they may wait for it.
  """
  try:
    yield
  finally:
    code = _report(sys.exc_info()[1])
    if names := _left():
      _log.warning("Exiting while threads are still running: %s", ", ".join(names))
    else:
      atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
      with contextlib.suppress(OSError, ValueError):
        stream.flush()
    os._exit(code)


def _left() -> list[str]:
  """Returns the names of threads that would block or crash the exit, after waiting for them."""
  until = time.monotonic() + _TIMEOUT_S
  while True:
    me = threading.current_thread()
    left = [x.name for x in threading.enumerate() if x is not me and (not x.daemon or x.name.startswith(_OURS))]
    if not left or time.monotonic() > until:
      return left
    time.sleep(0.05)


def _report(error: BaseException | None) -> int:
  """Prints an exception as the interpreter would and returns its exit code."""
  if error is None:
    return 0
  if not isinstance(error, SystemExit):
    sys.excepthook(type(error), error, error.__traceback__)
    return 130 if isinstance(error, KeyboardInterrupt) else 1
  if error.code is None or isinstance(error.code, int):
    return error.code or 0
  print(error.code, file=sys.stderr)
  return 1
