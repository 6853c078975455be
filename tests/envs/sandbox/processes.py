"""The process table: descendants of this process."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Callable

from tests.waiting import LONG_S


def _parents() -> dict[int, int]:
  parents = {}
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
      pid, rest = path.read_text().split(" ", 1)
    except (FileNotFoundError, ProcessLookupError):
      continue
    state, parent = rest[rest.rindex(")") + 1 :].split()[:2]
    if state != "Z":
      parents[int(pid)] = int(parent)
  return parents


def running() -> set[int]:
  return set(_parents())


def descendants(root: int) -> set[int]:
  """A live process and its descendants."""
  parents = _parents()
  found = {root} & set(parents)
  while True:
    more = {pid for pid, parent in parents.items() if parent in found} - found
    if not more:
      return found
    found |= more


def kill_descendants(root: int) -> None:
  """Kills a process and its descendants."""
  for pid in descendants(root):
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
      os.kill(pid, signal.SIGKILL)


def kill_named(root: int, name: str) -> None:
  """Kills the outermost process with a name among a process and its descendants."""
  parents, named = _parents(), set()
  for pid in descendants(root):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
      if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == name:
        named.add(pid)
  os.kill(next(pid for pid in named if parents.get(pid) not in named), signal.SIGKILL)


def with_marker(marker: str) -> set[int]:
  """Lists all live processes with the marker as name (prctl PR_SET_NAME) or in their command line."""
  found = set()
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      text = (path / "comm").read_text() + (path / "cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
      continue
    if marker in text and int(path.name) != os.getpid():
      found.add(int(path.name))
  return found


def wait_until(condition: Callable[[], bool], timeout: float = LONG_S) -> None:
  end = time.monotonic() + timeout
  while not condition():
    assert time.monotonic() < end, "still not so after the timeout"
    time.sleep(0.02)
