"""Attention over pages: the reference against dense attention, and the lowering of the TPU kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sao_jax.models.paged_attention import has_kernel, paged_attention
from sao_jax.types import RaggedBatch

PAGE, HEADS, KV_HEADS = 8, 4, 2
ROWS = [(5, 5), (17, 1), (12, 7)]
"""Length of each row, and the number of its newest tokens in the batch."""


def make(dim: int):
  """Returns q, k, v, the pages before, the batch, and each row's keys and values, `[length, K, dim]`."""
  rng = np.random.default_rng(0)
  tables = rng.permutation(np.arange(1, 13)).reshape(4, 3).astype(np.int32)
  num_tokens = 16
  pages = rng.normal(size=(13, PAGE, 2 * KV_HEADS, dim)).astype(np.float32)
  q = rng.normal(size=(num_tokens, HEADS, dim)).astype(np.float32)
  k, v = rng.normal(size=(2, num_tokens, KV_HEADS, dim)).astype(np.float32)
  positions, targets = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
  starts, contexts = [0], []
  for table, (length, count) in zip(tables, ROWS, strict=False):
    at, here = np.arange(length - count, length), slice(starts[-1], starts[-1] + count)
    positions[here], targets[here] = at, table[at // PAGE] * PAGE + at % PAGE
    flat = pages[table].reshape(-1, 2 * KV_HEADS, dim)
    old = slice(0, length - count)
    contexts.append([np.concatenate([flat[old, first::2], new[here]]) for first, new in ((0, k), (1, v))])
    starts.append(starts[-1] + count)
  batch = RaggedBatch(
    positions, targets, np.array([*(length for length, _ in ROWS), 1], np.int32), tables,
    np.array([*starts, starts[-1]], np.int32), np.array([len(ROWS)], np.int32),
  )  # fmt: skip
  return *jax.tree.map(jnp.asarray, (q, k, v, pages, batch)), contexts


def dense(q, contexts, scale):
  """Softmax attention from its definition, in float64, over the tokens of the batch."""
  out, first = [], 0
  for (length, count), (keys, values) in zip(ROWS, contexts, strict=True):
    for i in range(count):
      upto = length - count + i + 1
      heads = []
      for h in range(HEADS):
        group = h * KV_HEADS // HEADS
        scores = scale * keys[:upto, group].astype(np.float64) @ q[first + i, h]
        weights = np.exp(scores - scores.max())
        heads.append(weights @ values[:upto, group] / weights.sum())
      out.append(heads)
    first += count
  return np.array(out)


def test_the_kernel_compiles_for_tpus(monkeypatch):
  """Its numbers need a TPU: the interpreter of jax 0.10 does not know the reshapes of references in it."""
  pytest.importorskip("libtpu", reason="needs libtpu, the compiler for TPUs")
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  (device, *_) = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
  mesh = Mesh(np.array([device]), ("tensor",), axis_types=(AxisType.Auto,))
  place = NamedSharding(mesh, PartitionSpec())
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), make(128)[:5])
  with jax.set_mesh(mesh):
    compiled = jax.jit(paged_attention, static_argnums=(5, 6)).lower(*shapes, 0.3, "tpu").compile()
  assert "custom-call" in compiled.as_text()


def test_any_mix_of_prompt_and_decode_tokens_equals_dense_attention():
  dim = 8
  q, k, v, pages, batch, contexts = make(dim)
  out, written = jax.jit(paged_attention, static_argnums=(5, 6))(q, k, v, pages, batch, 0.3, "reference")
  want = dense(np.asarray(q), contexts, 0.3)
  np.testing.assert_allclose(np.asarray(out)[: len(want)], want, atol=2e-5)
  for table, (length, _), (keys, values) in zip(batch.tables, ROWS, contexts, strict=False):
    row = np.asarray(written)[table].reshape(-1, 2 * KV_HEADS, dim)[:length]
    np.testing.assert_array_equal(row[:, 0::2], keys)
    np.testing.assert_array_equal(row[:, 1::2], values)


@pytest.mark.parametrize(
  ("heads", "dim", "dtype", "known"),
  [
    (4, 128, "bfloat16", True), (1, 128, "bfloat16", True), (8, 256, "float32", True), (4, 64, "bfloat16", False),
    (10, 128, "bfloat16", False), (3, 128, "float32", False),
  ],
)  # fmt: skip
def test_which_shapes_the_kernel_for_tpus_takes(heads, dim, dtype, known):
  assert has_kernel(heads, dim, dtype) == known


def test_an_unknown_implementation_is_refused():
  q, k, v, pages, batch, _ = make(8)
  with pytest.raises(ValueError, match="impl must be auto, reference or tpu; received 'gpu'"):
    paged_attention(q, k, v, pages, batch, 0.3, "gpu")
