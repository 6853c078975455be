"""The two recurrences over one stream that advantages are made of, each sequential (CPU) and of logarithmic depth.

Both are selections and first-order linear recurrences, hence associative. On a CPU a sequential `lax.scan` does the
least work; on an accelerator its T tiny steps cost a launch each, so `lax.associative_scan` is used there.
`jax.lax.platform_dependent` picks when a program is lowered, so the same jitted function is right on each platform.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class GaeInputs(NamedTuple):
  """What `gae` reads, all finite off the mask. Scalars are closed over instead of scanned: fewer loads per step."""

  mask: jax.Array
  """`[T]` bool."""
  end: jax.Array | None
  """`[T]` bool: True on the last token of each segment; what lies to the right is not read. None: one segment."""
  base: jax.Array
  """`[T]` r − v on the mask, 0 off it."""
  v: jax.Array
  """`[T]` values on the mask, 0 off it."""
  discount: jax.Array
  """`[T]` or `[]`."""
  decay: jax.Array
  """`[T]` or `[]`: discount · λ."""
  bootstrap: jax.Array
  """`[T]` or `[]`: value after the last action; read where `end` is True. `[]` if `end` is None."""


def gae(inputs: GaeInputs) -> jax.Array:
  """A_t of the skip-observation recursion at True entries, anything elsewhere. `[T]` float32."""
  out: jax.Array = lax.platform_dependent(inputs, cpu=gae_sequential, default=gae_associative)
  return out


def gae_sequential(inputs: GaeInputs) -> jax.Array:
  """One `lax.scan` from the right that carries the next action's value and advantage."""
  arrays = {"discount": inputs.discount, "decay": inputs.decay, "bootstrap": inputs.bootstrap}
  scanned = {name: x for name, x in arrays.items() if x.ndim}
  constant = {name: x for name, x in arrays.items() if not x.ndim}

  def step(carry: tuple[jax.Array, jax.Array], x: tuple[Any, ...]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    next_v, next_adv = carry
    mask, end, base, v, varying = x
    at_t = constant | varying
    if end is not None:
      next_v = jnp.where(end, at_t["bootstrap"], next_v)
      next_adv = jnp.where(end, 0.0, next_adv)
    adv = jnp.where(mask, base + at_t["discount"] * next_v + at_t["decay"] * next_adv, next_adv)
    return (jnp.where(mask, v, next_v), adv), adv

  start = (jnp.float32(0) if inputs.end is not None else inputs.bootstrap, jnp.float32(0))
  return lax.scan(step, start, (inputs.mask, inputs.end, inputs.base, inputs.v, scanned), reverse=True)[1]


def gae_associative(inputs: GaeInputs) -> jax.Array:
  """The same in two associative scans: the next action's value, then A_t = b_t + c_t A_{t+1}."""
  mask, v = inputs.mask, inputs.v
  end = jnp.arange(mask.shape[0]) == mask.shape[0] - 1 if inputs.end is None else inputs.end
  # What a token sees to its right: the bootstrap at the segment's end, elsewhere its right neighbour's fill.
  right_mask = jnp.concatenate([mask[1:], jnp.zeros_like(mask[:1])])
  right_v = jnp.concatenate([v[1:], jnp.zeros_like(v[:1])])
  next_v = fill_associative(jnp.where(end, inputs.bootstrap, right_v), end | right_mask, reverse=True)
  b = jnp.where(mask, inputs.base + inputs.discount * next_v, 0.0)
  c = jnp.where(end, 0.0, jnp.where(mask, inputs.decay, 1.0))

  def combine(right: tuple[jax.Array, jax.Array], left: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    b_right, c_right = right
    b_left, c_left = left
    # Not 0 * b_right: a NaN in one segment must not reach the next.
    return b_left + c_left * jnp.where(c_left == 0, 0.0, b_right), c_left * c_right

  adv: jax.Array = lax.associative_scan(combine, (b, c), reverse=True)[0]
  return adv


def fill(x: jax.Array, known: jax.Array, *, reverse: bool) -> jax.Array:
  """Replaces entries that are not known by the nearest known one to the left (right if `reverse`); 0 if there is
  none."""

  def sequential(x: jax.Array, known: jax.Array) -> jax.Array:
    def step(last: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      last = jnp.where(xs[1], xs[0], last)
      return last, last

    return lax.scan(step, jnp.zeros((), x.dtype), (x, known), reverse=reverse)[1]

  def associative(x: jax.Array, known: jax.Array) -> jax.Array:
    return fill_associative(x, known, reverse=reverse)

  out: jax.Array = lax.platform_dependent(x, known, cpu=sequential, default=associative)
  return out


def fill_associative(x: jax.Array, known: jax.Array, *, reverse: bool) -> jax.Array:
  """`fill` as an associative scan."""

  def combine(earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jnp.where(later[1], later[0], earlier[0]), earlier[1] | later[1]

  blanked = jnp.where(known, x, jnp.zeros((), x.dtype))
  filled: jax.Array = lax.associative_scan(combine, (blanked, known), reverse=reverse)[0]
  return filled
