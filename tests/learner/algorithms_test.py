"""Policy losses by name against their definitions, and updates in which π_old matters."""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.learner import algorithms, batching, state, update
from sao_jax.learner.config import OptimizerConfig, PolicyLossName
from tests.learner import tiny

SHAPE = (3, 8)
LOSSES = tuple(algorithms.POLICY_LOSSES)


def arrays(seed=0):
  rng = np.random.default_rng(seed)
  logp, old, behavior = (-rng.uniform(0.1, 3.0, SHAPE) for _ in range(3))
  adv = rng.normal(size=SHAPE)
  mask = rng.random(SHAPE) < 0.7
  segments = np.where(np.arange(8) < 5, 1, 2) * np.ones(SHAPE, int)
  return logp, old, behavior, adv, mask, segments


def definition(config, logp, old, behavior, adv, mask, segments):
  """`(loss, clip mask below, clip mask above)`, in float64, token by token."""
  loss = np.zeros(SHAPE)
  low, high = np.zeros(SHAPE, bool), np.zeros(SHAPE, bool)
  for b, t in zip(*np.nonzero(mask), strict=True):
    ratio, rollout = np.exp(logp[b, t] - old[b, t]), np.exp(logp[b, t] - behavior[b, t])
    a = adv[b, t]
    if config.policy_loss == "dis":
      low[b, t], high[b, t] = rollout <= 1 - config.eps_low, rollout >= 1 + config.eps_high
      loss[b, t] = 0.0 if low[b, t] or high[b, t] else -rollout * a * logp[b, t]
      continue
    if config.policy_loss == "truncated_is":
      loss[b, t] = -min(rollout, config.is_cap) * a * logp[b, t]
      continue
    if config.policy_loss == "uncorrected":
      loss[b, t] = -a * logp[b, t]
      continue
    if config.policy_loss == "gspo":
      own = mask[b] & (segments[b] == segments[b, t])
      ratio = np.exp((logp[b] - old[b])[own].mean())
    loss[b, t] = -min(ratio * a, np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * a)
    low[b, t] = a < 0 and ratio < 1 - config.clip_low
    high[b, t] = a > 0 and ratio > 1 + config.clip_high
    if config.policy_loss == "icepop":
      k = np.exp(old[b, t] - behavior[b, t])
      loss[b, t] *= k if config.icepop_low <= k <= config.icepop_high else 0.0
      low[b, t] |= k < config.icepop_low
      high[b, t] |= k > config.icepop_high
  return loss, low, high


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_clip_masks_equal_the_definition(name):
  config = algorithms.learner_config("sao", policy_loss=name)
  given = arrays()
  expected = definition(config, *given)
  loss = algorithms.policy_loss(config, *map(jnp.asarray, given))
  low, high = algorithms.clip_mask(config, *map(jnp.asarray, given))
  np.testing.assert_allclose(loss, expected[0], rtol=1e-4, atol=1e-5)
  np.testing.assert_array_equal(low, expected[1])
  np.testing.assert_array_equal(high, expected[2])
  assert name in ("truncated_is", "uncorrected") or (expected[1].any() and expected[2].any())


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "gspo"])  # its tokens share one ratio
def test_tokens_in_the_clip_mask_get_no_gradient_and_all_others_do(name):
  config = algorithms.learner_config("sao", policy_loss=name)
  logp, *rest = map(jnp.asarray, arrays(1))
  gradient = jax.grad(lambda x: jnp.sum(algorithms.policy_loss(config, x, *rest)))(logp)
  low, high = algorithms.clip_mask(config, logp, *rest)
  left = np.asarray(low | high)
  assert not np.asarray(gradient)[left].any()
  assert np.asarray(gradient)[np.asarray(rest[3]) & ~left].all()


def test_a_policy_loss_is_in_the_table_or_refused():
  assert set(algorithms.POLICY_LOSSES) == set(get_args(PolicyLossName))
  config = algorithms.learner_config("sao")
  object.__setattr__(config, "policy_loss", "ppo")  # a name that the config would not let through
  for function in (algorithms.policy_loss, algorithms.clip_mask):
    with pytest.raises(ValueError, match=r"policy_loss must be one of dis, .*gspo, uncorrected; received 'ppo'"):
      function(config, *map(jnp.asarray, arrays()))


CHANGES = [
  ("dis", {"eps_low": 0.01}),
  ("dis", {"eps_high": 0.01}),
  ("ppo_clip", {"clip_low": 0.5}),
  ("ppo_clip", {"clip_high": 2.0}),
  ("icepop", {"icepop_low": 1.0}),
  ("icepop", {"icepop_high": 1.0}),
  ("truncated_is", {"is_cap": 0.5}),
  ("gspo", {"clip_low": 0.0}),
]


@pytest.mark.parametrize(("name", "fields"), CHANGES)
def test_every_setting_changes_its_loss_and_no_other(name, fields):
  given = tuple(map(jnp.asarray, arrays()))
  for loss in LOSSES:
    config = algorithms.learner_config("sao", policy_loss=loss)
    changed = dataclasses.replace(config, **fields)
    before, after = (np.asarray(algorithms.policy_loss(c, *given)) for c in (config, changed))
    shared = {"clip_low", "clip_high"} & set(fields) and loss in ("ppo_clip", "icepop", "gspo")
    assert (before != after).any() == (loss == name or bool(shared)), loss


# ---------------------------------------------------------------------------------------------------------------------
# Whole updates without a critic: small programs.

PLAIN = OptimizerConfig(learning_rate=5e-2, max_grad_norm=None)
GRPO = algorithms.learner_config(
  "grpo", policy_optimizer=PLAIN, row_length=16, rows_per_microbatch=2, min_microbatches=8
)


def run(config, trajectories, baseline_adv):
  batch, stats = batching.pack_batch(config, trajectories, baseline_adv)
  step = jax.jit(
    update.make_update_step(config, tiny.policy_apply, jit=False),
    compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
  )
  return jax.device_get(step(state.init_state(config, tiny.init(1)), batch, np.int32(stats.num_microbatches)))


def test_pi_old_is_the_policy_before_the_step():
  """One update: ratio 1, so PPO is a plain policy gradient however old the rollouts. Several: later ones do clip."""
  policy = tiny.init(1)
  made = tiny.trajectories(16, policy=policy, lag=1.0)
  adv = np.where(np.arange(16) % 2, 1.0, -1.0)
  learner, once = run(GRPO, made, adv)
  assert once["dis_masked_fraction"] == 0.0 and once["approx_kl"] > 0.05
  tokens = sum(t.num_actions for t in made)
  np.testing.assert_allclose(
    once["policy_loss"], -sum(a * t.num_actions for a, t in zip(adv, made, strict=True)) / tokens, atol=1e-5
  )
  learner_split, split = run(dataclasses.replace(GRPO, policy_minibatches=4), made, adv)
  assert 0.0 < split["dis_masked_fraction"] < 1.0
  counts = [int(s.policy_opt[0].count) for s in (learner, learner_split)]
  assert counts == [1, 4]


def test_pi_old_of_the_rollout_clips_with_one_update():
  """The clip mask is PPO's, of the ratio to the engine's log-probs, and its shares by sign of the advantage are too."""
  policy = tiny.init(1)
  made = tiny.trajectories(16, policy=policy, lag=1.0)
  adv = np.where(np.arange(16) % 2, 1.0, -1.0)
  _, metrics = run(dataclasses.replace(GRPO, old_policy="rollout"), made, adv)
  oracle = tiny.Oracle.of(policy)
  shares = {}
  for sign in (1.0, -1.0):
    clipped = []
    for t in (x for x, a in zip(made, adv, strict=True) if a == sign):
      ratio = np.exp(oracle.logps(t.tokens)[np.arange(len(t.tokens)), t.tokens] - t.behavior_logp)[t.action_mask]
      clipped += [r > 1.28 if sign > 0 else r < 0.8 for r in ratio]
    shares[sign] = np.mean(clipped)
  np.testing.assert_allclose(metrics["masked_fraction_positive_adv"], shares[1.0], atol=1e-6)
  np.testing.assert_allclose(metrics["masked_fraction_negative_adv"], shares[-1.0], atol=1e-6)
  assert 0.1 < shares[1.0] < 0.9 and 0.1 < shares[-1.0] < 0.9
  np.testing.assert_allclose(
    metrics["advantage_snr"], abs(metrics["advantage_mean"]) / metrics["advantage_std"], rtol=1e-5
  )


def test_the_loss_on_positive_examples_is_their_mean_negative_log_likelihood():
  policy = tiny.init(1)
  made = [
    tiny.trajectory(np.array([0, 0, 1, 1, 0, 1], bool), seed=i, reward=float(i % 2), policy=policy, index=i)
    for i in range(6)
  ]
  oracle = tiny.Oracle.of(policy)
  nll = np.concatenate([
    -oracle.logps(t.tokens)[np.arange(6), t.tokens][t.action_mask] for t in made if t.total_reward > 0
  ])
  for minibatches in (1, 2):
    config = dataclasses.replace(GRPO, policy_minibatches=minibatches)
    _, plain = run(config, made, np.zeros(6))
    _, imitating = run(dataclasses.replace(config, positive_weight=0.5), made, np.zeros(6))
    tolerance = {"rtol": 1e-5} if minibatches == 1 else {"rtol": 0.2}  # later minibatches meet a better policy
    np.testing.assert_allclose(imitating["policy_loss"] - plain["policy_loss"], 0.5 * nll.mean(), **tolerance)


def test_more_policy_minibatches_than_microbatches_skip_the_empty_ones():
  made = tiny.trajectories(2, policy=tiny.init(1))
  learner, metrics = run(dataclasses.replace(GRPO, policy_minibatches=4), made, [1.0, -1.0])
  used = 4 - int(learner.counters.policy_empty)
  assert int(learner.policy_opt[0].count) == used < 4
  assert learner.counters.policy_nonfinite == 0 and np.isfinite(metrics["policy_loss"])


def test_algorithms_without_a_critic_report_nan_where_there_is_nothing():
  learner, metrics = run(GRPO, tiny.trajectories(4), [1.0, -1.0, 0.5, -0.5])
  assert learner.critic is None and learner.critic_opt is None
  missing = {key for key, value in metrics.items() if np.isnan(value)}
  assert missing == set(update.CRITIC_KEYS)


def test_clipping_by_global_norm_and_weight_decay_do_what_they_say():
  made = tiny.trajectories(8)
  adv = np.linspace(-1.0, 1.0, 8)
  plain, metrics = run(GRPO, made, adv)
  norm = float(metrics["policy_grad_norm"])
  clipped, clipped_metrics = run(
    dataclasses.replace(GRPO, policy_optimizer=dataclasses.replace(PLAIN, max_grad_norm=norm / 4, weight_decay=0.1)),
    made, adv,
  )  # fmt: skip
  np.testing.assert_allclose(clipped_metrics["policy_grad_norm"], norm, rtol=1e-5)
  plain_mu, clipped_mu = plain.policy_opt[0].mu, clipped.policy_opt[1].mu
  jax.tree.map(lambda p, c: np.testing.assert_allclose(c, p / 4, rtol=1e-3, atol=1e-8), plain_mu, clipped_mu)
  start = tiny.init(1)
  # Adam's first step does not depend on the gradient's scale: what differs is the decay, rate x 0.1 x parameter.
  jax.tree.map(
    lambda p, c, s: np.testing.assert_allclose(c - p, -0.05 * 0.1 * np.asarray(s), rtol=2e-2, atol=2e-4),
    plain.policy, clipped.policy, start,
  )  # fmt: skip
