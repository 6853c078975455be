"""What the critic is fitted to and what the policy is weighted with: returns and advantages of packed rows.

`v_after` is the value model's raw output: at index t the value of the state after `tokens[t]`. Leading axes are free.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from sao_jax.learner.config import LearnerConfig
from sao_jax.ops import advantages as advantage_ops
from sao_jax.ops import masking
from sao_jax.types import TokenBatch


def values_before(v_after: jax.Array) -> jax.Array:
  """`v[..., t]`: value of the state before `tokens[t]`."""
  return masking.align_predictions(v_after, axis=-1)


def bootstrap_values(v_after: jax.Array, batch: TokenBatch) -> jax.Array:
  """For every token the value after its segment's last token if the trajectory was cut off there, else 0."""
  length = batch.segment_ids.shape[-1]
  index = jnp.broadcast_to(jnp.arange(length), batch.segment_ids.shape)
  ends = ~_same_segment_next(batch.segment_ids)
  last = jax.lax.cummin(jnp.where(ends, index, length - 1), axis=index.ndim - 1, reverse=True)
  return jnp.where(batch.truncated, jnp.take_along_axis(v_after, last, axis=-1), 0.0)


def critic_mask(config: LearnerConfig, batch: TokenBatch) -> jax.Array:
  """Tokens that the critic is fitted on: all action tokens, or the last one of each turn with `step_last`."""
  if config.advantage != "step_last":
    return batch.action_mask
  following = jnp.concatenate([batch.turn_ids[..., 1:], jnp.zeros_like(batch.turn_ids[..., :1])], axis=-1)
  same_turn = (batch.turn_ids == following) & _same_segment_next(batch.segment_ids)
  return batch.action_mask & ~same_turn


def targets_depend_on_values(config: LearnerConfig) -> bool:
  """Whether `critic_targets` changes with the critic: otherwise it is computed once per batch."""
  return config.lambda_critic < 1.0 or config.truncation == "bootstrap"


def critic_targets(config: LearnerConfig, v_after: jax.Array, batch: TokenBatch) -> jax.Array:
  """Returns on action tokens, 0 elsewhere, with the critic's own lambda (1 in the paper whatever the policy's is)."""
  v = values_before(v_after)
  if config.lambda_critic == 1.0:
    v = jnp.zeros_like(v)  # V cancels out of a lambda = 1 return; zeros make that exact.
  returns = _estimate(config, v, v_after, batch, config.lambda_critic) + v
  return jax.lax.stop_gradient(jnp.where(batch.action_mask, returns, 0.0))


def policy_advantages(config: LearnerConfig, v_after: jax.Array, batch: TokenBatch) -> jax.Array:
  """Advantages on action tokens, 0 elsewhere, from values with the trajectory's (or the fixed) lambda."""
  lambda_ = batch.lambda_policy if config.lambda_policy is None else config.lambda_policy
  adv = _estimate(config, values_before(v_after), v_after, batch, lambda_)
  return jax.lax.stop_gradient(jnp.where(batch.action_mask, adv, 0.0))


def policy_lambda(config: LearnerConfig, batch: TokenBatch) -> jax.Array:
  """lambda per token: the config's if it is fixed, else the trajectory's."""
  if config.lambda_policy is None:
    return batch.lambda_policy
  return jnp.full_like(batch.lambda_policy, config.lambda_policy)


def _same_segment_next(segment_ids: jax.Array) -> jax.Array:
  """Whether the next token of the row belongs to the same segment."""
  following = jnp.concatenate([segment_ids[..., 1:], jnp.full_like(segment_ids[..., :1], -1)], axis=-1)
  return segment_ids == following


def _estimate(
  config: LearnerConfig, v: jax.Array, v_after: jax.Array, batch: TokenBatch, lambda_: jax.Array | float
) -> jax.Array:
  """The config's advantage estimator on every row: all rows of the batch in one vmap."""
  mask = batch.action_mask
  if config.advantage == "gae_all_tokens":
    # Every token but a segment's first (whose aligned value would be that of the segment before) takes part.
    mask = (batch.segment_ids > 0) & (batch.positions > 0)
  # A scalar spares the op a pass over the row.
  bootstrap = bootstrap_values(v_after, batch) if config.truncation == "bootstrap" else 0.0

  def row(rewards: jax.Array, v: jax.Array, mask: jax.Array, ids: jax.Array, turns: jax.Array, *rest: Any) -> jax.Array:
    lambda_, bootstrap = rest
    common = {"discount": config.discount, "lambda_": lambda_, "bootstrap_value": bootstrap, "segment_ids": ids}
    if config.advantage == "step_mean":
      return advantage_ops.step_level_gae(rewards, v, mask, step_value="mean", turn_ids_t=turns, **common)
    if config.advantage == "step_last":
      return advantage_ops.step_level_gae(rewards, v, mask, step_value="last", turn_ids_t=turns, **common)
    return advantage_ops.skip_observation_gae(rewards, v, mask, **common)

  length = v.shape[-1]
  arguments = (batch.rewards, v, mask, batch.segment_ids, batch.turn_ids, lambda_, bootstrap)
  rows: list[Any] = [x if isinstance(x, float) else x.reshape(-1, length) for x in arguments]
  in_axes = tuple(None if isinstance(x, float) else 0 for x in arguments)
  return jax.vmap(row, in_axes=in_axes)(*rows).reshape(v.shape)
