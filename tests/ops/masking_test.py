"""sao_jax.ops.masking (PITFALLS 5, 7, 17, 18)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.ops import masking

NUMBERS = st.lists(st.floats(-100, 100, width=32), min_size=8, max_size=8)
MASKS = st.lists(st.booleans(), min_size=8, max_size=8)


@given(NUMBERS, MASKS)
def test_mean_and_whitening_are_their_definitions(x, mask):
  x, mask = np.array(x, np.float32), np.array(mask)
  dirty = np.where(mask, x, np.nan)
  kept = x[mask].astype(np.float64)
  mean = kept.mean() if mask.any() else 0.0
  np.testing.assert_allclose(masking.masked_mean(dirty, mask), mean, rtol=1e-5, atol=1e-4)
  white = np.asarray(masking.masked_whiten(dirty, mask))
  expected = np.zeros(8)
  if mask.any():
    expected[mask] = kept - mean
  if mask.sum() >= 2 and kept.std() > 1e-3:
    expected /= kept.std()
  if mask.sum() < 2 or kept.std() > 1e-3 or kept.std() == 0:
    np.testing.assert_allclose(white, expected, rtol=1e-3, atol=2e-4)
  assert np.isfinite(white).all()


def test_denominator_is_the_callers_number():
  x, mask = jnp.array([1.0, 1.0, 0.0, 0.0]), jnp.array([True, True, True, True])
  assert float(masking.masked_mean(x, mask)) == 0.5
  halves = [masking.masked_mean(x[i : i + 2], mask[i : i + 2], denominator=4) for i in (0, 2)]
  assert float(sum(halves)) == 0.5
  assert float(masking.masked_mean(x, mask, denominator=0)) == 0.0
  assert float(jax.jit(lambda d: masking.masked_mean(x, mask, denominator=d))(jnp.int32(8))) == 0.25


def test_nothing_masked_in_is_zero_with_zero_gradients():
  mask = jnp.zeros(3, bool)
  for f in (masking.masked_mean, lambda x, m: masking.masked_whiten(x, m).sum()):
    value, g = jax.value_and_grad(f)(jnp.array([jnp.nan, jnp.inf, 1.0]), mask)
    assert float(value) == 0.0
    np.testing.assert_array_equal(g, np.zeros(3))


def test_single_and_equal_entries_are_only_centred():
  one = masking.masked_whiten(jnp.array([3.0, jnp.nan]), jnp.array([True, False]))
  np.testing.assert_array_equal(one, [0.0, 0.0])
  equal = masking.masked_whiten(jnp.full((5,), 0.1), jnp.ones(5, bool))
  np.testing.assert_array_equal(equal, np.zeros(5))
  g = jax.grad(lambda x: masking.masked_whiten(x, jnp.ones(5, bool))[0])(jnp.full((5,), 0.1))
  assert np.isfinite(g).all()
  assert masking.masked_moments(jnp.full((7,), 1e6 / 3), jnp.ones(7, bool)).variance == 0


def test_each_row_has_its_own_mask_under_vmap():
  x = jnp.arange(6.0).reshape(2, 3)
  mask = jnp.array([[True, False, False], [False, True, True]])
  np.testing.assert_allclose(jax.vmap(masking.masked_mean)(x, mask), [0.0, 4.5])
  np.testing.assert_allclose(jax.vmap(masking.masked_whiten)(x, mask), [[0, 0, 0], [0, -1, 1]], atol=1e-6)


def test_integers_become_float32(own_checks):
  out = masking.masked_mean(jnp.array([1, 2]), jnp.array([1, 1]))
  assert out.dtype == jnp.float32
  assert float(out) == 1.5


def test_alignment_shifts_right_by_one_on_any_axis_and_dtype():
  x = jnp.arange(12, dtype=jnp.bfloat16).reshape(2, 3, 2)
  out = masking.align_predictions(x)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_array_equal(out[:, 1:], x[:, :-1])
  np.testing.assert_array_equal(out[:, 0], np.zeros((2, 2)))
  np.testing.assert_array_equal(masking.align_predictions(jnp.arange(3), axis=0, fill=7), [7, 0, 1])
  np.testing.assert_array_equal(masking.align_predictions(jnp.ones((2, 1))), np.zeros((2, 1)))
  with pytest.raises(ValueError, match="axis=1"):
    masking.align_predictions(jnp.zeros(3))


def test_bad_input(own_checks):
  with pytest.raises(ValueError, match=r"x \(2,\), mask \(3,\)"):
    masking.masked_mean(jnp.zeros(2), jnp.zeros(3, bool))
  with pytest.raises(TypeError, match=r"mask must be a bool mask.*float32"):
    masking.masked_mean(jnp.zeros(2), jnp.zeros(2))
  with pytest.raises(ValueError, match="denominator must be a scalar"):
    masking.masked_mean(jnp.zeros(2), jnp.ones(2, bool), denominator=jnp.ones(2))
