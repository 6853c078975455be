"""Loops over microbatches. The trip count is data: one program serves every count, and skips padding microbatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from sao_jax.types import Params

Inputs: TypeAlias = Any
"""A pytree of `[M, ...]` arrays."""

LossFn: TypeAlias = Callable[[Params, Any], tuple[jax.Array, Any]]
"""`(params, inputs of one microbatch) -> (loss, outputs)`, with the loss already divided by the batch's denominator."""


def map_microbatches(
  fn: Callable[[Any], Any], inputs: Inputs, buffers: Any, start: Int[Array, ""] | int, stop: Int[Array, ""] | int
) -> Any:
  """Writes `fn(inputs[m])` to `buffers[m]` for `start <= m < stop`; other entries of `buffers` stay unchanged."""
  return jax.lax.fori_loop(start, stop, lambda m, b: _put(b, fn(_take(inputs, m)), m), buffers)


def accumulate_gradients(
  loss_fn: LossFn, params: Params, inputs: Inputs, buffers: Any, start: Int[Array, ""] | int, stop: Int[Array, ""] | int
) -> tuple[Params, Float32[Array, ""], Any]:
  """Sums gradients and losses of the microbatches `start <= m < stop`.

  The gradient is taken inside the loop's body. The trip count may therefore be data, and only the activations of one
  microbatch are alive at a time.

  Args:
    loss_fn: see `LossFn`.
    params: parameters to differentiate with respect to.
    inputs: `[M, ...]` arrays.
    buffers: `[M, ...]` arrays; the outputs of `loss_fn` for microbatch m replace entry m.
    start: first microbatch.
    stop: one past the last.

  Returns:
    Gradients (float32 sums), the loss (float32 sum), and the buffers.
  """
  gradient = jax.value_and_grad(loss_fn, has_aux=True)

  def body(m: jax.Array, carry: tuple[Params, jax.Array, Any]) -> tuple[Params, jax.Array, Any]:
    total, loss_sum, written = carry
    (loss, outputs), grads = gradient(params, _take(inputs, m))
    total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads)
    return total, loss_sum + loss, _put(written, outputs, m)

  zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
  return jax.lax.fori_loop(start, stop, body, (zeros, jnp.zeros((), jnp.float32), buffers))


def _take(inputs: Inputs, index: jax.Array) -> Any:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, axis=0, keepdims=False), inputs)


def _put(buffers: Any, outputs: Any, index: jax.Array) -> Any:
  return jax.tree.map(lambda b, x: jax.lax.dynamic_update_index_in_dim(b, x, index, axis=0), buffers, outputs)
