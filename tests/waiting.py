"""Waits for what another thread or process is about to do: for the event itself, never for a time. Free ports."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

LONG_S = 120.0
"""A deadline that only a hang misses, on a busy machine too. It costs nothing where things pass."""


def until(condition: Callable[[], object], timeout_s: float = LONG_S, every_s: float = 0.01) -> None:
  """Returns once `condition` holds; an error if it does not within the deadline."""
  deadline = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline, f"still not so after {timeout_s} s"
    time.sleep(every_s)


@contextlib.contextmanager
def free_port() -> Iterator[int]:
  """A port that refuses connections until a server is bound to it, and that no other program is given meanwhile."""
  with socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    yield held.getsockname()[1]
