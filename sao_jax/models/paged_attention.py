"""Attention over the pages of a KV cache, for a ragged batch of prompt and decode tokens: one function.

On TPUs it is the ragged paged attention kernel that JAX ships, for the shapes that this takes (`has_kernel`). Elsewhere
it is a plain reference, one token at a time. Engines do not call the reference: without the kernel they decode through
windows. The kernel that JAX ships for GPUs only decodes, and needs keys and values in arrays of their own, with heads
before pages.

Keys and values of a token lie next to each other: head h's key is `2 h`, its value `2 h + 1`. On a mesh, `tensor`
splits heads if it divides the key/value heads; other axes hold replicas.

Shapes: T tokens, S rows (sequences), N pages per row, P pages, H query heads, K key/value heads, Dh head_dim.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from sao_jax.parallel.axes import axes_for
from sao_jax.parallel.constraints import ambient_mesh
from sao_jax.types import RaggedBatch

_PAGES_PER_BLOCK = 16
_QUERIES_PER_BLOCK = 32
_VMEM_BYTES = 64 * 2**20
_LANES = 128
_REFERENCE_BATCH = 8


def paged_attention(
  q: Float[Array, "T H Dh"],
  k: Float[Array, "T K Dh"],
  v: Float[Array, "T K Dh"],
  pages: Float[Array, "P page 2*K Dh"],
  batch: RaggedBatch,
  scale: float,
  impl: str = "auto",
) -> tuple[Float[Array, "T H Dh"], Float[Array, "P page 2*K Dh"]]:
  """Writes keys and values of the batch to their pages, then softmax(scale · q kᵀ) v over each row's own context.

  Args:
    q, k, v: projections of the batch's tokens; K divides H.
    pages: the cache of one layer.
    batch: rows, pages and positions of the tokens.
    scale: factor of the scores.
    impl: "reference", "tpu", or "auto" by platform.

  Returns:
    The mixed values, in q's dtype (arbitrary for padding tokens), and the pages.

  Raises:
    ValueError: unknown `impl`, or "tpu" with shapes that the kernel does not take.
  """
  if impl not in ("auto", "reference", "tpu"):
    raise ValueError(f"impl must be auto, reference or tpu; received {impl!r}.")

  def local(
    q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, batch: RaggedBatch
  ) -> tuple[jax.Array, jax.Array]:
    both = jnp.stack([k, v], axis=2).reshape(k.shape[0], -1, k.shape[2]).astype(pages.dtype)
    flat = pages.reshape(-1, *pages.shape[2:]).at[batch.targets].set(both)
    pages = flat.reshape(pages.shape)
    if impl == "auto" and has_kernel(k.shape[1], k.shape[2], pages.dtype):
      reference, kernel = functools.partial(_reference, scale=scale), functools.partial(_kernel, scale=scale)
      return jax.lax.platform_dependent(q, pages, batch, default=reference, tpu=kernel), pages
    return (_kernel if impl == "tpu" else _reference)(q, pages, batch, scale=scale), pages

  mesh = ambient_mesh()
  if mesh is None:
    return local(q, k, v, pages, batch)
  cache = pages_spec(k.shape[1], mesh)
  heads = PartitionSpec(None, cache[2])
  run = jax.shard_map(
    local,
    mesh=mesh,
    in_specs=(heads, heads, heads, cache, jax.tree.map(lambda _: PartitionSpec(), batch)),
    out_specs=(heads, cache),
    check_vma=False,
  )
  out: tuple[jax.Array, jax.Array] = run(q, k, v, pages, batch)
  return out


def has_kernel(num_kv_heads: int, head_dim: int, dtype: Any) -> bool:
  """Whether the kernel for TPUs takes pages with these heads. On a mesh, those of one device count."""
  mesh = ambient_mesh()
  devices = 1 if mesh is None or not axes_for(mesh, num_kv_heads, "tensor") else mesh.shape["tensor"]
  tiles, rest = divmod(2 * num_kv_heads // devices * jnp.dtype(dtype).itemsize, 4)
  return head_dim % _LANES == 0 and rest == 0 and (tiles in (1, 2, 4, 8) or tiles % 8 == 0)


def pages_spec(num_kv_heads: int, mesh: Mesh | AbstractMesh) -> PartitionSpec:
  """Returns how a mesh splits the pages of a layer: their heads over `tensor`, if it divides the key/value heads."""
  return PartitionSpec(None, None, axes_for(mesh, num_kv_heads, "tensor") or None)


def empty_pages(
  num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: Any
) -> Float[Array, "P page _ Dh"]:
  """Makes the zero pages of one layer, on a mesh split by `pages_spec`."""
  pages = jnp.zeros((num_pages, page_size, 2 * num_kv_heads, head_dim), dtype)
  mesh = ambient_mesh()
  if mesh is None:
    return pages
  return jax.lax.with_sharding_constraint(pages, NamedSharding(mesh, pages_spec(num_kv_heads, mesh)))


def _reference(q: jax.Array, pages: jax.Array, batch: RaggedBatch, *, scale: float) -> jax.Array:
  """The definition, token by token."""
  rows = jnp.searchsorted(batch.starts, jnp.arange(q.shape[0]), side="right") - 1
  rows = jnp.clip(rows, 0, batch.tables.shape[0] - 1)

  def one(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    query, table, position = inputs
    context = pages[table].reshape(-1, *pages.shape[2:])
    k, v = context[:, 0::2], context[:, 1::2]
    grouped = query.reshape(k.shape[1], -1, query.shape[-1])
    scores = jnp.einsum("kgd,skd->kgs", grouped * scale, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(jnp.arange(k.shape[0]) <= position, scores, -jnp.inf), axis=-1)
    return jnp.einsum("kgs,skd->kgd", weights.astype(v.dtype), v).reshape(query.shape)

  mixed: jax.Array = jax.lax.map(one, (q, batch.tables[rows], batch.positions), batch_size=_REFERENCE_BATCH)
  return mixed.astype(q.dtype)


def _kernel(q: jax.Array, pages: jax.Array, batch: RaggedBatch, *, scale: float) -> jax.Array:
  """The kernel that JAX ships for TPUs."""
  # Pallas takes long to import, and few runs need it.
  from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

  mixed: jax.Array = ragged_paged_attention(
    q, pages, batch.lengths, batch.tables, batch.starts, batch.num_rows, sm_scale=scale,
    num_kv_pages_per_block=min(_PAGES_PER_BLOCK, batch.tables.shape[1]), num_queries_per_block=_QUERIES_PER_BLOCK,
    vmem_limit_bytes=_VMEM_BYTES,
  )  # fmt: skip
  return mixed
