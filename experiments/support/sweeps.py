"""Helpers of the sweeps over tasks of other packages: a limit of CPU time, and the final JSON object."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
  """Raises TimeoutError after this much CPU time. Works on the main thread only."""

  def stop(*_: object) -> None:
    raise TimeoutError(f"took more than {seconds} s of CPU time")

  before = signal.signal(signal.SIGPROF, stop)
  signal.setitimer(signal.ITIMER_PROF, seconds)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def conclude(summary: Mapping[str, Any], *, faults: str) -> int:
  """Prints the summary as the last line; returns the exit code, which is 1 if the entry `faults` is not empty."""
  print("\n" + json.dumps(summary))
  return 1 if summary[faults] else 0
