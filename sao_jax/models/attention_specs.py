"""Partition specs of attention on a mesh, shared by `attention` and `splash`."""

from __future__ import annotations

from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from sao_jax.parallel.axes import ROWS, axes_for


def attention_specs(mesh: AbstractMesh, q: Float[Array, "B T H Dh"], k: Float[Array, "B T K Dh"]) -> tuple[P, P, P, P]:
  """Returns the specs of queries, of keys and values, of the queries' segment ids, and of the keys' segment ids.

  Rows are split over the row axes, heads over `tensor`, and queries over `context`. Keys and values are not split along
  `context`.
  """
  rows, context = axes_for(mesh, q.shape[0], *ROWS) or None, axes_for(mesh, q.shape[1], "context") or None
  heads = axes_for(mesh, k.shape[2], "tensor") or None
  return P(rows, context, heads, None), P(rows, None, heads, None), P(rows, context), P(rows, None)
