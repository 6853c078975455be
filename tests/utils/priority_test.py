"""Only the calling thread's priority is lowered."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from sao_jax.utils.priority import yield_to_others


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a niceness on Linux only")
def test_only_the_calling_thread_yields():
  before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
  seen: list[int] = []

  def run() -> None:
    yield_to_others()
    seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

  thread = threading.Thread(target=run)
  thread.start()
  thread.join()
  assert seen == [min(19, before + 5)]
  assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
