"""The supervised step: its gradient, the tokens it ignores, and a run that learns."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from sao_jax.learner import batching, supervised
from sao_jax.learner.config import OptimizerConfig
from tests.learner import tiny

CONFIG = OptimizerConfig(learning_rate=3e-2, max_grad_norm=None)


@functools.cache
def make_step():
  return supervised.make_sft_step(CONFIG, tiny.policy_apply)


def packed(demonstrations):
  return batching.pack(demonstrations, row_length=16, rows_per_microbatch=2, alpha=1.5, min_microbatches=8)


def demonstrations(count, seed=0):
  rng = np.random.default_rng(seed)
  made = []
  for i in range(count):
    mask = tiny.random_mask(rng)
    tokens = (np.arange(len(mask)) * 3 + i % 2) % tiny.VOCAB
    made.append(supervised.demonstration_trajectory(tokens, mask, index=i))
  return made


def test_first_gradient_equals_a_float64_rederivation():
  made = demonstrations(8)
  batch, stats = packed(made)
  policy = tiny.init(1)
  learner, metrics = make_step()(supervised.init_sft_state(CONFIG, policy), batch, np.int32(stats.num_microbatches))
  oracle = tiny.Oracle.of(policy)
  loss, gradient = 0.0, jax.tree.map(np.zeros_like, oracle.params)
  for t in made:
    weights = -t.action_mask.astype(np.float64) / stats.action_tokens
    loss += (weights * oracle.logps(t.tokens)[np.arange(len(t.tokens)), t.tokens]).sum()
    gradient = jax.tree.map(np.add, gradient, oracle.policy_gradient(t.tokens, weights))
  np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
  jax.tree.map(
    lambda mu, g: np.testing.assert_allclose(mu / 0.1, g, rtol=1e-3, atol=1e-6), learner.opt_state[0].mu, gradient
  )
  assert metrics["action_tokens"] == stats.action_tokens and learner.step == 1


def test_it_learns_a_rule_and_the_prompt_is_not_imitated():
  batch, stats = packed(demonstrations(16))
  learner = supervised.init_sft_state(CONFIG, tiny.init(1))
  losses = []
  for _ in range(60):
    learner, metrics = make_step()(learner, batch, np.int32(stats.num_microbatches))
    losses.append(float(metrics["loss"]))
  assert losses[-1] < 0.2 * losses[0]


def test_not_finite_or_empty_batches_change_nothing():
  batch, stats = packed(demonstrations(8))
  policy = tiny.init(1)
  learner, _ = make_step()(supervised.init_sft_state(CONFIG, policy), batch, np.int32(stats.num_microbatches))
  before = jax.device_get(learner)
  learner, metrics = make_step()(
    learner, batch.replace(action_mask=np.zeros_like(batch.action_mask)), np.int32(stats.num_microbatches)
  )
  after = jax.device_get(learner)
  jax.tree.map(np.testing.assert_array_equal, (after.params, after.opt_state), (before.params, before.opt_state))
  assert after.skipped == 1 and metrics["loss"] == 0.0
  poisoned = jax.tree.map(lambda x: x * np.nan, after.params)
  learner, _ = make_step()(after._replace(params=poisoned), batch, np.int32(stats.num_microbatches))
  assert learner.skipped == 2
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.opt_state), after.opt_state)


def test_demonstrations_are_trajectories():
  made = supervised.demonstration_trajectory([1, 2, 3, 4], [False, True, False, True], index=3, reward=1.0)
  assert made.num_turns == 2 and made.success and made.rewards.tolist() == [0.0, 0.0, 0.0, 1.0]
  with pytest.raises(ValueError, match="at least one action token"):
    supervised.demonstration_trajectory([1, 2], [False, False])
