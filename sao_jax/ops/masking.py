"""Masked reductions, and the one shift between a model's outputs and the tokens they predict."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float32, Real, Shaped

from sao_jax.ops import _checks


def align_predictions(x: Shaped[ArrayLike, "*shape"], *, axis: int = 1, fill: float = 0.0) -> Shaped[Array, "*shape"]:
  """Shifts model outputs right by one, so that index t describes `tokens[t]`.

  out[:, t] = x[:, t - 1], out[:, 0] = fill.

  A model's output at index t is computed from `tokens[: t + 1]`: it predicts `tokens[t + 1]`, or is the value of the
  state before that token. Everywhere else in this library, index t of an array describes `tokens[t]`. This is the only
  place that shifts.

  Args:
    x: outputs with time along `axis`, e.g. `[B, T]` values or `[B, T, D]` hidden states, any dtype.
    axis: the time axis.
    fill: value at index 0, which has no prediction (the first token is never an action).

  Returns:
    An array of the shape and dtype of `x`.

  >>> align_predictions(jnp.array([[1.0, 2.0, 3.0]])).tolist()
  [[0.0, 1.0, 2.0]]
  """
  x = jnp.asarray(x)
  if not -x.ndim <= axis < x.ndim:
    raise ValueError(f"axis must name an axis of x; received axis={axis} for shape {x.shape}.")
  length = x.shape[axis]
  first = jnp.full_like(jax.lax.slice_in_dim(x, 0, min(1, length), axis=axis), fill)
  return jnp.concatenate([first, jax.lax.slice_in_dim(x, 0, max(length - 1, 0), axis=axis)], axis=axis)


def masked_mean(
  x: Shaped[ArrayLike, "*shape"], mask: Bool[ArrayLike, "*#shape"], *, denominator: Real[ArrayLike, ""] | None = None
) -> Float32[Array, ""]:
  """Sum over True entries, divided by their number or by a given denominator.

  Σ_t M_t x_t / N, with N = Σ_t M_t unless given; 0 where N = 0.

  Entries off the mask are never read: NaN or Inf there reaches neither the result nor a gradient.

  Args:
    x: any shape, any real dtype.
    mask: shape of `x`, bool.
    denominator: scalar ≥ 0. For a microbatch, pass the number of action tokens of the whole batch: the microbatches'
      results then add up to the mean over the batch.

  Returns:
    A float32 scalar.

  Raises:
    ValueError: the shapes differ. TypeError: the mask is not bool or integer.

  >>> float(masked_mean(jnp.array([1.0, 1.0, 9.0]), jnp.array([True, True, False]), denominator=4))
  0.5
  """
  x, mask = _checks.broadcast(x=_checks.float32(x), mask=_checks.boolean("mask", mask))
  if denominator is not None and jnp.shape(denominator) != ():
    raise ValueError(f"denominator must be a scalar; received shape {jnp.shape(denominator)}.")
  total = jnp.sum(jnp.where(mask, x, 0.0))
  count = jnp.sum(mask).astype(jnp.float32) if denominator is None else _checks.float32(denominator)
  return jnp.where(count > 0, total / jnp.where(count > 0, count, 1.0), 0.0)


class Moments(NamedTuple):
  """Statistics over the True entries of a mask; float32 scalars."""

  num: Float32[Array, ""]
  mean: Float32[Array, ""]
  variance: Float32[Array, ""]
  """Population variance (divided by the count); exactly 0 if the entries are equal up to float32 rounding."""


def masked_moments(x: Real[ArrayLike, "*shape"], mask: Bool[ArrayLike, "*#shape"]) -> Moments:
  """Count, mean and population variance over True entries; all 0 if no entry is True.

  Entries are centred on their maximum first, so that equal entries give a variance of exactly 0. A spread of a few
  units in the last place of the largest entry is rounding noise, and counts as 0 as well.

  Args:
    x: any shape, any real dtype.
    mask: shape of `x`, bool.

  >>> moments = masked_moments(jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False]))
  >>> float(moments.mean), float(moments.variance)
  (2.0, 1.0)
  """
  x, mask = _checks.broadcast(x=_checks.float32(x), mask=_checks.boolean("mask", mask))
  x = jnp.where(mask, x, 0.0)
  centre = jax.lax.stop_gradient(jnp.max(x, initial=-jnp.inf, where=mask))
  centre = jnp.where(jnp.any(mask), centre, 0.0)
  shifted = jnp.where(mask, x - centre, 0.0)
  mean = masked_mean(shifted, mask)
  variance = masked_mean(jnp.square(shifted - mean), mask)
  noise = 4 * 2.0**-23 * jnp.max(jnp.abs(x), initial=0.0)
  # NaN compares False, so that a NaN at a True entry stays visible.
  variance = jnp.where(variance <= jnp.square(noise), 0.0, variance)
  return Moments(num=jnp.sum(mask).astype(jnp.float32), mean=centre + mean, variance=variance)


def masked_whiten(x: Real[ArrayLike, "*shape"], mask: Bool[ArrayLike, "*#shape"]) -> Float32[Array, "*shape"]:
  """Standardises the True entries to mean 0 and population variance 1.

  y_t = M_t (x_t − μ) / σ, with μ, σ over True entries only; y_t = M_t (x_t − μ) with fewer than two of them, or σ = 0.

  SAO does not whiten advantages. This is for variants that do; it is off by default in the learner.

  Args:
    x: any shape, any real dtype.
    mask: shape of `x`, bool.

  Returns:
    float32, shape of `x`; 0 off the mask.

  >>> masked_whiten(jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False])).tolist()
  [-1.0, 1.0, 0.0]
  """
  x, mask = _checks.broadcast(x=_checks.float32(x), mask=_checks.boolean("mask", mask))
  moments = masked_moments(x, mask)
  usable = (moments.num >= 2) & (moments.variance != 0)
  scale = jnp.where(usable, jax.lax.rsqrt(jnp.where(usable, moments.variance, 1.0)), 1.0)
  return jnp.where(mask, (jnp.where(mask, x, 0.0) - moments.mean) * scale, 0.0)
