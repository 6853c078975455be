"""Copies of arrays, in buffers that are not donated or overwritten."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.types import Params


def copy_leaves(tree: Any) -> Any:
  """Copies every array of a tree, on the same devices. Under `jax.jit`, too, no output aliases an input."""
  return jax.tree.map(jnp.copy, tree)


_copy_on_device = jax.jit(copy_leaves)


def owned_copy(params: Params) -> Params:
  """Copies parameters into new buffers on the same devices, and waits for the copy."""
  return jax.block_until_ready(_copy_on_device(params))


def is_key(leaf: Any) -> bool:
  """Whether a leaf is a typed PRNG key, or the shape of one."""
  return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def host_copies(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Copies named leaves into memory that the learner can neither donate nor overwrite.

  The copies are on the host. Arrays whose shards are spread over several processes are copied on their devices instead,
  all by one program. On accelerators, a program per leaf would do. But XLA's CPU client queues at most 32 programs
  (behind a chunk of an engine, for example), and then blocks the threads that this chunk needs for its collectives.
  """
  plain = {name: jax.random.key_data(leaf) if is_key(leaf) else leaf for name, leaf in leaves.items()}
  spread = {k: x for k, x in plain.items() if isinstance(x, jax.Array) and not x.is_fully_addressable}
  copied = _copy_on_device(spread) if spread else {}
  return {name: copied[name] if name in copied else _on_host(name, leaf) for name, leaf in plain.items()}


def _on_host(name: str, leaf: Any) -> np.ndarray:
  if isinstance(leaf, jax.Array | np.ndarray | np.generic):
    return np.array(leaf)
  raise ValueError(f"State leaf {name!r} must be an array; received {type(leaf).__name__}. Pass others as `host`.")
