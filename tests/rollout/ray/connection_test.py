"""Joining and starting Ray with time limits, against one that fails or hangs; the real one is in `cluster_test`."""

from __future__ import annotations

import signal
import socket
import threading
import types

import pytest

from sao_jax.rollout.ray import connection
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.ray.connection import RayConnection
from tests.waiting import LONG_S, free_port


class FakeRay:
  """Calls of `init` do what `outcomes` say, one each: an exception, an event that is waited for, or nothing."""

  def __init__(self, *outcomes: BaseException | threading.Event | None, head: str = "127.0.0.1:1"):
    self._outcomes = list(outcomes)
    self._head = head
    self.addresses: list[str] = []
    self.shutdowns = 0
    self.up = False

  def init(self, *, address: str, include_dashboard: bool, logging_level: int) -> None:
    self.addresses.append(address)
    outcome = self._outcomes.pop(0)
    if isinstance(outcome, BaseException):
      raise outcome
    if outcome is not None:
      outcome.wait(LONG_S)
    if threading.current_thread() is threading.main_thread():
      signal.signal(signal.SIGTERM, lambda *_: None)
    self.up = True

  def is_initialized(self) -> bool:
    return self.up

  def shutdown(self) -> None:
    self.shutdowns += 1
    self.up = False

  def get_runtime_context(self) -> types.SimpleNamespace:
    return types.SimpleNamespace(gcs_address=self._head)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(connection, "_FIRST_WAIT_S", 0.01)
  monkeypatch.setattr(connection, "_CHECK_EVERY_S", 0.0)


def connect(monkeypatch: pytest.MonkeyPatch, ray: FakeRay, **config: object) -> RayConnection:
  monkeypatch.setattr(connection, "import_ray", lambda: ray)
  return RayConnection(ClusterConfig(**config))  # type: ignore[arg-type]


BUSY = Exception("The current node timed out during startup.")
NOBODY = ConnectionError("Could not find any running Ray instance.")


def test_a_failed_start_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
  handler = signal.getsignal(signal.SIGTERM)
  ray = FakeRay(BUSY, BUSY, None)
  connection = connect(monkeypatch, ray, address="local")
  assert ray.addresses == ["local"] * 3 and ray.shutdowns == 2 and ray.up
  assert signal.getsignal(signal.SIGTERM) == handler
  connection.close()
  assert not ray.up


def test_attempts_are_bounded_and_the_error_names_the_last_failure(monkeypatch: pytest.MonkeyPatch) -> None:
  ray = FakeRay(BUSY, BUSY, BUSY)
  message = (
    r"connect to Ray after 3 attempts .*connect_timeout_s = 180\.0, ClusterConfig\.address = 'local': The current node"
  )
  with pytest.raises(ConnectionError, match=message):
    connect(monkeypatch, ray, address="local")
  assert not ray.up and ray.shutdowns == 3


@pytest.mark.parametrize("address", ["10.0.0.1:6379", None])
def test_a_hanging_connection_is_abandoned(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
  release = threading.Event()
  with pytest.raises(ConnectionError, match="the server at this address is not Ray"):
    connect(monkeypatch, FakeRay(release), address=address, connect_timeout_s=0.2)
  release.set()


def test_without_an_address_a_running_ray_is_joined_and_else_one_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
  joined, started = FakeRay(None), FakeRay(NOBODY, None)
  for ray in (joined, started):
    connect(monkeypatch, ray)
  assert joined.addresses == ["auto"] and started.addresses == ["auto", "local"]
  with pytest.raises(ConnectionError, match="Could not find"):
    connect(monkeypatch, FakeRay(NOBODY, NOBODY, NOBODY), address="10.0.0.1:6379")


def test_a_bad_address_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
  ray = FakeRay(ValueError("port must be a number"))
  with pytest.raises(ValueError, match="port must be a number"):
    connect(monkeypatch, ray, address="x:y")
  assert len(ray.addresses) == 1


def test_a_ray_of_the_process_is_used_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
  ray = FakeRay()
  ray.up = True
  connect(monkeypatch, ray).close()
  assert ray.up and ray.addresses == []


def test_a_head_that_comes_back_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
  with free_port() as port:
    ray = FakeRay(None, head=f"127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", port)):
      connection = connect(monkeypatch, ray, head_timeout_s=3.0)
      connection.check(1.0)
    for _ in range(3):  # found lost, then for 1 and 2 seconds
      connection.check(1.0)
    with socket.create_server(("127.0.0.1", port)):
      connection.check(1.0)
    for _ in range(3):
      connection.check(1.0)
    with pytest.raises(ConnectionError, match=rf"127\.0\.0\.1:{port}, was unreachable for 3\.0 s .*head_timeout_s"):
      connection.check(1.0)
  connection.close()
  assert not ray.up
