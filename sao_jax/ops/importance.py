"""Importance ratios, and direct double-sided importance sampling (DIS, arXiv 2607.07508, Section 3.1).

Log-probs may have any float dtype; they are cast to float32 before they are subtracted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Integer, Real

from sao_jax.ops import _checks

_EPS = 2.0**-23  # of float32


def log_ratio(logp: Float[ArrayLike, "*shape"], behavior_logp: Float[ArrayLike, "*#shape"]) -> Float32[Array, "*shape"]:
  """log π_θ(a) − log π_rollout(a) in float32, for equal shapes or scalars.

  >>> float(log_ratio(jnp.array(-1.0), jnp.array(-1.5)))
  0.5
  """
  logp, behavior_logp = _checks.broadcast(logp=_checks.float32(logp), behavior_logp=_checks.float32(behavior_logp))
  return logp - behavior_logp


def importance_ratio(
  logp: Float[ArrayLike, "*shape"], behavior_logp: Float[ArrayLike, "*#shape"]
) -> Float32[Array, "*shape"]:
  """Likelihood ratio between the learner's policy and the policy that sampled the token.

  r_t = exp(log π_θ(a_t|s_t) − log π_rollout(a_t|s_t)).                      (arXiv 2607.07508, Eq. 2)

  The behaviour log-prob is the rollout engine's own record: there is no π_old and no forward pass for one.

  Args:
    logp: learner's log-probs, any shape and float dtype (cast to float32 first), ≤ 0.
    behavior_logp: engine's log-probs, same shape.

  Returns:
    float32, same shape. Differentiable; `dis_coefficient` gives the constant that multiplies the score.

  Raises:
    ValueError: the shapes differ.

  >>> float(importance_ratio(jnp.array(-1.0), jnp.array(-1.0)))
  1.0
  """
  return jnp.exp(log_ratio(logp, behavior_logp))


def rounding_slack(
  logp: Float[ArrayLike, "*shape"], behavior_logp: Float[ArrayLike, "*#shape"]
) -> Float32[Array, "*shape"]:
  """Bound on the change that float32 rounding of two log-probs can make to their difference.

  In float32 a ratio that equals a bound exactly may end up a few units in the last place to either side of it.
  Comparing with this slack treats every such ratio as equal to the bound. It is 2.4e-7 for log-probs near 0 and 5e-6 at
  -20.
  """
  return 2 * _EPS * (1 + jnp.maximum(jnp.abs(_checks.float32(logp)), jnp.abs(_checks.float32(behavior_logp))))


def dis_mask(
  logp: Float[ArrayLike, "*shape"],
  behavior_logp: Float[ArrayLike, "*#shape"],
  *,
  eps_low: Real[ArrayLike, ""],
  eps_high: Real[ArrayLike, ""],
) -> Bool[Array, "*shape"]:
  """True where a token's ratio lies strictly inside the trust interval.

  1 − ε_low < r_t < 1 + ε_high.                                              (arXiv 2607.07508, Eq. 3)

  Both bounds are strict and hold for either sign of the advantage. Ratios are compared as log-ratios. A ratio within
  `rounding_slack` of a bound counts as equal to it, hence as outside: with ε = (0.3, 5.0), ratios of exactly 0.7 and
  6.0 are masked however the log-probs were rounded.

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
  logp: Float[ArrayLike, "*shape"],
  behavior_logp: Float[ArrayLike, "*#shape"],
  *,
  eps_low: Real[ArrayLike, ""],
  eps_high: Real[ArrayLike, ""],
) -> tuple[Bool[Array, "*shape"], Bool[Array, "*shape"]]:
  """Tokens below and above the interval of `dis_mask`, for metrics. A NaN ratio is in neither.

  >>> below, above = dis_outside(jnp.log(jnp.array([0.5, 2.0, 7.0])), jnp.zeros(3), eps_low=0.3, eps_high=5.0)
  >>> below.tolist(), above.tolist()
  ([True, False, False], [False, False, True])
  """
  outside = ~dis_mask(logp, behavior_logp, eps_low=eps_low, eps_high=eps_high)
  difference = log_ratio(logp, behavior_logp)
  return outside & (difference <= 0), outside & (difference > 0)


def icepop_outside(
  old_logp: Float[ArrayLike, "*shape"],
  behavior_logp: Float[ArrayLike, "*#shape"],
  *,
  low: Real[ArrayLike, ""],
  high: Real[ArrayLike, ""],
) -> tuple[Bool[Array, "*shape"], Bool[Array, "*shape"]]:
  """Tokens that IcePop masks: those whose mismatch ratio π_old / π_rollout is below `low`, and those above `high`.

  Both bounds are inclusive: a ratio within `rounding_slack` of one counts as equal to it, hence as kept. A NaN ratio is
  in neither.

  Args:
    old_logp: the learner's log-probs before the update, any shape and float dtype.
    behavior_logp: engine's log-probs, same shape.
    low: ≥ 0, the smallest ratio that is kept (0.5 in IcePop).
    high: > low, the largest one that is kept (5.0 in IcePop).

  Raises:
    ValueError: the shapes differ, a bound is out of range, or `low` is not below `high`.

  >>> below, above = icepop_outside(jnp.log(jnp.array([0.4, 0.5, 7.0])), jnp.zeros(3), low=0.5, high=5.0)
  >>> below.tolist(), above.tolist()
  ([True, False, False], [False, False, True])
  """
  _checks.interval("low", low, 0.0)
  _checks.interval("high", high, 0.0, open_low=True)
  if not isinstance(low, jax.Array) and not isinstance(high, jax.Array) and not low < high:  # type: ignore[operator]
    raise ValueError(f"low must be below high; received low={low!r}, high={high!r}.")
  mismatch = log_ratio(old_logp, behavior_logp)
  slack = rounding_slack(old_logp, behavior_logp)
  return mismatch < jnp.log(_checks.float32(low)) - slack, mismatch > jnp.log(_checks.float32(high)) + slack


def dis_coefficient(
  logp: Float[ArrayLike, "*shape"],
  behavior_logp: Float[ArrayLike, "*#shape"],
  *,
  eps_low: Real[ArrayLike, ""],
  eps_high: Real[ArrayLike, ""],
) -> Float32[Array, "*shape"]:
  """Calibrated ratio that multiplies a token's score.

  f(r) = r if 1 − ε_low < r < 1 + ε_high, else 0.                            (arXiv 2607.07508, Eq. 3)

  No gradient flows through it (`stop_gradient`).

  Args, Raises: as `dis_mask`.

  Returns:
    float32, same shape; 0 also where the ratio is NaN.

  >>> dis_coefficient(jnp.log(jnp.array([2.0, 7.0])), jnp.zeros(2), eps_low=0.3, eps_high=5.0).tolist()
  [2.0, 0.0]
  """
  kept = dis_mask(logp, behavior_logp, eps_low=eps_low, eps_high=eps_high)
  difference = jnp.where(kept, log_ratio(logp, behavior_logp), 0.0)
  return jax.lax.stop_gradient(jnp.where(kept, jnp.exp(difference), 0.0))


def sequence_log_ratio(
  logp: Float[ArrayLike, "T"],
  old_logp: Float[ArrayLike, "T"],
  action_mask: Bool[ArrayLike, "T"],
  *,
  segment_ids: Integer[ArrayLike, "T"] | None = None,
) -> Float32[Array, "T"]:
  """Logarithm of GSPO's length-normalised ratio, the same at every token of a sequence.

  log s = 1/l Σ_t M_t (log π_θ − log π_old)_t, l = Σ_t M_t.                  (arXiv 2507.18071, Eq. 7)

  Args:
    logp: `[T]` learner's log-probs.
    old_logp: `[T]` log-probs under π_old.
    action_mask: `[T]` bool, True on action tokens.
    segment_ids: `[T]` int, 0 = padding: each segment of a packed row is a sequence of its own. None: the stream is one
      sequence.

  Returns:
    `[T]` float32; 0 for a sequence without action tokens, and in padding.

  Raises:
    ValueError: the shapes differ, or are not `[T]`. TypeError: the mask is not bool, or the ids are not integers.

  >>> logp, mask, ids = jnp.array([-1.0, -2.0, -3.0]), jnp.array([True, True, True]), jnp.array([1, 1, 2])
  >>> sequence_log_ratio(logp, jnp.full(3, -2.0), mask, segment_ids=ids).tolist()
  [0.5, 0.5, -1.0]
  """
  logp, old_logp, mask = _checks.float32(logp), _checks.float32(old_logp), _checks.boolean("action_mask", action_mask)
  length = _checks.stream("sequence_log_ratio", logp=logp, old_logp=old_logp, action_mask=mask)
  ids = jnp.ones((length,), jnp.int32) if segment_ids is None else _checks.segments(segment_ids, length)
  mask = mask & (ids != 0)
  # Sequences are numbered by the changes of the id, so that any ids will do.
  number = jnp.cumsum(jnp.concatenate([jnp.zeros_like(mask[:1]), ids[1:] != ids[:-1]]))
  # Blanked before the subtraction: a NaN off the mask would poison the gradient.
  difference = jnp.where(mask, logp, 0.0) - jnp.where(mask, old_logp, 0.0)
  total = jax.ops.segment_sum(difference, number, num_segments=length)
  count = jax.ops.segment_sum(mask.astype(jnp.float32), number, num_segments=length)
  return (total / jnp.maximum(count, 1.0))[number]
