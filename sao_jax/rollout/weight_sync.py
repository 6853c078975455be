"""Weight sync: how the learner's parameters reach the rollout engines.

`WeightStore` keeps the newest version, which an asynchronous engine takes up between two decode chunks.
`WeightHistory` keeps the last few, for schedules that generate with weights of a set age.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from sao_jax.parallel.copies import owned_copy
from sao_jax.types import Params


class WeightSync(Protocol):
  """What the training loop needs: a place to publish to, and what a resume needs of it."""

  def publish(self, params: Params, version: int) -> None:
    """Makes a copy of `params` available to the engines as `version`; the caller may donate `params` afterwards."""
    ...

  def older(self) -> list[tuple[Params, int]]:
    """`(params, version)` of the versions before the newest that a resume needs, oldest first."""
    ...

  def restore(self, older: Sequence[tuple[Params, int]]) -> None:
    """Takes back what `older()` returned; called on a new object, before the first `publish`."""
    ...


class WeightStore:
  """The newest published parameters and their version; thread-safe.

  `publish` copies into buffers that nobody donates, and blocks until the copy is done: the learner may donate its own
  parameters to its next update at once (a reader could otherwise meet deleted buffers). The version before stays alive
  for as long as a reader still holds it, so at most two copies exist while an engine follows.

  Args:
    copy: copies parameters to where the engine reads them, and waits until they are there.
  """

  def __init__(self, copy: Callable[[Params], Params] = owned_copy) -> None:
    self._copy = copy
    self._changed = threading.Condition()
    self._latest: tuple[Params, int] | None = None

  def publish(self, params: Params, version: int) -> None:
    """Makes a copy of `params` the newest weights.

    Args:
      params: pytree of arrays; may be donated by the caller as soon as this returns.
      version: policy version, above every one published before.

    Raises:
      ValueError: `version` does not go up.
    """
    copied = self._copy(params)
    with self._changed:
      if version < 0 or (self._latest is not None and version <= self._latest[1]):
        newest = None if self._latest is None else self._latest[1]
        raise ValueError(f"version must be >= 0 and go up; received {version} after {newest}.")
      self._latest = (copied, version)
      self._changed.notify_all()

  def latest(self) -> tuple[Params, int]:
    """Returns the newest `(params, version)`; never donate them.

    Raises:
      RuntimeError: nothing was published yet.
    """
    with self._changed:
      if self._latest is None:
        raise RuntimeError("WeightStore.latest() called before the first publish().")
      return self._latest

  def wait_for(self, version: int, timeout: float | None = None) -> bool:
    """Waits until `version` or a newer one is published; False if `timeout` seconds passed first."""
    with self._changed:
      return self._changed.wait_for(lambda: self._latest is not None and self._latest[1] >= version, timeout)

  def older(self) -> list[tuple[Params, int]]:
    """Nothing: a resumed run publishes the newest weights first, and no others are ever read."""
    return []

  def restore(self, older: Sequence[tuple[Params, int]]) -> None:
    """Accepts only what `older` returns.

    Raises:
      ValueError: `older` is not empty.
    """
    if older:
      raise ValueError(f"WeightStore keeps no older weights; received {len(older)}.")


class WeightHistory:
  """The last `lag + 1` published versions.

  Args:
    lag: how many versions before the newest are kept; at least 0.
    copy: copies parameters to where the engine reads them, and waits until they are there.
  """

  def __init__(self, lag: int, copy: Callable[[Params], Params] = owned_copy) -> None:
    if lag < 0:
      raise ValueError(f"lag must be >= 0; received {lag}.")
    self._lag = lag
    self._copy = copy
    self._versions: collections.deque[tuple[Params, int]] = collections.deque(maxlen=lag + 1)

  def publish(self, params: Params, version: int) -> None:
    """Appends a copy of `params`; the oldest version is dropped once there are more than `lag + 1`."""
    self._versions.append((self._copy(params), version))

  def ahead(self, switches: int) -> tuple[Params, int]:
    """`(params, version)` of the oldest version kept, or of the one `switches` after it, up to the newest."""
    return self._versions[min(switches, len(self._versions) - 1)]

  def older(self) -> list[tuple[Params, int]]:
    """The `lag` versions before the newest; the oldest is repeated while there are fewer."""
    versions = list(self._versions)
    return ([versions[0]] * (self._lag + 1 - len(versions)) + versions)[:-1]

  def restore(self, older: Sequence[tuple[Params, int]]) -> None:
    """Takes back what `older` returned."""
    for params, version in older:
      if not self._versions or self._versions[-1][1] != version:
        self.publish(params, version)
