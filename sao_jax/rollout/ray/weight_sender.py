"""Published weights on their way into Ray's object store, and what is there for the engines.

Each process of the learner has a `WeightSender`. Its thread reads the shards of each published version, group by group,
while the learner trains on. `Outbox` collects what all senders have put, for the process that talks to the engines.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

from sao_jax.rollout.ray import weight_transfer as transfer
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import Params
from sao_jax.utils.priority import yield_to_others

_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class Group:
  """Pieces of one version in the object store.

  References are in tuples, since Ray would otherwise fetch the objects before a call that receives them.
  """

  key: tuple[int, int]
  """Sender, and number of the group."""
  full: tuple[Any, ...]
  """Reference to a list of `Piece`."""
  nbytes: int
  checksum: int
  base: int = -1
  """Version that `delta` starts from; -1: there is no delta."""
  delta: tuple[Any, ...] = ()
  """Reference to a list of one array or `Delta` per piece; empty if no value changed."""
  delta_nbytes: int = 0


@dataclasses.dataclass(frozen=True)
class Message:
  """A group of a version, from a sender; the last one has no group."""

  sender: int
  version: int
  group: Group | None = None
  shapes: Params | None = None
  """With the last message: `weight_transfer.shapes_of` the weights."""


@dataclasses.dataclass(eq=False)
class Update:
  """A version in the object store. Grows while the senders are putting it."""

  version: int
  groups: list[Group] = dataclasses.field(default_factory=list)
  finished: set[int] = dataclasses.field(default_factory=set)
  """Senders that have put all their groups."""
  shapes: Params | None = None
  complete: bool = False
  abandoned: bool = False
  """A sender has left this version out; it will never be complete."""


class Outbox:
  """The newest version from all senders.

  Args:
    num_senders: processes of the learner.
  """

  def __init__(self, num_senders: int):
    self._num_senders = num_senders
    self._lock = threading.Lock()
    self._newest: Update | None = None

  @property
  def newest(self) -> Update | None:
    """The newest version of which any group is there."""
    return self._newest

  def clear(self) -> None:
    """Drops everything, so that Ray can free it."""
    with self._lock:
      self._newest = None

  def add(self, message: Message) -> None:
    """Adds what a sender has put. A sender's messages come in their order."""
    with self._lock:
      newest = self._newest
      if newest is None or message.version > newest.version:
        if newest is not None and not newest.complete:
          newest.abandoned = True
        newest = self._newest = Update(message.version)
      if message.version < newest.version:
        return  # another sender has gone on to a later version
      if message.group is not None:
        newest.groups.append(message.group)
        return
      newest.finished.add(message.sender)
      newest.shapes = message.shapes
      newest.complete = len(newest.finished) == self._num_senders


class WeightSender:
  """Thread that puts this process's shards of each published version into Ray's object store.

  A version that is replaced before the thread has come to it is left out.

  Args:
    store: where the learner publishes. Its arrays are read until the next version is sent.
    put: `ray.put`.
    emit: receives the messages, on the thread.
    index: number of this process among the learner's.
  """

  def __init__(self, store: WeightStore, put: Callable[[Any], Any], emit: Callable[[Message], None], *, index: int = 0):
    self._store, self._put, self._emit, self._index = store, put, emit, index
    self._stop = threading.Event()
    self._error: BaseException | None = None
    self._version = -1
    self._groups: list[list[transfer.Shard]] | None = None
    self._sent: list[tuple[list[transfer.Piece], Group]] = []
    """The pieces of the version sent last, and where they are."""
    self._thread = threading.Thread(target=self._run, name="sao_jax-weights", daemon=True)

  def start(self) -> None:
    """Starts sending."""
    self._thread.start()

  def check(self) -> None:
    """Raises the exception that ended the thread; otherwise does nothing."""
    if self._error is not None:
      raise self._error

  def stop(self, timeout: float) -> None:
    """Asks the thread to stop, and waits for it up to `timeout` seconds."""
    self._stop.set()
    self._thread.join(timeout)

  def _run(self) -> None:
    yield_to_others()
    try:
      while not self._stop.is_set():
        if self._store.wait_for(self._version + 1, timeout=_POLL_S):
          self._send(*self._store.latest())
    except BaseException as error:  # noqa: BLE001 (handed to the thread that calls check())
      self._error = error

  def _send(self, params: Params, version: int) -> None:
    leaves = jax.tree.leaves(params)
    if self._groups is None:
      self._groups = transfer.groups(transfer.own_shards(leaves), transfer.GROUP_BYTES)
    for number, shards in enumerate(self._groups):
      if self._stop.is_set():
        return
      pieces = transfer.read(leaves, shards)
      group = self._put_group(number, pieces)
      self._sent[number : number + 1] = [(pieces, group)]
      self._emit(Message(self._index, version, group))
    self._version = version
    self._emit(Message(self._index, version, shapes=transfer.shapes_of(params)))

  def _put_group(self, number: int, pieces: Sequence[transfer.Piece]) -> Group:
    key, nbytes = (self._index, number), sum(piece.values.nbytes for piece in pieces)
    before = self._sent[number] if self._version >= 0 else None
    deltas: list[Any] = []
    if before is not None:
      for old, new in zip(before[0], pieces, strict=True):
        delta = transfer.encode(new.values, old.values)
        deltas.append(new.values if delta is None else delta)
      if not any(getattr(delta, "values", delta).size for delta in deltas):  # nothing changed
        return dataclasses.replace(before[1], base=self._version, delta=(), delta_nbytes=0)
    checksum = transfer.checksum(piece.values for piece in pieces)
    delta_nbytes = sum(delta.nbytes for delta in deltas)
    if before is None or delta_nbytes > transfer.MAX_DELTA_SHARE * nbytes:
      return Group(key, (self._put(list(pieces)),), nbytes, checksum)
    changes = self._put(deltas)  # first, since most engines wait for it
    return Group(key, (self._put(list(pieces)),), nbytes, checksum, self._version, (changes,), delta_nbytes)
