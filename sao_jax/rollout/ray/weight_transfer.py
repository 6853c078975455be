"""Weights between processes: the shards of a pytree as flat pieces, what changed in them, and checksums.

A piece is the part of one leaf that one device of the learner holds. Its values travel as unsigned integers with the
same bits, so that NaN payloads and negative zeros arrive as they are. Pieces travel in groups of about `GROUP_BYTES`.

At a learning rate of 1e-6 about three bfloat16 weights in a hundred change in a step: most updates are smaller than the
distance to the next bfloat16 number. So a group is sent as a delta where that is smaller: the values that changed, and
16-bit offsets in blocks of 65,536 values.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from sao_jax.types import Params

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""First position and end of a piece in each dimension of its leaf."""

GROUP_BYTES = 32 * 2**20
_BLOCK_BITS = 16
MAX_DELTA_SHARE = 0.5
"""A larger delta is not worth its encoding."""
_SAMPLE_STRIDE = 2**10
_SURELY_DENSE = 0.6
"""If more of a sample of at least 1,000 values changed, no delta can be small enough: it may have a third at most."""
_ALIGNMENT = 64
"""JAX shares memory of this alignment (bytes) with NumPy on a CPU, and copies other memory."""
_ROW = 2**15
_FACTOR = 0x9E3779B97F4A7C15
"""Odd, so that multiplication by it, modulo 2^64, loses no bits."""


class Piece(NamedTuple):
  """Values of a part of a leaf."""

  leaf: int
  """Number of the leaf in the pytree."""
  bounds: Bounds
  values: np.ndarray
  """`[n]` unsigned: the bits of the values, in C order."""


class Delta(NamedTuple):
  """Values of a piece that differ from those of the version before."""

  counts: np.ndarray
  """`[blocks]` uint32: how many of them are in each block of 65,536 values."""
  offsets: np.ndarray
  """`[changed]` uint16: their positions in their blocks."""
  values: np.ndarray
  """`[changed]`: their bits."""

  @property
  def nbytes(self) -> int:
    return int(self.counts.nbytes + self.offsets.nbytes + self.values.nbytes)


class Shard(NamedTuple):
  """A part of a leaf that this process sends, as a position in `leaf.addressable_shards`."""

  leaf: int
  position: int
  nbytes: int


def own_shards(leaves: Sequence[jax.Array]) -> list[Shard]:
  """Returns the shards that this process sends. Every part of a leaf has one sender; replicas take turns."""
  mine: list[Shard] = []
  for number, leaf in enumerate(leaves):
    holders: dict[Bounds, list[jax.Device]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
      holders.setdefault(_bounds(index, leaf.shape), []).append(device)
    for position, shard in enumerate(leaf.addressable_shards):
      same = sorted(holders[_bounds(shard.index, leaf.shape)], key=lambda device: device.id)
      if same[number % len(same)] == shard.device:
        mine.append(Shard(number, position, int(shard.data.nbytes)))
  return mine


def groups(shards: Iterable[Shard], group_bytes: int) -> list[list[Shard]]:
  """Divides shards into groups of at most `group_bytes`, or of one shard."""
  made: list[list[Shard]] = []
  size = group_bytes
  for shard in shards:
    if size + shard.nbytes > group_bytes:
      made.append([])
      size = 0
    made[-1].append(shard)
    size += shard.nbytes
  return made


def read(leaves: Sequence[jax.Array], shards: Iterable[Shard]) -> list[Piece]:
  """Reads shards to the host; on a CPU without a copy. The values must not be changed."""
  pieces = []
  for shard in shards:
    found = leaves[shard.leaf].addressable_shards[shard.position]
    pieces.append(Piece(shard.leaf, _bounds(found.index, leaves[shard.leaf].shape), bits(np.asarray(found.data))))
  return pieces


def encode(new: np.ndarray, old: np.ndarray) -> Delta | None:
  """Returns the difference between two versions of a piece's values; None where it would be larger than half of them.

  >>> old = np.zeros(100_000, np.uint16)
  >>> new = old.copy()
  >>> new[[7, 70_000]] = 3, 4
  >>> delta = encode(new, old)
  >>> delta.counts, delta.offsets, delta.values
  (array([1, 1], dtype=uint32), array([   7, 4464], dtype=uint16), array([3, 4], dtype=uint16))
  >>> bool((decode(delta, old) == new).all())
  True
  """
  sample = slice(None, None, _SAMPLE_STRIDE)
  if new.size > 1_000 * _SAMPLE_STRIDE and np.mean(new[sample] != old[sample]) > _SURELY_DENSE:
    return None  # without reading all values
  changed = new != old
  blocks = -(-new.size >> _BLOCK_BITS)
  size = int(np.count_nonzero(changed)) * (2 + new.itemsize) + 4 * blocks
  if size > MAX_DELTA_SHARE * new.nbytes:
    return None
  positions = np.flatnonzero(changed)
  counts = np.bincount(positions >> _BLOCK_BITS, minlength=blocks).astype(np.uint32)
  return Delta(counts, positions.astype(np.uint16), new[positions])


def decode(delta: Delta, old: np.ndarray) -> np.ndarray:
  """Returns the new values, in memory of their own."""
  new = copied(old)
  starts = np.arange(delta.counts.size, dtype=np.int64) << _BLOCK_BITS
  new[np.repeat(starts, delta.counts) + delta.offsets] = delta.values
  return new


def apply(change: np.ndarray | Delta, old: np.ndarray) -> np.ndarray:
  """Returns the new values, in memory of their own: those of a delta, or a copy of whole ones."""
  return decode(change, old) if isinstance(change, Delta) else copied(change)


def copied(values: np.ndarray) -> np.ndarray:
  """Copies values into memory of their own that JAX can share on a CPU."""
  memory = np.empty(values.nbytes + _ALIGNMENT, np.uint8)
  first = -memory.ctypes.data % _ALIGNMENT
  copy = memory[first : first + values.nbytes].view(values.dtype)
  np.copyto(copy, values)
  return copy


def checksum(pieces: Iterable[np.ndarray]) -> int:
  """Returns a 32-bit checksum of values, in their order.

  CRC-32 takes longer than copying, and each side computes this once per version. So rows of 256 KB are first folded
  into one, `sum_i row_i * factor^(n - i)` per column modulo 2^64. The CRC is that of the sum and of what is left. A
  change of any single word changes the sum.
  """
  crc = 0
  for values in pieces:
    raw = values.view(np.uint8)
    whole = raw.size // (8 * _ROW)
    if whole:
      folded = np.zeros(_ROW, np.uint64)
      for row in raw[: whole * 8 * _ROW].view(np.uint64).reshape(whole, _ROW):
        np.multiply(folded, np.uint64(_FACTOR), out=folded)
        np.add(folded, row, out=folded)
      crc = zlib.crc32(folded.data, crc)
    crc = zlib.crc32(raw[whole * 8 * _ROW :].data, crc)
  return crc


def place(shapes: Params, shardings: Params, groups: Iterable[Iterable[Piece]]) -> Params:
  """Places pieces on devices, and waits for it.

  On a CPU, the arrays may share the memory of the pieces, which must not be changed any more.

  Args:
    shapes: pytree of `jax.ShapeDtypeStruct`.
    shardings: the same tree, of shardings.
    groups: all pieces of the weights.

  Raises:
    ValueError: the pieces of a leaf do not have as many values as the leaf.
  """
  by_leaf: dict[int, list[Piece]] = {}
  for piece in itertools.chain.from_iterable(groups):
    by_leaf.setdefault(piece.leaf, []).append(piece)
  leaves, tree = jax.tree.flatten(shapes)
  placed = []
  for number, (shape, sharding) in enumerate(zip(leaves, jax.tree.leaves(shardings), strict=True)):
    pieces = by_leaf.get(number, [])
    sizes = [piece.values.size for piece in pieces]
    if sum(sizes) != shape.size:
      raise ValueError(f"leaf {number} of shape {shape.shape} must have {shape.size} values; received {sizes}.")
    placed.append(jax.make_array_from_callback(shape.shape, sharding, _reader(shape, pieces)))
  made: Params = jax.block_until_ready(jax.tree.unflatten(tree, placed))
  return made


def _reader(shape: jax.ShapeDtypeStruct, pieces: Sequence[Piece]) -> Callable[[Any], np.ndarray]:
  """Returns a function from an index to that part of a leaf."""
  arrays = [
    (piece.bounds, piece.values.view(shape.dtype).reshape([end - first for first, end in piece.bounds]))
    for piece in pieces
  ]

  def part(index: tuple[slice, ...]) -> np.ndarray:
    wanted = _bounds(index, shape.shape)
    filled: np.ndarray | None = None
    for bounds, values in arrays:
      both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(bounds, wanted, strict=True)]
      if any(first >= end for first, end in both):
        continue
      source = values[tuple(slice(first - a, end - a) for (first, end), (a, _) in zip(both, bounds, strict=True))]
      if tuple(both) == wanted:
        return source
      if filled is None:
        filled = np.empty([end - first for first, end in wanted], shape.dtype)
      filled[tuple(slice(first - c, end - c) for (first, end), (c, _) in zip(both, wanted, strict=True))] = source
    assert filled is not None, "the pieces cover the leaf"
    return filled

  return part


def shapes_of(params: Params) -> Params:
  """Returns shapes and dtypes without shardings, which may be pickled."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)


def bits(values: np.ndarray) -> np.ndarray:
  """Returns the bits of an array as flat unsigned integers; a view where the array is contiguous."""
  return np.ascontiguousarray(values).reshape(-1).view(f"u{values.itemsize}")


def _bounds(index: tuple[slice, ...], shape: Sequence[int]) -> Bounds:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
