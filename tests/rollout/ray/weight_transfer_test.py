"""Weights in pieces: every bit arrives, deltas are small, and a wrong bit is noticed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_jax.rollout.ray import weight_transfer as transfer

BLOCK = 2**16


def bits_of(x) -> np.ndarray:
  return np.asarray(x).reshape(-1).view(f"u{x.dtype.itemsize}")


SPECIAL = {
  # Payloads of NaNs, quiet and signalling, both zeros, infinities, the smallest and largest subnormal number.
  np.uint16: [0x7FC1, 0xFFA5, 0x7F81, 0x0000, 0x8000, 0x7F80, 0xFF80, 0x0001, 0x807F],
  np.uint32: [0x7FC00001, 0xFFA55AA5, 0x7F800001, 0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 1, 0x807FFFFF],
}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_a_delta_restores_every_bit(dtype):
  unsigned = np.uint16 if dtype == ml_dtypes.bfloat16 else np.uint32
  rng = np.random.default_rng(0)
  for size in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7):
    old = rng.integers(0, np.iinfo(unsigned).max, size, unsigned)
    old[: len(SPECIAL[unsigned])] = SPECIAL[unsigned][:size]
    for changed in (0, 1, size // 50):
      new = old.copy()
      where = rng.choice(size, changed, replace=False)
      new[where] = rng.choice(SPECIAL[unsigned], changed)  # from any NaN or zero to any other
      delta = transfer.encode(new, old)
      if delta is None:
        assert size < BLOCK  # the counts of the blocks outweigh it
        continue
      restored = transfer.decode(delta, old)
      np.testing.assert_array_equal(restored, new)
      assert not np.shares_memory(restored, old)
      assert delta.values.size == np.count_nonzero(new != old)
      assert transfer.checksum([restored]) == transfer.checksum([new])


def test_a_delta_of_most_values_is_no_delta():
  old = np.arange(BLOCK, dtype=np.uint16)
  new = old.copy()
  new[: BLOCK // 5] += 1
  delta = transfer.encode(new, old)
  assert delta is not None and delta.nbytes <= transfer.MAX_DELTA_SHARE * new.nbytes
  new[: BLOCK // 3] += 1
  assert transfer.encode(new, old) is None
  old = np.zeros(2**21, np.uint16)  # large enough for a sample
  new = old.copy()
  assert transfer.encode(new + 1, old) is None
  new[:: transfer._SAMPLE_STRIDE] = 1  # the sample alone
  assert transfer.encode(new, old) is None
  new = old.copy()
  new[3::100] = 1
  np.testing.assert_array_equal(transfer.decode(transfer.encode(new, old), old), new)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 8 * transfer._ROW, 24 * transfer._ROW + 5]))
def test_a_flipped_bit_and_swapped_values_change_the_checksum(seed, size):
  rng = np.random.default_rng(seed)
  values = rng.integers(0, 256, size, np.uint8)
  before = transfer.checksum([values])
  other = values.copy()
  other[rng.integers(size)] ^= 1 << rng.integers(8)
  assert transfer.checksum([other]) != before
  i, j = rng.integers(size, size=2)
  if values[i] != values[j]:
    other = values.copy()
    other[[i, j]] = other[[j, i]]
    assert transfer.checksum([other]) != before
  row = 8 * transfer._ROW
  if size > 2 * row:  # whole rows in another order
    other = values.copy()
    other[:row], other[row : 2 * row] = values[row : 2 * row], values[:row]
    assert transfer.checksum([other]) != before


def test_all_pieces_of_a_sharded_tree_come_back():
  """With several devices: `tests.rollout.ray.mesh_engine_test`."""
  params = {
    "a": jax.random.normal(jax.random.key(0), (33, 7), jnp.bfloat16),
    "b": {"c": jnp.float32(-0.0), "d": jnp.arange(5)},
  }
  leaves = jax.tree.leaves(params)
  shards = transfer.own_shards(leaves)
  assert [(shard.leaf, shard.position) for shard in shards] == [(0, 0), (1, 0), (2, 0)]
  made = transfer.groups(shards, group_bytes=464)
  assert [len(group) for group in made] == [1, 2]
  shapes = transfer.shapes_of(params)
  place = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes)
  groups = [transfer.read(leaves, group) for group in made]
  placed = transfer.place(shapes, place, groups)
  for x, y in zip(jax.tree.leaves(placed), leaves, strict=True):
    assert x.shape == y.shape and x.dtype == y.dtype
    np.testing.assert_array_equal(bits_of(x), bits_of(y))
  with pytest.raises(ValueError, match=r"leaf 0 of shape \(33, 7\) must have 231 values; received \[\]"):
    transfer.place(shapes, place, groups[1:])


def test_a_leaf_is_put_together_from_pieces_of_another_sharding():
  leaf = np.arange(6 * 8, dtype=np.int32).reshape(6, 8)
  parts = [
    transfer.Piece(0, ((a, b), (c, d)), np.ascontiguousarray(leaf[a:b, c:d]).reshape(-1).view(np.uint32))
    for a, b in ((0, 2), (2, 6))
    for c, d in ((0, 3), (3, 8))
  ]
  part = transfer._reader(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), parts)
  for index in (np.s_[:, :], np.s_[1:5, 2:4], np.s_[0:2, 0:3], np.s_[3:4, 7:8]):
    np.testing.assert_array_equal(part(index), leaf[index])
