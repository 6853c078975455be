"""What differs between algorithms: the policy's loss per token, the tokens it leaves out, and the named
combinations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from sao_jax.learner.config import LearnerConfig
from sao_jax.ops import importance, policy_losses

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
  # The paper's method: DIS, two critic updates, frozen critic attention, skip-observation GAE, length-adaptive lambda.
  "sao": {},
  # Table 1's "DIS only": single rollouts and DIS with a plainly trained value model. The paper does not spell the row
  # out; read here as SAO less what Section 3.2 adds to value training (one update, all parameters).
  "sao_dis_only": {"critic_updates": 1, "frozen_critic": ()},
  "sao_one_update": {"critic_updates": 1},
  "sao_full_critic": {"frozen_critic": ()},
  "sao_fixed_lambda": {"lambda_policy": 0.95},
  "sao_all_tokens": {"advantage": "gae_all_tokens"},
  "sao_step_mean": {"advantage": "step_mean"},
  "sao_step_last": {"advantage": "step_last"},
  "sao_previous_values": {"values_from": "previous"},
  "sao_ppo_clip": {"policy_loss": "ppo_clip"},
  "sao_icepop": {"policy_loss": "icepop"},
  "sao_truncated_is": {"policy_loss": "truncated_is"},
  "sao_gspo": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
  "grpo": {"policy_loss": "ppo_clip", "advantage": "baseline", "baseline": "group"},
  "grpo_dis": {"advantage": "baseline", "baseline": "group"},
  # Without DIS and without what SAO adds to value training: one update of all parameters, after the advantages.
  "vapo": {"policy_loss": "ppo_clip", "critic_updates": 1, "frozen_critic": (), "values_from": "previous"},
  # Single rollouts without a critic: they differ from SAO in the advantage alone.
  "running_mean": {"advantage": "baseline", "baseline": "running_mean"},
  "global_running_mean": {"advantage": "baseline", "baseline": "global_running_mean"},
  "reinforce": {"advantage": "baseline", "baseline": "batch_mean"},
  "spo": {"advantage": "baseline", "baseline": "spo"},
}
"""Fields of `LearnerConfig` that each name sets; all others keep their defaults or what the caller gives."""

# Math with tools (METHOD, training settings).
_DIS_BOUNDS: Mapping[str, float] = {"eps_low": 0.3, "eps_high": 5.0}


def learner_config(name: str, **overrides: Any) -> LearnerConfig:
  """The config of a named algorithm.

  >>> learner_config("sao", eps_low=0.8, eps_high=3.0).critic_updates
  2

  Args:
    name: a key of `ALGORITHMS`.
    **overrides: fields of `LearnerConfig`; they win over the algorithm's.

  Raises:
    ValueError: unknown name or field, or a field's value is refused.
  """
  if name not in ALGORITHMS:
    raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; received {name!r}.")
  known = {field.name for field in dataclasses.fields(LearnerConfig)}
  unknown = sorted(set(overrides) - known)
  if unknown:
    raise ValueError(f"unknown fields of LearnerConfig: {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
  # One bound given alone must not be completed from the defaults.
  bounds = {} if set(overrides) & set(_DIS_BOUNDS) else _DIS_BOUNDS
  return LearnerConfig(**{**bounds, **ALGORITHMS[name], **overrides})


def policy_loss(
  config: LearnerConfig,
  logp: jax.Array,
  old_logp: jax.Array,
  behavior_logp: jax.Array,
  adv: jax.Array,
  action_mask: jax.Array,
  segment_ids: jax.Array,
) -> jax.Array:
  """Loss per token (to minimise), 0 off actions; every array is `[B, T]`, and gradients flow through `logp` only."""
  if config.policy_loss == "dis":
    return policy_losses.dis_policy_loss(
      logp, behavior_logp, adv, action_mask, eps_low=_given(config.eps_low), eps_high=_given(config.eps_high)
    )
  if config.policy_loss == "truncated_is":
    return policy_losses.truncated_is_loss(logp, behavior_logp, adv, action_mask, cap=config.is_cap)
  clip = {"clip_low": config.clip_low, "clip_high": config.clip_high}
  if config.policy_loss == "icepop":
    bounds = {"low": config.icepop_low, "high": config.icepop_high}
    return policy_losses.icepop_loss(logp, old_logp, behavior_logp, adv, action_mask, **bounds, **clip)
  if config.policy_loss == "gspo":
    logp = sequence_logp(logp, old_logp, action_mask, segment_ids)
  return policy_losses.ppo_clip_loss(logp, old_logp, adv, action_mask, **clip)


def sequence_logp(logp: jax.Array, old_logp: jax.Array, action_mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Log-probs whose ratio to `old_logp` is GSPO's, the same at every token of a trajectory.

  s = exp(1/l sum_t (log pi(a_t) - log pi_old(a_t))) (GSPO, arXiv 2507.18071, Eq. 7), per segment of packed rows. With a
  mean over tokens a trajectory weighs as many tokens as it has, where GSPO weighs all trajectories alike.
  """
  length = logp.shape[-1]

  def row(difference: jax.Array, mask: jax.Array, segments: jax.Array) -> jax.Array:
    sums = jax.ops.segment_sum(jnp.where(mask, difference, 0.0), segments, num_segments=length + 1)
    counts = jax.ops.segment_sum(mask.astype(jnp.float32), segments, num_segments=length + 1)
    return (sums / jnp.maximum(counts, 1.0))[segments]

  return old_logp + jax.vmap(row)(logp - old_logp, action_mask, segment_ids)


def left_out(
  config: LearnerConfig,
  logp: jax.Array,
  old_logp: jax.Array,
  behavior_logp: jax.Array,
  adv: jax.Array,
  action_mask: jax.Array,
  segment_ids: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Action tokens that the loss gives no gradient: those with too small a ratio, and those with too large a one.

  Masked by DIS or IcePop, clipped by PPO or GSPO. Leading axes are free.
  """
  nothing = jnp.zeros_like(action_mask)
  if config.policy_loss == "truncated_is":
    return nothing, nothing
  if config.policy_loss == "dis":
    low, high = importance.dis_outside(
      logp, behavior_logp, eps_low=_given(config.eps_low), eps_high=_given(config.eps_high)
    )
    return action_mask & low, action_mask & high
  if config.policy_loss == "gspo":
    shape = (-1, logp.shape[-1])
    flat = sequence_logp(*(x.reshape(shape) for x in (logp, old_logp, action_mask, segment_ids)))
    logp = flat.reshape(logp.shape)
  ratio = importance.importance_ratio(logp, old_logp)
  low = action_mask & (adv < 0.0) & (ratio < 1.0 - config.clip_low)
  high = action_mask & (adv > 0.0) & (ratio > 1.0 + config.clip_high)
  if config.policy_loss == "icepop":
    calibration = importance.importance_ratio(old_logp, behavior_logp)
    low |= action_mask & (calibration < config.icepop_low)
    high |= action_mask & (calibration > config.icepop_high)
  return low, high


def _given(bound: float | None) -> float:
  if bound is None:  # LearnerConfig has refused this already; the type checker cannot know.
    raise ValueError("eps_low and eps_high are required with policy_loss='dis'.")
  return bound
