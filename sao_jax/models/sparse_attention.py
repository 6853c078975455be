"""Sparse attention (DSA): every query attends to the `index_topk` keys that a small indexer gives the largest scores.

The score of a key is I[t, s] = Σ_j w[t, j] · relu(q[t, j] · k[s]) over the indexer's heads j (DeepSeek-V3.2,
arXiv 2512.02556, equation 1). As in transformers, q and k are rotated, and w holds the factor
1 / sqrt(heads · dimensions). Of equal scores, those of earlier keys count. Scores of exactly 0 are common where an
indexer has few heads, and torch breaks such ties in the order that its sorting happens to leave.

The choice has no gradient, so the indexer receives none: the reinforcement-learning loss leaves it as it was loaded.
Only a loss of its own could train it, such as the one that DeepSeek-V3.2 pretrains it with; there is none here.

Over packed rows, a block of queries is computed at a time and its choice is kept as bits, so that no array of all
scores exists. Blocks are recomputed in the backward pass. On a mesh, rows are split over its row axes, heads over
`tensor`, and queries over `context`; each device along `tensor` makes the same choice.

Shapes: B rows, T tokens, H heads of Dk (queries, keys) and Dv (values) dimensions; J heads of Di dimensions in the
indexer; k = index_topk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Float32, Int, UInt8

from sao_jax.models.attention_specs import attention_specs
from sao_jax.parallel.axes import ROWS, axes_for
from sao_jax.parallel.constraints import ambient_mesh

MASKED = -1e30  # finite: a row without allowed keys gives a uniform softmax, not NaN
_MOST_QUERIES = 256
_MOST_SCORES = 2**28
"""Number of scores of a block of queries, over rows, heads and keys: 1 GiB in float32."""


class IndexerQueries(NamedTuple):
  """The queries' side of the indexer's scores."""

  heads: Float[Array, "*tokens J Di"]
  weights: Float32[Array, "*tokens J"]
  """The weight of each head, with the factor of the scores."""


def index_scores(queries: IndexerQueries, keys: Float[Array, "B S Di"]) -> Float32[Array, "B T S"]:
  """Scores of all keys of a row for each of its queries."""
  highest = jax.lax.Precision.HIGHEST
  products = jnp.einsum("btjd,bsd->btjs", queries.heads, keys, preferred_element_type=jnp.float32, precision=highest)
  scores = jnp.einsum("btj,btjs->bts", queries.weights, jax.nn.relu(products), precision=highest)
  return jnp.where(scores == 0.0, 0.0, scores)  # -0.0 is smaller than 0.0 in the order that sorting uses


def top_mask(scores: Float32[Array, "*rows S"], allowed: Bool[Array, "*rows S"], k: int) -> Bool[Array, "*rows S"]:
  """Marks the k largest of the allowed scores of each row, or all of them if they are fewer.

  Of equal scores, the first ones count, as in `jax.lax.top_k`. The k-th largest score is found bit by bit: for a long
  row this takes 32 comparisons with a number, where sorting takes hundreds with other elements.
  """
  bits = jax.lax.bitcast_convert_type(jnp.where(allowed, scores, -jnp.inf), jnp.int32)
  # Unsigned integers in the order of the floats.
  order = jax.lax.bitcast_convert_type(jnp.where(bits < 0, ~bits, bits | jnp.int32(-(2**31))), jnp.uint32)

  def add_bit(i: jax.Array, bound: jax.Array) -> jax.Array:
    larger = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
    enough = jnp.sum(order >= larger[..., None], axis=-1) >= k
    return jnp.where(enough, larger, bound)

  bound = jax.lax.fori_loop(0, 32, add_bit, jnp.zeros(scores.shape[:-1], jnp.uint32))[..., None]
  above, equal = order > bound, order == bound
  room = k - jnp.sum(above, axis=-1, keepdims=True)
  return (above | (equal & (jnp.cumsum(equal, axis=-1) <= room))) & allowed


def choose_packed(
  queries: IndexerQueries, keys: Float[Array, "B T Di"], segment_ids: Int[Array, "B T"], *, k: int
) -> UInt8[Array, "B T bytes"]:
  """Chooses k keys for each query of packed rows, out of those of its segment up to its own position.

  Args:
    queries: of the indexer; `heads` `[B, T, J, Di]`.
    keys: of the indexer.
    segment_ids: tokens attend only to tokens with the same id.
    k: number of keys.

  Returns:
    The mask `[B, T, T]`, packed into bytes along the keys (`jnp.packbits`).
  """
  mesh = ambient_mesh()
  heads = queries.heads.shape[2]

  def local(
    q: jax.Array, weights: jax.Array, keys: jax.Array, q_segments: jax.Array, k_segments: jax.Array
  ) -> jax.Array:
    def one(q: jax.Array, weights: jax.Array, segments: jax.Array, positions: jax.Array) -> jax.Array:
      allowed = _causal(segments, k_segments, positions)
      return jnp.packbits(top_mask(index_scores(IndexerQueries(q, weights), keys), allowed, k), axis=-1)

    first = _first_query(q.shape[1], keys.shape[1])
    return _map_queries(one, (q, weights, q_segments), first, scores_per_query=heads * keys.shape[1])

  arguments = (queries.heads, queries.weights, keys, segment_ids, segment_ids)
  if mesh is None:
    return local(*arguments)
  rows, context = axes_for(mesh, keys.shape[0], *ROWS) or None, axes_for(mesh, keys.shape[1], "context") or None
  specs = (P(rows, context, None, None), P(rows, context, None), P(rows, None, None), P(rows, context), P(rows, None))
  run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(rows, context, None), check_vma=False)
  return run(*arguments)


def attend_chosen(
  q: Float[Array, "B T H Dk"],
  k: Float[Array, "B T H Dk"],
  v: Float[Array, "B T H Dv"],
  chosen: UInt8[Array, "B T bytes"],
  scale: float,
) -> Float[Array, "B T H Dv"]:
  """softmax(scale · q kᵀ) v over the keys that `choose_packed` chose for each query."""
  mesh = ambient_mesh()

  def local(q: jax.Array, k: jax.Array, v: jax.Array, chosen: jax.Array) -> jax.Array:
    def one(q: jax.Array, chosen: jax.Array, positions: jax.Array) -> jax.Array:
      del positions
      allowed = jnp.unpackbits(chosen, axis=-1, count=k.shape[1]).astype(bool)[:, None]
      scores = jnp.einsum("bqhd,bshd->bhqs", q, k, preferred_element_type=jnp.float32) * scale
      weights = jax.nn.softmax(jnp.where(allowed, scores, MASKED), axis=-1).astype(v.dtype)
      return jnp.einsum("bhqs,bshd->bqhd", weights, v)

    return _map_queries(one, (q, chosen), jnp.int32(0), scores_per_query=k.shape[1] * k.shape[2])

  if mesh is None:
    return local(q, k, v, chosen)
  queries, keys, _, _ = attention_specs(mesh, q, k)
  specs = (queries, keys, keys, P(queries[0], queries[1], None))
  run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)
  return run(q, k, v, chosen)


def _causal(segments: jax.Array, k_segments: jax.Array, positions: jax.Array) -> jax.Array:
  """`[B, Q, S]`: keys of the same segment up to each query's place in the row."""
  same = segments[:, :, None] == k_segments[:, None, :]
  return same & (positions[:, None] >= jnp.arange(k_segments.shape[1])[None, :])


def _first_query(queries: int, keys: int) -> jax.Array:
  """Place in the row of this device's first query, inside `shard_map` or outside."""
  return jnp.int32(0) if queries == keys else jax.lax.axis_index("context") * queries


def _map_queries(
  one: Callable[..., jax.Array], inputs: tuple[jax.Array, ...], first: jax.Array, *, scores_per_query: int
) -> jax.Array:
  """Applies `one(*inputs, positions)` to blocks of queries, the second axis of `inputs`, and joins the results."""
  rows, length = inputs[0].shape[:2]
  most = max(min(_MOST_QUERIES, _MOST_SCORES // (rows * scores_per_query)), 1)
  block = math.gcd(length, 2 ** (most.bit_length() - 1))

  def blocks(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x.reshape(rows, -1, block, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def run(arguments: Any) -> jax.Array:
    return one(*arguments)

  positions = (first + jnp.arange(length)).reshape(-1, block)
  out = jax.lax.map(run, (*(blocks(x) for x in inputs), positions))
  return jnp.moveaxis(out, 0, 1).reshape(rows, length, *out.shape[3:])
