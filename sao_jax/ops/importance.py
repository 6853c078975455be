"""Direct double-sided importance sampling (DIS), arXiv 2607.07508 Section 3.1: the ratio, its bounds, the coefficient.

Log-probs may be of any float dtype; they are cast to float32 before they are subtracted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from sao_jax.ops import _checks

_EPS = 2.0**-23  # of float32


def log_ratio(logp: ArrayLike, behavior_logp: ArrayLike) -> jax.Array:
  """log π_θ(a) − log π_rollout(a) in float32; shapes equal, or scalars."""
  logp, behavior_logp = _checks.broadcast(logp=_checks.float32(logp), behavior_logp=_checks.float32(behavior_logp))
  return logp - behavior_logp


def importance_ratio(logp: ArrayLike, behavior_logp: ArrayLike) -> jax.Array:
  """Likelihood ratio of the learner's policy and the one that really sampled.

  r_t = exp(log π_θ(a_t|s_t) − log π_rollout(a_t|s_t)).                      (arXiv 2607.07508, Eq. 2)

  The behaviour log-prob is the rollout engine's own record: there is no π_old and no forward pass for one.

  Args:
    logp: learner's log-probs, any shape and float dtype (cast to float32 first), ≤ 0.
    behavior_logp: engine's log-probs, same shape.

  Returns:
    float32, same shape. Differentiable; use `dis_coefficient` for what multiplies the score.

  Raises:
    ValueError: the shapes differ.

  >>> float(importance_ratio(jnp.array(-1.0), jnp.array(-1.0)))
  1.0
  """
  return jnp.exp(log_ratio(logp, behavior_logp))


def rounding_slack(logp: ArrayLike, behavior_logp: ArrayLike) -> jax.Array:
  """How far float32 rounding of two log-probs can move their difference.

  A ratio that equals a bound in real arithmetic arrives here a few units in the last place to either side of it.
  Comparing with this slack decides such a ratio always the same way: as equal to the bound. It is 3e-7 for log-probs
  near 0 and 5e-6 at -20.
  """
  return 2 * _EPS * (1 + jnp.maximum(jnp.abs(_checks.float32(logp)), jnp.abs(_checks.float32(behavior_logp))))


def dis_mask(logp: ArrayLike, behavior_logp: ArrayLike, *, eps_low: ArrayLike, eps_high: ArrayLike) -> jax.Array:
  """Whether a token's ratio lies strictly inside the trust interval.

  1 − ε_low < r_t < 1 + ε_high.                                              (arXiv 2607.07508, Eq. 3)

  Strict on both sides, whatever the advantage's sign. Compared as log-ratios, where a ratio within `rounding_slack` of
  a bound counts as on it, hence outside: exactly 0.7 and 6.0 are masked with ε = (0.3, 5.0) however the log-probs were
  rounded.

  Args:
    logp: learner's log-probs, any shape and float dtype.
    behavior_logp: engine's log-probs, same shape.
    eps_low: in [0, 1); the lower bound is 1 − eps_low. Paper: 0.3 (math), 0.8 (coding).
    eps_high: > 0; the upper bound is 1 + eps_high. Paper: 5.0 (math: an upper bound of 6.0), 3.0 (coding).

  Returns:
    bool, same shape: True = kept. A NaN ratio is not kept.

  Raises:
    ValueError: the shapes differ, or an epsilon is out of range. TypeError: an epsilon is missing or None.

  >>> r = jnp.array([0.7, 5.5, 6.0])
  >>> dis_mask(jnp.log(r), jnp.zeros(3), eps_low=0.3, eps_high=5.0).tolist()
  [False, True, False]
  """
  _checks.interval("eps_low", eps_low, 0.0, 1.0, open_high=True)
  _checks.interval("eps_high", eps_high, 0.0, open_low=True)
  difference = log_ratio(logp, behavior_logp)
  slack = rounding_slack(logp, behavior_logp)
  lower, upper = jnp.log1p(-_checks.float32(eps_low)), jnp.log1p(_checks.float32(eps_high))
  return (difference > lower + slack) & (difference < upper - slack)


def dis_outside(
  logp: ArrayLike, behavior_logp: ArrayLike, *, eps_low: ArrayLike, eps_high: ArrayLike
) -> tuple[jax.Array, jax.Array]:
  """The two sides of `dis_mask`, for metrics: `(below, above)`, bool, same shape; a NaN ratio is in neither."""
  outside = ~dis_mask(logp, behavior_logp, eps_low=eps_low, eps_high=eps_high)
  difference = log_ratio(logp, behavior_logp)
  return outside & (difference <= 0), outside & (difference > 0)


def dis_coefficient(logp: ArrayLike, behavior_logp: ArrayLike, *, eps_low: ArrayLike, eps_high: ArrayLike) -> jax.Array:
  """The calibrated ratio that multiplies a token's score.

  f(r) = r if 1 − ε_low < r < 1 + ε_high, else 0.                            (arXiv 2607.07508, Eq. 3)

  It is a coefficient: no gradient flows through it (`stop_gradient`).

  Args, Raises: as `dis_mask`.

  Returns:
    float32, same shape; 0 also where the ratio is NaN.

  >>> dis_coefficient(jnp.log(jnp.array([2.0, 7.0])), jnp.zeros(2), eps_low=0.3, eps_high=5.0).tolist()
  [2.0, 0.0]
  """
  kept = dis_mask(logp, behavior_logp, eps_low=eps_low, eps_high=eps_high)
  difference = jnp.where(kept, log_ratio(logp, behavior_logp), 0.0)
  return jax.lax.stop_gradient(jnp.where(kept, jnp.exp(difference), 0.0))
