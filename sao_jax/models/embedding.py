"""Token embeddings where the vocabulary is split over the devices of a rollout engine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sao_jax.parallel.axes import ROWS, axes_for, weights_in_place
from sao_jax.parallel.constraints import ambient_mesh
from sao_jax.parallel.rules import ENGINE_RULES, spec_for


def look_up(table: Float[Array, "V D"], tokens: Int[Array, "*tokens"], dtype: Any) -> Float[Array, "*tokens D"]:
  """Embeds tokens in `dtype`; ids outside the vocabulary are clipped.

  On a mesh of an engine's own, each device looks up the ids of its part of the vocabulary, and a sum over devices adds
  the others. The compiler would gather the table instead.
  """
  mesh = ambient_mesh()
  if mesh is None or not weights_in_place(mesh):
    return table.astype(dtype).at[tokens].get(mode="clip")
  spec = spec_for(("embed", "embedding"), table.shape, mesh, ENGINE_RULES)
  split = (spec[0],) if isinstance(spec[0], str) else spec[0] or ()
  rows = axes_for(mesh, tokens.shape[0], *ROWS)
  travel = tuple(name for name in split if name in rows)
  others = tuple(name for name in split if name not in rows)

  def local(table: jax.Array, tokens: jax.Array) -> jax.Array:
    if travel:
      tokens = jax.lax.all_gather(tokens, travel, axis=0, tiled=True)
    ids = tokens
    if split:
      ids = tokens - jax.lax.axis_index(split) * table.shape[0]
    x = table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False).astype(dtype)
    x = jax.lax.psum(x, others) if others else x
    return jax.lax.psum_scatter(x, travel, scatter_dimension=0, tiled=True) if travel else x

  ids = jnp.clip(tokens, 0, table.shape[0] - 1)
  run = jax.shard_map(
    local, mesh=mesh, in_specs=(spec, P(rows or None)), out_specs=P(rows or None),
    check_vma=False,  # a sum over devices that hold different parts is not seen to be the same on all
  )  # fmt: skip
  embedded: jax.Array = run(table, ids)
  return embedded
