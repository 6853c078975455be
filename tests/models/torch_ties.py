"""The choice of equal scores that torch makes on CPUs, for comparisons with references made by transformers.

`torch.topk` leaves open which of several equal values it returns. On CPUs it calls the C++ library's `nth_element`,
whose result is determined by the swaps of quickselect. With the few heads of a small indexer, scores of exactly 0 are
so common that nearly every long row has such a tie.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def quickselect(scores: list[float], k: int) -> list[int]:
  """The indices that stand in the first k places after `nth_element` with the larger scores first."""
  order = list(range(len(scores)))

  def before(i: int, j: int) -> bool:
    return scores[i] > scores[j]

  first, last = 0, len(order)
  while last - first > 3:
    # The median of the second, the middle and the last element becomes the pivot, in the first place.
    places = (first + 1, first + (last - first) // 2, last - 1)
    low, middle, high = (order[place] for place in places)
    if before(low, middle):
      pivot = places[1] if before(middle, high) else places[2] if before(low, high) else places[0]
    else:
      pivot = places[0] if before(low, high) else places[2] if before(middle, high) else places[1]
    order[first], order[pivot] = order[pivot], order[first]
    left, right = first + 1, last - 1
    while True:
      while before(order[left], order[first]):
        left += 1
      while before(order[first], order[right]):
        right -= 1
      if left >= right:
        break
      order[left], order[right] = order[right], order[left]
      left, right = left + 1, right - 1
    first, last = (left, last) if left <= k - 1 else (first, left)
  order[first:last] = sorted(order[first:last], key=lambda i: -scores[i])
  return order[:k]


def top_mask(scores: jax.Array, allowed: jax.Array, k: int) -> jax.Array:
  """`sparse_attention.top_mask` with torch's choice of equal scores; for short rows (torch sorts long ones)."""

  def mark(scores: np.ndarray) -> np.ndarray:
    mask = np.zeros(scores.shape, bool)
    for row in np.ndindex(scores.shape[:-1]):
      mask[row][quickselect(scores[row].tolist(), k)] = True
    return mask

  shape = jax.ShapeDtypeStruct(scores.shape, jnp.bool_)
  return jax.pure_callback(mark, shape, jnp.where(allowed, scores, -jnp.inf)) & allowed
