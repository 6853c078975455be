"""Published weights: how the learner's parameters reach the rollout engine."""

from __future__ import annotations

import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp

from sao_jax.types import Params


@jax.jit
def _copy(params: Params) -> Params:
  return jax.tree.map(jnp.copy, params)


def owned_copy(params: Params) -> Params:
  """Fresh buffers with the same values, there when this returns (`jnp.copy` is never elided: no output aliases an
  input)."""
  return jax.block_until_ready(_copy(params))


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
