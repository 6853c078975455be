"""One learner step, in the paper's order: K critic updates, values, advantages, one policy update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from sao_jax.learner import algorithms, microbatches, optimizers, partition, scoring, targets
from sao_jax.learner.config import LearnerConfig
from sao_jax.learner.state import LearnerState
from sao_jax.ops import diagnostics, masking, value_losses
from sao_jax.types import Params, PolicyApply, TokenBatch, ValueApply

Metrics: TypeAlias = dict[str, jax.Array]
"""Float32 scalars on the device; NaN where a quantity does not exist (no critic, no variance)."""

Step: TypeAlias = Callable[[LearnerState, TokenBatch, Any], tuple[LearnerState, Metrics]]
"""`(state (donated), batch [M, B, T], num_microbatches int32) -> (state, metrics)`."""

CRITIC_KEYS = (
  "value_loss", "value_loss_last", "critic_grad_norm", "explained_variance", "explained_variance_before",
  "returns_square_mean",
)  # fmt: skip


class PolicyOutputs(NamedTuple):
  """What the policy's forward passes leave behind; `[M, B, T]`, or `[B, T]` of one microbatch."""

  logp: jax.Array
  entropy: jax.Array


class CriticUpdate(NamedTuple):
  """What K critic updates leave behind."""

  state: LearnerState
  v_after: jax.Array
  """`[M, B, T]`: raw values from before the first update."""
  returns: jax.Array
  """`[M, B, T]`: what the first update fitted."""
  metrics: Metrics


def make_update_step(
  config: LearnerConfig, policy_apply: PolicyApply, value_apply: ValueApply | None = None, *, jit: bool = True
) -> Step:
  """Builds the learner step (METHOD 3.2): critic x K -> values with the updated critic -> GAE -> policy.

  The policy's objective is sum over action tokens / number of action tokens of the WHOLE batch (masked ones count),
  whatever the split into microbatches, rows and devices. Microbatches from `num_microbatches` on are not computed.

  Args:
    config: what to compute.
    policy_apply: the policy.
    value_apply: the value model; required if `config.uses_critic`.
    jit: compile the step, donating its state; False returns the plain function.

  Returns:
    The step. Its metrics are device scalars: fetch them once, with `jax.device_get`.
  """
  if config.uses_critic and value_apply is None:
    raise ValueError(f"value_apply is required with advantage={config.advantage!r}; received None.")

  def step(state: LearnerState, batch: TokenBatch, num_microbatches: jax.Array) -> tuple[LearnerState, Metrics]:
    if value_apply is None or not config.uses_critic:
      adv = jnp.where(batch.action_mask, batch.baseline_adv, 0.0)
      critic_metrics = {key: jnp.full((), jnp.nan) for key in CRITIC_KEYS}
    else:
      state, v_after, returns, critic_metrics = update_critic(config, value_apply, state, batch, num_microbatches)
      if config.values_from == "updated":
        v_after = compute_values(value_apply, state.critic, batch, num_microbatches)
        if targets.targets_depend_on_values(config):
          returns = targets.critic_targets(config, v_after, batch)
      critic_metrics["explained_variance"] = explained_variance(config, v_after, returns, batch)
      adv = targets.policy_advantages(config, v_after, batch)
    if config.whiten_advantages:
      adv = jnp.where(batch.action_mask, masking.masked_whiten(adv, batch.action_mask), 0.0)
    state, policy_metrics = update_policy(config, policy_apply, state, batch, adv, num_microbatches)
    state = state._replace(step=state.step + 1)
    return state, {**critic_metrics, **policy_metrics, **_counts(state)}

  return jax.jit(step, donate_argnums=0) if jit else step


def make_critic_step(
  config: LearnerConfig, value_apply: ValueApply, *, num_updates: int | None = None, jit: bool = True
) -> Step:
  """Builds the critic's part of the step alone, for value pretraining; policy and step count stay as they are.

  Args:
    config: what to compute.
    value_apply: the value model.
    num_updates: updates per call; None: `config.critic_updates`.
    jit: compile, donating the state.
  """

  def step(state: LearnerState, batch: TokenBatch, num_microbatches: jax.Array) -> tuple[LearnerState, Metrics]:
    update = update_critic(config, value_apply, state, batch, num_microbatches, num_updates=num_updates)
    return update.state, {**update.metrics, **_counts(update.state)}

  return jax.jit(step, donate_argnums=0) if jit else step


def compute_values(
  value_apply: ValueApply, critic: Params, batch: TokenBatch, num_microbatches: jax.Array
) -> jax.Array:
  """`[M, B, T]` float32: the value model's raw outputs (one ahead); 0 in microbatches that are not used."""

  def values(tokens: TokenBatch) -> jax.Array:
    return _value_forward(value_apply, critic, tokens)

  return microbatches.map_microbatches(values, batch, jnp.zeros_like(batch.rewards), 0, num_microbatches)


def update_critic(
  config: LearnerConfig,
  value_apply: ValueApply,
  state: LearnerState,
  batch: TokenBatch,
  num_microbatches: jax.Array,
  *,
  num_updates: int | None = None,
) -> CriticUpdate:
  """K real optimizer updates of the critic, each over the whole batch; frozen parameters get no gradient at all."""
  optimizer = optimizers.make_optimizer(config.critic_optimizer)
  trainable, frozen = partition.split(state.critic, config.frozen_critic)
  mask = targets.critic_mask(config, batch)
  count = jnp.sum(mask)

  # Returns with lambda = 1 are the same in every pass.
  moving = targets.targets_depend_on_values(config)
  fixed = jnp.zeros_like(batch.rewards)
  if not moving:
    fixed = targets.critic_targets(config, fixed, batch)

  def loss_fn(trained: Params, inputs: tuple[TokenBatch, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    tokens, mask, target = inputs
    v_after = _value_forward(value_apply, partition.merge(trained, frozen), tokens)
    if moving:
      target = targets.critic_targets(config, jax.lax.stop_gradient(v_after), tokens)
    loss = value_losses.squared_value_loss(targets.values_before(v_after), target, mask)
    return jnp.sum(loss) / jnp.maximum(count, 1), v_after

  def one_pass(carry: tuple[Params, Any], _: None) -> tuple[tuple[Params, Any], Any]:
    trained, opt_state = carry
    grads, loss, v_after = microbatches.accumulate_gradients(
      loss_fn, trained, (batch, mask, fixed), jnp.zeros_like(batch.rewards), 0, num_microbatches
    )
    finite = _all_finite(targets.values_before(v_after), mask) & _all_finite(fixed, mask)
    done = optimizers.guarded_update(optimizer, grads, opt_state, trained, loss=loss, kept=count, finite=finite)
    return (done.params, done.opt_state), (loss, done.grad_norm, done.nonfinite, done.empty, v_after)

  length = num_updates or config.critic_updates
  (trained, opt_state), passes = jax.lax.scan(one_pass, (trainable, state.critic_opt), None, length=length)
  losses, norms, nonfinite, empty, v_after = passes
  returns = targets.critic_targets(config, v_after[0], batch) if moving else fixed
  counters = state.counters._replace(
    critic_nonfinite=state.counters.critic_nonfinite + jnp.sum(nonfinite),
    critic_empty=state.counters.critic_empty + jnp.sum(empty),
  )
  metrics = {
    "value_loss": losses[0],
    "value_loss_last": losses[-1],
    "critic_grad_norm": jnp.mean(norms),
    "explained_variance_before": explained_variance(config, v_after[0], returns, batch),
    "returns_square_mean": masking.masked_mean(jnp.square(returns), mask),
  }
  state = state._replace(critic=partition.merge(trained, frozen), critic_opt=opt_state, counters=counters)
  return CriticUpdate(state, v_after[0], returns, metrics)


def policy_gradient(
  config: LearnerConfig,
  policy_apply: PolicyApply,
  params: Params,
  batch: TokenBatch,
  adv: jax.Array,
  start: jax.Array | int,
  stop: jax.Array | int,
  *,
  denominator: jax.Array,
  written: PolicyOutputs,
  old_logp: jax.Array | None = None,
) -> tuple[Params, jax.Array, PolicyOutputs]:
  """Gradient and loss of the microbatches `start <= m < stop`: sum over action tokens / `denominator`.

  Args:
    config: the loss.
    policy_apply: the policy.
    params: its parameters.
    batch: `[M, B, T]`.
    adv: `[M, B, T]` advantages.
    start: first microbatch.
    stop: one past the last.
    denominator: action tokens that the loss is a mean over, scalar.
    written: log-probs and entropies; the entries of these microbatches are replaced.
    old_logp: `[M, B, T]` log-probs under pi_old; None: `params` are pi_old.
  """

  def loss_fn(
    params: Params, inputs: tuple[TokenBatch, jax.Array, jax.Array | None]
  ) -> tuple[jax.Array, PolicyOutputs]:
    tokens, adv, old = inputs
    logp, entropy = _forward(config, policy_apply, params, tokens)
    old = jax.lax.stop_gradient(logp) if old is None else old
    arguments = (logp, old, tokens.behavior_logp, adv, tokens.action_mask, tokens.segment_ids)
    return jnp.sum(algorithms.policy_loss(config, *arguments)) / denominator, PolicyOutputs(logp, entropy)

  return microbatches.accumulate_gradients(loss_fn, params, (batch, adv, old_logp), written, start, stop)


def update_policy(
  config: LearnerConfig,
  policy_apply: PolicyApply,
  state: LearnerState,
  batch: TokenBatch,
  adv: jax.Array,
  num_microbatches: jax.Array,
) -> tuple[LearnerState, Metrics]:
  """The policy's update (or `policy_minibatches` of them), and everything that is reported about it."""
  optimizer = optimizers.make_optimizer(config.policy_optimizer)
  split = config.policy_minibatches
  # With a single update pi_old is the policy itself, and needs no forward pass of its own.
  old_logp = None if split == 1 else _policy_logp(config, policy_apply, state.policy, batch, num_microbatches)
  counts = jnp.sum(batch.action_mask, axis=(1, 2))
  index = jnp.arange(counts.shape[0])

  def one_update(carry: tuple[Params, Any, PolicyOutputs], part: jax.Array) -> tuple[Any, Any]:
    params, opt_state, written = carry
    start, stop = part * num_microbatches // split, (part + 1) * num_microbatches // split
    here = (index >= start) & (index < stop)
    grads, loss, written = policy_gradient(
      config, policy_apply, params, batch, adv, start, stop,
      denominator=jnp.maximum(jnp.sum(jnp.where(here, counts, 0)), 1), written=written, old_logp=old_logp,
    )  # fmt: skip
    logp = written.logp
    arguments = (logp if old_logp is None else old_logp, batch.behavior_logp, adv, batch.action_mask, batch.segment_ids)
    low, high = (side & here[:, None, None] for side in algorithms.left_out(config, logp, *arguments))
    actions = batch.action_mask & here[:, None, None]
    kept = jnp.sum(actions & ~low & ~high)
    finite = _all_finite(logp, actions) & _all_finite(batch.behavior_logp, actions) & _all_finite(adv, actions)
    allowed = state.step >= config.hold_policy_steps
    done = optimizers.guarded_update(
      optimizer, grads, opt_state, params, loss=loss, kept=kept, finite=finite, allowed=allowed
    )
    return (done.params, done.opt_state, written), (loss, done.grad_norm, done.nonfinite, done.empty, low, high)

  written = PolicyOutputs(jnp.zeros_like(batch.behavior_logp), jnp.zeros_like(batch.behavior_logp))
  carry, reports = jax.lax.scan(one_update, (state.policy, state.policy_opt, written), jnp.arange(split))
  params, opt_state, written = carry
  losses, norms, nonfinite, empty, low, high = reports
  counters = state.counters._replace(
    policy_nonfinite=state.counters.policy_nonfinite + jnp.sum(nonfinite),
    policy_empty=state.counters.policy_empty + jnp.sum(empty),
  )
  metrics = _policy_metrics(config, batch, adv, written, jnp.any(low, axis=0), jnp.any(high, axis=0))
  metrics |= {"policy_loss": jnp.mean(losses), "policy_grad_norm": jnp.mean(norms)}
  return state._replace(policy=params, policy_opt=opt_state, counters=counters), metrics


def explained_variance(config: LearnerConfig, v_after: jax.Array, returns: jax.Array, batch: TokenBatch) -> jax.Array:
  """EV = 1 - Var(R - V) / Var(R) over the tokens that the critic is fitted on."""
  return diagnostics.explained_variance(targets.values_before(v_after), returns, targets.critic_mask(config, batch))


def _all_finite(x: jax.Array, mask: jax.Array) -> jax.Array:
  return jnp.all(jnp.isfinite(x) | ~mask)


def _value_forward(value_apply: ValueApply, critic: Params, tokens: TokenBatch) -> jax.Array:
  return value_apply(critic, tokens.tokens, tokens.positions, tokens.segment_ids).astype(jnp.float32)


def _forward(
  config: LearnerConfig, policy_apply: PolicyApply, params: Params, tokens: TokenBatch
) -> tuple[jax.Array, jax.Array]:
  """`scoring.action_logprobs` at the config's temperature."""
  output = policy_apply(params, tokens.tokens, tokens.positions, tokens.segment_ids)
  return scoring.action_logprobs(output, tokens, temperature=config.temperature, chunk_size=config.logprob_chunk_size)


def _policy_logp(
  config: LearnerConfig, policy_apply: PolicyApply, params: Params, batch: TokenBatch, num_microbatches: jax.Array
) -> jax.Array:
  def logp(tokens: TokenBatch) -> jax.Array:
    return _forward(config, policy_apply, params, tokens)[0]

  written = microbatches.map_microbatches(logp, batch, jnp.zeros_like(batch.behavior_logp), 0, num_microbatches)
  return jax.lax.stop_gradient(written)


def _policy_metrics(
  config: LearnerConfig, batch: TokenBatch, adv: jax.Array, outputs: PolicyOutputs, low: jax.Array, high: jax.Array
) -> Metrics:
  logp, entropy = outputs
  mask = batch.action_mask

  def mean(x: jax.Array) -> jax.Array:
    return masking.masked_mean(x.astype(jnp.float32), mask)

  ratio = jnp.exp(jnp.where(mask, logp - batch.behavior_logp, 0.0))
  adv_mean = mean(adv)
  return {
    "dis_masked_fraction": mean(low | high),
    "dis_masked_low": mean(low),
    "dis_masked_high": mean(high),
    "ratio_mean": mean(ratio),
    "approx_kl": diagnostics.approx_kl(logp, batch.behavior_logp, mask),
    "effective_sample_size": diagnostics.effective_sample_size(logp, batch.behavior_logp, mask),
    "entropy": mean(entropy),
    "lambda_policy_mean": mean(targets.policy_lambda(config, batch)),
    "advantage_mean": adv_mean,
    "advantage_std": jnp.sqrt(mean(jnp.square(adv - adv_mean))),
    "action_tokens": jnp.sum(mask).astype(jnp.float32),
  }


def _counts(state: LearnerState) -> Metrics:
  """Skipped updates so far, by model and kind."""
  counters = state.counters._asdict()
  return {f"skipped_{name}": value.astype(jnp.float32) for name, value in counters.items()}
