"""How attention is split over a mesh: shared by the implementations in `attention` and `splash`."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from sao_jax.parallel.axes import ROWS, axes_for


def attention_specs(mesh: AbstractMesh, q: jax.Array, k: jax.Array) -> tuple[P, P, P, P]:
  """Partition specs of the queries `[B, T, H, Dh]`, keys and values, query segments `[B, T]` and key segments.

  Rows follow the row axes, heads `tensor`, and queries `context`; keys and values are whole along `context`.
  """
  rows, context = axes_for(mesh, q.shape[0], *ROWS) or None, axes_for(mesh, q.shape[1], "context") or None
  heads = axes_for(mesh, k.shape[2], "tensor") or None
  return P(rows, context, heads, None), P(rows, None, heads, None), P(rows, context), P(rows, None)
