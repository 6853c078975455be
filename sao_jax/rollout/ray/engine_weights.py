"""Weights of one engine, as seen by the process that talks to it: which groups to send next, and as what."""

from __future__ import annotations

import collections
import logging
from typing import Any

from sao_jax.rollout.ray.weight_sender import Group, Update

_MAX_CALLS = 2
"""Groups that an engine fetches at once."""
METHODS = ("receive_weights", "drop_weights", "swap_weights")
"""Methods of `EngineWorker` that `EngineWeights.next_calls` calls."""

_log = logging.getLogger(__name__)


class WeightSyncError(RuntimeError):
  """An engine's weights differ from the learner's even after a full transfer."""


class EngineWeights:
  """Transfers to one engine, one version at a time.

  Groups go out as soon as they are in the object store. A group is sent as a delta if the engine has the version that
  the delta starts from, and in full otherwise: to a new engine, and to one that has missed a version. If a checksum
  does not match, the newest version is sent in full. If that does not match either, `returned` raises.

  Args:
    name: of the engine, for messages.
  """

  def __init__(self, name: str):
    self.version = -1
    """Version of the engine's weights; -1: it has none."""
    self.counters = collections.Counter[str]()
    self._name = name
    self._update: Update | None = None
    """The version on its way."""
    self._next = 0
    """Number of the next group to send."""
    self._running = 0
    """Number of remote calls that have not returned."""
    self._deltas = 0
    self._only_full = False
    """Whether a checksum did not match since the last swap."""
    self._restart = False

  def next_calls(self, newest: Update | None) -> list[tuple[Any, ...]]:
    """Returns the remote calls to make now: method and arguments.

    Args:
      newest: the newest version in the object store.
    """
    if self._update is None and not self._running and newest is not None and newest.version > self.version:
      self._update, self._next, self._deltas = newest, 0, 0
    update = self._update
    if update is None:
      return []
    if self._restart or update.abandoned:
      if self._running:
        return []
      self._update, self._restart = None, False
      return [self._call("drop_weights")]
    calls: list[tuple[Any, ...]] = []
    while self._next < len(update.groups) and self._running < _MAX_CALLS:
      calls.append(self._send(update.groups[self._next]))
      self._next += 1
    if update.complete and self._next == len(update.groups) and not self._running:
      self._next += 1  # once
      calls.append(self._call("swap_weights", update.shapes, update.version))
    return calls

  def returned(self, method: str, result: Any) -> None:
    """Records that a call has returned.

    Raises:
      WeightSyncError: a checksum did not match in a full transfer that followed a first mismatch.
    """
    self._running -= 1
    if method == "swap_weights":
      assert self._update is not None
      self.version, self._update, self._only_full = self._update.version, None, False
      self.counters["weight_transfers"] += 1
      self.counters["full_weight_transfers"] += not self._deltas
    elif method == "receive_weights" and not result and not self._restart:
      self._mismatch()

  def _mismatch(self) -> None:
    assert self._update is not None
    self.counters["weight_checksum_mismatches"] += 1
    text = f"the checksum of the weights of version {self._update.version} does not match in {self._name}"
    if self._only_full:
      raise WeightSyncError(f"{text}, after a full transfer because of an earlier mismatch.")
    _log.warning("%s; all of them are sent again.", text)
    self._restart = self._only_full = True

  def _send(self, group: Group) -> tuple[Any, ...]:
    as_delta = 0 <= group.base == self.version and not self._only_full
    self._deltas += as_delta
    self.counters["weight_bytes"] += group.nbytes
    self.counters["weight_bytes_sent"] += group.delta_nbytes if as_delta else group.nbytes
    return self._call("receive_weights", group.key, group.full, group.delta if as_delta else None, group.checksum)

  def _call(self, *call: Any) -> tuple[Any, ...]:
    self._running += 1
    return call
