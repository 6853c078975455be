"""Advantages and returns over action tokens (arXiv 2607.07508, Section 3.2 and appendix A.1), and the group baseline.

Per-stream functions take `[T]`; use them under `jax.vmap`. Index t describes `tokens[t]`: v[t] is the value of the
state BEFORE it. Rewards, values, discounts and lambdas are read at action tokens only, so other tokens may hold
anything there, NaN included.

Packed rows: with `segment_ids` the stream is cut wherever the id changes, and nothing crosses a cut. Id 0 is padding:
it holds no actions, whatever the mask says.

Bootstrap: `bootstrap_value` is the value of the state after a segment's last ACTION token. It is 0 for an episode that
really ended. Its shape decides its meaning:
  `[]`   one value for every segment;
  `[T]`  one per token, read at each segment's last action token only;
  `[S]`  one per segment (only with `segment_ids`): entry s belongs to segment id s. Entry 0 (padding) is unused, so
         S is at least the largest id + 1. If S = T, the values are taken per token.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float32, Integer, Real

from sao_jax.ops import _checks, _recurrences


def skip_observation_gae(
  r_t: Real[ArrayLike, "T"],
  v_t: Real[ArrayLike, "T"],
  action_mask_t: Bool[ArrayLike, "T"],
  *,
  discount: Real[ArrayLike, "#T"] | Real[ArrayLike, ""],
  lambda_: Real[ArrayLike, "#T"] | Real[ArrayLike, ""],
  bootstrap_value: Real[ArrayLike, "S"] | Real[ArrayLike, ""] = 0.0,
  segment_ids: Integer[ArrayLike, "T"] | None = None,
) -> Float32[Array, "T"]:
  """Generalised advantage estimation over action tokens; observation tokens are skipped.

  With t' the next action token of the same segment:
    δ_t = r_t + γ_t V(s_t') − V(s_t),   A_t = δ_t + γ_t λ_t A_t';
  at the segment's last action token V(s_t') is the bootstrap value and A_t' = 0. (arXiv 2607.07508, Eqs. 4, 5; γ, λ per
  token)

  The recurrence is `_recurrences.gae_sequential` on CPUs, and `gae_associative`, of logarithmic depth, on
  accelerators.

  Args:
    r_t: `[T]` rewards, any real dtype. A turn's reward, terminal or not, stands on its last action token.
    v_t: `[T]` values.
    action_mask_t: `[T]` bool, True on action tokens.
    discount: γ in [0, 1], scalar or `[T]`; entry t is for the step from t to t'.
    lambda_: λ in [0, 1], scalar or `[T]`; e.g. each trajectory's own (`length_adaptive_lambda`) on all its tokens.
    bootstrap_value: `[]`, `[T]` or `[S]`; see the module's docstring.
    segment_ids: `[T]` int, 0 = padding; None for a single stream.

  Returns:
    `[T]` float32 advantages, 0 off the mask.

  Raises:
    ValueError: the shapes differ or are not `[T]`, or discount or lambda_ is out of range.
    TypeError: the mask is not bool, or the ids are not integers.

  >>> r, m = jnp.array([0, 0, 1, 0]), jnp.array([True, False, True, False])
  >>> skip_observation_gae(r, jnp.zeros(4), m, discount=1.0, lambda_=0.5).tolist()
  [0.5, 0.0, 1.0, 0.0]
  """
  length = _checks.stream(
    "skip_observation_gae", r_t=jnp.asarray(r_t), v_t=jnp.asarray(v_t), action_mask_t=jnp.asarray(action_mask_t)
  )
  mask, ids = _segments(action_mask_t, segment_ids, length)
  v = jnp.where(mask, _checks.float32(v_t), 0.0)
  discount_t = _coefficient("discount", discount, mask)
  decay_t = discount_t * _coefficient("lambda_", lambda_, mask)
  adv = _recurrences.gae(
    _recurrences.GaeInputs(
      mask=mask,
      end=None if ids is None else jnp.concatenate([ids[1:] != ids[:-1], jnp.ones_like(mask[:1])]),
      base=jnp.where(mask, _checks.float32(r_t), 0.0) - v,
      v=v,
      discount=discount_t,
      decay=decay_t,
      bootstrap=_bootstrap(bootstrap_value, mask, ids),
    )
  )
  return jnp.where(mask, adv, 0.0)


def skip_observation_returns(
  r_t: Real[ArrayLike, "T"],
  v_t: Real[ArrayLike, "T"],
  action_mask_t: Bool[ArrayLike, "T"],
  *,
  discount: Real[ArrayLike, "#T"] | Real[ArrayLike, ""],
  lambda_: Real[ArrayLike, "#T"] | Real[ArrayLike, ""],
  bootstrap_value: Real[ArrayLike, "S"] | Real[ArrayLike, ""] = 0.0,
  segment_ids: Integer[ArrayLike, "T"] | None = None,
) -> Float32[Array, "T"]:
  """The critic's targets: λ-returns over action tokens.

  R_t = A_t + V(s_t) on action tokens, A from `skip_observation_gae` with the CRITIC's λ (1 in the paper whatever the
  policy's λ; with γ = 1 that is the Monte-Carlo return, plus the bootstrap of a cut-off episode).

  Args, Raises: as `skip_observation_gae`.

  Returns:
    `[T]` float32, 0 off the mask.

  >>> r, v, m = jnp.array([0, 1]), jnp.array([0.5, 0.5]), jnp.array([True, True])
  >>> skip_observation_returns(r, v, m, discount=1.0, lambda_=1.0).tolist()
  [1.0, 1.0]
  """
  adv = skip_observation_gae(
    r_t,
    v_t,
    action_mask_t,
    discount=discount,
    lambda_=lambda_,
    bootstrap_value=bootstrap_value,
    segment_ids=segment_ids,
  )
  mask = _segments(action_mask_t, segment_ids, adv.shape[0])[0]
  return jnp.where(mask, adv + jnp.where(mask, _checks.float32(v_t), 0.0), 0.0)


def step_level_gae(
  r_t: Real[ArrayLike, "T"],
  v_t: Real[ArrayLike, "T"],
  action_mask_t: Bool[ArrayLike, "T"],
  *,
  discount: Real[ArrayLike, "#T"] | Real[ArrayLike, ""],
  lambda_: Real[ArrayLike, "#T"] | Real[ArrayLike, ""],
  step_value: Literal["mean", "last"],
  bootstrap_value: Real[ArrayLike, "S"] | Real[ArrayLike, ""] = 0.0,
  segment_ids: Integer[ArrayLike, "T"] | None = None,
  turn_ids_t: Integer[ArrayLike, "T"] | None = None,
) -> Float32[Array, "T"]:
  """GAE over whole steps (turns): one advantage per step, shared by all its tokens.

  δ_i = R_i + γ V(S_{i+1}) − V(S_i),  A_i = δ_i + γ λ A_{i+1};  R_i is the sum of rewards on the step's action tokens,
  V(S_i) the mean of V over them or V at the last of them; γ counts once per step. (arXiv 2607.07508, appendix A.1;
  ablation)

  For a length-adaptive λ, use the number of steps as the length. With "last", fit the critic on each step's last token
  only.

  Args:
    r_t, v_t, action_mask_t, segment_ids: as `skip_observation_gae`.
    discount, lambda_: as there; arrays are read at each step's last token.
    step_value: "mean" or "last".
    bootstrap_value: as there; `[T]` is read at the last step's last token.
    turn_ids_t: `[T]` int, the turn that each action token belongs to, ascending within a segment; read at action tokens
      only. Needed where two turns may touch (an empty observation). None: a step is a run of consecutive action tokens.

  Returns:
    `[T]` float32, 0 off the mask.

  Raises:
    ValueError: as `skip_observation_gae`, or an unknown step_value.

  >>> r, v, m = jnp.array([0, 0, 0, 1]), jnp.array([0.2, 0.5, 9, 0.75]), jnp.array([True, True, False, True])
  >>> step_level_gae(r, v, m, discount=1.0, lambda_=1.0, step_value="last").tolist()
  [0.5, 0.5, 0.0, 0.25]
  """
  if step_value not in ("mean", "last"):
    raise ValueError(f"step_value must be 'mean' or 'last'; received {step_value!r}.")
  length = _checks.stream(
    "step_level_gae", r_t=jnp.asarray(r_t), v_t=jnp.asarray(v_t), action_mask_t=jnp.asarray(action_mask_t)
  )
  mask, ids = _segments(action_mask_t, segment_ids, length)
  step_t, last_t = _steps(mask, ids, turn_ids_t)
  # Steps become the entries of a shorter stream, padded to T; token index `last_t[i]` stands for step i.
  num_steps = jnp.max(jnp.where(mask, step_t + 1, 0), initial=0)
  valid = jnp.arange(length) < num_steps
  v = jnp.where(mask, _checks.float32(v_t), 0.0)
  rewards = jax.ops.segment_sum(jnp.where(mask, _checks.float32(r_t), 0.0), step_t, num_segments=length)
  if step_value == "mean":
    counts = jax.ops.segment_sum(mask.astype(jnp.float32), step_t, num_segments=length)
    values = jax.ops.segment_sum(v, step_t, num_segments=length) / jnp.maximum(counts, 1.0)
  else:
    values = v[last_t]
  bootstrap = _bootstrap(bootstrap_value, mask, ids)
  adv = skip_observation_gae(
    rewards,
    values,
    valid,
    discount=_at(_coefficient("discount", discount, mask), last_t),
    lambda_=_at(_coefficient("lambda_", lambda_, mask), last_t),
    bootstrap_value=_at(bootstrap, last_t),
    segment_ids=None if ids is None else jnp.where(valid, ids[last_t], 0),
  )
  return jnp.where(mask, adv[jnp.where(mask, step_t, 0)], 0.0)


def length_adaptive_lambda(
  num_actions: Real[ArrayLike, "*shape"], *, alpha: Real[ArrayLike, ""] = 1.5
) -> Float32[Array, "*shape"]:
  """Length-adaptive λ of the policy's advantages.

  λ = max(0, 1 − 1 / (α l)), l = number of ACTION tokens (steps, for step-level variants); 0 for l = 0. (VAPO, arXiv
  2504.05118)

  Args:
    num_actions: l ≥ 0, any shape, integer or float.
    alpha: > 0; 1.5 in arXiv 2607.07508.

  Returns:
    float32 in [0, 1), shape of `num_actions`.

  >>> round(float(length_adaptive_lambda(4)), 4)
  0.8333
  """
  _checks.interval("alpha", alpha, 0.0, open_low=True)
  _checks.interval("num_actions", num_actions, 0.0)
  scaled = _checks.float32(alpha) * _checks.float32(num_actions)
  # Clamped at 1, so that nothing is divided by 0.
  return 1.0 - 1.0 / jnp.maximum(scaled, 1.0)


def group_relative_advantages(
  rewards: Real[ArrayLike, "N"], group_ids: Integer[ArrayLike, "N"], *, num_groups: int, normalize_std: bool = True
) -> Float32[Array, "N"]:
  """GRPO's advantages: each episode's reward relative to the mean of its group.

  A_i = (R_i − mean_g) / (std_g + 1e-6), or R_i − mean_g; population std (divided by the group's size). (arXiv
  2402.03300)

  A group of one, or of equal rewards, has advantage exactly 0.

  Args:
    rewards: `[N]` episode rewards, any real dtype.
    group_ids: `[N]` int in [0, num_groups).
    num_groups: static number of groups.
    normalize_std: divide by the group's standard deviation.

  Returns:
    `[N]` float32; NaN where an id is out of range (under jit, where ids cannot be checked).

  Raises:
    ValueError: the shapes differ, or an id known on the host is out of range. TypeError: float ids.

  >>> group_relative_advantages(jnp.array([1, 0, 3]), jnp.array([0, 0, 1]), num_groups=2).round(3).tolist()
  [1.0, -1.0, 0.0]
  """
  _checks.ids("group_ids", group_ids, num_groups, "num_groups")
  r, ids = _checks.float32(rewards), jnp.asarray(group_ids)
  _checks.stream("group_relative_advantages", rewards=r, group_ids=ids)
  known = (ids >= 0) & (ids < num_groups)
  ids = jnp.where(known, ids, num_groups)  # the scatter drops these

  def mean(x: jax.Array) -> jax.Array:
    count = jax.ops.segment_sum(jnp.ones_like(x), ids, num_segments=num_groups)
    return (jax.ops.segment_sum(x, ids, num_segments=num_groups) / jnp.maximum(count, 1.0))[ids]

  # Centred on the group's largest reward first: equal rewards give exactly 0, not rounding noise over a tiny std.
  x = r - jax.ops.segment_max(r, ids, num_segments=num_groups)[ids]
  centred = x - mean(x)
  if normalize_std:
    variance = mean(jnp.square(centred))
    positive = variance > 0
    centred = centred / (jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1.0)), 0.0) + 1e-6)
  return jnp.where(known, centred, jnp.nan)


def _segments(
  action_mask_t: ArrayLike, segment_ids: ArrayLike | None, length: int
) -> tuple[jax.Array, jax.Array | None]:
  """Returns the mask without padding, and the checked ids; both `[T]`."""
  mask = _checks.boolean("action_mask_t", action_mask_t)
  if segment_ids is None:
    return mask, None
  ids = _checks.segments(segment_ids, length)
  return mask & (ids != 0), ids


def _coefficient(name: str, x: ArrayLike, mask: jax.Array) -> jax.Array:
  """γ or λ as float32: a scalar stays a scalar; an array becomes `[T]`, 0 off the mask."""
  _checks.interval(name, x, 0.0, 1.0)
  value = _checks.float32(x)
  if value.ndim == 0:
    return value
  if value.shape not in ((1,), mask.shape):
    raise ValueError(f"{name} must be a scalar or broadcast with [T] = {mask.shape}; received shape {value.shape}.")
  return jnp.where(mask, value, 0.0)


def _bootstrap(bootstrap_value: ArrayLike, mask: jax.Array, ids: jax.Array | None) -> jax.Array:
  """The bootstrap as a scalar, or as `[T]` that holds the segment's value from its last action token to its end."""
  value = _checks.float32(bootstrap_value)
  if value.ndim == 0:
    return value
  if value.shape == mask.shape:
    filled = _recurrences.fill(value, mask, reverse=False)
    return filled if ids is not None else filled[-1]
  if value.ndim != 1 or ids is None:
    raise ValueError(
      f"bootstrap_value must be a scalar, [T] = {mask.shape} per token, or, with segment_ids, [S] per segment id; "
      f"received shape {value.shape}{' and no segment_ids' if ids is None else ''}."
    )
  largest = 0 if isinstance(ids, jax.core.Tracer) or not ids.size else int(jnp.max(ids))
  if largest >= value.shape[0]:
    raise ValueError(
      f"bootstrap_value per segment is indexed by segment id (entry 0 is padding): ids up to {largest} need at least "
      f"{largest + 1} entries; received shape {value.shape} (per token would be {mask.shape})."
    )
  return value.at[ids].get(mode="fill", fill_value=jnp.nan)


def _steps(mask: jax.Array, ids: jax.Array | None, turn_ids_t: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
  """Returns the step number of each token (T off the mask), and the index of each step's last token (0 for no step).

  Both are `[T]`.
  """
  length = mask.shape[0]
  index = jnp.arange(length)
  ids = jnp.zeros_like(index) if ids is None else ids
  if turn_ids_t is None:
    same_run = jnp.concatenate([jnp.zeros_like(mask[:1]), mask[:-1] & (ids[1:] == ids[:-1])])
    start = mask & ~same_run
  else:
    turns = jnp.asarray(turn_ids_t)
    if turns.shape != (length,) or not jnp.issubdtype(turns.dtype, jnp.integer):
      raise ValueError(f"turn_ids_t must be integers [T] = ({length},); received {turns.dtype.name} {turns.shape}.")
    previous = _recurrences.fill(index, mask, reverse=False)  # the last action token up to and including t
    previous = jnp.concatenate([jnp.zeros_like(previous[:1]), previous[:-1]])
    first = jnp.cumsum(mask) == 1
    start = mask & (first | (turns != turns[previous]) | (ids != ids[previous]))
  step_t = jnp.where(mask, jnp.cumsum(start) - 1, length)
  last_t = jax.ops.segment_max(index, step_t, num_segments=length)
  return step_t, jnp.clip(last_t, 0, max(length - 1, 0))


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
  return x[index] if x.ndim else x
