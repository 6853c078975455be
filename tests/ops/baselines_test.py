"""sao_jax.ops.baselines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_jax.ops import baselines
from tests.ops import oracles

CALL = st.lists(st.tuples(st.integers(0, 3), st.integers(-8, 8)), min_size=9, max_size=9)
UPDATE = jax.jit(baselines.update)
VALUE = jax.jit(baselines.value)


@given(st.lists(CALL, min_size=1, max_size=4))
def test_running_mean_is_the_mean_of_the_last_rewards_in_order(calls):
  """Windows of 3 are passed within one call of 9 as well as over calls."""
  state = baselines.init(4, window=3)
  ids, rewards = [], []
  for call in calls:
    i, r = (np.array(x) for x in zip(*call, strict=True))
    state = UPDATE(state, i, r / 8)
    ids.extend(i)
    rewards.extend(r / 8)
    expected = oracles.running_means(ids, rewards, window=3, num_prompts=4)
    np.testing.assert_allclose(VALUE(state, np.arange(4)), expected, atol=1e-6)


def test_before_any_reward_it_is_zero_and_one_prompt_is_the_global_window():
  state = baselines.RunningMean.init(1, window=128)
  assert float(state.value(0)) == 0.0
  rewards = (np.arange(300) % 7).astype(np.float32)
  for part in np.split(rewards, 2):
    state = UPDATE(state, np.zeros(150, int), part)
  assert float(state.value(0)) == pytest.approx(rewards[-128:].mean(), rel=1e-6)
  assert state.rewards.dtype == jnp.float32


def test_unknown_prompts(own_checks):
  state = baselines.init(2)
  with pytest.raises(ValueError, match=r"prompt_ids must be in \[0, num_prompts = 2\); received values from 0 to 2"):
    state.update(np.array([0, 2]), np.ones(2))
  with pytest.raises(TypeError, match="prompt_ids must be integers"):
    state.update(np.array([0.0]), np.ones(1))
  with pytest.raises(ValueError, match=r"RunningMean\.update works on one stream"):
    state.update(np.array([0, 1]), np.ones(3))
  with pytest.raises(ValueError, match="window=0"):
    baselines.init(2, window=0)
  state = UPDATE(state, jnp.array([-1, 5, 1]), jnp.array([9.0, 9.0, 1.0]))  # traced ids cannot be checked: dropped
  np.testing.assert_array_equal(VALUE(state, jnp.array([0, 1, 2, -1])), [0, 1, np.nan, np.nan])


def test_value_tracker_is_its_recursion(own_checks):
  half_life, low, high = 0.06, 0.875, 0.96
  state = baselines.ValueTracker.init(np.array([0.25, 0.5]), rho_min=low)
  np.testing.assert_allclose(state.value(np.arange(2)), [0.25, 0.5])
  np.testing.assert_allclose(state.alpha + state.beta, 8.0)
  ids, rewards, kl = np.array([0, 1, 0, 0]), np.array([1.0, 0.0, 0.5, 1.0]), np.array([0.0, 0.006, 1.0, 0.01])
  alpha, beta = [2.0, 4.0], [6.0, 4.0]
  for i, r, d in zip(ids, rewards, kl, strict=True):
    rho = min(max(2 ** (-d / half_life), low), high)
    alpha[i], beta[i] = rho * alpha[i] + r, rho * beta[i] + 1 - r
  state = state.update(ids, rewards, kl, half_life=half_life, rho_min=low, rho_max=high)
  np.testing.assert_allclose(state.alpha, alpha, rtol=1e-6)
  np.testing.assert_allclose(state.value(np.arange(2)), np.array(alpha) / (np.array(alpha) + beta), rtol=1e-6)
  with pytest.raises(ValueError, match=r"rewards must be in \[0, 1\]"):
    state.update(ids, rewards * 2, kl, half_life=half_life, rho_min=low, rho_max=high)
  with pytest.raises(ValueError, match="rho_max"):
    state.update(ids, rewards, kl, half_life=half_life, rho_min=low, rho_max=0.5)
  with pytest.raises(ValueError, match="initial_value must be"):
    baselines.ValueTracker.init(0.5, rho_min=low)
