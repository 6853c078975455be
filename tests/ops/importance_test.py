"""sao_jax.ops.importance against its definition (PITFALLS 1, 2, 3, 6)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.ops import importance
from tests.ops import oracles

MATH = {"eps_low": 0.3, "eps_high": 5.0}
LOGP = st.floats(-12, 0, width=32)


def test_bounds_are_strict_and_one_plus_five():
  r = np.array([0.7, 0.70001, 5.5, 5.9999, 6.0, 6.0001, 1.0, 0.69999])
  expected = [False, True, True, True, False, False, True, False]
  np.testing.assert_array_equal(importance.dis_mask(np.log(r), np.zeros(8), **MATH), expected)


@pytest.mark.parametrize("behavior", [0.0, -0.1, -1.0, -np.pi, -7.77, -20.3])
@pytest.mark.parametrize(("eps_low", "eps_high"), [(0.3, 5.0), (0.8, 3.0), (0.2, 0.28)])
def test_a_ratio_on_a_bound_is_masked_however_it_was_rounded(behavior, eps_low, eps_high):
  for bound in (1 - eps_low, 1 + eps_high):
    logp = np.float32(behavior + np.log(bound))
    assert not importance.dis_mask(logp, np.float32(behavior), eps_low=eps_low, eps_high=eps_high)
    for inside in (bound * 1.0001, bound * 0.9999):
      kept = importance.dis_mask(
        np.float32(behavior + np.log(inside)), np.float32(behavior), eps_low=eps_low, eps_high=eps_high
      )
      assert kept == (1 - eps_low < inside < 1 + eps_high)


@given(st.lists(st.tuples(LOGP, LOGP), min_size=16, max_size=16))
def test_coefficient_is_the_definition(pairs):
  logp, behavior = np.array(pairs, np.float32).T
  r = np.exp(logp.astype(np.float64) - behavior)
  clear = np.min(np.abs(r[:, None] / [0.7, 6.0] - 1), axis=1) > 1e-5  # rounding decides nearer ones: tested above
  actual = np.asarray(importance.dis_coefficient(logp, behavior, **MATH))
  expected = oracles.dis_coefficient(logp, behavior, **MATH)
  np.testing.assert_allclose(actual[clear], expected[clear], rtol=5e-6)
  mask = importance.dis_mask(logp, behavior, **MATH)
  np.testing.assert_array_equal(actual != 0, mask)
  below, above = importance.dis_outside(logp, behavior, **MATH)
  np.testing.assert_array_equal(below | above, ~mask)
  assert not (below & above).any()
  np.testing.assert_array_equal(below[~mask], r[~mask] < 1)


def test_half_precision_is_cast_before_the_difference():
  logp, behavior = jnp.bfloat16(-20.0), jnp.float32(-20.05)
  assert float(importance.importance_ratio(logp, behavior)) == pytest.approx(np.exp(0.05), rel=1e-5)
  assert importance.importance_ratio(logp, behavior).dtype == jnp.float32


def test_extremes_are_masked_and_finite():
  inf, nan = np.inf, np.nan
  logp = jnp.array([-inf, 0.0, -1.0, nan, -inf, -1.0, 0.0])
  behavior = jnp.array([-1.0, -inf, nan, -1.0, -inf, -200.0, -1e30])
  assert not importance.dis_mask(logp, behavior, **MATH).any()
  np.testing.assert_array_equal(importance.dis_coefficient(logp, behavior, **MATH), np.zeros(7))
  below, above = importance.dis_outside(logp, behavior, **MATH)
  np.testing.assert_array_equal(below, [True, False, False, False, False, False, False])
  np.testing.assert_array_equal(above, [False, True, False, False, False, True, True])


def test_no_gradient_through_the_coefficient():
  g = jax.grad(lambda x: importance.dis_coefficient(x, -2.1, **MATH))(-2.0)
  assert float(g) == 0.0
  assert float(jax.grad(lambda x: importance.importance_ratio(x, -2.1))(-2.0)) == pytest.approx(np.exp(0.1), rel=1e-5)


def test_jit_and_vmap_agree_and_epsilons_may_be_traced():
  logp, behavior = -jnp.arange(6.0).reshape(2, 3), -jnp.ones((2, 3))
  plain = importance.dis_coefficient(logp, behavior, **MATH)
  traced = jax.jit(lambda a, b, lo, hi: importance.dis_coefficient(a, b, eps_low=lo, eps_high=hi))
  np.testing.assert_array_equal(traced(logp, behavior, 0.3, 5.0), plain)
  rows = jax.vmap(lambda a, b: importance.dis_coefficient(a, b, **MATH))(logp, behavior)
  np.testing.assert_array_equal(rows, plain)


@pytest.mark.parametrize(
  ("epsilons", "error", "message"),
  [
    ({"eps_low": 0.3}, TypeError, "eps_high"),
    ({"eps_low": 0.3, "eps_high": None}, TypeError, "eps_high must be given.*None"),
    ({"eps_low": "a", "eps_high": 5.0}, TypeError, "eps_low must be a number.*'a'"),
    ({"eps_low": 1.0, "eps_high": 5.0}, ValueError, r"eps_low must be in \[0, 1\); received 1.0"),
    ({"eps_low": -0.1, "eps_high": 5.0}, ValueError, "eps_low"),
    ({"eps_low": 0.3, "eps_high": 0.0}, ValueError, r"eps_high must be in \(0, inf\); received 0.0"),
    ({"eps_low": 0.3, "eps_high": float("nan")}, ValueError, "eps_high"),
  ],
)
def test_bad_epsilons(own_checks, epsilons, error, message):
  with pytest.raises(error, match=message):
    importance.dis_mask(0.0, 0.0, **epsilons)


def test_epsilons_are_keyword_only_and_shapes_must_agree(own_checks):
  with pytest.raises(TypeError):
    importance.dis_mask(0.0, 0.0, 0.3, 5.0)  # type: ignore[misc]
  with pytest.raises(ValueError, match=r"logp \(3,\), behavior_logp \(4,\)"):
    importance.importance_ratio(jnp.zeros(3), jnp.zeros(4))
