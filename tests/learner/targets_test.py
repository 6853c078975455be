"""Returns, advantages and masks of packed rows against loops over unpacked trajectories in float64."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.learner import algorithms, batching, targets
from tests.learner import tiny

COUNT, ROW = 10, 32
CONFIG = algorithms.learner_config("sao", row_length=ROW, rows_per_microbatch=3, min_microbatches=4)


def pieces(config, trajectories, seed=0):
  """The packed batch, random raw values for it, and for each trajectory its index into the flattened batch."""
  batch, _ = batching.pack_batch(config, trajectories, np.arange(1, len(trajectories) + 1))
  v_after = np.random.default_rng(seed).normal(size=batch.tokens.shape).astype(np.float32)
  where = [np.flatnonzero(batch.baseline_adv.reshape(-1) == i + 1) for i in range(len(trajectories))]
  return jax.tree.map(jnp.asarray, batch), jnp.asarray(v_after), where


def reference(config, t, v_after, lambda_):
  """Advantages of one trajectory, entry by entry of the estimator that the config names."""
  v = np.concatenate([[0.0], v_after[:-1]]).astype(np.float64)
  bootstrap = float(v_after[-1]) if config.truncation == "bootstrap" and t.ended == "truncated" else 0.0
  turns = batching.turn_ids(t.action_mask)
  if config.advantage == "gae":
    entries = [[i] for i in np.flatnonzero(t.action_mask)]
  elif config.advantage == "gae_all_tokens":
    entries = [[i] for i in range(1, len(v))]
  else:
    entries = [np.flatnonzero(turns == k) for k in range(1, turns.max() + 1)]
  adv = np.zeros(len(v))
  next_value, next_adv = bootstrap, 0.0
  for entry in reversed(entries):
    value = v[entry[-1]] if config.advantage == "step_last" else v[entry].mean()
    delta = t.rewards[entry].sum() + config.discount * next_value - value
    adv[entry] = delta + config.discount * lambda_ * next_adv
    next_value, next_adv = value, adv[entry[0]]
  return np.where(t.action_mask, adv, 0.0), v


VARIANTS = [
  {},
  {"truncation": "bootstrap", "discount": 0.9},
  {"lambda_policy": 0.6, "alpha": 3.0},
  {"advantage": "gae_all_tokens", "discount": 0.9, "truncation": "bootstrap"},
  {"advantage": "step_mean", "discount": 0.8},
  {"advantage": "step_last", "discount": 0.8, "truncation": "bootstrap"},
]


@pytest.mark.parametrize("fields", VARIANTS)
def test_advantages_and_returns_equal_the_definition(fields):
  config = dataclasses.replace(CONFIG, **fields)
  made = tiny.trajectories(COUNT, seed=5, truncated_share=0.5)
  batch, v_after, where = pieces(config, made)
  adv, returns = jax.jit(lambda v, b: (targets.policy_advantages(config, v, b), targets.critic_targets(config, v, b)))(
    v_after, batch
  )
  adv, returns = np.asarray(adv).reshape(-1), np.asarray(returns).reshape(-1)
  for t, index in zip(made, where, strict=True):
    length = batching.num_turns(t) if config.per_step else t.num_actions
    lambda_ = config.lambda_policy
    if lambda_ is None:
      lambda_ = max(0.0, 1.0 - 1.0 / (config.alpha * length))
    values = v_after.reshape(-1)[index]
    np.testing.assert_allclose(adv[index], reference(config, t, values, lambda_)[0], rtol=1e-4, atol=1e-5)
    monte_carlo, _ = reference(config, t, np.concatenate([np.zeros(len(index) - 1), values[-1:]]), 1.0)
    np.testing.assert_allclose(returns[index], monte_carlo, rtol=1e-4, atol=1e-5)
  assert not adv[~np.asarray(batch.action_mask).reshape(-1)].any()


def test_returns_with_lambda_below_one_read_the_values():
  config = dataclasses.replace(CONFIG, lambda_critic=0.7, discount=0.9)
  made = tiny.trajectories(COUNT, seed=6)
  batch, v_after, where = pieces(config, made)
  returns = np.asarray(targets.critic_targets(config, v_after, batch)).reshape(-1)
  for t, index in zip(made, where, strict=True):
    adv, v = reference(config, t, v_after.reshape(-1)[index], 0.7)
    np.testing.assert_allclose(returns[index], np.where(t.action_mask, adv + v, 0.0), rtol=1e-4, atol=1e-5)
  assert targets.targets_depend_on_values(config) and not targets.targets_depend_on_values(CONFIG)


def test_pitfall_11_and_12_observations_are_skipped():
  """Rewards of the last action before a trailing observation; a value at an observation is never read."""
  batch, _, _ = pieces(CONFIG, [tiny.trajectory([False, True, False, True, False], reward=1.0)])
  config = dataclasses.replace(CONFIG, lambda_policy=0.5)
  zeros = jnp.zeros(batch.tokens.shape)
  adv = targets.policy_advantages(config, zeros, batch)
  np.testing.assert_allclose(adv[0, 0, :5], [0.0, 0.5, 0.0, 1.0, 0.0])
  v_after = zeros.at[0, 0, :3].set(jnp.array([0.2, 999.0, 0.4]))
  config = dataclasses.replace(CONFIG, lambda_policy=1.0)
  adv = targets.policy_advantages(config, v_after, batch)
  np.testing.assert_allclose(adv[0, 0, :5], [0.0, 0.8, 0.0, 0.6, 0.0], rtol=1e-6)
  np.testing.assert_allclose(targets.critic_targets(config, v_after, batch)[0, 0, :5], [0, 1, 0, 1, 0])


def test_pitfall_18_values_belong_to_the_state_before_the_token():
  v_after = jnp.arange(12.0).reshape(1, 2, 6)
  np.testing.assert_array_equal(targets.values_before(v_after), [[[0, 0, 1, 2, 3, 4], [0, 6, 7, 8, 9, 10]]])


def test_bootstrap_is_the_value_after_each_segments_last_token():
  endings = ["truncated", "terminal"] * 3
  made = [tiny.trajectory([False, True] + [False] * i, ended=e, index=i) for i, e in enumerate(endings)]
  batch, v_after, where = pieces(CONFIG, made)
  found = np.asarray(targets.bootstrap_values(v_after, batch)).reshape(-1)
  for t, index in zip(made, where, strict=True):
    expected = v_after.reshape(-1)[index[-1]] if t.ended == "truncated" else 0.0
    np.testing.assert_array_equal(found[index], expected)
  assert not found[np.asarray(batch.segment_ids).reshape(-1) == 0].any()


def test_the_last_token_variant_trains_the_critic_on_the_last_token_of_each_turn():
  made = [tiny.trajectory([False, True, True, False, True]), tiny.trajectory([False, True], index=1)]
  batch, _, where = pieces(CONFIG, made)
  last = np.asarray(targets.critic_mask(dataclasses.replace(CONFIG, advantage="step_last"), batch)).reshape(-1)
  np.testing.assert_array_equal(last[where[0]], [False, False, True, False, True])
  np.testing.assert_array_equal(last[where[1]], [False, True])
  for advantage in ("gae", "step_mean"):
    mask = targets.critic_mask(dataclasses.replace(CONFIG, advantage=advantage), batch)
    np.testing.assert_array_equal(mask, batch.action_mask)
