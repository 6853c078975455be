"""The learner step against a float64 re-derivation, and the related PITFALLS."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.learner import algorithms, batching, state, update
from sao_jax.learner.config import OptimizerConfig
from tests.learner import tiny

PLAIN = OptimizerConfig(learning_rate=1e-2, max_grad_norm=None)
CRITIC = OptimizerConfig(learning_rate=3e-2, max_grad_norm=None)
ROWS = {"row_length": 16, "rows_per_microbatch": 2, "min_microbatches": 8}


def make_config(name: str = "sao", **fields):
  return algorithms.learner_config(name, **{"policy_optimizer": PLAIN, "critic_optimizer": CRITIC, **ROWS, **fields})


@functools.cache
def make_step(config):
  return update.make_update_step(config, tiny.policy_apply, tiny.value_apply if config.uses_critic else None)


@functools.cache
def make_critic_step(config, num_updates):
  return update.make_critic_step(config, tiny.value_apply, num_updates=num_updates)


# Values from before the updates and lambda = 1: advantages that can be written down.
PREVIOUS = make_config(values_from="previous", lambda_policy=1.0)


def make_state(config, policy=None, critic=None):
  return state.init_state(
    config, policy or tiny.init(1), (critic or tiny.init(2, value=True)) if config.uses_critic else None
  )


def run_critic(config, trajectories, num_updates):
  """The critic's part alone; returns state and metrics."""
  batch, stats = batching.pack_batch(config, trajectories)
  step = make_critic_step(config, num_updates)
  return jax.device_get(step(make_state(config), batch, np.int32(stats.num_microbatches)))


def run(config, trajectories, *, policy=None, critic=None, steps: int = 1, baseline_adv=None):
  """Packs, steps, and fetches; nothing but the explicit transfers may cross between host and device."""
  batch, stats = batching.pack_batch(config, trajectories, baseline_adv)
  learner = make_state(config, policy, critic)
  batch, count = jax.device_put((batch, np.int32(stats.num_microbatches)))
  step = make_step(config)
  with jax.transfer_guard("disallow"):
    for _ in range(steps):
      learner, metrics = step(learner, batch, count)
  return jax.device_get(learner), jax.device_get(metrics)


def first_gradient(opt_state):
  """Adam's first moment after one update is (1 - b1) times the gradient."""
  moments = next(s for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
  return jax.tree.map(lambda mu: mu / (1.0 - PLAIN.b1), moments.mu)


def assert_close(actual, expected, **tolerance):
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, **tolerance), actual, expected)


def assert_same(actual, expected):
  jax.tree.map(np.testing.assert_array_equal, actual, expected)


# ---------------------------------------------------------------------------------------------------------------------
# The oracle: the whole step on unpacked trajectories, loop by loop, in float64.


def oracle_gae(trajectory, values, lambda_, discount, bootstrap=0.0):
  """Equations 4 and 5, from the last action token to the first."""
  advantages = np.zeros(len(values))
  following_value, following_advantage = bootstrap, 0.0
  for t in reversed(np.flatnonzero(trajectory.action_mask)):
    delta = float(trajectory.rewards[t]) + discount * following_value - values[t]
    advantages[t] = delta + discount * lambda_ * following_advantage
    following_value, following_advantage = values[t], advantages[t]
  return advantages


def oracle_adam(params, grads, moments, count, rate):
  first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], grads)
  second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g**2, moments[1], grads)
  new = jax.tree.map(
    lambda p, m, v: p - rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8),
    params, first, second,
  )  # fmt: skip
  return new, (first, second)


def add(trees):
  return functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), trees)


def oracle_step(config, trajectories, policy, critic):
  """Returns the critic's parameters, the advantages per trajectory, the policy's gradient and loss."""
  total = sum(t.num_actions for t in trajectories)
  value = tiny.Oracle.of(critic)
  attention, embed = value.params["layers_0"]["attention"], value.params["embed"]
  zeros = jax.tree.map(np.zeros_like, value.params)
  moments = (zeros, zeros)

  def bootstrap(t, model):
    cut = config.truncation == "bootstrap" and t.ended == "truncated"
    return model.values_after(t.tokens)[-1] if cut else 0.0

  for count in range(1, config.critic_updates + 1):
    gradients = []
    for t in trajectories:
      v = value.values(t.tokens)
      targets = oracle_gae(t, v, config.lambda_critic, config.discount, bootstrap(t, value)) + v
      gradients.append(value.value_gradient(t.tokens, np.where(t.action_mask, 2.0 * (v - targets) / total, 0.0)))
    params, moments = oracle_adam(value.params, add(gradients), moments, count, CRITIC.learning_rate)
    if "attention" in config.frozen_critic:
      params["layers_0"]["attention"] = attention
    if "embeddings" in config.frozen_critic:
      params["embed"] = embed
    value = tiny.Oracle(params)
  actor = tiny.Oracle.of(policy)
  advantages, gradients, loss = [], [], 0.0
  for t in trajectories:
    lambda_ = config.lambda_policy
    if lambda_ is None:
      lambda_ = max(0.0, 1.0 - 1.0 / (config.alpha * t.num_actions))
    adv = oracle_gae(t, value.values(t.tokens), lambda_, config.discount, bootstrap(t, value))
    logp = actor.logps(t.tokens, config.temperature)[np.arange(len(t.tokens)), t.tokens]
    ratio = np.exp(np.where(t.action_mask, logp - t.behavior_logp, 0.0))
    kept = t.action_mask & (1.0 - config.eps_low < ratio) & (ratio < 1.0 + config.eps_high)
    coefficient = -np.where(kept, ratio * adv, 0.0) / total
    loss += np.sum(coefficient * logp)
    gradients.append(actor.policy_gradient(t.tokens, coefficient, config.temperature))
    advantages.append(adv)
  return value.params, advantages, add(gradients), loss


@pytest.mark.parametrize(
  "fields",
  [
    {},
    {"frozen_critic": (), "critic_updates": 1, "discount": 0.9, "lambda_policy": 0.7, "temperature": 0.7},
    {"truncation": "bootstrap", "lambda_critic": 0.8, "discount": 0.95, "eps_low": 0.1, "eps_high": 0.3},
  ],
)
def test_one_step_equals_a_float64_rederivation(fields):
  config = make_config(**fields)
  policy, critic = tiny.init(1), tiny.init(2, value=True)
  made = tiny.trajectories(12, seed=3, policy=policy, lag=0.3, truncated_share=0.4, temperature=config.temperature)
  learner, metrics = run(config, made, policy=policy, critic=critic)
  expected_critic, advantages, gradient, loss = oracle_step(config, made, policy, critic)
  assert_close(learner.critic, expected_critic, rtol=1e-3, atol=2e-5)
  assert_close(first_gradient(learner.policy_opt), gradient, rtol=1e-3, atol=3e-6)
  np.testing.assert_allclose(metrics["policy_loss"], loss, rtol=1e-4, atol=1e-6)
  flat = np.concatenate([a[t.action_mask] for a, t in zip(advantages, made, strict=True)])
  np.testing.assert_allclose(metrics["advantage_mean"], flat.mean(), rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(metrics["advantage_std"], flat.std(), rtol=1e-3, atol=1e-5)
  assert metrics["action_tokens"] == len(flat)


# ---------------------------------------------------------------------------------------------------------------------
# PITFALLS.


def test_pitfall_10_without_lag_every_ratio_is_one_and_nothing_is_masked():
  policy = tiny.init(1)
  _, metrics = run(make_config(), tiny.trajectories(12, policy=policy), policy=policy)
  np.testing.assert_allclose(metrics["ratio_mean"], 1.0, atol=1e-6)
  assert metrics["dis_masked_fraction"] == 0.0 and abs(metrics["approx_kl"]) < 1e-6


def test_pitfall_9_another_temperature_than_the_engines_shows_in_the_ratio():
  policy = tiny.init(1, scale=1.5)
  _, metrics = run(make_config(), tiny.trajectories(12, policy=policy, temperature=0.7), policy=policy)
  assert metrics["approx_kl"] > 0.01


def with_ratios(trajectory, policy, ratios):
  """The same trajectory, recorded with log-probs that make the given ratios."""
  logp = tiny.Oracle.of(policy).logps(trajectory.tokens)[np.arange(len(trajectory.tokens)), trajectory.tokens]
  recorded = np.full(len(logp), np.nan, np.float32)
  recorded[trajectory.action_mask] = (logp[trajectory.action_mask] - np.log(ratios)).astype(np.float32)
  object.__setattr__(trajectory, "behavior_logp", recorded)
  return trajectory


def test_pitfall_5_masked_tokens_count_in_the_denominator():
  """Two of four tokens masked: the gradient is that of the other two, over four."""
  policy = tiny.init(1)
  config = PREVIOUS
  half = with_ratios(tiny.trajectory([False, True, True, True, True]), policy, [1.0, 1.0, 0.1, 9.0])
  learner, metrics = run(config, [half], policy=policy)
  assert metrics["dis_masked_fraction"] == 0.5
  assert metrics["dis_masked_low"] == 0.25 and metrics["dis_masked_high"] == 0.25
  adv = oracle_gae(half, tiny.Oracle.of(tiny.init(2, value=True)).values(half.tokens), 1.0, 1.0)
  coefficient = -adv * np.array([0, 1, 1, 0, 0]) / 4.0
  expected = tiny.Oracle.of(policy).policy_gradient(half.tokens, coefficient)
  assert_close(first_gradient(learner.policy_opt), expected, rtol=1e-3, atol=1e-6)


def test_pitfall_7_nothing_kept_moves_nothing():
  """All tokens masked, with momentum from an earlier step and weight decay: policy and critic stay bit for bit."""
  decay = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
  config = make_config(policy_optimizer=decay, critic_optimizer=decay)
  policy = tiny.init(1)
  step = make_step(config)
  good, stats = batching.pack_batch(config, tiny.trajectories(12, policy=policy))
  learner, _ = step(make_state(config, policy), good, np.int32(stats.num_microbatches))
  before = jax.device_get(learner)
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), before.policy, policy)
  assert all(change > 0 for change in jax.tree.leaves(moved))
  masked = good.replace(behavior_logp=np.where(good.action_mask, -40.0, 0.0).astype(np.float32))
  learner, metrics = step(learner, masked, np.int32(stats.num_microbatches))
  after, metrics = jax.device_get((learner, metrics))
  assert metrics["dis_masked_fraction"] == 1.0 and metrics["policy_loss"] == 0.0
  assert metrics["policy_grad_norm"] == 0.0 and all(np.isfinite(m) for m in metrics.values())
  assert_same((after.policy, after.policy_opt), (before.policy, before.policy_opt))
  assert after.counters.policy_empty == 1 and after.counters.policy_nonfinite == 0
  assert after.step == before.step + 1

  nothing = good.replace(action_mask=np.zeros_like(good.action_mask))
  before = after
  learner, metrics = step(learner, nothing, np.int32(stats.num_microbatches))
  after, metrics = jax.device_get((learner, metrics))
  assert_same((after.policy, after.policy_opt), (before.policy, before.policy_opt))
  assert_same((after.critic, after.critic_opt), (before.critic, before.critic_opt))
  assert metrics["policy_loss"] == 0.0 and metrics["value_loss"] == 0.0
  assert all(np.isfinite(value) for key, value in metrics.items() if not key.startswith("explained_variance"))
  assert after.counters.critic_empty == 2


@pytest.mark.parametrize(
  ("poison", "value"),
  # A log-prob of -inf is a ratio that DIS masks: loss and gradient are finite, and still nothing must be learned of it.
  [("rewards", np.nan), ("rewards", np.inf), ("behavior_logp", np.nan), ("behavior_logp", -np.inf)],
)
def test_a_batch_that_is_not_finite_changes_nothing_and_is_counted(poison, value):
  config = make_config()
  policy = tiny.init(1)
  batch, stats = batching.pack_batch(config, tiny.trajectories(12, policy=policy))
  bad = np.array(getattr(batch, poison))
  bad[tuple(np.argwhere(batch.action_mask)[0])] = value
  step = make_step(config)
  learner, _ = step(make_state(config, policy), batch, np.int32(stats.num_microbatches))
  before = jax.device_get(learner)
  learner, _ = step(learner, batch.replace(**{poison: bad}), np.int32(stats.num_microbatches))
  after = jax.device_get(learner)
  assert_same((after.policy, after.policy_opt), (before.policy, before.policy_opt))
  assert after.counters.policy_nonfinite == 1 and after.counters.policy_empty == 0
  if poison == "rewards":
    assert_same((after.critic, after.critic_opt), (before.critic, before.critic_opt))
    assert after.counters.critic_nonfinite == 2
  else:
    assert after.counters.critic_nonfinite == 0
  learner, metrics = step(learner, batch, np.int32(stats.num_microbatches))
  assert all(np.isfinite(value) for value in jax.device_get(metrics).values())


EVERYTHING = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 3, "decay_steps": 9}
MANY = make_config(
  policy_optimizer=OptimizerConfig(**EVERYTHING), critic_optimizer=OptimizerConfig(**EVERYTHING), critic_updates=3,
  policy_minibatches=2,
)  # fmt: skip
"""Every setting of the optimizers, several updates of both models, several microbatches in each."""


def counts(learner):
  """Updates of policy and critic, by the counts that their schedules go by."""
  return [
    {int(leaf) for leaf in jax.tree.leaves(opt) if leaf.dtype == np.int32}
    for opt in (learner.policy_opt, learner.critic_opt)
  ]


def test_skipped_updates_do_not_show_in_what_comes_later_whatever_the_optimizer():
  policy = tiny.init(1)
  batch, stats = batching.pack_batch(MANY, tiny.trajectories(40, policy=policy))
  assert stats.num_microbatches >= 6
  half = stats.num_microbatches // 2
  poisoned = np.array(batch.rewards)
  poisoned[tuple(np.argwhere(batch.action_mask)[0])] = np.nan
  none = np.zeros_like(batch.action_mask)
  first_only = batch.action_mask & (np.arange(len(none)) < half)[:, None, None]

  def go(*batches):
    learner = make_state(MANY, policy)
    for x in batches:
      learner, _ = make_step(MANY)(learner, x, np.int32(stats.num_microbatches))
    return jax.device_get(learner)

  whole = go(batch, batch)
  assert counts(whole) == [{4}, {6}] and sum(whole.counters) == 0
  empty = go(batch, batch.replace(action_mask=none), batch)
  assert_same((empty.policy, empty.policy_opt, empty.critic, empty.critic_opt), whole[:4])
  assert empty.counters._asdict() == {**whole.counters._asdict(), "policy_empty": 2, "critic_empty": 3}
  # A reward that is no number spoils all of the critic's updates, and that one of the policy's that it is part of.
  bad = go(batch, batch.replace(rewards=poisoned))
  assert counts(bad) == [{3}, {3}]
  assert bad.counters._asdict() == {**whole.counters._asdict(), "policy_nonfinite": 1, "critic_nonfinite": 3}
  assert_same((bad.critic, bad.critic_opt), (go(batch).critic, go(batch).critic_opt))
  # A minibatch without actions among good ones.
  some = go(batch.replace(action_mask=first_only))
  assert counts(some) == [{1}, {3}] and some.counters.policy_empty == 1 and some.counters.policy_nonfinite == 0


def test_a_critic_that_overflows_in_its_second_pass_stops_there_and_takes_the_policy_along():
  config = dataclasses.replace(MANY, critic_optimizer=OptimizerConfig(learning_rate=1e25, max_grad_norm=None))
  learner, metrics = run(config, tiny.trajectories(12, policy=tiny.init(1)), policy=tiny.init(1))
  assert np.isfinite(metrics["value_loss"]) and not np.isfinite(metrics["value_loss_last"])
  assert counts(learner) == [{0}, {1}]
  assert learner.counters.critic_nonfinite == 2 and learner.counters.policy_nonfinite == 2
  assert_same(learner.policy, jax.device_get(tiny.init(1)))


def test_pitfall_13_the_critic_is_fitted_to_monte_carlo_returns_whatever_the_policys_lambda():
  made = [tiny.trajectory([False, True, True], reward=1.0)]
  v = tiny.Oracle.of(tiny.init(2, value=True)).values(made[0].tokens)[1:]
  for config in (make_config(), PREVIOUS):
    _, metrics = run(config, made)
    np.testing.assert_allclose(metrics["value_loss"], np.mean((v - 1.0) ** 2), rtol=1e-5)


def test_pitfall_15_an_advantage_of_zero_is_still_an_action():
  """Tokens whose advantage and return are 0 count in the denominators and in every mean."""
  config = make_config("reinforce")
  policy = tiny.init(1)
  made = [tiny.trajectory([False, True, True], seed=i, index=i, policy=policy) for i in range(4)]
  _, one = run(config, made, policy=policy, baseline_adv=[1.0, 0.0, 0.0, 0.0])
  assert one["action_tokens"] == 8 and one["advantage_mean"] == 0.25
  adv = np.array([1.0, 0.0, 0.0, 0.0])
  oracle = tiny.Oracle.of(policy)
  expected = -sum(a * oracle.logps(t.tokens)[np.arange(3), t.tokens][1:].sum() for a, t in zip(adv, made, strict=True))
  np.testing.assert_allclose(one["policy_loss"], expected / 8, rtol=1e-5)
  learner, _ = run(config, made, policy=policy, baseline_adv=[0.0] * 4)
  assert learner.counters.policy_empty == 0


@pytest.mark.parametrize(("truncation", "discount"), [("terminal", 1.0), ("bootstrap", 0.5)])
def test_pitfall_16_bootstrapping_a_truncated_episode_is_a_setting(truncation, discount):
  oracle = tiny.Oracle.of(tiny.init(2, value=True))
  config = dataclasses.replace(PREVIOUS, truncation=truncation, discount=discount)
  for ended in ("truncated", "terminal"):
    made = [tiny.trajectory([False, True, True, False], reward=2.0, ended=ended)]
    v = oracle.values(made[0].tokens)[1:3]
    last = 2.0
    if truncation == "bootstrap" and ended == "truncated":
      last += discount * oracle.values_after(made[0].tokens)[-1]
    _, metrics = run(config, made)
    np.testing.assert_allclose(metrics["value_loss"], np.mean((v - [discount * last, last]) ** 2), rtol=1e-5)
    np.testing.assert_allclose(metrics["advantage_mean"], np.mean([discount * last, last] - v), rtol=1e-5)


def test_pitfall_17_whitening_reads_action_tokens_only_and_is_off_by_default():
  made = tiny.trajectories(12, policy=tiny.init(1))
  _, plain = run(make_config(), made)
  _, white = run(make_config(whiten_advantages=True), made)
  assert abs(plain["advantage_mean"]) > 1e-4
  np.testing.assert_allclose(white["advantage_mean"], 0.0, atol=1e-6)
  np.testing.assert_allclose(white["advantage_std"], 1.0, rtol=1e-5)
  _, single = run(make_config(whiten_advantages=True), [tiny.trajectory([False, True], policy=tiny.init(1))])
  assert single["advantage_mean"] == 0.0 and np.isfinite(single["policy_loss"])


def test_pitfall_19_advantages_come_from_the_updated_values():
  made = tiny.trajectories(12, policy=tiny.init(1))
  pulled, metrics = {}, {}
  for source, config in (("updated", make_config(lambda_policy=1.0)), ("previous", PREVIOUS)):
    learner, metrics[source] = run(config, made)
    pulled[source] = learner.critic
  assert_same(pulled["updated"], pulled["previous"])
  assert metrics["updated"]["advantage_mean"] != metrics["previous"]["advantage_mean"]
  assert metrics["updated"]["explained_variance"] != metrics["updated"]["explained_variance_before"]
  np.testing.assert_allclose(
    metrics["previous"]["explained_variance"], metrics["previous"]["explained_variance_before"], rtol=1e-6
  )


def test_pitfall_20_the_critics_warm_up_scales_its_own_rate():
  warm = dataclasses.replace(CRITIC, warmup_steps=10)
  start = tiny.init(2, value=True)["value_head"]["kernel"]
  changes = []
  for optimizer in (CRITIC, warm):
    learner, _ = run_critic(make_config(critic_optimizer=optimizer), tiny.trajectories(12), 1)
    changes.append(learner.critic["value_head"]["kernel"] - start)
  np.testing.assert_allclose(changes[1], changes[0] / 10.0, rtol=1e-3, atol=1e-6)


def test_pitfall_20_holding_the_policy_leaves_the_critic_training():
  config = make_config(hold_policy_steps=2)
  policy, critic = tiny.init(1), tiny.init(2, value=True)
  for steps, moves in ((2, False), (3, True)):
    learner, metrics = run(config, tiny.trajectories(12, policy=policy), steps=steps)
    assert (np.abs(learner.policy["lm_head"]["kernel"] - policy["lm_head"]["kernel"]).max() > 0) == moves
    assert np.abs(learner.critic["value_head"]["kernel"] - critic["value_head"]["kernel"]).max() > 0
    assert metrics["policy_grad_norm"] > 0 and learner.version == steps
    assert learner.counters.policy_empty == 0


def test_pitfall_21_frozen_attention_has_no_optimizer_state_and_does_not_change():
  config, full = make_config(frozen_critic=("attention",)), make_config(frozen_critic=())

  def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))

  start = tiny.init(2, value=True)["layers_0"]["attention"]
  assert size(make_state(full).critic_opt) - size(make_state(config).critic_opt) == 2 * size(start)
  learner, _ = run_critic(config, tiny.trajectories(12), 1)
  assert_same(learner.critic["layers_0"]["attention"], start)
  learner, _ = run_critic(full, tiny.trajectories(12), 1)
  assert np.abs(learner.critic["layers_0"]["attention"]["v_proj"]["kernel"] - start["v_proj"]["kernel"]).max() > 0


def test_pitfall_21_frozen_leaves_have_no_gradient_in_the_compiled_program():
  """The gradient of the frozen kernel is one matrix product, and the program lacks it."""

  def products(config):
    batch, _ = batching.pack_batch(config, tiny.trajectories(4))
    lowered = make_critic_step(config, 1).lower(make_state(config), batch, np.int32(1))
    return lowered.compile().as_text().count(" dot(")

  assert products(make_config(frozen_critic=("attention",))) == products(make_config(frozen_critic=())) - 1


def test_pitfall_22_k_updates_are_k_real_updates():
  learners, metrics = zip(*(run_critic(make_config(), tiny.trajectories(12), k) for k in (1, 3)), strict=True)
  assert [int(learner.critic_opt[0].count) for learner in learners] == [1, 3]
  heads = [learner.critic["value_head"]["kernel"] for learner in learners]
  assert np.abs(heads[1] - heads[0]).max() > 1.5 * CRITIC.learning_rate
  assert metrics[0]["value_loss"] == metrics[1]["value_loss"] > metrics[1]["value_loss_last"]


def test_pitfall_23_every_row_has_its_own_mask():
  """Two rows with different masks give what the two give alone."""
  config = PREVIOUS
  policy = tiny.init(1)
  one = tiny.trajectory([False] + [True] * 3 + [False] * 12, seed=1, index=1, policy=policy)
  two = tiny.trajectory([False] * 9 + [True] * 7, seed=2, index=2, policy=policy)
  gradients = [first_gradient(run(config, made, policy=policy)[0].policy_opt) for made in ([one], [two], [one, two])]
  expected = jax.tree.map(lambda a, b: (3 * a + 7 * b) / 10, gradients[0], gradients[1])
  assert_close(gradients[2], expected, rtol=1e-3, atol=1e-6)


def test_pitfall_26_the_state_owns_its_buffers():
  """Parameters handed in, and leaves shared by policy and critic, survive the donated step."""
  config = make_config()
  policy = tiny.init(1)
  critic = {**tiny.init(2, value=True), "embed": policy["embed"]}
  kept = jax.device_get((policy, critic))
  run(config, tiny.trajectories(6), policy=policy, critic=critic)
  assert_same(jax.device_get((policy, critic)), kept)


def test_pitfall_33_a_zero_head_starts_at_value_zero():
  critic = tiny.init(2, value=True)
  critic["value_head"]["kernel"] = jnp.zeros_like(critic["value_head"]["kernel"])
  made = [tiny.trajectory([False, True, True], reward=1.0)]
  _, metrics = run(PREVIOUS, made, critic=critic)
  assert metrics["value_loss"] == 1.0 and metrics["advantage_mean"] == 1.0


# ---------------------------------------------------------------------------------------------------------------------
# Microbatches.


def test_microbatches_add_up_to_one_big_batch():
  made = tiny.trajectories(12, policy=tiny.init(1), lag=0.2)
  small, small_metrics = run(make_config(), made)
  large, large_metrics = run(make_config(rows_per_microbatch=16, min_microbatches=1), made)
  for name in ("policy", "critic"):
    assert_close(getattr(small, name), getattr(large, name), rtol=1e-3, atol=2e-5)
  assert_close(first_gradient(small.policy_opt), first_gradient(large.policy_opt), rtol=1e-4, atol=1e-6)
  for key in small_metrics:
    np.testing.assert_allclose(small_metrics[key], large_metrics[key], rtol=1e-3, atol=1e-5, err_msg=key)


def test_unused_microbatches_are_not_computed():
  """Garbage past the trip count is never touched, and one program serves every trip count."""
  config = make_config()
  policy = tiny.init(1)
  batch, stats = batching.pack_batch(config, tiny.trajectories(6, policy=policy))
  assert stats.num_microbatches < stats.num_padded_microbatches
  calls = []

  def counting(params, tokens, positions, segment_ids):
    jax.debug.callback(lambda: calls.append(1))
    return tiny.value_apply(params, tokens, positions, segment_ids)

  plain = update.make_critic_step(config, counting, num_updates=1, jit=False)
  step = jax.jit(plain)
  step(make_state(config, policy), batch, np.int32(stats.num_microbatches))
  jax.effects_barrier()
  assert len(calls) == stats.num_microbatches
  step(make_state(config, policy), batch, np.int32(1))
  jax.effects_barrier()
  assert len(calls) == stats.num_microbatches + 1 and step._cache_size() == 1


def test_critic_step_alone_leaves_policy_and_step_count():
  config = make_config()
  batch, stats = batching.pack_batch(config, tiny.trajectories(12))
  step = make_critic_step(config, 1)
  learner = make_state(config)
  losses = []
  for _ in range(30):
    learner, metrics = step(learner, batch, np.int32(stats.num_microbatches))
    losses.append(float(metrics["value_loss"]))
  assert losses[-1] < 0.5 * losses[0]
  assert_same(jax.device_get(learner.policy), jax.device_get(tiny.init(1)))
  assert learner.step == 0 and int(learner.critic_opt[0].count) == 30


def test_same_inputs_same_bits_from_one_program():
  """Also where the policy comes tied to a device, as from a checkpoint, and the critic does not."""
  config = make_config()
  policy = jax.device_put(tiny.init(1), jax.devices()[0])
  made = tiny.trajectories(12, policy=policy, lag=0.2)
  first = run(config, made, policy=policy, steps=2)
  compiled = make_step(config)._cache_size()
  assert_same(run(config, made, policy=tiny.init(1), steps=2), first)
  assert make_step(config)._cache_size() == compiled <= 2


def test_missing_and_superfluous_critics_are_refused():
  with pytest.raises(ValueError, match="value_apply is required"):
    update.make_update_step(make_config(), tiny.policy_apply)
  with pytest.raises(ValueError, match="critic_params is required"):
    state.init_state(make_config(), tiny.init(1))
  with pytest.raises(ValueError, match="critic_params is not used"):
    state.init_state(make_config("grpo"), tiny.init(1), tiny.init(2, value=True))
