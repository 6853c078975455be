"""The decoder: packed rows, incremental decoding, and its parts against NumPy."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.models import cached_policy, layers, policy_apply
from sao_jax.models.config import RopeScaling
from tests.models import tiny

SLOTS, ROWS, CHUNK, STEPS, MAX_LEN = 4, 3, 6, 3, 20
WEIGHTS = np.random.default_rng(5).normal(size=(ROWS, MAX_LEN, 24)).astype(np.float32) / 8
CONFIGS = {
  "dense": tiny.dense(),
  "sparse": tiny.sparse(),
  "latent": tiny.latent(q_lora_rank=0),
  "indexed": tiny.indexed(),
}


def _params(name: str) -> Any:
  return tiny.policy_params(CONFIGS[name])


@functools.cache
def _functions(name: str) -> tuple[Any, Any, Any, Any]:
  model = cached_policy(CONFIGS[name])

  def jit(function: Any, static: str) -> Any:
    return jax.jit(function, static_argnames=static, donate_argnums=1)

  def loop(
    params: Any, cache: Any, tokens: jax.Array, start: jax.Array, count: jax.Array, *, live_lens: tuple[int, ...]
  ) -> Any:
    """Decodes the given tokens `[steps, S]`: hidden states `[steps, S, D]` and the cache; rows by falling start."""
    slots = jnp.argsort(start, descending=True)
    window = model.window(cache, slots, start[slots], steps=tokens.shape[0], live_lens=live_lens)

    def body(window: Any, i: jax.Array) -> Any:
      hidden, window = model.step(model.prepare(params), window, tokens[i, slots], i)
      return window, hidden

    window, hidden = jax.lax.scan(body, window, jnp.arange(tokens.shape[0]))
    return hidden[:, jnp.argsort(slots)], model.merge(cache, window, count[slots])

  return model, jax.jit(policy_apply(CONFIGS[name])), jit(model.extend, "live_len"), jit(loop, "live_lens")


def _sequences(seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, tiny.VOCAB, size=(ROWS, MAX_LEN)).astype(np.int32)


def _full(name: str, tokens: np.ndarray) -> np.ndarray:
  positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
  return np.asarray(_functions(name)[1](_params(name), tokens, positions, np.ones_like(tokens)).hidden)


def test_rope_turns_pairs_of_dimensions() -> None:
  config = tiny.dense(rope_theta=500.0, partial_rotary_factor=0.5)
  x = np.random.default_rng(0).normal(size=(3, 2, 8)).astype(np.float32)
  positions = np.asarray([0, 7, 123])
  got = jax.jit(lambda x, at: layers.apply_rope(x, *layers.rope_tables(config, at)))(x, positions)
  want = x.astype(np.float64)
  for t, position in enumerate(positions):
    for pair in range(2):  # 4 of 8 dimensions turn: pairs (0, 2) and (1, 3)
      turned = (x[t, :, pair] + 1j * x[t, :, pair + 2]) * np.exp(1j * position * 500.0 ** (-2 * pair / 4))
      want[t, :, pair], want[t, :, pair + 2] = turned.real, turned.imag
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_llama3_scaling_keeps_short_and_divides_long_wavelengths() -> None:
  scaling = RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192)
  plain, _ = layers.rope_frequencies(tiny.dense(head_dim=64, rope_theta=500_000.0))
  scaled, factor = layers.rope_frequencies(tiny.dense(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling))
  wavelengths = 2 * np.pi / plain
  assert factor == 1.0
  np.testing.assert_allclose(scaled[wavelengths < 2048], plain[wavelengths < 2048])
  np.testing.assert_allclose(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8)
  assert np.all(np.diff(scaled) < 0)


def _attention_oracle(q: np.ndarray, k: np.ndarray, v: np.ndarray, segments: np.ndarray, scale: float) -> np.ndarray:
  out = np.zeros(q.shape)
  groups = q.shape[2] // k.shape[2]
  for b, t, h in np.ndindex(*q.shape[:3]):
    seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
    scores = np.asarray([q[b, t, h] @ k[b, s, h // groups] * scale for s in seen])
    weights = np.exp(scores - scores.max())
    out[b, t, h] = sum(w * v[b, s, h // groups] for w, s in zip(weights / weights.sum(), seen, strict=True))
  return out


def test_packed_attention_equals_its_definition() -> None:
  rng = np.random.default_rng(0)
  q, k, v = (rng.normal(size=(2, 9, heads, 4)).astype(np.float32) for heads in (4, 2, 2))
  segments = np.asarray([[1, 1, 1, 2, 2, 2, 2, 0, 0], [1] * 9])
  got = jax.jit(layers.packed_attention, static_argnums=4)(q, k, v, segments, 0.7)
  np.testing.assert_allclose(got, _attention_oracle(q, k, v, segments, 0.7), atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_rows_equal_the_same_sequences_alone(name: str) -> None:
  tokens = _sequences()
  alone = _full(name, tokens)
  lengths = [7, 4, 5]
  row = np.zeros((1, MAX_LEN), np.int32)
  positions, segments = np.zeros_like(row), np.zeros_like(row)
  start = 0
  for i, length in enumerate(lengths):
    span = slice(start, start + length)
    row[0, span], positions[0, span], segments[0, span] = tokens[i, :length], np.arange(length), i + 1
    start += length
  hidden = np.asarray(_functions(name)[1](_params(name), row, positions, segments).hidden)
  assert np.isfinite(hidden).all()
  start = 0
  for i, length in enumerate(lengths):
    np.testing.assert_allclose(hidden[0, start : start + length], alone[i, :length], atol=1e-5)
    start += length


@pytest.mark.parametrize("name", CONFIGS)
@given(data=st.data())
def test_incremental_equals_full_in_any_chunking(name: str, data: st.DataObject) -> None:
  model, _, extend, loop = _functions(name)
  params, tokens = _params(name), _sequences(data.draw(st.integers(0, 3)))
  want = _full(name, tokens)
  slots = np.asarray(data.draw(st.permutations(range(SLOTS)))[:ROWS], np.int32)
  cache = model.init_cache(SLOTS, MAX_LEN)
  done = np.zeros(ROWS, np.int32)
  for _ in range(5):
    if data.draw(st.booleans()):
      count = np.asarray([data.draw(st.integers(0, CHUNK)) for _ in range(ROWS)], np.int32)
      count = np.minimum(count, MAX_LEN - done)
      fed = np.full((ROWS, CHUNK), 3, np.int32)  # past the count there are real-looking tokens
      for r in range(ROWS):
        fed[r, : count[r]] = tokens[r, done[r] : done[r] + count[r]]
      hidden, cache = extend(params, cache, fed, slots, done, count, live_len=MAX_LEN)
      advanced = count > 0
    else:
      # Every row stops somewhere in the loop; after that it is fed other tokens.
      count = np.asarray([data.draw(st.integers(0, STEPS)) for _ in range(ROWS)], np.int32)
      count = np.minimum(count, MAX_LEN - done)
      fed, at, fed_count = (np.zeros(shape, np.int32) for shape in ((STEPS, SLOTS), SLOTS, SLOTS))
      for r, slot in enumerate(slots):
        fed[: count[r], slot] = tokens[r, done[r] : done[r] + count[r]]
      at[slots], fed_count[slots] = done, count
      hidden, cache = loop(params, cache, fed, at, fed_count, live_lens=(MAX_LEN + STEPS,))
      hidden, advanced = np.asarray(hidden)[np.maximum(count - 1, 0), slots], count > 0
    done = done + count
    for r in np.flatnonzero(advanced):
      np.testing.assert_allclose(hidden[r], want[r, done[r] - 1], atol=1e-5)


def test_rows_of_one_slot_read_each_other() -> None:
  """A context may be split into several rows of one call, in the order of its tokens."""
  model, _, extend, _ = _functions("dense")
  params, tokens = _params("dense"), _sequences()
  cuts = [(0, 5), (5, 4), (9, 2)]
  fed = np.zeros((ROWS, CHUNK), np.int32)
  for r, (start, count) in enumerate(cuts):
    fed[r, :count] = tokens[1, start : start + count]
  start, count = np.asarray(cuts, np.int32).T
  cache = model.init_cache(SLOTS, MAX_LEN)
  hidden, _ = extend(params, cache, fed, np.full(ROWS, 2, np.int32), start, count, live_len=MAX_LEN)
  np.testing.assert_allclose(hidden, _full("dense", tokens)[1, start + count - 1], atol=1e-5)


def _equal(a: Any, b: Any) -> bool:
  return all(jax.tree.leaves(jax.tree.map(lambda x, y: bool((np.asarray(x) == np.asarray(y)).all()), a, b)))


def _marked_cache(model: Any) -> Any:
  """Every entry 7.0: an entry that is not 7.0 was written."""
  return jax.tree.map(lambda x: jnp.full_like(x, 7.0), model.init_cache(SLOTS, MAX_LEN))


def _written(cache: Any) -> np.ndarray:
  """`[S, max_len]`: which positions were written, checked to be the same in every layer, key and value."""
  maps = []
  for layer in cache.values():
    maps.append((np.asarray(layer["key"]) != 7.0).any(axis=(1, 2)))
    maps.append((np.asarray(layer["value"]) != 7.0).any(axis=(1, 3)))
  assert all((m == maps[0]).all() for m in maps)
  return maps[0]


def test_only_what_is_fed_is_written() -> None:
  model, _, extend, loop = _functions("dense")
  params, tokens = _params("dense"), _sequences()[:, :CHUNK]
  _, cache = extend(
    params,
    _marked_cache(model),
    tokens,
    np.asarray([2, SLOTS, 0]),
    np.asarray([1, 0, MAX_LEN - 2]),
    np.asarray([3, 5, 2]),
    live_len=MAX_LEN,
  )
  want = np.zeros((SLOTS, MAX_LEN), bool)
  want[2, 1:4] = want[0, MAX_LEN - 2 :] = True  # the row of slot SLOTS is ignored
  np.testing.assert_array_equal(_written(cache), want)
  at, count = np.asarray([5, 8, 0, 17]), np.asarray([3, 1, 0, 3])
  _, cache = loop(params, _marked_cache(model), tokens[:, :SLOTS][:STEPS], at, count, live_lens=(MAX_LEN,))
  want = np.zeros((SLOTS, MAX_LEN), bool)
  want[0, 5:8] = want[1, 8] = want[3, 17:] = True
  np.testing.assert_array_equal(_written(cache), want)


def test_nothing_past_live_len_is_read() -> None:
  model, _, extend, loop = _functions("dense")
  params, tokens = _params("dense"), _sequences()
  poisoned = jax.tree.map(
    lambda x: (
      jnp.where(jnp.arange(MAX_LEN)[:, None] < 12, x, jnp.nan)
      if x.shape[-1] != MAX_LEN
      else jnp.where(jnp.arange(MAX_LEN) < 12, x, jnp.nan)
    ),
    model.init_cache(SLOTS, MAX_LEN),
  )
  slots, start, count = np.arange(ROWS), np.zeros(ROWS, np.int32), np.full(ROWS, 5)
  hidden, cache = extend(params, poisoned, tokens[:, :CHUNK], slots, start, count, live_len=12)
  assert np.isfinite(hidden).all()
  hidden, _ = loop(params, cache, tokens[:, :SLOTS], np.full(SLOTS, 5), np.full(SLOTS, 3), live_lens=(12,))
  assert np.isfinite(hidden).all()


@pytest.mark.parametrize(("last", "live_lens"), [(17, (12,)), (2, (12,)), (2, (12, 6))])
def test_live_lens_change_no_number(last: int, live_lens: tuple[int, ...]) -> None:
  """Not for slots whose loop fits in them; those beyond are idle, and nothing is written for them."""
  model, _, _, loop = _functions("dense")
  params = _params("dense")
  keys = iter(jax.random.split(jax.random.key(3), 100))
  cache = jax.tree.map(lambda x: np.asarray(jax.random.normal(next(keys), x.shape)), model.init_cache(SLOTS, MAX_LEN))
  tokens = np.arange(STEPS * SLOTS, dtype=np.int32).reshape(STEPS, SLOTS)
  at, count = np.asarray([3, 0, 9, last], np.int32), np.asarray([3, 2, 1, 0], np.int32)
  hidden, got = loop(params, jax.tree.map(jnp.asarray, cache), tokens, at, count, live_lens=live_lens)
  want_hidden, want = loop(params, jax.tree.map(jnp.asarray, cache), tokens, at, count, live_lens=(MAX_LEN,))
  np.testing.assert_allclose(hidden[:, :3], want_hidden[:, :3], atol=1e-5)
  assert np.isfinite(hidden).all()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[3], b[3]), got, cache)


@given(data=st.data())
def test_write_span_equals_its_definition(data: st.DataObject) -> None:
  time_axis, width, length = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([2, 5, 9])), 7
  shape, new_shape = [2, 3, 3], [4, 3, 3]
  shape[1:1] = new_shape[1:1] = []
  shape[time_axis], new_shape[time_axis] = length, width
  array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
  new = -1.0 - np.arange(np.prod(new_shape), dtype=np.float32).reshape(new_shape)
  slots = np.asarray(data.draw(st.lists(st.sampled_from([-1, 0, 1, 2, 99]), min_size=4, max_size=4)))
  start = np.asarray([data.draw(st.integers(0, length)) for _ in slots])
  count = np.asarray([data.draw(st.integers(0, min(width, length - s))) for s in start])
  write = jax.jit(layers.write_span, static_argnames="time_axis")
  got = write(array, new, slots, start, count, time_axis=time_axis - 1)
  want = array.copy()
  for slot, first, n, row in zip(slots, start, count, new, strict=True):
    if 0 <= slot < 2:
      np.moveaxis(want[slot], time_axis - 1, 0)[first : first + n] = np.moveaxis(row, time_axis - 1, 0)[:n]
  np.testing.assert_array_equal(got, want)


@functools.cache
def _gradient(remat: str) -> Any:
  tokens = _sequences()
  positions = np.broadcast_to(np.arange(MAX_LEN, dtype=np.int32), tokens.shape)
  apply = policy_apply(dataclasses.replace(CONFIGS["dense"], remat=remat))

  def loss(params: Any) -> jax.Array:
    return jnp.sum(apply(params, tokens, positions, np.ones_like(tokens)).hidden * WEIGHTS)

  return jax.jit(jax.grad(loss))(_params("dense"))


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_number(remat: str) -> None:
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), _gradient(remat), _gradient("none"))


def test_a_decode_loop_copies_neither_cache_nor_window() -> None:
  """With donation, the compiled loop holds no copy of a whole key or value array, of cache or window."""
  model, params = cached_policy(CONFIGS["dense"]), _params("dense")

  def decode(params: Any, cache: Any, tokens: jax.Array) -> Any:
    window = model.window(cache, jnp.arange(SLOTS), jnp.zeros(SLOTS, jnp.int32), steps=STEPS, live_lens=(12,))

    def body(i: jax.Array, carry: Any) -> Any:
      tokens, window = carry
      hidden, window = model.step(params, window, tokens, i)
      return jnp.argmax(hidden, -1).astype(jnp.int32), window

    tokens, window = jax.lax.fori_loop(0, STEPS, body, (tokens, window))
    return tokens, model.merge(cache, window, jnp.full(SLOTS, STEPS))

  cache = model.init_cache(SLOTS, MAX_LEN)
  lowered = jax.jit(decode, donate_argnums=1).lower(model.prepare(params), cache, jnp.zeros(SLOTS, jnp.int32))
  program = lowered.compile().as_text()
  assert "f32[4,2,8,12]" in program  # what the search below looks for is what there is
  for shape in ("4,2,8,20", "4,2,20,8", "4,2,8,12", "4,2,12,8"):
    copies = [line for line in program.splitlines() if f"f32[{shape}]" in line and " copy(" in line]
    copies = [line for line in copies if "broadcast" not in line]  # the zeros that a window is filled into
    assert not copies, copies
