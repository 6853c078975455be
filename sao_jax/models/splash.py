"""Splash attention: the Pallas kernel for TPUs that JAX ships, with segments, with or without a mesh."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sao_jax.models.attention_specs import attention_specs

_BLOCK = 512
_LANES = 128


class CausalMask(masks.CausalMask):
  """JAX's causal mask, without computing the blocks off the diagonal.

  To make a kernel for 131,072 tokens, JAX reads 65,536 blocks four times. Computing them took minutes.
  """

  def __getitem__(self, index: Any) -> np.ndarray:
    queries, keys = index
    shape = (queries.stop - queries.start, keys.stop - keys.start)
    if queries.start >= keys.stop - 1:
      return _block(shape, True)
    if queries.stop <= keys.start:
      return _block(shape, False)
    computed: np.ndarray = super().__getitem__(index)
    return computed


@functools.lru_cache(maxsize=8)
def _block(shape: tuple[int, int], value: bool) -> np.ndarray:
  block = np.full(shape, value)
  block.setflags(write=False)
  return block


def attend(
  mesh: AbstractMesh | None,
  q: Float[Array, "B T H Dh"],
  k: Float[Array, "B T K Dh"],
  v: Float[Array, "B T K Dh"],
  segment_ids: Int[Array, "B T"],
  scale: float,
  *,
  interpret: bool = False,
) -> Float[Array, "B T H Dh"]:
  """`attention.packed_attention` with this kernel; `interpret` runs it without a TPU."""
  q = (q * scale).astype(q.dtype)
  if mesh is None:
    kernel = make_kernel(q.shape[2], q.shape[1], head_shards=1, query_shards=1, interpret=interpret)
    return _run(kernel, q, k, v, segment_ids, segment_ids)
  queries, keys, query_segments, key_segments = attention_specs(mesh, q, k)
  kernel = make_kernel(
    q.shape[2], q.shape[1], head_shards=mesh.shape["tensor"] if queries[2] else 1,
    query_shards=mesh.shape["context"] if queries[1] else 1, interpret=interpret,
  )  # fmt: skip
  kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, P(queries[2], queries[1])))
  run = jax.shard_map(
    _run, mesh=mesh, in_specs=(kernel_spec, queries, keys, keys, query_segments, key_segments), out_specs=queries,
    check_vma=False,
  )  # fmt: skip
  return run(kernel, q, k, v, segment_ids, segment_ids)


def make_kernel(
  heads: int, length: int, *, head_shards: int, query_shards: int, interpret: bool
) -> kernels.SplashAttentionKernel:
  """Makes the causal kernel for rows of `length` tokens. Its block table is split like heads and queries."""
  block = math.gcd(length // query_shards, _BLOCK)
  if block % _LANES:
    raise ValueError(
      f"splash attention needs a multiple of {_LANES} tokens per row and device; received {length} / {query_shards}."
    )
  sizes = kernels.BlockSizes(
    block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
  )
  mask = masks.MultiHeadMask([CausalMask((length, length)) for _ in range(heads)])
  return kernels.make_splash_mha(
    mask, head_shards=head_shards, q_seq_shards=query_shards, block_sizes=sizes, interpret=interpret
  )


def _run(
  kernel: kernels.SplashAttentionKernel,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segments: jax.Array,
  k_segments: jax.Array,
) -> jax.Array:
  heads_first = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
  out: Any = jax.vmap(kernel)(*heads_first, kernels.SegmentIds(q_segments, k_segments))
  return jnp.swapaxes(out, 1, 2).astype(q.dtype)
