"""Per-token policy losses: negated objectives, to be minimised. Reduce with `masking.masked_mean`.

Unless stated otherwise, arrays have any shape and results are float32. Off the action mask the loss is exactly 0 and
has no gradient, whatever is stored there. A NaN log-prob or advantage AT an action token gives NaN: a broken model must
not look like a batch with nothing to learn from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Integer, Real

from sao_jax.ops import _checks, importance


def _prepare(logp: ArrayLike, action_mask: ArrayLike, **constants: ArrayLike) -> tuple[jax.Array, ...]:
  """Casts, checks shapes, sets everything off the mask to 0, and stops all gradients but that of `logp`."""
  mask, logp, *rest = _checks.broadcast(
    action_mask=_checks.boolean("action_mask", action_mask),
    logp=_checks.float32(logp),
    **{name: _checks.float32(x) for name, x in constants.items()},
  )
  # Before any arithmetic: a NaN in a branch that is not taken still poisons the gradient.
  logp = jnp.where(mask, logp, 0.0)
  return mask, logp, *(jax.lax.stop_gradient(jnp.where(mask, x, 0.0)) for x in rest)


def _score_loss(coefficient: jax.Array, logp: jax.Array, adv: jax.Array, mask: jax.Array) -> jax.Array:
  """−c_t A_t log π_t with a constant c; a token with c = 0 gives 0 even where log π is −inf."""
  live = mask & (coefficient != 0)
  return jnp.where(live, -coefficient * adv * jnp.where(live, logp, 0.0), 0.0)


def _clipped_surrogate(
  difference: jax.Array, adv: jax.Array, *, clip_low: ArrayLike, clip_high: ArrayLike
) -> jax.Array:
  """min(r A, clip(r, 1 − clip_low, 1 + clip_high) A), r = exp(difference); finite where r overflows but is clipped."""
  _checks.interval("clip_low", clip_low, 0.0, 1.0, open_high=True)
  _checks.interval("clip_high", clip_high, 0.0)
  clip_low, clip_high = _checks.float32(clip_low), _checks.float32(clip_high)
  too_high = (difference > jnp.log1p(clip_high)) & (adv >= 0)
  too_low = (difference < jnp.log1p(-clip_low)) & (adv <= 0)
  ratio = jnp.exp(jnp.where(too_high | too_low, 0.0, difference))
  return adv * jnp.where(too_high, 1 + clip_high, jnp.where(too_low, 1 - clip_low, ratio))


def dis_policy_loss(
  logp: Float[ArrayLike, "*shape"],
  behavior_logp: Float[ArrayLike, "*#shape"],
  adv: Real[ArrayLike, "*#shape"],
  action_mask: Bool[ArrayLike, "*#shape"],
  *,
  eps_low: Real[ArrayLike, ""],
  eps_high: Real[ArrayLike, ""],
) -> Float32[Array, "*shape"]:
  """SAO's policy loss with direct double-sided importance sampling.

  ℓ_t = −sg[f(r_t) A_t] log π_θ(a_t|s_t), f(r) = r if 1 − ε_low < r < 1 + ε_high else 0.    (arXiv 2607.07508, Eqs. 1-3)

  The gradient is −f(r_t) A_t ∇log π. A token outside the interval contributes nothing, but still counts in the
  denominator (all action tokens): the more tokens are masked, the smaller the step.

  Args:
    logp: learner's log-probs, any shape, any float dtype.
    behavior_logp: log-probs that the rollout engine sampled with.
    adv: advantages (constants). Shape of `logp` or scalar.
    action_mask: bool, True on action tokens.
    eps_low: in [0, 1).
    eps_high: > 0. Required, like eps_low: neither follows from the other.

  Returns:
    float32 per-token losses, shape of `logp`.

  Raises:
    ValueError: the shapes differ, or an epsilon is out of range. TypeError: the mask is not bool, or an epsilon is
      missing.

  >>> g = jax.grad(lambda x: dis_policy_loss(x, -2.1, 2.0, True, eps_low=0.3, eps_high=5.0))(-2.0)
  >>> round(float(g), 4)
  -2.2103
  """
  mask, logp, adv, behavior_logp = _prepare(logp, action_mask, adv=adv, behavior_logp=behavior_logp)
  coefficient = importance.dis_coefficient(logp, behavior_logp, eps_low=eps_low, eps_high=eps_high)
  coefficient = jnp.where(jnp.isnan(jax.lax.stop_gradient(logp) - behavior_logp), jnp.nan, coefficient)
  return _score_loss(coefficient, logp, adv, mask)


def truncated_is_loss(
  logp: Float[ArrayLike, "*shape"],
  behavior_logp: Float[ArrayLike, "*#shape"],
  adv: Real[ArrayLike, "*#shape"],
  action_mask: Bool[ArrayLike, "*#shape"],
  *,
  cap: Real[ArrayLike, ""],
) -> Float32[Array, "*shape"]:
  """Score-function loss with a truncated importance weight.

  ℓ_t = −sg[min(r_t, cap) A_t] log π_θ(a_t|s_t), r_t = π_θ / π_rollout.

  Unlike DIS, it caps large ratios instead of masking them, and keeps small ones. (Truncation as ρ̄ in IMPALA, arXiv
  1802.01561; the form is CISPO's, arXiv 2506.13585, with the rollout engine's log-probs in place of π_old.)

  Args:
    logp, behavior_logp, adv, action_mask: as `dis_policy_loss`.
    cap: > 0.

  Returns:
    float32 per-token losses, shape of `logp`.
  """
  _checks.interval("cap", cap, 0.0, open_low=True)
  mask, logp, adv, behavior_logp = _prepare(logp, action_mask, adv=adv, behavior_logp=behavior_logp)
  ratio = importance.importance_ratio(logp, behavior_logp)
  return _score_loss(jax.lax.stop_gradient(jnp.minimum(ratio, _checks.float32(cap))), logp, adv, mask)


def score_function_loss(
  logp: Float[ArrayLike, "*shape"],
  adv: Real[ArrayLike, "*#shape"],
  action_mask: Bool[ArrayLike, "*#shape"],
) -> Float32[Array, "*shape"]:
  """Score-function loss without any correction for the age of the tokens.

  ℓ_t = −sg[A_t] log π_θ(a_t|s_t). (Williams 1992, REINFORCE)

  It is the gradient of PPO's surrogate where π_old is the policy itself, so that every ratio is 1.

  Args:
    logp, adv, action_mask: as `dis_policy_loss`.

  Returns:
    float32 per-token losses, shape of `logp`.

  >>> float(score_function_loss(jnp.array([-2.0]), jnp.array([0.5]), jnp.array([True]))[0])
  1.0
  """
  mask, logp, adv = _prepare(logp, action_mask, adv=adv)
  return _score_loss(jnp.ones_like(logp), logp, adv, mask)


def ppo_clip_loss(
  logp: Float[ArrayLike, "*shape"],
  old_logp: Float[ArrayLike, "*#shape"],
  adv: Real[ArrayLike, "*#shape"],
  action_mask: Bool[ArrayLike, "*#shape"],
  *,
  clip_low: Real[ArrayLike, ""],
  clip_high: Real[ArrayLike, ""],
) -> Float32[Array, "*shape"]:
  """PPO's clipped surrogate with separate bounds ("clip-higher").

  ℓ_t = −min(r_t A_t, clip(r_t, 1 − c_low, 1 + c_high) A_t), r_t = π_θ / π_old. (arXiv 1707.06347, Eq. 7; DAPO's two
  bounds)

  A token is clipped only if A > 0 and r > 1 + c_high, or A < 0 and r < 1 − c_low. A ratio on a bound is not clipped.

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
  mask, logp, adv, old_logp = _prepare(logp, action_mask, adv=adv, old_logp=old_logp)
  surrogate = _clipped_surrogate(logp - old_logp, adv, clip_low=clip_low, clip_high=clip_high)
  return jnp.where(mask, -surrogate, 0.0)


def icepop_loss(
  logp: Float[ArrayLike, "*shape"],
  old_logp: Float[ArrayLike, "*#shape"],
  behavior_logp: Float[ArrayLike, "*#shape"],
  adv: Real[ArrayLike, "*#shape"],
  action_mask: Bool[ArrayLike, "*#shape"],
  *,
  low: Real[ArrayLike, ""],
  high: Real[ArrayLike, ""],
  clip_low: Real[ArrayLike, ""],
  clip_high: Real[ArrayLike, ""],
) -> Float32[Array, "*shape"]:
  """IcePop: PPO's surrogate, weighted by the masked mismatch ratio between training and inference engine.

  ℓ_t = −M(k_t) min(r_t A_t, clip(r_t, 1 − c_low, 1 + c_high) A_t), r_t = π_θ / π_old, k_t = π_old / π_rollout,
  M(k) = k if low ≤ k ≤ high else 0. (Ling team, "Small Leak Can Sink a Great Ship", 2025; Ring-1T report)

  No gradient flows through k. The bounds are inclusive; a k that equals a bound up to float32 rounding is kept.

  Args:
    logp: learner's log-probs, any shape, any float dtype.
    old_logp: the learner's log-probs before the update (constants).
    behavior_logp: the rollout engine's log-probs (constants).
    adv, action_mask, clip_low, clip_high: as `ppo_clip_loss`.
    low: ≥ 0, the smallest mismatch ratio that is kept (0.5 in IcePop).
    high: > low, the largest one that is kept (5.0 in IcePop).

  Returns:
    float32 per-token losses, shape of `logp`.
  """
  mask, logp, adv, old_logp, behavior_logp = _prepare(
    logp, action_mask, adv=adv, old_logp=old_logp, behavior_logp=behavior_logp
  )
  below, above = importance.icepop_outside(old_logp, behavior_logp, low=low, high=high)
  outside = below | above
  weight = jnp.where(outside, 0.0, jnp.exp(jnp.where(outside, 0.0, importance.log_ratio(old_logp, behavior_logp))))
  surrogate = _clipped_surrogate(jnp.where(outside, 0.0, logp - old_logp), adv, clip_low=clip_low, clip_high=clip_high)
  return jnp.where(mask & ~outside, -weight * surrogate, 0.0)


def gspo_loss(
  logp: Float[ArrayLike, "T"],
  old_logp: Float[ArrayLike, "T"],
  adv: Real[ArrayLike, "T"] | Real[ArrayLike, ""],
  action_mask: Bool[ArrayLike, "T"],
  *,
  clip_low: Real[ArrayLike, ""],
  clip_high: Real[ArrayLike, ""],
  segment_ids: Integer[ArrayLike, "T"] | None = None,
) -> Float32[Array, "T"]:
  """GSPO: one length-normalised ratio for the whole sequence, clipped as a whole.

  s = exp(1/l Σ_t M_t (log π_θ − log π_old)_t), l = Σ_t M_t;  ℓ_t = −min(s A_t, clip(s, 1 − c_low, 1 + c_high) A_t).
  (arXiv 2507.18071, Eqs. 5-7)

  The paper's objective for a sequence is the mean of ℓ_t over its action tokens with A_t = A. GSPO's bounds are of
  order 1e-4.

  Args:
    logp: `[T]` learner's log-probs of one sequence, or of a packed row (use `jax.vmap` for a batch).
    old_logp: `[T]` log-probs under π_old (constants).
    adv: `[T]` or scalar advantages (constants).
    action_mask: `[T]` bool.
    clip_low: in [0, 1).
    clip_high: ≥ 0.
    segment_ids: `[T]` int, 0 = padding: each segment is a sequence of its own. None: the stream is one sequence.

  Returns:
    `[T]` float32 losses.

  Raises:
    ValueError: the shapes differ, or are not `[T]`. TypeError: the mask is not bool, or the ids are not integers.
  """
  length = _checks.stream("gspo_loss", logp=jnp.asarray(logp), old_logp=jnp.asarray(old_logp))
  mask, logp, adv, old_logp = _prepare(logp, action_mask, adv=adv, old_logp=old_logp)
  if segment_ids is not None:
    mask = mask & (_checks.segments(segment_ids, length) != 0)
  difference = importance.sequence_log_ratio(logp, old_logp, mask, segment_ids=segment_ids)
  surrogate = _clipped_surrogate(difference, adv, clip_low=clip_low, clip_high=clip_high)
  return jnp.where(mask, -surrogate, 0.0)


def kl_loss(
  logp: Float[ArrayLike, "*shape"],
  reference_logp: Float[ArrayLike, "*#shape"],
  action_mask: Bool[ArrayLike, "*#shape"],
) -> Float32[Array, "*shape"]:
  """KL divergence to a reference policy, estimated at each token. It is added to a policy loss with a coefficient.

  ℓ_t = exp(d_t) − d_t − 1, d_t = log π_ref(a_t|s_t) − log π_θ(a_t|s_t).                     (arXiv 2402.03300, Eq. 4)

  This is Schulman's k3 estimator: never negative, and unbiased for KL(π_θ ‖ π_ref) where π_θ sampled the token. Its
  gradient is (1 − exp(d_t)) ∇log π, whose mean over π_θ's tokens is the gradient of KL(π_ref ‖ π_θ). Not part of SAO.

  Args:
    logp: learner's log-probs, any shape, any float dtype.
    reference_logp: log-probs under the reference (constants), same shape.
    action_mask: bool, True on action tokens.

  Returns:
    float32 per-token estimates, shape of `logp`.

  >>> float(kl_loss(-1.0, -1.0, True)), round(float(kl_loss(-1.0, -2.0, True)), 4)
  (0.0, 0.3679)
  """
  mask, logp, reference_logp = _prepare(logp, action_mask, reference_logp=reference_logp)
  difference = reference_logp - logp
  return jnp.where(mask, jnp.expm1(difference) - difference, 0.0)


def entropy_loss(
  entropy: Float[ArrayLike, "*shape"], action_mask: Bool[ArrayLike, "*#shape"]
) -> Float32[Array, "*shape"]:
  """Entropy bonus as a loss. It is added to a policy loss with a coefficient.

  ℓ_t = −H(π_θ(·|s_t)).                                                    (Williams and Peng 1991; arXiv 1602.01783)

  Not part of SAO.

  Args:
    entropy: of the action tokens' distributions, any shape, such as the second result of
      `logprobs.masked_token_logprobs`, which is differentiable.
    action_mask: bool, True on action tokens.

  Returns:
    float32 per-token losses, shape of `entropy`.

  >>> float(entropy_loss(0.5, True))
  -0.5
  """
  entropy, mask = _checks.broadcast(
    entropy=_checks.float32(entropy), action_mask=_checks.boolean("action_mask", action_mask)
  )
  return jnp.where(mask, -jnp.where(mask, entropy, 0.0), 0.0)
