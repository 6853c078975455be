"""Algorithms by name (`ALGORITHMS`), and policy losses by name (`POLICY_LOSSES`).

To add a policy loss: write it as a pure function in `ops/policy_losses.py` and export it in `ops/__init__.py`; add its
name to `config.PolicyLossName`, and its settings with their checks to `LearnerConfig`; add a row
`PolicyLoss(loss, clip_mask)` to `POLICY_LOSSES` here, and, if it has an algorithm, one to `ALGORITHMS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from sao_jax import ops
from sao_jax.learner.config import LearnerConfig

ALGORITHMS: Mapping[str, Mapping[str, Any]] = {
  # The paper's method: DIS, two critic updates of projections and head, skip-observation GAE, length-adaptive λ.
  "sao": {},
  # "DIS only" in Table 1: single rollouts and DIS, with a value model trained in the plain way. The paper does not
  # define the row; we take it as SAO without what Section 3.2 adds to value training (one update, all parameters).
  "sao_dis_only": {"critic_updates": 1, "frozen_critic": ()},
  "sao_one_update": {"critic_updates": 1},
  "sao_full_critic": {"frozen_critic": ()},
  # All but attention: embeddings, norms and routers train, too.
  "sao_frozen_attention": {"frozen_critic": ("attention",)},
  "sao_fixed_lambda": {"lambda_policy": 0.95},
  "sao_all_tokens": {"advantage": "gae_all_tokens"},
  "sao_step_mean": {"advantage": "step_mean"},
  "sao_step_last": {"advantage": "step_last"},
  "sao_previous_values": {"values_from": "previous"},
  "sao_ppo_clip": {"policy_loss": "ppo_clip"},
  "sao_icepop": {"policy_loss": "icepop"},
  "sao_truncated_is": {"policy_loss": "truncated_is"},
  "sao_uncorrected": {"policy_loss": "uncorrected"},
  "sao_gspo": {"policy_loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
  "grpo": {"policy_loss": "ppo_clip", "advantage": "baseline", "baseline": "group"},
  "grpo_dis": {"advantage": "baseline", "baseline": "group"},
  # The paper's "vanilla VAPO": single rollouts and PPO's clipping in place of DIS, with α = 1.5 as in SAO and none of
  # SAO's additions to value training: one update of all parameters, after the advantages.
  "vapo": {"policy_loss": "ppo_clip", "critic_updates": 1, "frozen_critic": (), "values_from": "previous"},
  # The same with the settings of VAPO's own paper (arXiv 2504.05118): its α, and its loss on positive examples. Without
  # its groups: with a value model, no advantage needs one. Its α is for thousands of tokens: up to 20, λ = 0.
  "vapo_own_settings": {
    "policy_loss": "ppo_clip",
    "critic_updates": 1,
    "frozen_critic": (),
    "values_from": "previous",
    "alpha": 0.05,
    "positive_weight": 0.1,
  },
  # Single rollouts without a critic: these differ from SAO only in the advantage.
  "running_mean": {"advantage": "baseline", "baseline": "running_mean"},
  "global_running_mean": {"advantage": "baseline", "baseline": "global_running_mean"},
  "reinforce": {"advantage": "baseline", "baseline": "batch_mean"},
  "spo": {"advantage": "baseline", "baseline": "spo"},
}
"""Fields of `LearnerConfig` that each algorithm sets. The others keep their defaults, or the caller's values."""

# The paper's setting for mathematics with tools.
_DIS_BOUNDS: Mapping[str, float] = {"eps_low": 0.3, "eps_high": 5.0}


def learner_config(name: str, **overrides: Any) -> LearnerConfig:
  """Returns the config of a named algorithm.

  >>> learner_config("sao", eps_low=0.8, eps_high=3.0).critic_updates
  2
  >>> learner_config("grpo").policy_loss, learner_config("grpo").baseline
  ('ppo_clip', 'group')

  Args:
    name: a key of `ALGORITHMS`.
    **overrides: fields of `LearnerConfig`; they take precedence over the algorithm's.

  Raises:
    ValueError: unknown name or field, or a value that `LearnerConfig` refuses.
  """
  if name not in ALGORITHMS:
    raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}; received {name!r}.")
  known = {field.name for field in dataclasses.fields(LearnerConfig)}
  unknown = sorted(set(overrides) - known)
  if unknown:
    raise ValueError(f"unknown fields of LearnerConfig: {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
  # If only one bound is given, the other must not come from the defaults.
  bounds = {} if set(overrides) & set(_DIS_BOUNDS) else _DIS_BOUNDS
  return LearnerConfig(**{**bounds, **ALGORITHMS[name], **overrides})


class LossInputs(NamedTuple):
  """Arrays that a policy loss may read, all `[..., B, T]`."""

  logp: Float[Array, "*M B T"]
  """Log-probs under the policy being trained; the only array that takes a gradient."""
  old_logp: Float[Array, "*M B T"]
  """Log-probs under π_old (`LearnerConfig.old_policy`)."""
  behavior_logp: Float[Array, "*M B T"]
  """Log-probs that the rollout engine recorded."""
  adv: Float[Array, "*M B T"]
  action_mask: Bool[Array, "*M B T"]
  segment_ids: Int[Array, "*M B T"]
  """0 is padding."""


Sides: TypeAlias = tuple[jax.Array, jax.Array]
"""Two bool masks of tokens: those whose ratio is too small, and those whose ratio is too large."""


class PolicyLoss(NamedTuple):
  """A policy loss, and the tokens that it masks or clips."""

  loss: Callable[[LearnerConfig, LossInputs], jax.Array]
  """Loss per token, to be minimised; float32, 0 off actions. Arrays are `[B, T]`."""
  clip_mask: Callable[[LearnerConfig, LossInputs], Sides]
  """Tokens without a gradient because of their ratio; read on action tokens only. Leading axes are free."""


def policy_loss(
  config: LearnerConfig,
  logp: Float[Array, "B T"],
  old_logp: Float[Array, "B T"],
  behavior_logp: Float[Array, "B T"],
  adv: Float[Array, "B T"],
  action_mask: Bool[Array, "B T"],
  segment_ids: Int[Array, "B T"],
) -> Float32[Array, "B T"]:
  """Loss per token of the config's algorithm, to be minimised; 0 off actions.

  Args:
    config: names the loss and holds its settings.
    logp, old_logp, behavior_logp, adv, action_mask, segment_ids: see `LossInputs`. Gradients flow through `logp` only.

  Raises:
    ValueError: `config.policy_loss` is not in `POLICY_LOSSES`.
  """
  inputs = LossInputs(logp, old_logp, behavior_logp, adv, action_mask, segment_ids)
  return _named(config).loss(config, inputs)


def clip_mask(
  config: LearnerConfig,
  logp: Float[Array, "*M B T"],
  old_logp: Float[Array, "*M B T"],
  behavior_logp: Float[Array, "*M B T"],
  adv: Float[Array, "*M B T"],
  action_mask: Bool[Array, "*M B T"],
  segment_ids: Int[Array, "*M B T"],
) -> tuple[Bool[Array, "*M B T"], Bool[Array, "*M B T"]]:
  """Action tokens that get no gradient because their ratio is too small, and those whose ratio is too large.

  DIS and IcePop mask them; PPO and GSPO clip them.

  Args:
    config, logp, old_logp, behavior_logp, adv, action_mask, segment_ids: as `policy_loss`, with free leading axes.

  Raises:
    ValueError: `config.policy_loss` is not in `POLICY_LOSSES`.
  """
  inputs = LossInputs(logp, old_logp, behavior_logp, adv, action_mask, segment_ids)
  low, high = _named(config).clip_mask(config, inputs)
  return action_mask & low, action_mask & high


def _named(config: LearnerConfig) -> PolicyLoss:
  if config.policy_loss not in POLICY_LOSSES:
    raise ValueError(f"policy_loss must be one of {', '.join(POLICY_LOSSES)}; received {config.policy_loss!r}.")
  return POLICY_LOSSES[config.policy_loss]


def _dis(config: LearnerConfig, x: LossInputs) -> jax.Array:
  """Equations 1 to 3 of arXiv 2607.07508."""
  return ops.dis_policy_loss(x.logp, x.behavior_logp, x.adv, x.action_mask, **_dis_bounds(config))


def _dis_clip_mask(config: LearnerConfig, x: LossInputs) -> Sides:
  return ops.dis_outside(x.logp, x.behavior_logp, **_dis_bounds(config))


def _truncated_is(config: LearnerConfig, x: LossInputs) -> jax.Array:
  return ops.truncated_is_loss(x.logp, x.behavior_logp, x.adv, x.action_mask, cap=config.is_cap)


def _uncorrected(config: LearnerConfig, x: LossInputs) -> jax.Array:
  del config
  return ops.score_function_loss(x.logp, x.adv, x.action_mask)


def _no_clip_mask(config: LearnerConfig, x: LossInputs) -> Sides:
  del config
  return jnp.zeros_like(x.action_mask), jnp.zeros_like(x.action_mask)


def _ppo_clip(config: LearnerConfig, x: LossInputs) -> jax.Array:
  return ops.ppo_clip_loss(x.logp, x.old_logp, x.adv, x.action_mask, **_clip_bounds(config))


def _ppo_clip_mask(config: LearnerConfig, x: LossInputs) -> Sides:
  return _clipped(config, ops.importance_ratio(x.logp, x.old_logp), x.adv)


def _icepop(config: LearnerConfig, x: LossInputs) -> jax.Array:
  bounds = {"low": config.icepop_low, "high": config.icepop_high, **_clip_bounds(config)}
  return ops.icepop_loss(x.logp, x.old_logp, x.behavior_logp, x.adv, x.action_mask, **bounds)


def _icepop_clip_mask(config: LearnerConfig, x: LossInputs) -> Sides:
  low, high = _ppo_clip_mask(config, x)
  below, above = ops.icepop_outside(x.old_logp, x.behavior_logp, low=config.icepop_low, high=config.icepop_high)
  return low | below, high | above


def _gspo(config: LearnerConfig, x: LossInputs) -> jax.Array:
  """A mean over tokens weighs a trajectory by its number of tokens; in GSPO all trajectories weigh the same."""

  def row(logp: jax.Array, old_logp: jax.Array, adv: jax.Array, mask: jax.Array, ids: jax.Array) -> jax.Array:
    return ops.gspo_loss(logp, old_logp, adv, mask, segment_ids=ids, **_clip_bounds(config))

  return jax.vmap(row)(x.logp, x.old_logp, x.adv, x.action_mask, x.segment_ids)


def _gspo_clip_mask(config: LearnerConfig, x: LossInputs) -> Sides:
  def row(logp: jax.Array, old_logp: jax.Array, mask: jax.Array, ids: jax.Array) -> jax.Array:
    return ops.sequence_log_ratio(logp, old_logp, mask, segment_ids=ids)

  rows = (array.reshape(-1, array.shape[-1]) for array in (x.logp, x.old_logp, x.action_mask, x.segment_ids))
  return _clipped(config, jnp.exp(jax.vmap(row)(*rows)).reshape(x.logp.shape), x.adv)


def _clipped(config: LearnerConfig, ratio: jax.Array, adv: jax.Array) -> Sides:
  """Tokens at which PPO's surrogate is clipped, and so has no gradient."""
  return (adv < 0.0) & (ratio < 1.0 - config.clip_low), (adv > 0.0) & (ratio > 1.0 + config.clip_high)


def _clip_bounds(config: LearnerConfig) -> dict[str, float]:
  return {"clip_low": config.clip_low, "clip_high": config.clip_high}


def _dis_bounds(config: LearnerConfig) -> dict[str, float]:
  if config.eps_low is None or config.eps_high is None:  # refused by LearnerConfig; the type checker cannot know
    raise ValueError("eps_low and eps_high are required with policy_loss='dis'.")
  return {"eps_low": config.eps_low, "eps_high": config.eps_high}


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
  "dis": PolicyLoss(_dis, _dis_clip_mask),
  "truncated_is": PolicyLoss(_truncated_is, _no_clip_mask),
  "ppo_clip": PolicyLoss(_ppo_clip, _ppo_clip_mask),
  "icepop": PolicyLoss(_icepop, _icepop_clip_mask),
  "gspo": PolicyLoss(_gspo, _gspo_clip_mask),
  "uncorrected": PolicyLoss(_uncorrected, _no_clip_mask),
}
"""Policy losses by the name in `LearnerConfig.policy_loss`."""
