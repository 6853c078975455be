"""Attention over packed rows: causal, inside segments; one function, several implementations (`attention_impl`).

* "xla": `jax.nn.dot_product_attention` with a mask; scores of a whole row exist. Short rows.
* "chunked": blocks of queries in a loop, each recomputed in the backward pass; scores of one block exist. Any platform.
* "splash": the Pallas kernel that JAX ships for TPUs, with a backward pass of its own; scores never leave the core.
* "auto": "splash" on TPUs where its shapes allow, "xla" up to `CHUNKED_FROM` tokens, "chunked" beyond.

On a mesh, rows are split over its row axes, heads over `tensor`, queries over `context`; keys and values of a row are
small beside its scores, and are gathered along `context`.

Shapes: B rows, T tokens, H query heads, K key/value heads, Dh head_dim.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from sao_jax.models.mesh import ROWS, ambient_mesh, axes_for

CHUNKED_FROM = 8192
_QUERY_BLOCK = 256
_LANES = 128


def packed_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  scale: float,
  impl: str = "xla",
  *,
  interpret: bool = False,
) -> jax.Array:
  """softmax(scale * q k^T) v over the keys of the same segment that are not later.

  Args:
    q: `[B, T, H, Dh]`.
    k: `[B, T, K, Dh]`, K a divisor of H.
    v: `[B, T, K, Dh]`.
    segment_ids: `[B, T]` int32.
    scale: of the scores.
    impl: see the module.
    interpret: run Pallas kernels in interpret mode (tests on CPU).

  Returns:
    `[B, T, H, Dh]` in q's dtype.
  """
  if impl == "auto":
    anywhere = functools.partial(packed_attention, scale=scale, impl="xla" if q.shape[1] < CHUNKED_FROM else "chunked")
    if q.shape[1] % _LANES or q.shape[-1] % _LANES:
      return anywhere(q, k, v, segment_ids)
    on_tpu = functools.partial(packed_attention, scale=scale, impl="splash")
    return jax.lax.platform_dependent(q, k, v, segment_ids, tpu=on_tpu, default=anywhere)
  if impl == "xla":
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, scale=scale)
  mesh = ambient_mesh()
  if impl == "chunked":
    if mesh is None:
      return _chunked(q, k, v, segment_ids, segment_ids, jnp.int32(0), scale=scale)
    return _chunked_on_mesh(mesh, q, k, v, segment_ids, scale)
  if impl == "splash":
    from sao_jax.models import splash  # Pallas takes long to import, and few runs need it.

    return splash.attend(mesh, q, k, v, segment_ids, scale, interpret=interpret)
  raise ValueError(f"attention_impl must be auto, xla, chunked or splash; received {impl!r}.")


def _chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segments: jax.Array,
  k_segments: jax.Array,
  first: jax.Array,
  *,
  scale: float,
) -> jax.Array:
  """Queries `first, first + 1, ...` of a row against all its keys, one block of queries at a time."""
  rows, length = q.shape[:2]
  block = math.gcd(length, _QUERY_BLOCK)
  keys = jnp.arange(k.shape[1])

  @jax.checkpoint
  def one(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    q_block, segments, positions = inputs
    same = segments[:, None, :, None] == k_segments[:, None, None, :]
    allowed = same & (positions[:, None] >= keys[None, :])
    return jax.nn.dot_product_attention(q_block, k, v, mask=allowed, scale=scale)

  def blocks(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x.reshape(rows, -1, block, *x.shape[2:]), 1, 0)

  positions = (first + jnp.arange(length)).reshape(-1, block)
  out = jax.lax.map(one, (blocks(q), blocks(q_segments), positions))
  return jnp.moveaxis(out, 0, 1).reshape(q.shape)


def specs(mesh: AbstractMesh, q: jax.Array, k: jax.Array) -> tuple[P, P, P, P]:
  """Of queries `[B, T, H, Dh]`, of keys and values, of the queries' segments `[B, T]` and of the keys'."""
  rows, context = axes_for(mesh, q.shape[0], *ROWS) or None, axes_for(mesh, q.shape[1], "context") or None
  heads = axes_for(mesh, k.shape[2], "tensor") or None
  return P(rows, context, heads, None), P(rows, None, heads, None), P(rows, context), P(rows, None)


def _chunked_on_mesh(
  mesh: AbstractMesh, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float
) -> jax.Array:
  queries, keys, query_segments, key_segments = specs(mesh, q, k)

  def local(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, k_segments: jax.Array) -> jax.Array:
    first = jax.lax.axis_index("context") * q.shape[1] if queries[1] else jnp.int32(0)
    return _chunked(q, k, v, q_segments, k_segments, first, scale=scale)

  run = jax.shard_map(
    local, mesh=mesh, in_specs=(queries, keys, keys, query_segments, key_segments), out_specs=queries, check_vma=False
  )
  return run(q, k, v, segment_ids, segment_ids)
