"""A learner of several processes and one cluster of engines: how the processes' shards come together.

The main process talks to the engines. Each process puts its own shards into the object store of its machine. Messages
with the references go through a small Ray worker, the hub, since Ray passes references between processes only so.
"""

from __future__ import annotations

import threading
import uuid
from typing import Any, NamedTuple

from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.ray.connection import RayConnection
from sao_jax.rollout.ray.weight_sender import Message, Outbox, WeightSender
from sao_jax.rollout.weight_sync import WeightStore

_NAMESPACE = "sao_jax"
_POLL_S = 0.02
_STOP_S = 5.0


class HubAddress(NamedTuple):
  """Where the other processes find the hub; JSON values."""

  cluster: str
  """Address of the Ray cluster."""
  name: str


class Hub:
  """Messages that the main process has not taken yet; a Ray worker with one thread, which keeps their order."""

  def __init__(self) -> None:
    self._messages: list[Message] = []

  def post(self, message: Message) -> None:
    self._messages.append(message)

  def take(self) -> list[Message]:
    messages, self._messages = self._messages, []
    return messages


class HubReader:
  """The hub, and a thread of the main process that moves its messages to the outbox.

  Args:
    connection: to the Ray cluster.
  """

  def __init__(self, connection: RayConnection):
    name = uuid.uuid4().hex
    ray = self._ray = connection.ray
    self.address = HubAddress(ray.get_runtime_context().gcs_address, name)
    options = {"name": name, "namespace": _NAMESPACE, "num_cpus": 0, "max_restarts": 0}
    self._hub = ray.remote(Hub).options(**options).remote()
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._thread: threading.Thread | None = None

  def start(self, outbox: Outbox) -> None:
    """Starts the thread."""
    self._thread = threading.Thread(target=self._run, args=(outbox,), name="sao_jax-hub", daemon=True)
    self._thread.start()

  def check(self) -> None:
    """Raises the exception that ended the thread; otherwise does nothing."""
    if self._error is not None:
      raise self._error

  def stop(self) -> None:
    """Ends the thread. The hub ends when this process disconnects from Ray."""
    self._stop.set()
    if self._thread is not None:
      self._thread.join(_STOP_S)

  def _run(self, outbox: Outbox) -> None:
    try:
      while not self._stop.wait(_POLL_S):
        for message in self._ray.get(self._hub.take.remote()):
          outbox.add(message)
    except BaseException as error:  # noqa: BLE001 (handed to the thread that calls check())
      self._error = error


class RemoteSender:
  """Sender of a process that does not talk to the engines. Its thread starts at once.

  Args:
    config: settings of the cluster.
    address: of the hub.
    store: where the learner publishes.
    index: number of this process among the learner's, >= 1.

  Raises:
    ConnectionError: Ray cannot be reached on this machine.
  """

  def __init__(self, config: ClusterConfig, address: HubAddress, store: WeightStore, *, index: int):
    self._connection = RayConnection(config, address=address.cluster)
    ray = self._connection.ray
    hub: Any = ray.get_actor(address.name, namespace=_NAMESPACE)
    self._sender = WeightSender(store, ray.put, lambda message: ray.get(hub.post.remote(message)), index=index)
    self._sender.start()

  def check(self) -> None:
    """Raises the exception that ended the sender's thread; otherwise does nothing."""
    self._sender.check()

  def close(self) -> None:
    """Ends the thread, and disconnects from Ray."""
    self._sender.stop(timeout=6.0)
    self._connection.close()
