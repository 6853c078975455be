"""Connection to a Ray cluster: made within a time limit, and closed before Ray ends the process because it is lost."""

from __future__ import annotations

import contextlib
import dataclasses
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
_CHECK_EVERY_S = 2.0
_CHECK_TIMEOUT_S = 1.0


class RayConnection:
  """Connection of this process to a Ray cluster. It joins or starts one, unless the process is already connected.

  Joining hangs for ever if a server that is not Ray accepts connections at the address. Starting sometimes fails on a
  busy machine. So joining runs on a thread, and both are tried `_ATTEMPTS` times within `connect_timeout_s`.

  Ray ends every process that cannot reach the cluster's head (its GCS) for a minute, the learner's too. `check` raises
  after `head_timeout_s`, so that there is time to write a checkpoint.

  Args:
    config: settings of the cluster.
    address: in place of `config.address`.

  Raises:
    ConnectionError: no attempt succeeded in time.
  """

  def __init__(self, config: ClusterConfig, *, address: str | None = None):
    self.ray = import_ray()
    self._config = config if address is None else dataclasses.replace(config, address=address)
    self._owned = not self.ray.is_initialized()
    if self._owned:
      # By default Ray's processes have a niceness of 15. Next to a learner on the same cores they would hardly run.
      os.environ.setdefault("RAY_worker_niceness", "0")
      _connect(self.ray, self._config)
    self._head = _address(self.ray.get_runtime_context().gcs_address)
    self._checked_at = time.monotonic()
    self._lost_s = 0.0
    self.lost = False
    """Whether `check` has raised."""

  def check(self, seconds: float) -> None:
    """Checks, at most every two seconds, that the head is reachable.

    Args:
      seconds: time since the last call, without time in which this process was suspended.

    Raises:
      ConnectionError: the head was unreachable for `head_timeout_s`. Call `close` at once, and nothing else.
    """
    self._lost_s += seconds if self._lost_s else 0.0
    if time.monotonic() - self._checked_at < _CHECK_EVERY_S:
      return
    self._checked_at = time.monotonic()
    try:
      socket.create_connection(self._head, timeout=_CHECK_TIMEOUT_S).close()
      self._lost_s = 0.0
    except OSError as error:
      self._lost_s = max(self._lost_s, 1e-9)
      if self._lost_s >= self._config.head_timeout_s:
        self.lost = True
        host, port = self._head
        raise ConnectionError(
          f"the head of the Ray cluster, {host}:{port}, was unreachable for {self._config.head_timeout_s} s "
          f"(ClusterConfig.head_timeout_s): {error}"
        ) from error

  def close(self) -> None:
    """Disconnects from Ray if this object has connected, or if the head is lost."""
    if (self._owned or self.lost) and self.ray.is_initialized():
      self.ray.shutdown()


def import_ray() -> Any:
  """Imports Ray; `MissingExtraError` says how to install it if it is missing."""
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
      raise  # a wrong address: no retry helps
    except Exception as error:
      ray.shutdown()
      wait = _FIRST_WAIT_S * 2.0 ** (attempt - 1)
      if attempt == _ATTEMPTS or time.monotonic() + wait >= deadline:
        raise ConnectionError(
          f"cannot connect to Ray after {attempt} attempts within ClusterConfig.connect_timeout_s = "
          f"{config.connect_timeout_s}, ClusterConfig.address = {config.address!r}: {error}"
        ) from error
      _log.warning("cannot connect to Ray (%s: %s); retrying", type(error).__name__, error)
      time.sleep(wait)


def _join_or_start(ray: Any, address: str | None, deadline: float) -> None:
  """Calls `ray.init(address)`; joins within the time limit, or starts a cluster."""

  def init(where: str) -> None:
    ray.init(address=where, include_dashboard=False, logging_level=logging.WARNING)

  if address != "local":
    try:
      _within(lambda: init(address or "auto"), deadline)
      return
    except ConnectionError:
      if address is not None:
        raise
  with _keep_sigterm():  # Ray starts processes on the main thread only
    init("local")


def _within(call: Callable[[], None], deadline: float) -> None:
  """Calls `call` on a thread. If it does not return in time, the thread is left behind and `TimeoutError` raised."""
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
    raise TimeoutError("the server at this address is not Ray, or too slow")
  if errors:
    raise errors[0]


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
  """Filters out Ray's warning that it did not replace the handler of SIGTERM, which is intended."""
  return "SIGTERM" not in record.getMessage()


def _address(text: str) -> tuple[str, int]:
  host, _, port = text.rpartition(":")
  return host.strip("[]"), int(port)


@contextlib.contextmanager
def _keep_sigterm() -> Iterator[None]:
  """Restores the process's handler of SIGTERM, which `ray.init` replaces."""
  before = signal.getsignal(signal.SIGTERM)
  try:
    yield
  finally:
    if threading.current_thread() is threading.main_thread():
      signal.signal(signal.SIGTERM, before)
