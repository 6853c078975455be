"""Per-token policy losses: negated objectives, to be minimised. Reduce with `masking.masked_mean`.

Common to all: any shape unless stated otherwise, float32 results, exactly 0 (and no gradient) off the action mask,
whatever is stored there. A NaN log-prob or advantage AT an action token gives NaN: a broken model must not look like a
quiet batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.ops import _checks, importance


def _prepare(logp: ArrayLike, adv: ArrayLike, action_mask: ArrayLike, **others: ArrayLike) -> tuple[jax.Array, ...]:
  """Casts, checks shapes, blanks everything off the mask; advantages and the other log-probs take no gradient."""
  mask = _checks.boolean("action_mask", action_mask)
  arrays = _checks.broadcast(
    action_mask=mask,
    logp=_checks.float32(logp),
    adv=_checks.float32(adv),
    **{name: _checks.float32(x) for name, x in others.items()},
  )
  mask, logp, *constants = arrays
  # Blanked before any arithmetic, not after: a NaN in a branch that is not taken still poisons its gradient.
  logp = jnp.where(mask, logp, 0.0)
  return mask, logp, *(jax.lax.stop_gradient(jnp.where(mask, x, 0.0)) for x in constants)


def _score_loss(coefficient: jax.Array, logp: jax.Array, adv: jax.Array, mask: jax.Array) -> jax.Array:
  """−c_t A_t log π_t with a constant c; a token with c = 0 gives 0 even where log π is −inf."""
  live = mask & (coefficient != 0)
  return jnp.where(live, -coefficient * adv * jnp.where(live, logp, 0.0), 0.0)


def _clipped_surrogate(
  difference: jax.Array, adv: jax.Array, *, clip_low: ArrayLike, clip_high: ArrayLike
) -> jax.Array:
  """min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = exp(difference); safe where r overflows and is clipped
  anyway."""
  _checks.interval("clip_low", clip_low, 0.0, 1.0, open_high=True)
  _checks.interval("clip_high", clip_high, 0.0)
  clip_low, clip_high = _checks.float32(clip_low), _checks.float32(clip_high)
  too_high = (difference > jnp.log1p(clip_high)) & (adv >= 0)
  too_low = (difference < jnp.log1p(-clip_low)) & (adv <= 0)
  ratio = jnp.exp(jnp.where(too_high | too_low, 0.0, difference))
  return adv * jnp.where(too_high, 1 + clip_high, jnp.where(too_low, 1 - clip_low, ratio))


def dis_policy_loss(
  logp: ArrayLike,
  behavior_logp: ArrayLike,
  adv: ArrayLike,
  action_mask: ArrayLike,
  *,
  eps_low: ArrayLike,
  eps_high: ArrayLike,
) -> jax.Array:
  """SAO's policy loss with direct double-sided importance sampling.

  ℓ_t = −sg[f(r_t) A_t] log π_θ(a_t|s_t), f(r) = r if 1 − ε_low < r < 1 + ε_high else 0.    (arXiv 2607.07508, Eqs. 1-3)

  The gradient is −f(r_t) A_t ∇log π. A token outside the interval contributes nothing but still counts in the
  denominator (all action tokens), so that more masking makes a smaller step.

  Args:
    logp: learner's log-probs, any shape, any float dtype.
    behavior_logp: log-probs that the rollout engine sampled with.
    adv: advantages (constants). Shape of `logp` or scalar.
    action_mask: bool, True on action tokens.
    eps_low: in [0, 1).
    eps_high: > 0; required, there is no single epsilon.

  Returns:
    float32 per-token losses, shape of `logp`.

  Raises:
    ValueError: shapes differ, or an epsilon is out of range. TypeError: mask of float dtype, or an epsilon is missing.

  >>> g = jax.grad(lambda x: dis_policy_loss(x, -2.1, 2.0, True, eps_low=0.3, eps_high=5.0))(-2.0)
  >>> round(float(g), 4)
  -2.2103
  """
  mask, logp, adv, behavior_logp = _prepare(logp, adv, action_mask, behavior_logp=behavior_logp)
  coefficient = importance.dis_coefficient(logp, behavior_logp, eps_low=eps_low, eps_high=eps_high)
  coefficient = jnp.where(jnp.isnan(jax.lax.stop_gradient(logp) - behavior_logp), jnp.nan, coefficient)
  return _score_loss(coefficient, logp, adv, mask)


def truncated_is_loss(
  logp: ArrayLike, behavior_logp: ArrayLike, adv: ArrayLike, action_mask: ArrayLike, *, cap: ArrayLike
) -> jax.Array:
  """Score-function loss with a truncated importance weight.

  ℓ_t = −sg[min(r_t, cap) A_t] log π_θ(a_t|s_t), r_t = π_θ / π_rollout.

  Unlike DIS it caps large ratios instead of dropping them, and keeps small ones. (Truncation as ρ̄ in IMPALA, arXiv
  1802.01561; the form is CISPO's, arXiv 2506.13585, with the rollout engine's log-probs in place of π_old.)

  Args:
    logp, behavior_logp, adv, action_mask: as `dis_policy_loss`.
    cap: > 0.

  Returns:
    float32 per-token losses, shape of `logp`.
  """
  _checks.interval("cap", cap, 0.0, open_low=True)
  mask, logp, adv, behavior_logp = _prepare(logp, adv, action_mask, behavior_logp=behavior_logp)
  ratio = importance.importance_ratio(logp, behavior_logp)
  return _score_loss(jax.lax.stop_gradient(jnp.minimum(ratio, _checks.float32(cap))), logp, adv, mask)


def ppo_clip_loss(
  logp: ArrayLike,
  old_logp: ArrayLike,
  adv: ArrayLike,
  action_mask: ArrayLike,
  *,
  clip_low: ArrayLike,
  clip_high: ArrayLike,
) -> jax.Array:
  """PPO's clipped surrogate with separate bounds ("clip-higher").

  ℓ_t = −min(r_t A_t, clip(r_t, 1 − c_low, 1 + c_high) A_t), r_t = π_θ / π_old. (arXiv 1707.06347, Eq. 7; DAPO's two
  bounds)

  A token is cut only where A > 0 and r > 1 + c_high, or A < 0 and r < 1 − c_low; on a bound it is not cut.

  Args:
    logp: learner's log-probs, any shape, any float dtype.
    old_logp: log-probs under π_old (constants), same shape.
    adv: advantages (constants), same shape or scalar.
    action_mask: bool, True on action tokens.
    clip_low: in [0, 1).
    clip_high: ≥ 0.

  Returns:
    float32 per-token losses, shape of `logp`.
  """
  mask, logp, adv, old_logp = _prepare(logp, adv, action_mask, old_logp=old_logp)
  surrogate = _clipped_surrogate(logp - old_logp, adv, clip_low=clip_low, clip_high=clip_high)
  return jnp.where(mask, -surrogate, 0.0)


def icepop_loss(
  logp: ArrayLike,
  old_logp: ArrayLike,
  behavior_logp: ArrayLike,
  adv: ArrayLike,
  action_mask: ArrayLike,
  *,
  low: ArrayLike,
  high: ArrayLike,
  clip_low: ArrayLike,
  clip_high: ArrayLike,
) -> jax.Array:
  """IcePop: PPO's surrogate, weighted by the masked mismatch between training and inference engine.

  ℓ_t = −M(k_t) min(r_t A_t, clip(r_t, 1 − c_low, 1 + c_high) A_t), r_t = π_θ / π_old, k_t = π_old / π_rollout,
  M(k) = k if low ≤ k ≤ high else 0. (Ling team, "Small Leak Can Sink a Great Ship", 2025; Ring-1T report)

  It keeps π_old; k is a constant. The bounds are inclusive; a k that equals one up to float32 rounding is kept.

  Args:
    logp: learner's log-probs, any shape, any float dtype.
    old_logp: the learner's log-probs before the update (constants).
    behavior_logp: the rollout engine's log-probs (constants).
    adv, action_mask, clip_low, clip_high: as `ppo_clip_loss`.
    low: ≥ 0, the smallest mismatch ratio kept (0.5 in IcePop).
    high: > low, the largest one kept (5.0 in IcePop).

  Returns:
    float32 per-token losses, shape of `logp`.
  """
  _checks.interval("low", low, 0.0)
  _checks.interval("high", high, 0.0, open_low=True)
  if not isinstance(low, jax.Array) and not isinstance(high, jax.Array) and not low < high:  # type: ignore[operator]
    raise ValueError(f"low must be below high; received low={low!r}, high={high!r}.")
  mask, logp, adv, old_logp, behavior_logp = _prepare(
    logp, adv, action_mask, old_logp=old_logp, behavior_logp=behavior_logp
  )
  mismatch = importance.log_ratio(old_logp, behavior_logp)
  slack = importance.rounding_slack(old_logp, behavior_logp)
  outside = (mismatch < jnp.log(_checks.float32(low)) - slack) | (mismatch > jnp.log(_checks.float32(high)) + slack)
  weight = jnp.where(outside, 0.0, jnp.exp(jnp.where(outside, 0.0, mismatch)))
  surrogate = _clipped_surrogate(jnp.where(outside, 0.0, logp - old_logp), adv, clip_low=clip_low, clip_high=clip_high)
  return jnp.where(mask & ~outside, -weight * surrogate, 0.0)


def gspo_loss(
  logp: ArrayLike,
  old_logp: ArrayLike,
  adv: ArrayLike,
  action_mask: ArrayLike,
  *,
  clip_low: ArrayLike,
  clip_high: ArrayLike,
) -> jax.Array:
  """GSPO: one length-normalised ratio for the whole sequence, clipped as a whole.

  s = exp(1/l Σ_t M_t (log π_θ − log π_old)_t), l = Σ_t M_t;  ℓ_t = −min(s A_t, clip(s, 1 − c_low, 1 + c_high) A_t).
  (arXiv 2507.18071, Eqs. 5-7)

  The paper's objective for a sequence is the mean of ℓ_t over its action tokens with A_t = A; GSPO's bounds are of
  order 1e-4.

  Args:
    logp: `[T]` learner's log-probs of ONE sequence (use `jax.vmap` for a batch; not for packed rows).
    old_logp: `[T]` log-probs under π_old (constants).
    adv: `[T]` or scalar advantages (constants).
    action_mask: `[T]` bool.
    clip_low: in [0, 1).
    clip_high: ≥ 0.

  Returns:
    `[T]` float32 losses.

  Raises:
    ValueError: not one stream, or shapes differ.
  """
  _checks.stream("gspo_loss", logp=jnp.asarray(logp), old_logp=jnp.asarray(old_logp))
  mask, logp, adv, old_logp = _prepare(logp, adv, action_mask, old_logp=old_logp)
  length = jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
  difference = jnp.broadcast_to(jnp.sum(logp - old_logp) / length, logp.shape)
  surrogate = _clipped_surrogate(difference, adv, clip_low=clip_low, clip_high=clip_high)
  return jnp.where(mask, -surrogate, 0.0)
