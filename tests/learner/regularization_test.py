"""KL to a reference policy and entropy bonus: gradients against float64, effects over steps, the reference itself."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.learner import batching, regularization, state
from tests.learner import tiny
from tests.learner.update_test import PLAIN, assert_close, assert_same, first_gradient, make_config, make_step

CONFIG = make_config("reinforce")
MADE = tiny.trajectories(12, policy=tiny.init(1), lag=0.2)
REFERENCE = 7
"""Seed of a reference policy that is not the policy."""


def run(config, adv, *, steps=1, reference=None, made=MADE, policy=None):
  """Steps on one batch; `reference` is a seed, None the policy itself. Returns the last state, and all metrics."""
  learner = state.init_state(config, policy or tiny.init(1))
  if reference is not None:
    learner = learner._replace(reference=tiny.init(reference))
  batch, stats = batching.pack_batch(config, made, adv)
  rows = []
  for _ in range(steps):
    learner, metrics = make_step(config)(learner, batch, np.int32(stats.num_microbatches))
    rows.append(jax.device_get(metrics))
  return jax.device_get(learner), rows


def oracle(kl_coef, entropy_coef):
  """Gradient and loss of the two terms, and the mean KL, trajectory by trajectory in float64."""
  policy, reference = tiny.Oracle.of(tiny.init(1)), tiny.Oracle.of(tiny.init(REFERENCE))
  total = sum(t.num_actions for t in MADE)
  gradients, loss, divergence = [], 0.0, 0.0
  for t in MADE:
    chosen = np.arange(len(t.tokens)), t.tokens
    table = policy.logps(t.tokens)
    d = np.where(t.action_mask, reference.logps(t.tokens)[chosen] - table[chosen], 0.0)
    kl = np.exp(d) - d - 1.0
    entropy = np.where(t.action_mask, -np.sum(np.exp(table) * table, axis=-1), 0.0)
    divergence += kl.sum() / total
    loss += (kl_coef * kl.sum() - entropy_coef * entropy.sum()) / total
    gradients.append(policy.policy_gradient(t.tokens, kl_coef * (1.0 - np.exp(d)) / total))
    # dH/dz_v = -pi_v (log pi_v + H), at the position before the token.
    d_logits = entropy_coef / total * np.exp(table) * (table + entropy[:, None]) * t.action_mask[:, None]
    d_logits = np.concatenate([d_logits[1:], np.zeros((1, tiny.VOCAB))])
    head = policy.params["lm_head"]["kernel"]
    hidden = policy.hidden(t.tokens)[0]
    gradients.append({**policy.backward(t.tokens, d_logits @ head.T), "lm_head": {"kernel": hidden.T @ d_logits}})
  return functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), gradients), loss, divergence


@pytest.mark.parametrize(("kl_coef", "entropy_coef"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_gradient_and_loss_are_the_definitions(kl_coef, entropy_coef):
  config = dataclasses.replace(CONFIG, kl_coef=kl_coef, entropy_coef=entropy_coef)
  learner, (metrics,) = run(config, [0.0] * 12, reference=REFERENCE if kl_coef else None)
  gradient, loss, divergence = oracle(kl_coef, entropy_coef)
  assert_close(first_gradient(learner.policy_opt), gradient, rtol=1e-3, atol=1e-6)
  np.testing.assert_allclose(metrics["policy_loss"], loss, rtol=1e-4)
  if kl_coef:
    np.testing.assert_allclose(metrics["reference_kl"], divergence, rtol=1e-4)
  else:
    assert "reference_kl" not in metrics and learner.reference is None


def test_the_terms_add_to_the_policys_loss():
  adv = [float(i % 3 - 1) for i in range(12)]
  both = dataclasses.replace(CONFIG, kl_coef=0.3, entropy_coef=0.2)
  whole, (metrics,) = run(both, adv, reference=REFERENCE)
  plain, (plain_metrics,) = run(CONFIG, adv)
  gradient, loss, _ = oracle(0.3, 0.2)
  expected = jax.tree.map(np.add, first_gradient(plain.policy_opt), gradient)
  assert_close(first_gradient(whole.policy_opt), expected, rtol=1e-3, atol=1e-6)
  np.testing.assert_allclose(metrics["policy_loss"], plain_metrics["policy_loss"] + loss, rtol=1e-4)


def test_the_policy_itself_as_reference_gives_nothing():
  learner, (metrics,) = run(dataclasses.replace(CONFIG, kl_coef=1.0), [0.0] * 12)
  assert abs(metrics["reference_kl"]) < 1e-10 and abs(metrics["policy_loss"]) < 1e-10
  for leaf in jax.tree.leaves(first_gradient(learner.policy_opt)):
    np.testing.assert_allclose(leaf, 0.0, atol=1e-6)


def test_a_larger_coefficient_keeps_the_policy_nearer_to_the_reference():
  adv = [float(i % 3 - 1) for i in range(12)]
  found = []
  for kl_coef in (1e-6, 0.3, 3.0):
    learner, rows = run(dataclasses.replace(CONFIG, kl_coef=kl_coef), adv, steps=40)
    found.append(rows[-1]["reference_kl"])
    assert_same(learner.reference, jax.device_get(tiny.init(1)))  # it never moves
  assert found[0] > 1.5 * found[1] > 3.0 * found[2] > 0.0


def test_the_bonus_raises_the_entropy():
  _, rows = run(dataclasses.replace(CONFIG, entropy_coef=0.1), [0.0] * 12, steps=20)
  assert rows[-1]["entropy"] > rows[0]["entropy"] + 0.05
  assert rows[-1]["entropy"] <= np.log(tiny.VOCAB) + 1e-5


def test_the_split_into_microbatches_changes_nothing():
  adv = [float(i % 3 - 1) for i in range(12)]
  config = dataclasses.replace(CONFIG, kl_coef=0.3, entropy_coef=0.2)
  small, (small_metrics,) = run(config, adv, reference=REFERENCE)
  wide = dataclasses.replace(config, rows_per_microbatch=16, min_microbatches=1)
  large, (large_metrics,) = run(wide, adv, reference=REFERENCE)
  assert_close(first_gradient(small.policy_opt), first_gradient(large.policy_opt), rtol=1e-4, atol=1e-6)
  for key in ("policy_loss", "reference_kl", "entropy"):
    np.testing.assert_allclose(small_metrics[key], large_metrics[key], rtol=1e-5)


def test_an_update_is_not_empty_where_only_the_loss_is_masked():
  """DIS masks every token; the policy still moves towards the reference. Without actions, nothing moves."""
  far = [np.where(t.action_mask, np.float32(-40.0), np.float32(np.nan)) for t in MADE]
  masked = [dataclasses.replace(t, behavior_logp=logp) for t, logp in zip(MADE, far, strict=True)]
  config = dataclasses.replace(CONFIG, kl_coef=0.3)
  learner, rows = run(config, [1.0] * 12, steps=10, reference=REFERENCE, made=masked)
  assert rows[0]["dis_masked_fraction"] == 1.0 and learner.counters.policy_empty == 0
  assert rows[-1]["reference_kl"] < 0.9 * rows[0]["reference_kl"]
  batch, stats = batching.pack_batch(config, MADE, [1.0] * 12)
  batch = batch.replace(action_mask=np.zeros_like(batch.action_mask))
  before = state.init_state(config, tiny.init(1))._replace(reference=tiny.init(REFERENCE))
  after, metrics = make_step(config)(before, batch, np.int32(stats.num_microbatches))
  assert after.counters.policy_empty == 1 and metrics["reference_kl"] == 0.0 == metrics["policy_loss"]
  assert_same(jax.device_get(after.policy), jax.device_get(tiny.init(1)))


def test_every_minibatch_has_the_terms():
  config = dataclasses.replace(CONFIG, kl_coef=0.3, entropy_coef=0.2, policy_minibatches=2)
  learner, (metrics,) = run(config, [0.0] * 12, reference=REFERENCE)
  assert int(learner.policy_opt[0].count) == 2 and metrics["reference_kl"] > 0.0
  assert learner.counters.policy_empty == 0


def test_the_reference_has_buffers_of_its_own():
  config = dataclasses.replace(CONFIG, kl_coef=0.3)
  policy = tiny.init(1)
  for made in (state.init_state(config, policy), jax.jit(functools.partial(state.init_state, config))(policy)):
    assert_same(jax.device_get(made.reference), jax.device_get(policy))
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((made.policy, made.reference, policy))]
    assert len(set(buffers)) == len(buffers)


def test_without_a_reference_a_kl_term_is_refused():
  config = dataclasses.replace(CONFIG, kl_coef=0.3, policy_optimizer=PLAIN)
  batch, _ = batching.pack_batch(config, MADE, [0.0] * 12)
  with pytest.raises(ValueError, match=r"LearnerState\.reference is required with kl_coef=0\.3; received None"):
    regularization.reference_logp(config, tiny.policy_apply, None, batch, jnp.int32(1))
  assert regularization.reference_logp(CONFIG, tiny.policy_apply, None, batch, jnp.int32(1)) is None
