"""Copies of a learner's arrays that a save may take its time with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(leaf: Any) -> bool:
  """Whether a leaf is a typed PRNG key, or the shape of one."""
  return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def owned_copies(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Copies leaves into memory that the learner cannot donate or overwrite.

  On the host, or where each process of a pod has its own shards only, on the devices. There all are copied by one
  program. A program each would do on accelerators; XLA's CPU client lets 32 wait, behind an engine's chunk, say, and
  for the place of the next one it blocks the very threads that the chunk needs for its collectives: for ever.
  """
  plain = {name: jax.random.key_data(leaf) if is_key(leaf) else leaf for name, leaf in leaves.items()}
  spread = {k: x for k, x in plain.items() if isinstance(x, jax.Array) and not x.is_fully_addressable}
  copied = _copies(spread) if spread else {}
  return {name: copied[name] if name in copied else _on_host(name, leaf) for name, leaf in plain.items()}


@jax.jit
def _copies(tree: dict[str, jax.Array]) -> dict[str, jax.Array]:
  return jax.tree.map(jnp.copy, tree)


def _on_host(name: str, leaf: Any) -> np.ndarray:
  if isinstance(leaf, jax.Array | np.ndarray | np.generic):
    return np.array(leaf)
  raise ValueError(f"State leaf {name!r} must be an array; received {type(leaf).__name__}. Others go into `host`.")
