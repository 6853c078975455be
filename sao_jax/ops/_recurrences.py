"""Two recurrences over one stream, from which advantages are built: `gae` and `fill`.

Each has a sequential and an associative form. On a CPU a sequential `lax.scan` does the least work. On an accelerator
each of its T small steps costs a kernel launch, so `lax.associative_scan`, of logarithmic depth, is used there. Both
recurrences are selections and first-order linear recurrences, hence associative. `jax.lax.platform_dependent` chooses
when a program is lowered, so that one jitted function suits every platform.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class GaeInputs(NamedTuple):
  """Inputs of `gae`, all finite off the mask. Scalars are not scanned over, which saves loads in every step."""

  mask: jax.Array
  """`[T]` bool."""
  end: jax.Array | None
  """`[T]` bool: True on the last token of each segment, where the recursion starts anew. None: one segment."""
  base: jax.Array
  """`[T]` r − v on the mask, 0 off it."""
  v: jax.Array
  """`[T]` values on the mask, 0 off it."""
  discount: jax.Array
  """`[T]` or `[]`."""
  decay: jax.Array
  """`[T]` or `[]`: discount · λ."""
  bootstrap: jax.Array
  """`[T]` or `[]`: value after the last action, read where `end` is True. `[]` if `end` is None."""


def gae(inputs: GaeInputs) -> jax.Array:
  """Returns A_t of the skip-observation recursion, `[T]` float32; entries off the mask are undefined."""
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
  """`gae` in two associative scans: the next action's value, then A_t = b_t + c_t A_{t+1}."""
  mask, v = inputs.mask, inputs.v
  end = jnp.arange(mask.shape[0]) == mask.shape[0] - 1 if inputs.end is None else inputs.end
  # The value to the right of a token: the bootstrap at the segment's end, else that of the nearest action.
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
  """Replaces unknown entries by the nearest known one to the left (right if `reverse`), or by 0 without one."""

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
