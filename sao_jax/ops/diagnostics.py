"""Diagnostics of a batch: float32 scalars over the True entries of a mask. Other entries are never read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Real

from sao_jax.ops import _checks, importance, masking


def explained_variance(
  v: Real[ArrayLike, "*shape"], returns: Real[ArrayLike, "*#shape"], mask: Bool[ArrayLike, "*#shape"]
) -> Float32[Array, ""]:
  """Share of the returns' variance that the values explain.

  EV = 1 − Var(R − V) / Var(R).                                              (arXiv 2607.07508, Section 4)

  Args:
    v: values, any shape.
    returns: same shape (or scalar).
    mask: bool, True on action tokens.

  Returns:
    At most 1; 0 for a constant V. NaN if Var(R) = 0 (up to float32 rounding) or no entry counts.

  >>> float(explained_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0]), jnp.array([True, True])))
  1.0
  """
  v, returns, mask = _checks.broadcast(
    v=_checks.float32(v), returns=_checks.float32(returns), mask=_checks.boolean("mask", mask)
  )
  total = masking.masked_moments(returns, mask).variance
  residual = masking.masked_moments(jnp.where(mask, returns - v, 0.0), mask).variance
  return jnp.where(total == 0, jnp.nan, 1.0 - residual / jnp.where(total == 0, 1.0, total))


def effective_sample_size(
  logp: Float[ArrayLike, "*shape"], behavior_logp: Float[ArrayLike, "*#shape"], mask: Bool[ArrayLike, "*#shape"]
) -> Float32[Array, ""]:
  """Number of on-policy tokens that the importance-weighted tokens are worth.

  ESS = (Σ_t r_t)² / Σ_t r_t², from 1 to the number of tokens (all ratios equal); 0 without tokens.        (Kish)

  Args:
    logp: learner's log-probs, any shape.
    behavior_logp: engine's log-probs, same shape.
    mask: bool, True on action tokens.

  >>> round(float(effective_sample_size(jnp.log(jnp.array([3.0, 1.0])), jnp.zeros(2), jnp.array([True, True]))), 4)
  1.6
  """
  difference, mask = _masked_log_ratio(logp, behavior_logp, mask)
  # A common factor cancels; dividing by the largest ratio keeps the squares in range.
  largest = jnp.max(difference, initial=-jnp.inf, where=mask)
  largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
  weight = jnp.where(mask, jnp.exp(jnp.where(mask, difference - largest, 0.0)), 0.0)
  squares = jnp.sum(jnp.square(weight))
  return jnp.where(squares == 0, 0.0, jnp.square(jnp.sum(weight)) / jnp.where(squares == 0, 1.0, squares))


def approx_kl(
  logp: Float[ArrayLike, "*shape"],
  behavior_logp: Float[ArrayLike, "*#shape"],
  mask: Bool[ArrayLike, "*#shape"],
  *,
  denominator: Real[ArrayLike, ""] | None = None,
) -> Float32[Array, ""]:
  """KL(π_rollout ‖ π_θ) per token, estimated from tokens that π_rollout sampled.

  mean_t (r_t − 1 − log r_t), r = π_θ / π_rollout: Schulman's k3 estimator, unbiased and never negative.

  Args:
    logp: learner's log-probs, any shape.
    behavior_logp: engine's log-probs, same shape.
    mask: bool, True on action tokens.
    denominator: as `masking.masked_mean`.

  >>> float(approx_kl(jnp.array([-1.0]), jnp.array([-1.0]), jnp.array([True])))
  0.0
  """
  difference, mask = _masked_log_ratio(logp, behavior_logp, mask)
  return masking.masked_mean(jnp.expm1(difference) - difference, mask, denominator=denominator)


def _masked_log_ratio(logp: ArrayLike, behavior_logp: ArrayLike, mask: ArrayLike) -> tuple[jax.Array, jax.Array]:
  mask, logp, behavior_logp = _checks.broadcast(
    mask=_checks.boolean("mask", mask), logp=_checks.float32(logp), behavior_logp=_checks.float32(behavior_logp)
  )
  return importance.log_ratio(jnp.where(mask, logp, 0.0), jnp.where(mask, behavior_logp, 0.0)), mask
