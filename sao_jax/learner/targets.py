"""Returns (the critic's targets) and advantages of packed rows.

`v_after` is the value model's raw output: at index t, the value of the state after `tokens[t]`. Leading axes are free.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from sao_jax.learner.config import LearnerConfig
from sao_jax.ops import advantages, masking
from sao_jax.types import TokenBatch


def values_before(v_after: Float32[Array, "*M B T"]) -> Float32[Array, "*M B T"]:
  """Aligns values: v[..., t] is the value of the state before `tokens[t]`.

  >>> values_before(jnp.array([[1.0, 2.0, 3.0]])).tolist()
  [[0.0, 1.0, 2.0]]
  """
  return masking.align_predictions(v_after, axis=-1)


def bootstrap_values(v_after: Float32[Array, "*M B T"], batch: TokenBatch) -> Float32[Array, "*M B T"]:
  """Value after the last token of each token's segment if the trajectory was cut off there, else 0."""
  length = batch.segment_ids.shape[-1]
  index = jnp.broadcast_to(jnp.arange(length), batch.segment_ids.shape)
  ends = ~_same_segment_next(batch.segment_ids)
  last = jax.lax.cummin(jnp.where(ends, index, length - 1), axis=index.ndim - 1, reverse=True)
  return jnp.where(batch.truncated, jnp.take_along_axis(v_after, last, axis=-1), 0.0)


def critic_mask(config: LearnerConfig, batch: TokenBatch) -> Bool[Array, "*M B T"]:
  """Tokens that the critic is fitted on: all action tokens, or with `step_last` the last one of each turn."""
  if config.advantage != "step_last":
    return batch.action_mask
  following = jnp.concatenate([batch.turn_ids[..., 1:], jnp.zeros_like(batch.turn_ids[..., :1])], axis=-1)
  same_turn = (batch.turn_ids == following) & _same_segment_next(batch.segment_ids)
  return batch.action_mask & ~same_turn


def targets_depend_on_values(config: LearnerConfig) -> bool:
  """Whether `critic_targets` depends on the critic. If not, it is computed once per batch."""
  return config.lambda_critic < 1.0 or config.truncation == "bootstrap"


def critic_targets(
  config: LearnerConfig, v_after: Float32[Array, "*M B T"], batch: TokenBatch
) -> Float32[Array, "*M B T"]:
  """λ-returns on action tokens, 0 elsewhere, with the critic's own λ (1 in the paper whatever the policy's λ)."""
  v = values_before(v_after)
  if config.lambda_critic == 1.0:
    v = jnp.zeros_like(v)  # V cancels in a return with λ = 1; zeros make that exact.
  returns = _estimate(config, v, v_after, batch, config.lambda_critic) + v
  return jax.lax.stop_gradient(jnp.where(batch.action_mask, returns, 0.0))


def policy_advantages(
  config: LearnerConfig, v_after: Float32[Array, "*M B T"], batch: TokenBatch
) -> Float32[Array, "*M B T"]:
  """Advantages on action tokens, 0 elsewhere, with the trajectory's length-adaptive λ, which `batching.pack` wrote into
  the batch, or the config's fixed one.

  By default skip-observation GAE (arXiv 2607.07508, Eqs. 4 and 5); `config.advantage` names the variants.
  """
  lambda_ = batch.lambda_policy if config.lambda_policy is None else config.lambda_policy
  adv = _estimate(config, values_before(v_after), v_after, batch, lambda_)
  return jax.lax.stop_gradient(jnp.where(batch.action_mask, adv, 0.0))


def baseline_advantages(batch: TokenBatch) -> Float32[Array, "*M B T"]:
  """Advantages that came with the batch, from rewards alone; 0 off action tokens."""
  return jnp.where(batch.action_mask, batch.baseline_adv, 0.0)


def positive_examples(config: LearnerConfig, batch: TokenBatch) -> Bool[Array, "*M B T"]:
  """Action tokens from which on the trajectory's rewards, undiscounted, sum to more than 0.

  For a reward at the end these are all action tokens of the successful trajectories.
  """
  plain = dataclasses.replace(config, advantage="gae", baseline="none", discount=1.0, truncation="terminal")
  zeros = jnp.zeros_like(batch.rewards)
  return batch.action_mask & (_estimate(plain, zeros, zeros, batch, 1.0) > 0.0)


def policy_lambda(config: LearnerConfig, batch: TokenBatch) -> Float32[Array, "*M B T"]:
  """λ per token: the config's if it is fixed, else the trajectory's."""
  if config.lambda_policy is None:
    return batch.lambda_policy
  return jnp.full_like(batch.lambda_policy, config.lambda_policy)


def _same_segment_next(segment_ids: Int32[Array, "*M B T"]) -> Bool[Array, "*M B T"]:
  """True where the next token of the row belongs to the same segment."""
  following = jnp.concatenate([segment_ids[..., 1:], jnp.full_like(segment_ids[..., :1], -1)], axis=-1)
  return segment_ids == following


def _estimate(
  config: LearnerConfig, v: jax.Array, v_after: jax.Array, batch: TokenBatch, lambda_: jax.Array | float
) -> jax.Array:
  """Applies the config's advantage estimator to all rows of the batch, in one vmap."""
  mask = batch.action_mask
  if config.advantage == "gae_all_tokens":
    # All tokens but the first of a segment, whose aligned value would be the previous segment's.
    mask = (batch.segment_ids > 0) & (batch.positions > 0)
  # With a scalar, the op saves a pass over the row.
  bootstrap = bootstrap_values(v_after, batch) if config.truncation == "bootstrap" else 0.0

  def row(rewards: jax.Array, v: jax.Array, mask: jax.Array, ids: jax.Array, turns: jax.Array, *rest: Any) -> jax.Array:
    lambda_, bootstrap = rest
    common = {"discount": config.discount, "lambda_": lambda_, "bootstrap_value": bootstrap, "segment_ids": ids}
    if config.advantage == "step_mean":
      return advantages.step_level_gae(rewards, v, mask, step_value="mean", turn_ids_t=turns, **common)
    if config.advantage == "step_last":
      return advantages.step_level_gae(rewards, v, mask, step_value="last", turn_ids_t=turns, **common)
    return advantages.skip_observation_gae(rewards, v, mask, **common)

  length = v.shape[-1]
  arguments = (batch.rewards, v, mask, batch.segment_ids, batch.turn_ids, lambda_, bootstrap)
  rows: list[Any] = [x if isinstance(x, float) else x.reshape(-1, length) for x in arguments]
  in_axes = tuple(None if isinstance(x, float) else 0 for x in arguments)
  return jax.vmap(row, in_axes=in_axes)(*rows).reshape(v.shape)
