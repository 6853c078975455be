"""Priority of threads."""

from __future__ import annotations

import os
import sys
import threading

_NICENESS = 5


def yield_to_others() -> None:
  """Lowers the priority of the calling thread, on Linux: where cores are scarce, the process's other threads go first.

  On other systems it does nothing, since there a thread has no niceness of its own.
  """
  if sys.platform == "linux":
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS))
