"""Argument checks shared by the ops. They read only shapes and numbers on the host, so they cost nothing under jit."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def float32(x: ArrayLike) -> jax.Array:
  """Casts to float32, before any arithmetic: bfloat16 log-probs near -20 are 0.125 apart, 13 % in the ratio."""
  return jnp.asarray(x).astype(jnp.float32)


def boolean(name: str, x: ArrayLike) -> jax.Array:
  """Returns a mask as bool. Integers 0 and 1 are accepted; floats are refused, since they may be weights."""
  mask = jnp.asarray(x)
  if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
    raise TypeError(f"{name} must be a bool mask (True = counts); received dtype {mask.dtype.name}.")
  return mask.astype(jnp.bool_)


def broadcast(**arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Brings arrays to one shape: their shapes must be equal, except for scalars.

  NumPy's broadcasting is refused on purpose: it would accept `[B]` advantages with `[B, B]` log-probs.
  """
  shapes = {name: jnp.shape(x) for name, x in arrays.items()}
  full = {shape for shape in shapes.values() if shape}
  if len(full) > 1:
    listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    raise ValueError(f"Arguments must have one common shape (or be scalars); received {listing}.")
  shape = full.pop() if full else ()
  return tuple(jnp.broadcast_to(x, shape) for x in arrays.values())


def stream(function: str, **arrays: jax.Array) -> int:
  """Checks that all arrays are `[T]` with the same T, and returns T."""
  shapes = {name: jnp.shape(x) for name, x in arrays.items()}
  if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) != 1:
    listing = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    raise ValueError(f"{function} works on one stream [T] (use jax.vmap for a batch); received {listing}.")
  return int(next(iter(shapes.values()))[0])


def interval(
  name: str, x: Any, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> None:
  """Checks numbers known on the host against an interval. JAX arrays, traced or not, are not read."""
  wanted = f"in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high or math.isinf(high) else ']'}"
  if isinstance(x, jax.Array):
    return
  try:
    value = np.asarray(x, dtype=np.float64)
  except (TypeError, ValueError):
    raise TypeError(f"{name} must be a number {wanted}; received {x!r}.") from None
  if x is None:  # np.asarray(None, float) is nan
    raise TypeError(f"{name} must be given, as a number {wanted}; received None.")
  above = value > low if open_low else value >= low
  below = value < high if open_high else value <= high
  if not bool(np.all(above & below)):
    raise ValueError(f"{name} must be {wanted}; received {x!r}.")


def ids(name: str, x: Any, size: int, size_name: str) -> None:
  """Checks that ids are integers in `[0, size)`. The values of JAX arrays are not read."""
  dtype = x.dtype if isinstance(x, jax.Array) else np.asarray(x).dtype
  if not jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(f"{name} must be integers; received dtype {dtype}.")
  if isinstance(x, jax.Array):
    return
  value = np.asarray(x)
  if value.size and (value.min() < 0 or value.max() >= size):
    raise ValueError(
      f"{name} must be in [0, {size_name} = {size}); received values from {value.min()} to {value.max()}."
    )


def segments(segment_ids: ArrayLike, length: int) -> jax.Array:
  """Checks segment ids of a stream: `[T]` integers."""
  ids = jnp.asarray(segment_ids)
  if ids.shape != (length,):
    raise ValueError(f"segment_ids must be [T] = ({length},); received shape {ids.shape}.")
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise TypeError(f"segment_ids must be integers (0 = padding); received dtype {ids.dtype.name}.")
  return ids
