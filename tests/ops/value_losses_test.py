"""sao_jax.ops.value_losses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.ops import value_losses

ROWS = st.lists(st.tuples(*[st.floats(-3, 3, width=32)] * 3, st.booleans()), min_size=8, max_size=8)


@given(ROWS)
def test_losses_are_their_definitions(rows):
  v, old_v, target, mask = (np.array(x) for x in zip(*rows, strict=True))
  dirty = [np.where(mask, x, np.nan).astype(np.float32) for x in (v, old_v, target)]
  squared = np.where(mask, (v - target) ** 2, 0)
  np.testing.assert_allclose(value_losses.squared_value_loss(dirty[0], dirty[2], mask), squared, rtol=1e-5, atol=1e-6)
  near = old_v + np.clip(v - old_v, -0.2, 0.2)
  clipped = np.where(mask, np.maximum((v - target) ** 2, (near - target) ** 2), 0)
  actual = value_losses.clipped_value_loss(*dirty, mask, clip=0.2)
  np.testing.assert_allclose(actual, clipped, rtol=1e-4, atol=1e-5)
  assert actual.dtype == jnp.float32


def test_gradients_flow_to_v_alone_and_are_finite_off_the_mask():
  v, target = jnp.array([1.0, jnp.nan, 2.0]), jnp.array([0.5, 1.0, jnp.inf])
  mask = jnp.array([True, False, False])
  g_v, g_target = jax.grad(lambda a, b: value_losses.squared_value_loss(a, b, mask).sum(), (0, 1))(v, target)
  np.testing.assert_allclose(g_v, [1.0, 0, 0])
  np.testing.assert_array_equal(g_target, np.zeros(3))
  g = jax.grad(lambda a: value_losses.clipped_value_loss(a, v, target, mask, clip=0.2).sum())(v)
  np.testing.assert_allclose(g, [1.0, 0, 0])


def test_clipping_takes_the_worse_error():
  loss = value_losses.clipped_value_loss(1.0, 0.0, 1.0, True, clip=0.2)
  np.testing.assert_allclose(loss, 0.64, rtol=1e-6)


def test_bad_input(own_checks):
  with pytest.raises(ValueError, match=r"mask \(3,\), v \(2,\)"):
    value_losses.squared_value_loss(jnp.zeros(2), jnp.zeros(2), jnp.ones(3, bool))
  with pytest.raises(ValueError, match=r"clip must be in \(0, inf\)"):
    value_losses.clipped_value_loss(0.0, 0.0, 0.0, True, clip=0)
