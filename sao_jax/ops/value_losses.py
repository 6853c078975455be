"""Per-token value losses. Reduce with `masking.masked_mean`; targets are constants."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float32, Real

from sao_jax.ops import _checks


def _prepare(v: ArrayLike, mask: ArrayLike, **constants: ArrayLike) -> tuple[jax.Array, ...]:
  mask_, v_, *rest = _checks.broadcast(
    mask=_checks.boolean("mask", mask),
    v=_checks.float32(v),
    **{name: _checks.float32(x) for name, x in constants.items()},
  )
  blanked = (jax.lax.stop_gradient(jnp.where(mask_, x, 0.0)) for x in rest)
  return mask_, jnp.where(mask_, v_, 0.0), *blanked


def squared_value_loss(
  v: Real[ArrayLike, "*shape"], target: Real[ArrayLike, "*#shape"], mask: Bool[ArrayLike, "*#shape"]
) -> Float32[Array, "*shape"]:
  """Squared error of the values.

  ℓ_t = M_t (V(s_t) − sg[R_t])². (arXiv 2607.07508, Section 3.2; no factor 1/2)

  Args:
    v: values, any shape, any float dtype; v[t] belongs to the state before token t.
    target: returns, same shape or scalar.
    mask: bool, True on the tokens that count (action tokens).

  Returns:
    float32 per-token losses, shape of `v`; 0 off the mask, whatever is stored there.

  Raises:
    ValueError: shapes differ. TypeError: mask of float dtype.

  >>> squared_value_loss(jnp.array([0.5, 9.0]), jnp.array([1.0, 0.0]), jnp.array([True, False])).tolist()
  [0.25, 0.0]
  """
  mask, v, target = _prepare(v, mask, target=target)
  return jnp.where(mask, jnp.square(v - target), 0.0)


def clipped_value_loss(
  v: Real[ArrayLike, "*shape"],
  old_v: Real[ArrayLike, "*#shape"],
  target: Real[ArrayLike, "*#shape"],
  mask: Bool[ArrayLike, "*#shape"],
  *,
  clip: Real[ArrayLike, ""],
) -> Float32[Array, "*shape"]:
  """PPO's pessimistic value loss: the larger squared error of the value and of the value clipped to the old one.

  ℓ_t = M_t max((V − R)², (V_old + clip(V − V_old, −c, c) − R)²). (as in OpenAI baselines' PPO2; no factor 1/2)

  Args:
    v: values, any shape, any float dtype.
    old_v: values before the update (constants), same shape.
    target: returns (constants), same shape or scalar.
    mask: bool.
    clip: > 0.

  Returns:
    float32 per-token losses, shape of `v`; 0 off the mask.
  """
  _checks.interval("clip", clip, 0.0, open_low=True)
  mask, v, old_v, target = _prepare(v, mask, old_v=old_v, target=target)
  bound = _checks.float32(clip)
  near = old_v + jnp.clip(v - old_v, -bound, bound)
  return jnp.where(mask, jnp.maximum(jnp.square(v - target), jnp.square(near - target)), 0.0)
