"""The choice of keys and the attention to them, against plain loops in float64."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.models import sparse_attention
from sao_jax.models.sparse_attention import IndexerQueries

ROWS, LENGTH, HEADS, DIM, K = 2, 12, 3, 4, 5
SEGMENTS = np.asarray([[1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 0, 0], [1] * LENGTH])


def _inputs(seed: int = 0) -> tuple[IndexerQueries, jax.Array]:
  rng = np.random.default_rng(seed)

  def draw(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  return IndexerQueries(draw(ROWS, LENGTH, HEADS, DIM), draw(ROWS, LENGTH, HEADS)), draw(ROWS, LENGTH, DIM)


def _first_largest(scores: Any, k: int) -> list[int]:
  return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def _chosen(queries: IndexerQueries, keys: jax.Array) -> np.ndarray:
  """The mask `[B, T, T]` from the definition, in float64."""
  q, w, k = (np.asarray(x, np.float64) for x in (queries.heads, queries.weights, keys))
  mask = np.zeros((ROWS, LENGTH, LENGTH), bool)
  for b, t in np.ndindex(ROWS, LENGTH):
    seen = [s for s in range(t + 1) if SEGMENTS[b, s] == SEGMENTS[b, t]]
    scores = [sum(w[b, t, j] * max(q[b, t, j] @ k[b, s], 0.0) for j in range(HEADS)) for s in seen]
    mask[b, t, [seen[i] for i in _first_largest(scores, K)]] = True
  return mask


@given(data=st.data())
def test_the_k_largest_are_marked_and_of_equal_ones_the_first(data: st.DataObject) -> None:
  values = st.sampled_from([0.0, -0.0, 1.5, -1.5, 1e-30, -1e30, 3.0])
  scores = np.asarray(data.draw(st.lists(st.lists(values, min_size=7, max_size=7), min_size=2, max_size=2)), np.float32)
  allowed = np.asarray(data.draw(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=2, max_size=2)))
  k = data.draw(st.sampled_from([1, 3, 9]))
  normal = np.where(scores == 0, np.float32(0.0), scores)  # as `index_scores` leaves them
  got = np.asarray(jax.jit(sparse_attention.top_mask, static_argnums=2)(normal, allowed, k))
  for row in range(2):
    places = np.flatnonzero(allowed[row])
    want = places[_first_largest(scores[row][places].tolist(), k)] if places.size else places
    np.testing.assert_array_equal(np.flatnonzero(got[row]), np.sort(want))


def test_scores_have_no_negative_zero() -> None:
  """Or a key without a score would rank below others of the same score."""
  queries = IndexerQueries(jnp.ones((1, 1, 1, 1)), jnp.full((1, 1, 1), -2.0))
  scores = np.asarray(sparse_attention.index_scores(queries, jnp.asarray([[[-1.0], [0.5]]])))
  np.testing.assert_array_equal(scores, [[[0.0, -1.0]]])
  assert not np.signbit(scores[0, 0, 0])


def test_the_choice_equals_its_definition() -> None:
  queries, keys = _inputs()
  choose = jax.jit(functools.partial(sparse_attention.choose_packed, k=K))
  got = np.unpackbits(np.asarray(choose(queries, keys, SEGMENTS)), axis=-1, count=LENGTH).astype(bool)
  np.testing.assert_array_equal(got, _chosen(queries, keys))


def test_attention_and_its_gradients_equal_masked_attention() -> None:
  rng = np.random.default_rng(1)
  q, k, v = (jnp.asarray(rng.normal(size=(ROWS, LENGTH, 2, dim)), jnp.float32) for dim in (4, 4, 3))
  mask = _chosen(*_inputs())
  bits = jnp.packbits(jnp.asarray(mask), axis=-1)

  def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bshd->bhqs", q, k) * 0.7
    return jnp.einsum("bhqs,bshd->bqhd", jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf)), v)

  def chosen(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return sparse_attention.attend_chosen(q, k, v, bits, 0.7)

  def both(attend: Any) -> Any:
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(attend(*x))), argnums=(0, 1, 2)))(q, k, v)

  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), both(chosen), both(plain))


def test_blocks_of_queries_hold_a_bounded_number_of_scores() -> None:
  """The compiled gradient over a long row holds nothing of the size of all its scores."""
  length, heads = 4096, 64

  def loss(q: jax.Array, k: jax.Array, v: jax.Array, bits: jax.Array) -> jax.Array:
    return jnp.sum(sparse_attention.attend_chosen(q, k, v, bits, 1.0))

  array = jax.ShapeDtypeStruct((1, length, heads, 8), jnp.float32)
  bits = jax.ShapeDtypeStruct((1, length, length // 8), jnp.uint8)
  memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(array, array, array, bits).compile().memory_analysis()
  assert memory.temp_size_in_bytes < heads * length * length * 4 / 2
