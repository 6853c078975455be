"""Weight sync: how the learner's parameters reach the rollout engines.

`WeightStore` keeps the newest version; an asynchronous engine reads it between two decode chunks. `WeightHistory` keeps
the last few versions, for schedules that generate with weights of a set age.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from sao_jax.parallel.copies import owned_copy
from sao_jax.types import Params


class WeightSync(Protocol):
  """Interface that the training loop publishes weights through."""

  def publish(self, params: Params, version: int) -> None:
    """Makes a copy of `params` available to the engines as `version`. The caller may donate `params` afterwards."""
    ...

  def older(self) -> list[tuple[Params, int]]:
    """Returns `(params, version)` of the older versions that a resumed run needs, oldest first."""
    ...

  def restore(self, older: Sequence[tuple[Params, int]]) -> None:
    """Restores what `older()` returned; called on a new object, before the first `publish`."""
    ...


class WeightStore:
  """The newest published parameters and their version; thread-safe.

  `publish` copies the parameters and waits for the copy. So the learner may donate its own buffers to its next update,
  and no reader meets deleted ones. The previous version lives as long as a reader holds it: while an engine follows,
  there are at most two copies.

  >>> import jax.numpy as jnp
  >>> store = WeightStore()
  >>> store.publish({"w": jnp.zeros(2)}, version=0)
  >>> store.publish({"w": jnp.ones(2)}, version=1)
  >>> params, version = store.latest()
  >>> version, params["w"].tolist()
  (1, [1.0, 1.0])

  Args:
    copy: copies parameters to the engine's devices and waits for the copy.
  """

  def __init__(self, copy: Callable[[Params], Params] = owned_copy) -> None:
    self._copy = copy
    self._changed = threading.Condition()
    self._latest: tuple[Params, int] | None = None

  def publish(self, params: Params, version: int) -> None:
    """Makes a copy of `params` the newest weights.

    Args:
      params: pytree of arrays. The caller may donate them as soon as this returns.
      version: policy version, >= 0 and above every version published before.

    Raises:
      ValueError: `version` is negative or does not increase.
    """
    copied = self._copy(params)
    with self._changed:
      if version < 0 or (self._latest is not None and version <= self._latest[1]):
        newest = None if self._latest is None else self._latest[1]
        raise ValueError(f"version must be >= 0 and increase; received {version} after {newest}.")
      self._latest = (copied, version)
      self._changed.notify_all()

  def latest(self) -> tuple[Params, int]:
    """Returns the newest `(params, version)`. Readers share these arrays: never donate them.

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
    """Returns an empty list: engines read only the newest version, and a resumed run publishes it again."""
    return []

  def restore(self, older: Sequence[tuple[Params, int]]) -> None:
    """Restores nothing.

    Raises:
      ValueError: `older` is not empty.
    """
    if older:
      raise ValueError(f"older must be empty, since a WeightStore keeps no older weights; received {len(older)}.")


class WeightHistory:
  """The last `lag + 1` published versions.

  >>> history = WeightHistory(lag=2)
  >>> for version in range(5):
  ...   history.publish({}, version)
  >>> [history.ahead(switches)[1] for switches in (0, 1, 2, 9)]
  [2, 3, 4, 4]

  Args:
    lag: number of versions to keep before the newest, >= 0.
    copy: copies parameters to the engine's devices and waits for the copy.

  Raises:
    ValueError: `lag` is negative.
  """

  def __init__(self, lag: int, copy: Callable[[Params], Params] = owned_copy) -> None:
    if lag < 0:
      raise ValueError(f"lag must be >= 0; received {lag}.")
    self._lag = lag
    self._copy = copy
    self._versions: collections.deque[tuple[Params, int]] = collections.deque(maxlen=lag + 1)

  def publish(self, params: Params, version: int) -> None:
    """Appends a copy of `params` as `version`. Drops the oldest version once there are more than `lag + 1`."""
    self._versions.append((self._copy(params), version))

  def ahead(self, switches: int) -> tuple[Params, int]:
    """Returns `(params, version)` of the version that is `switches` after the oldest one kept, at most the newest."""
    return self._versions[min(switches, len(self._versions) - 1)]

  def newest(self) -> tuple[Params, int]:
    """Returns the newest `(params, version)`."""
    return self._versions[-1]

  def older(self) -> list[tuple[Params, int]]:
    """Returns the `lag` versions before the newest. The oldest one is repeated while there are fewer."""
    versions = list(self._versions)
    return ([versions[0]] * (self._lag + 1 - len(versions)) + versions)[:-1]

  def restore(self, older: Sequence[tuple[Params, int]]) -> None:
    """Restores what `older` returned."""
    for params, version in older:
      if not self._versions or self._versions[-1][1] != version:
        self.publish(params, version)
