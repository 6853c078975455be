"""One learner step, in the paper's order: K critic updates, values, advantages, one policy update.

Shapes: M microbatches of B rows of T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from sao_jax.learner import algorithms, microbatches, optimizers, partition, regularization, scoring, targets
from sao_jax.learner.config import LearnerConfig
from sao_jax.learner.state import LearnerState
from sao_jax.ops import diagnostics, masking, value_losses
from sao_jax.types import AnyArray, Params, PolicyApply, TokenBatch, ValueApply

Metrics: TypeAlias = dict[str, jax.Array]
"""Float32 scalars on the device; NaN for a quantity that does not exist (no critic, no variance)."""

Step: TypeAlias = Callable[[LearnerState, TokenBatch, Any], tuple[LearnerState, Metrics]]
"""`(state (donated), batch [M, B, T], num_microbatches int32) -> (state, metrics)`."""

CRITIC_KEYS = (
  "value_loss", "value_loss_last", "critic_grad_norm", "explained_variance", "explained_variance_before",
  "returns_square_mean",
)  # fmt: skip


class PolicyOutputs(NamedTuple):
  """Log-probs and entropies of the action tokens: `[M, B, T]`, or `[B, T]` for one microbatch."""

  logp: Float32[Array, "*M B T"]
  entropy: Float32[Array, "*M B T"]


class CriticUpdate(NamedTuple):
  """Result of K critic updates."""

  state: LearnerState
  v_after: Float32[Array, "M B T"]
  """The critic's raw output, from the parameters before the first update. Entry t is the value of the state that
  follows token t."""
  returns: Float32[Array, "M B T"]
  """Targets of the first update."""
  metrics: Metrics


def make_update_step(
  config: LearnerConfig, policy_apply: PolicyApply, value_apply: ValueApply | None = None, *, jit: bool = True
) -> Step:
  """Builds the learner step of arXiv 2607.07508, Section 3.2: critic x K -> values -> GAE -> policy.

  The policy's objective is a sum over action tokens, divided by the number of action tokens of the WHOLE batch, masked
  ones included. It does not depend on the split into microbatches, rows and devices. Microbatches from
  `num_microbatches` on are not computed.

  Args:
    config: the algorithm and its settings.
    policy_apply: the policy.
    value_apply: the value model; required if `config.uses_critic`.
    jit: compile the step, donating its state; False returns the plain function.

  Returns:
    The step. Its metrics are device scalars: fetch them once, with `jax.device_get`.

  Raises:
    ValueError: the algorithm needs a value model, and there is none.
  """
  if config.uses_critic and value_apply is None:
    raise ValueError(f"value_apply is required with advantage={config.advantage!r}; received None.")

  def step(state: LearnerState, batch: TokenBatch, num_microbatches: Int[Array, ""]) -> tuple[LearnerState, Metrics]:
    if value_apply is not None and config.uses_critic:
      # K updates of the critic, each on the squared error between V and the λ-returns of action tokens (Section 3.2).
      critic = update_critic(config, value_apply, state, batch, num_microbatches)
      # V(s_t) with the updated critic.
      state, v_after, critic_metrics = values_for_policy(config, value_apply, critic, batch, num_microbatches)
      # Skip-observation GAE with a length-adaptive λ (Equations 4 and 5).
      adv = targets.policy_advantages(config, v_after, batch)
    else:
      # From rewards alone, computed on the host (`baselines.py`).
      adv, critic_metrics = targets.baseline_advantages(batch), {key: jnp.full((), jnp.nan) for key in CRITIC_KEYS}
    # One policy update; by default with DIS (Equations 1 to 3).
    adv = masking.masked_whiten(adv, batch.action_mask) if config.whiten_advantages else adv
    state, policy_metrics = update_policy(config, policy_apply, state, batch, adv, num_microbatches)
    state = state._replace(step=state.step + 1)
    return state, {**critic_metrics, **policy_metrics, **_skipped(state)}

  return jax.jit(step, donate_argnums=0) if jit else step


def make_critic_step(
  config: LearnerConfig, value_apply: ValueApply, *, num_updates: int | None = None, jit: bool = True
) -> Step:
  """Builds the critic's part of the step, for value pretraining. The policy and the step count stay unchanged.

  Args:
    config: the algorithm and its settings.
    value_apply: the value model.
    num_updates: updates per call; None: `config.critic_updates`.
    jit: compile the step, donating its state; False returns the plain function.
  """

  def step(state: LearnerState, batch: TokenBatch, num_microbatches: Int[Array, ""]) -> tuple[LearnerState, Metrics]:
    update = update_critic(config, value_apply, state, batch, num_microbatches, num_updates=num_updates)
    return update.state, {**update.metrics, **_skipped(update.state)}

  return jax.jit(step, donate_argnums=0) if jit else step


def make_critic_evaluation(config: LearnerConfig, value_apply: ValueApply, *, jit: bool = True) -> Step:
  """Builds a step that measures the critic on a batch and changes nothing: its `explained_variance`.

  Args:
    config: decides the returns and the tokens.
    value_apply: the value model.
    jit: compile the step, donating its state (which it returns); False returns the plain function.
  """

  def step(state: LearnerState, batch: TokenBatch, num_microbatches: Int[Array, ""]) -> tuple[LearnerState, Metrics]:
    v_after = compute_values(value_apply, state.critic, batch, num_microbatches)
    returns = targets.critic_targets(config, v_after, batch)
    return state, {"explained_variance": explained_variance(config, v_after, returns, batch)}

  return jax.jit(step, donate_argnums=0) if jit else step


def values_for_policy(
  config: LearnerConfig,
  value_apply: ValueApply,
  critic: CriticUpdate,
  batch: TokenBatch,
  num_microbatches: Int[Array, ""],
) -> tuple[LearnerState, Float32[Array, "M B T"], Metrics]:
  """Values that the advantages are computed from, of the updated critic or, with `values_from="previous"`, of the old.

  Returns:
    The updated state, raw values, and the critic's metrics with the explained variance of these values.
  """
  v_after, returns = critic.v_after, critic.returns
  if config.values_from == "updated":
    v_after = compute_values(value_apply, critic.state.critic, batch, num_microbatches)
    if targets.targets_depend_on_values(config):
      returns = targets.critic_targets(config, v_after, batch)
  explained = explained_variance(config, v_after, returns, batch)
  return critic.state, v_after, {**critic.metrics, "explained_variance": explained}


def compute_values(
  value_apply: ValueApply, critic: Params, batch: TokenBatch, num_microbatches: Int[Array, ""]
) -> Float32[Array, "M B T"]:
  """The value model's raw outputs (at index t, the value after `tokens[t]`); 0 in unused microbatches."""

  def values(tokens: TokenBatch) -> jax.Array:
    return _value_forward(value_apply, critic, tokens)

  return microbatches.map_microbatches(values, batch, jnp.zeros_like(batch.rewards), 0, num_microbatches)


def update_critic(
  config: LearnerConfig,
  value_apply: ValueApply,
  state: LearnerState,
  batch: TokenBatch,
  num_microbatches: Int[Array, ""],
  *,
  num_updates: int | None = None,
) -> CriticUpdate:
  """Makes K optimizer updates of the critic, each over the whole batch. Frozen parameters have no gradient.

  L = 1/N Σ_t M_t (V(s_t) − R_t)², with R the λ-returns of `targets.critic_targets` and N the number of
  tokens that the critic is fitted on.
  """
  optimizer = optimizers.make_optimizer(config.critic_optimizer)
  trainable, frozen = partition.split(state.critic, config.frozen_critic)
  mask = targets.critic_mask(config, batch)
  count = jnp.sum(mask)

  # Returns with λ = 1 are the same in every pass.
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
  adv: Float[Array, "M B T"],
  start: Int[Array, ""] | int,
  stop: Int[Array, ""] | int,
  *,
  denominator: Int[Array, ""],
  outputs: PolicyOutputs,
  old_logp: Float[Array, "M B T"] | None = None,
  imitation: Float[Array, "M B T"] | None = None,
  reference_logp: Float[Array, "M B T"] | None = None,
) -> tuple[Params, Float32[Array, ""], PolicyOutputs]:
  """Gradient and loss of the microbatches `start <= m < stop`: a sum over action tokens, divided by `denominator`.

  Args:
    config: names the loss.
    policy_apply: the policy.
    params: its parameters.
    batch: `[M, B, T]` leaves.
    adv: `[M, B, T]` advantages.
    start: first microbatch.
    stop: one past the last.
    denominator: number of action tokens that the loss is a mean over.
    outputs: `[M, B, T]` log-probs and entropies; the entries of these microbatches are replaced.
    old_logp: `[M, B, T]` log-probs under π_old; None: `params` are π_old.
    imitation: `[M, B, T]` weights of a term −w log π that is added to the loss; None: no such term.
    reference_logp: `[M, B, T]` log-probs under the reference policy; None: no KL divergence is added.
  """

  def loss_fn(
    params: Params, inputs: tuple[TokenBatch, jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]
  ) -> tuple[jax.Array, PolicyOutputs]:
    tokens, adv, old, imitated, reference = inputs
    logp, entropy = _forward(config, policy_apply, params, tokens)
    old = jax.lax.stop_gradient(logp) if old is None else old
    arguments = (logp, old, tokens.behavior_logp, adv, tokens.action_mask, tokens.segment_ids)
    loss = algorithms.policy_loss(config, *arguments)
    if imitated is not None:
      loss = loss - imitated * jnp.where(tokens.action_mask, logp, 0.0)
    loss = regularization.regularized_loss(config, loss, logp, entropy, reference, tokens.action_mask)
    return jnp.sum(loss) / denominator, PolicyOutputs(logp, entropy)

  inputs = (batch, adv, old_logp, imitation, reference_logp)
  return microbatches.accumulate_gradients(loss_fn, params, inputs, outputs, start, stop)


def update_policy(
  config: LearnerConfig,
  policy_apply: PolicyApply,
  state: LearnerState,
  batch: TokenBatch,
  adv: Float[Array, "M B T"],
  num_microbatches: Int[Array, ""],
) -> tuple[LearnerState, Metrics]:
  """Makes one policy update, or `policy_minibatches` of them, and returns its metrics."""
  optimizer = optimizers.make_optimizer(config.policy_optimizer)
  split = config.policy_minibatches
  old_logp = _old_logp(config, policy_apply, state.policy, batch, num_microbatches)
  reference_logp = regularization.reference_logp(config, policy_apply, state.reference, batch, num_microbatches)
  positive = targets.positive_examples(config, batch) if config.positive_weight else None
  counts = jnp.sum(batch.action_mask, axis=(1, 2))
  index = jnp.arange(counts.shape[0])

  def one_update(carry: tuple[Params, Any, PolicyOutputs], part: jax.Array) -> tuple[Any, Any]:
    params, opt_state, outputs = carry
    start, stop = part * num_microbatches // split, (part + 1) * num_microbatches // split
    here = (index >= start) & (index < stop)
    count = jnp.maximum(jnp.sum(jnp.where(here, counts, 0)), 1)
    imitation = None if positive is None else _imitation(config, positive & here[:, None, None], count)
    grads, loss, outputs = policy_gradient(
      config, policy_apply, params, batch, adv, start, stop, denominator=count, outputs=outputs, old_logp=old_logp,
      imitation=imitation, reference_logp=reference_logp,
    )  # fmt: skip
    logp = outputs.logp
    arguments = (logp if old_logp is None else old_logp, batch.behavior_logp, adv, batch.action_mask, batch.segment_ids)
    low, high = (side & here[:, None, None] for side in algorithms.clip_mask(config, logp, *arguments))
    actions = batch.action_mask & here[:, None, None]
    kept = jnp.sum(actions if config.regularized else actions & ~low & ~high)
    finite = _all_finite(logp, actions) & _all_finite(batch.behavior_logp, actions) & _all_finite(adv, actions)
    allowed = state.step >= config.hold_policy_steps
    done = optimizers.guarded_update(
      optimizer, grads, opt_state, params, loss=loss, kept=kept, finite=finite, allowed=allowed
    )
    return (done.params, done.opt_state, outputs), (loss, done.grad_norm, done.nonfinite, done.empty, low, high)

  outputs = PolicyOutputs(jnp.zeros_like(batch.behavior_logp), jnp.zeros_like(batch.behavior_logp))
  carry, reports = jax.lax.scan(one_update, (state.policy, state.policy_opt, outputs), jnp.arange(split))
  params, opt_state, outputs = carry
  losses, norms, nonfinite, empty, low, high = reports
  counters = state.counters._replace(
    policy_nonfinite=state.counters.policy_nonfinite + jnp.sum(nonfinite),
    policy_empty=state.counters.policy_empty + jnp.sum(empty),
  )
  metrics = _policy_metrics(config, batch, adv, outputs, jnp.any(low, axis=0), jnp.any(high, axis=0))
  own = old_logp
  if old_logp is None or config.old_policy == "rollout":  # In the latter, `old_logp` is the engine's own.
    own = outputs.logp if config.policy_minibatches == 1 else None
  metrics |= _engine_agreement(batch, own, state.version)
  metrics |= {"policy_loss": jnp.mean(losses), "policy_grad_norm": jnp.mean(norms)}
  metrics |= regularization.metrics(outputs.logp, reference_logp, batch.action_mask)
  return state._replace(policy=params, policy_opt=opt_state, counters=counters), metrics


def explained_variance(
  config: LearnerConfig, v_after: Float[Array, "M B T"], returns: Float[Array, "M B T"], batch: TokenBatch
) -> Float32[Array, ""]:
  """EV = 1 − Var(R − V) / Var(R), over the tokens that the critic is fitted on."""
  return diagnostics.explained_variance(targets.values_before(v_after), returns, targets.critic_mask(config, batch))


def _all_finite(x: jax.Array, mask: jax.Array) -> jax.Array:
  return jnp.all(jnp.isfinite(x) | ~mask)


def _value_forward(value_apply: ValueApply, critic: Params, tokens: TokenBatch) -> jax.Array:
  return value_apply(critic, tokens.tokens, tokens.positions, tokens.segment_ids).astype(jnp.float32)


def _forward(
  config: LearnerConfig, policy_apply: PolicyApply, params: Params, tokens: TokenBatch
) -> tuple[jax.Array, jax.Array]:
  """Log-probs and entropies of action tokens at the config's temperature."""
  output = policy_apply(params, tokens.tokens, tokens.positions, tokens.segment_ids)
  return scoring.action_logprobs(output, tokens, temperature=config.temperature, chunk_size=config.logprob_chunk_size)


def _old_logp(
  config: LearnerConfig, policy_apply: PolicyApply, params: Params, batch: TokenBatch, num_microbatches: Int[Array, ""]
) -> Float32[Array, "M B T"] | None:
  """Log-probs under π_old. None: with a single update the policy is its own π_old, without a forward pass for it."""
  if config.old_policy == "rollout":
    return batch.behavior_logp
  if config.policy_minibatches == 1:
    return None
  return scoring.batch_logprobs(config, policy_apply, params, batch, num_microbatches)


def _imitation(
  config: LearnerConfig, positive: Bool[Array, "M B T"], count: Int[Array, ""]
) -> Float32[Array, "M B T"]:
  """Weights that make a sum over `count` tokens, divided by `count`, a mean over the positive ones."""
  return config.positive_weight * positive * (count / jnp.maximum(jnp.sum(positive), 1))


def _policy_metrics(
  config: LearnerConfig,
  batch: TokenBatch,
  adv: Float[Array, "M B T"],
  outputs: PolicyOutputs,
  low: Bool[Array, "M B T"],
  high: Bool[Array, "M B T"],
) -> Metrics:
  logp, entropy = outputs
  mask = batch.action_mask

  def mean(x: jax.Array) -> jax.Array:
    return masking.masked_mean(x.astype(jnp.float32), mask)

  ratio = jnp.exp(jnp.where(mask, logp - batch.behavior_logp, 0.0))
  adv_mean = mean(adv)
  adv_std = jnp.sqrt(mean(jnp.square(adv - adv_mean)))
  masked = (low | high).astype(jnp.float32)
  return {
    "dis_masked_fraction": mean(masked),
    "dis_masked_low": mean(low),
    "dis_masked_high": mean(high),
    # Shares of the tokens of each sign.
    "masked_fraction_positive_adv": masking.masked_mean(masked, mask & (adv > 0.0)),
    "masked_fraction_negative_adv": masking.masked_mean(masked, mask & (adv < 0.0)),
    "ratio_mean": mean(ratio),
    "approx_kl": diagnostics.approx_kl(logp, batch.behavior_logp, mask),
    "effective_sample_size": diagnostics.effective_sample_size(logp, batch.behavior_logp, mask),
    "entropy": mean(entropy),
    "lambda_policy_mean": mean(targets.policy_lambda(config, batch)),
    "advantage_mean": adv_mean,
    "advantage_std": adv_std,
    # Signal-to-noise ratio |mean| / std over the batch's action tokens; 0 where all advantages are 0.
    "advantage_snr": jnp.abs(adv_mean) / jnp.maximum(adv_std, 1e-12),
    "action_tokens": jnp.sum(mask).astype(jnp.float32),
  }


def _engine_agreement(
  batch: TokenBatch, logp: Float[Array, "M B T"] | None, version: Int32[AnyArray, ""]
) -> Metrics:
  """Compares the engine's log-probs with the learner's, where both have the same weights (staleness 0).

  Args:
    batch: the step's batch.
    logp: the learner's log-probs before its first update; None if they are not computed.
    version: of the learner's weights.

  Returns:
    `logprob_error`, the mean absolute difference in nats (0 without such tokens), and `logprob_error_tokens`, their
    number.
  """
  if batch.version is None or logp is None:
    return {"logprob_error": jnp.full((), jnp.nan), "logprob_error_tokens": jnp.zeros(())}
  fresh = batch.action_mask & (batch.version == version)
  error = jnp.where(fresh, jnp.abs(logp - batch.behavior_logp), 0.0)
  return {
    "logprob_error": masking.masked_mean(error, fresh),
    "logprob_error_tokens": jnp.sum(fresh).astype(jnp.float32),
  }


def _skipped(state: LearnerState) -> Metrics:
  """Number of skipped updates so far, by model and cause."""
  counters = state.counters._asdict()
  return {f"skipped_{name}": value.astype(jnp.float32) for name, value in counters.items()}
