"""Numbers to watch, not to optimise. All are float32 scalars over True entries; entries off the mask are never read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.ops import _checks, importance, masking


def explained_variance(v: ArrayLike, returns: ArrayLike, mask: ArrayLike) -> jax.Array:
  """Share of the returns' variance that the values explain.

  EV = 1 − Var(R − V) / Var(R).                                              (arXiv 2607.07508, Section 4)

  Args:
    v: values, any shape.
    returns: same shape (or scalar).
    mask: bool, True on action tokens.

  Returns:
    At most 1; 0 for a constant V; NaN where Var(R) = 0 (up to float32 rounding) or nothing is masked in.

  >>> float(explained_variance(jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0]), jnp.array([True, True])))
  1.0
  """
  v, returns, mask = _checks.broadcast(
    v=_checks.float32(v), returns=_checks.float32(returns), mask=_checks.boolean("mask", mask)
  )
  total = masking.masked_moments(returns, mask).variance
  residual = masking.masked_moments(jnp.where(mask, returns - v, 0.0), mask).variance
  return jnp.where(total == 0, jnp.nan, 1.0 - residual / jnp.where(total == 0, 1.0, total))


def effective_sample_size(logp: ArrayLike, behavior_logp: ArrayLike, mask: ArrayLike) -> jax.Array:
  """How many on-policy tokens the importance-weighted tokens are worth.

  ESS = (Σ_t r_t)² / Σ_t r_t², between 1 and the number of tokens (all ratios equal); 0 for no token.      (Kish)

  Args:
    logp: learner's log-probs, any shape.
    behavior_logp: engine's log-probs, same shape.
    mask: bool, True on action tokens.

  >>> round(float(effective_sample_size(jnp.log(jnp.array([3.0, 1.0])), jnp.zeros(2), jnp.array([True, True]))), 4)
  1.6
  """
  difference, mask = _masked_log_ratio(logp, behavior_logp, mask)
  # The ratio's scale cancels: dividing by the largest one keeps the squares in range.
  largest = jnp.max(difference, initial=-jnp.inf, where=mask)
  largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
  weight = jnp.where(mask, jnp.exp(jnp.where(mask, difference - largest, 0.0)), 0.0)
  squares = jnp.sum(jnp.square(weight))
  return jnp.where(squares == 0, 0.0, jnp.square(jnp.sum(weight)) / jnp.where(squares == 0, 1.0, squares))


def approx_kl(
  logp: ArrayLike, behavior_logp: ArrayLike, mask: ArrayLike, *, denominator: ArrayLike | None = None
) -> jax.Array:
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
