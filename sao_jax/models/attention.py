"""Attention over packed rows, causal and within segments: one function with several implementations (`attention_impl`).

* "xla": `jax.nn.dot_product_attention` with a mask. It holds the scores of a whole row; for short rows.
* "heads_first": the same with matmuls over contiguous heads. On CPUs it takes less than half the time of "xla".
* "chunked": a loop over blocks of queries, each recomputed in the backward pass. It holds the scores of one block; for
  any platform.
* "splash": the Pallas kernel that JAX ships for TPUs, with its own backward pass. Scores never leave the core.
* "auto": "splash" on TPUs if the shapes allow it. Otherwise, up to `CHUNKED_FROM` tokens, "heads_first" on CPUs that
  hold whole rows and "xla" elsewhere; "chunked" for longer rows.

On a mesh, rows are split over its row axes, heads over `tensor`, and queries over `context`. Keys and values are
gathered along `context`, since they are small beside the scores.

Shapes: B rows, T tokens, H query heads, K key/value heads, Dh head_dim.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxtyping import Array, Float, Int

from sao_jax.models.attention_specs import attention_specs
from sao_jax.parallel.constraints import ambient_mesh

CHUNKED_FROM = 8192
_HALVED_FROM = 128
_QUERY_BLOCK = 256
_LANES = 128


def packed_attention(
  q: Float[Array, "B T H Dh"],
  k: Float[Array, "B T K Dh"],
  v: Float[Array, "B T K Dh"],
  segment_ids: Int[Array, "B T"],
  scale: float,
  impl: str = "xla",
  *,
  interpret: bool = False,
) -> Float[Array, "B T H Dh"]:
  """softmax(scale · q kᵀ) v over the keys of the same segment up to the query's own position.

  Args:
    q: queries.
    k: keys; K divides H.
    v: values.
    segment_ids: tokens attend only to tokens with the same id.
    scale: factor of the scores.
    impl: "auto", "xla", "heads_first", "chunked" or "splash"; see the module.
    interpret: run Pallas kernels in interpret mode (tests on CPU).

  Returns:
    The attention's output, in q's dtype.

  Raises:
    ValueError: unknown `impl`, or "splash" with rows that are not a multiple of 128 tokens per device.

  >>> x, ids = jnp.ones((1, 3, 2, 4)), jnp.array([[1, 1, 2]])
  >>> packed_attention(x, x[:, :, :1], x[:, :, :1], ids, scale=0.5).shape
  (1, 3, 2, 4)
  """
  if impl == "auto":
    short = q.shape[1] < CHUNKED_FROM
    default, on_cpu, on_tpu = (
      functools.partial(packed_attention, scale=scale, impl=choice)
      for choice in ("xla" if short else "chunked", "heads_first" if short else "chunked", "splash")
    )
    # "heads_first" would gather rows whose tokens are split over devices.
    mesh = ambient_mesh()
    choices = {"cpu": on_cpu} if mesh is None or mesh.shape["context"] == 1 else {}
    if not (q.shape[1] % _LANES or q.shape[-1] % _LANES):
      choices["tpu"] = on_tpu
    return jax.lax.platform_dependent(q, k, v, segment_ids, default=default, **choices)
  if impl == "xla":
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True, scale=scale)
  if impl == "heads_first":
    return _heads_first(q, k, v, segment_ids, scale)
  mesh = ambient_mesh()
  if impl == "chunked":
    if mesh is None:
      return _chunked(q, k, v, segment_ids, segment_ids, jnp.int32(0), scale=scale)
    return _chunked_on_mesh(mesh, q, k, v, segment_ids, scale)
  if impl == "splash":
    from sao_jax.models import splash  # Pallas takes long to import, and few runs need it.

    return splash.attend(mesh, q, k, v, segment_ids, scale, interpret=interpret)
  raise ValueError(f"attention_impl must be auto, xla, heads_first, chunked or splash; received {impl!r}.")


def _heads_first(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float) -> jax.Array:
  """The first half of a row's queries skips the second half of its keys. Weights are normalised after the matmul."""
  (rows, length, _, dim), kv_heads = q.shape, k.shape[2]
  queries = (q * scale).astype(q.dtype).reshape(rows, length, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
  keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  allowed = (segment_ids[:, :, None] == segment_ids[:, None, :]) & jnp.tri(length, dtype=bool)
  middle = length // 2 if length >= _HALVED_FROM else 0
  halves = [(0, middle), (middle, length)] if middle else [(0, length)]
  outputs = []
  for first, last in halves:
    merged = queries[:, :, :, first:last].reshape(rows, kv_heads, -1, dim)
    scores = jnp.einsum("bkqd,bksd->bkqs", merged, keys[:, :, :last], preferred_element_type=jnp.float32)
    scores = scores.reshape(rows, kv_heads, -1, last - first, last)
    scores = jnp.where(allowed[:, None, None, first:last, :last], scores, -jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.sum(weights, axis=-1, keepdims=True)  # at least 1: every token attends to itself
    mixed = jnp.einsum(
      "bkqs,bksd->bkqd", weights.astype(v.dtype).reshape(rows, kv_heads, -1, last), values[:, :, :last],
      preferred_element_type=jnp.float32,
    )  # fmt: skip
    outputs.append(mixed.reshape(rows, kv_heads, -1, last - first, dim) / total)
  joined = jnp.concatenate(outputs, axis=3) if middle else outputs[0]
  return joined.transpose(0, 3, 1, 2, 4).reshape(q.shape).astype(q.dtype)


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
  """Attention of a row's queries `first, first + 1, ...` to all its keys, one block of queries at a time."""
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


def _chunked_on_mesh(
  mesh: AbstractMesh, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, scale: float
) -> jax.Array:
  queries, keys, query_segments, key_segments = attention_specs(mesh, q, k)

  def local(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, k_segments: jax.Array) -> jax.Array:
    first = jax.lax.axis_index("context") * q.shape[1] if queries[1] else jnp.int32(0)
    return _chunked(q, k, v, q_segments, k_segments, first, scale=scale)

  run = jax.shard_map(
    local, mesh=mesh, in_specs=(queries, keys, keys, query_segments, key_segments), out_specs=queries, check_vma=False
  )
  return run(q, k, v, segment_ids, segment_ids)
