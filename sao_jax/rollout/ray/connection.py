"""The connection to a Ray cluster: made within a time limit, and given up before Ray ends the process for its loss."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.utils.extras import require_extra

_log = logging.getLogger(__name__)

_ATTEMPTS = 3
_FIRST_WAIT_S = 2.0
_LOOK_EVERY_S = 2.0
_LOOK_S = 1.0


class RayConnection:
  """Joins a Ray cluster, or starts one here, unless the process has done so; `close` ends what this object began.

  Joining hangs for ever if something accepts connections at the address and is no Ray; starting fails now and then on a
  machine that is busy. So joining is waited for in a thread, and both are tried `_ATTEMPTS` times within
  `connect_timeout_s`.

  A process of Ray's that does not reach the head (its GCS) for a minute is ended by Ray on the spot, the learner's too.
  `check` raises after `head_timeout_s`, so that there is time to save.

  Args:
    config: the cluster.

  Raises:
    ConnectionError: no attempt succeeded in time.
  """

  def __init__(self, config: ClusterConfig):
    self.ray = import_ray()
    self._config = config
    self._owned = not self.ray.is_initialized()
    if self._owned:
      # Ray gives its processes a niceness of 15; beside a learner on the same cores the engines would get next to none.
      os.environ.setdefault("RAY_worker_niceness", "0")
      _connect(self.ray, config)
    self._head = _address(self.ray.get_runtime_context().gcs_address)
    self._looked = time.monotonic()
    self._lost_s = 0.0
    self.lost = False
    """Whether `check` has raised."""

  def check(self, seconds: float) -> None:
    """Looks at the head, now and then.

    Args:
      seconds: since the last call; without those in which this process was suspended.

    Raises:
      ConnectionError: it has been out of reach for `head_timeout_s`. Only `close` is of use now, and is urgent.
    """
    self._lost_s += seconds if self._lost_s else 0.0
    if time.monotonic() - self._looked < _LOOK_EVERY_S:
      return
    self._looked = time.monotonic()
    try:
      socket.create_connection(self._head, timeout=_LOOK_S).close()
      self._lost_s = 0.0
    except OSError as error:
      self._lost_s = max(self._lost_s, 1e-9)
      if self._lost_s >= self._config.head_timeout_s:
        self.lost = True
        host, port = self._head
        raise ConnectionError(
          f"the head of the Ray cluster, {host}:{port}, was out of reach for ClusterConfig.head_timeout_s = "
          f"{self._config.head_timeout_s}: {error}"
        ) from error

  def close(self) -> None:
    """Ends Ray in this process if this object has started it, or if its head is lost."""
    if (self._owned or self.lost) and self.ray.is_initialized():
      self.ray.shutdown()


def import_ray() -> Any:
  """Ray, or an error that says how to get it."""
  with require_extra("cluster"):
    import ray
  return ray


def _connect(ray: Any, config: ClusterConfig) -> None:
  deadline = time.monotonic() + config.connect_timeout_s
  for attempt in range(1, _ATTEMPTS + 1):
    try:
      _join_or_start(ray, config.address, deadline)
      return
    except (ValueError, TypeError):
      raise  # a wrong address will not become right
    except Exception as error:
      ray.shutdown()
      wait = _FIRST_WAIT_S * 2.0 ** (attempt - 1)
      if attempt == _ATTEMPTS or time.monotonic() + wait >= deadline:
        raise ConnectionError(
          f"Ray was not there after {attempt} attempts within ClusterConfig.connect_timeout_s = "
          f"{config.connect_timeout_s}, ClusterConfig.address = {config.address!r}: {error}"
        ) from error
      _log.warning("Ray is not there (%s: %s); trying again", type(error).__name__, error)
      time.sleep(wait)


def _join_or_start(ray: Any, address: str | None, deadline: float) -> None:
  """As `ray.init(address)`."""

  def init(where: str) -> None:
    ray.init(address=where, include_dashboard=False, logging_level=logging.WARNING)

  if address != "local":
    try:
      _within(lambda: init(address or "auto"), deadline)
      return
    except ConnectionError:
      if address is not None:
        raise
  with _keep_sigterm():  # starts processes, which it does on the main thread only
    init("local")


def _within(call: Callable[[], None], deadline: float) -> None:
  """Calls on a thread, which is left behind if it does not return in time."""
  errors: list[BaseException] = []

  def run() -> None:
    try:
      call()
    except BaseException as error:  # noqa: BLE001 (raised by the caller)
      errors.append(error)

  quiet = logging.getLogger("ray._private.worker")
  quiet.addFilter(_is_not_about_sigterm)
  thread = threading.Thread(target=run, name="sao_jax-ray", daemon=True)
  thread.start()
  thread.join(max(0.0, deadline - time.monotonic()))
  quiet.removeFilter(_is_not_about_sigterm)
  if thread.is_alive():
    raise TimeoutError("what is at the address does not answer as Ray does, or takes too long")
  if errors:
    raise errors[0]


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
  """Ray warns that it did not take over SIGTERM, which is as it should be."""
  return "SIGTERM" not in record.getMessage()


def _address(text: str) -> tuple[str, int]:
  host, _, port = text.rpartition(":")
  return host.strip("[]"), int(port)


@contextlib.contextmanager
def _keep_sigterm() -> Iterator[None]:
  """Undoes that `ray.init` replaces the process's handler of SIGTERM."""
  before = signal.getsignal(signal.SIGTERM)
  try:
    yield
  finally:
    if threading.current_thread() is threading.main_thread():
      signal.signal(signal.SIGTERM, before)
