"""Mixture of experts without dropped tokens: routing, and one `expert_mlp` with several implementations.

Every token passes through exactly its `num_experts_per_tok` experts, whatever the imbalance. Implementations
(`moe_impl`):

* "ragged", for GPUs: tokens sorted by expert, and `jax.lax.ragged_dot`.
* "gmm", for TPUs: the same with the Pallas grouped matmul that JAX ships.
* "blocks", for CPUs, where ragged_dot computes every expert on every token: tokens sorted by expert, with each expert's
  run padded to whole blocks.
* "dense", for few tokens (decoding), where sorting costs more than it saves: all experts on all tokens.
* "auto": chosen by the platform; on CPUs "blocks" or "dense", by the static number of tokens.

Shapes: N tokens, k experts per token, E experts of width F, D hidden_size.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from sao_jax.models.config import MOE_IMPLEMENTATIONS, ModelConfig
from sao_jax.models.expert_parallel import apply_experts
from sao_jax.models.layers import MLP, linear_init, residual_scale


class ExpertKernels(NamedTuple):
  """Weights of all experts."""

  gate: Float[Array, "E D F"]
  up: Float[Array, "E D F"]
  down: Float[Array, "E F D"]


def route(
  logits: Float32[Array, "*tokens E"], correction_bias: Float32[Array, "E"] | None, config: ModelConfig
) -> tuple[Float32[Array, "*tokens k"], Int32[Array, "*tokens k"]]:
  """Chooses each token's experts from router logits, and returns their weights and ids.

  With "softmax" (Qwen3-MoE), these are the k largest probabilities. With "sigmoid" (DeepSeek-V3, GLM-4.5), groups are
  ranked by the sum of their two largest values of score + correction bias; from the `topk_group` best groups, the k
  largest values are chosen. The weights are the scores without the bias.
  """
  top_k = config.num_experts_per_tok
  if config.router == "softmax":
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), top_k)
    total = jnp.sum(weights, axis=-1, keepdims=True)
  else:
    scores = jax.nn.sigmoid(logits)
    choice = scores if correction_bias is None else scores + correction_bias
    _, experts = jax.lax.top_k(_keep_best_groups(choice, config), top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    total = jnp.sum(weights, axis=-1, keepdims=True) + 1e-20
  if config.norm_topk_prob:
    weights = weights / total
  return weights * config.routed_scaling_factor, experts


def _keep_best_groups(choice: jax.Array, config: ModelConfig) -> jax.Array:
  if config.n_group == 1:
    return choice
  grouped = choice.reshape(*choice.shape[:-1], config.n_group, -1)
  group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
  _, best = jax.lax.top_k(group_scores, config.topk_group)
  kept = jnp.any(jax.nn.one_hot(best, config.n_group, dtype=jnp.bool_), axis=-2)
  return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)


class _Layout(NamedTuple):
  """Rows of the (token, choice) pairs when pairs are sorted by expert, M rows in all."""

  source: Int32[Array, "M"]
  """The pair (token * k + choice) of each row; N * k in padding rows."""
  row_of: Int32[Array, "N k"]
  """The row of each pair."""


@jax.custom_vjp
def _dispatch(x: jax.Array, layout: _Layout) -> jax.Array:
  """Maps `[N, D]` to `[M, D]`: each row's token, 0 in padding. Its gradient is also a gather, not a scatter."""
  return x.at[layout.source // layout.row_of.shape[1]].get(mode="fill", fill_value=0)


def _dispatch_forward(x: jax.Array, layout: _Layout) -> tuple[jax.Array, _Layout]:
  return _dispatch(x, layout), layout


def _dispatch_backward(layout: _Layout, grad: jax.Array) -> tuple[jax.Array, None]:
  return jnp.sum(grad[layout.row_of], axis=1, dtype=jnp.float32).astype(grad.dtype), None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def _combine(y: jax.Array, weights: jax.Array, layout: _Layout) -> jax.Array:
  """Maps `[M, D]` and `[N, k]` to `[N, D]`: the weighted sum of each token's rows, in float32."""
  return jnp.einsum("nkd,nk->nd", y[layout.row_of].astype(jnp.float32), weights).astype(y.dtype)


_CombineResidual = tuple[jax.Array, jax.Array, _Layout]


def _combine_forward(y: jax.Array, weights: jax.Array, layout: _Layout) -> tuple[jax.Array, _CombineResidual]:
  return _combine(y, weights, layout), (y, weights, layout)


def _combine_backward(residual: _CombineResidual, grad: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  y, weights, layout = residual
  row_weight = weights.reshape(-1).at[layout.source].get(mode="fill", fill_value=0)
  grad_y = _dispatch(grad.astype(jnp.float32), layout) * row_weight[:, None]
  grad_weights = jnp.einsum("nkd,nd->nk", y[layout.row_of].astype(jnp.float32), grad.astype(jnp.float32))
  return grad_y.astype(y.dtype), grad_weights, None


_combine.defvjp(_combine_forward, _combine_backward)


@jax.custom_vjp
def _weights_of(kernel: jax.Array, experts: jax.Array) -> jax.Array:
  """Gathers `[b, ...]` from `[E, ...]` by ids `[b]`. Its gradient is one small matmul, not b scattered additions."""
  return kernel[experts]


def _weights_of_forward(kernel: jax.Array, experts: jax.Array) -> tuple[jax.Array, tuple[jax.Array, int]]:
  return kernel[experts], (experts, kernel.shape[0])


def _weights_of_backward(residual: tuple[jax.Array, int], grad: jax.Array) -> tuple[jax.Array, None]:
  experts, num_experts = residual
  chosen = jax.nn.one_hot(experts, num_experts, dtype=grad.dtype)
  return jnp.tensordot(chosen, grad, axes=(0, 0)), None


_weights_of.defvjp(_weights_of_forward, _weights_of_backward)


def _dense(x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: ExpertKernels) -> jax.Array:
  """All experts as one wide SwiGLU, whose hidden units are weighted by the routing (0 for experts not chosen)."""
  num_experts, dim, width = kernels.gate.shape
  chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
  combine = jnp.einsum("nk,nke->ne", weights, chosen).astype(x.dtype)
  gate, up = (w.swapaxes(0, 1).reshape(dim, num_experts * width) for w in (kernels.gate, kernels.up))
  hidden = (jax.nn.silu(x @ gate) * (x @ up)).reshape(-1, num_experts, width) * combine[..., None]
  return hidden.reshape(-1, num_experts * width) @ kernels.down.reshape(num_experts * width, dim)


def _sorted_by_expert(experts: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the order of the flattened pairs, their experts in that order, and each expert's number of pairs."""
  flat = experts.reshape(-1)
  order = jnp.argsort(flat, stable=True).astype(jnp.int32)
  sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
  return order, flat[order], sizes


def _ragged(x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: ExpertKernels) -> jax.Array:
  order, _, sizes = _sorted_by_expert(experts, kernels.gate.shape[0])
  row_of = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=jnp.int32), unique_indices=True)
  layout = _Layout(order, row_of.reshape(experts.shape))
  rows = _dispatch(x, layout)
  hidden = jax.nn.silu(jax.lax.ragged_dot(rows, kernels.gate, sizes)) * jax.lax.ragged_dot(rows, kernels.up, sizes)
  return _combine(jax.lax.ragged_dot(hidden, kernels.down, sizes), weights, layout)


def _gmm(
  x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: ExpertKernels, *, interpret: bool = False
) -> jax.Array:
  """Rows are padded to whole tiles. The padding forms a group of its own, which the grouped matmul skips."""
  from jax.experimental.pallas.ops.tpu.megablox import ops as megablox  # Pallas takes long to import.

  pairs = experts.size
  rows_tile, tile = min(512, -(-pairs // 8) * 8), _tile(kernels)
  padding = -pairs % rows_tile
  order, _, sizes = _sorted_by_expert(experts, kernels.gate.shape[0])
  row_of = jnp.zeros_like(order).at[order].set(jnp.arange(pairs, dtype=jnp.int32), unique_indices=True)
  layout = _Layout(jnp.pad(order, (0, padding), constant_values=pairs), row_of.reshape(experts.shape))
  groups = jnp.concatenate([sizes, (pairs + padding - jnp.sum(sizes))[None]])

  def multiply(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    tiling = (rows_tile, tile, tile)  # the last two are equal, since the backward pass swaps them
    product: jax.Array = megablox.gmm(rows, kernel, groups, rows.dtype, tiling, interpret=interpret)
    return product

  rows = _dispatch(x, layout)
  hidden = jax.nn.silu(multiply(rows, kernels.gate)) * multiply(rows, kernels.up)
  return _combine(multiply(hidden, kernels.down), weights, layout)


def _tile(kernels: ExpertKernels) -> int:
  """Side of the kernels' tiles. It divides both dimensions; TPUs need a multiple of 128."""
  return math.gcd(*kernels.gate.shape[1:], 1024)


def _blocks(x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: ExpertKernels, *, block: int) -> jax.Array:
  """A batched matmul with one expert per block: each expert's run of sorted rows is padded to whole blocks."""
  num_experts = kernels.gate.shape[0]
  pairs = experts.size
  order, sorted_experts, sizes = _sorted_by_expert(experts, num_experts)
  blocks_of = -(-sizes // block)
  ends = jnp.cumsum(blocks_of)
  num_blocks = pairs // block + num_experts  # static, and enough for any split: each expert wastes less than a block
  block_expert = jnp.minimum(jnp.sum(jnp.arange(num_blocks)[:, None] >= ends, axis=1), num_experts - 1)
  first_pair, first_row = jnp.cumsum(sizes) - sizes, (ends - blocks_of) * block
  rows = (first_row - first_pair)[sorted_experts] + jnp.arange(pairs, dtype=jnp.int32)
  source = jnp.full((num_blocks * block,), pairs, jnp.int32).at[rows].set(order, unique_indices=True)
  row_of = jnp.zeros((pairs,), jnp.int32).at[order].set(rows, unique_indices=True)
  layout = _Layout(source, row_of.reshape(experts.shape))
  blocked = _dispatch(x, layout).reshape(num_blocks, block, -1)
  gate, up, down = (_weights_of(kernel, block_expert) for kernel in kernels)
  out = (jax.nn.silu(blocked @ gate) * (blocked @ up)) @ down
  return _combine(out.reshape(num_blocks * block, -1), weights, layout)


def _block_size(pairs: int, num_experts: int) -> int:
  """Largest block whose padding (at most one block per expert) stays below half of the real rows."""
  return next((block for block in (128, 64, 32, 16) if 2 * num_experts * block <= pairs), 8)


def _on_cpu(x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: ExpertKernels) -> jax.Array:
  num_experts = kernels.gate.shape[0]
  block = _block_size(experts.size, num_experts)
  # Compares the rows that each multiplies; sorting and gathering weights adds about half the cost of the matmuls.
  if x.shape[0] * num_experts <= 1.6 * (experts.size + num_experts * block):
    return _dense(x, weights, experts, kernels)
  return _blocks(x, weights, experts, kernels, block=block)


def expert_mlp(
  x: Float[Array, "N D"],
  weights: Float32[Array, "N k"],
  experts: Int32[Array, "N k"],
  kernels: ExpertKernels,
  *,
  impl: str = "auto",
) -> Float[Array, "N D"]:
  """Weighted sum of the chosen experts' SwiGLUs: y_n = Σ_j weights[n, j] · swiglu_{experts[n, j]}(x_n).

  Args:
    x: tokens.
    weights: weight of each token's experts.
    experts: their ids; the k experts of a token differ.
    kernels: weights of all experts, in x's dtype.
    impl: one of `config.MOE_IMPLEMENTATIONS`; see the module.

  Returns:
    The sums, in x's dtype.

  Raises:
    ValueError: unknown `impl`.
  """
  if impl == "auto":
    on_tpu = _gmm if _tile(kernels) % 128 == 0 else _ragged
    return jax.lax.platform_dependent(x, weights, experts, kernels, cpu=_on_cpu, tpu=on_tpu, default=_ragged)
  if impl == "ragged":
    return _ragged(x, weights, experts, kernels)
  if impl == "gmm":
    return _gmm(x, weights, experts, kernels)
  if impl == "blocks":
    return _blocks(x, weights, experts, kernels, block=_block_size(experts.size, kernels.gate.shape[0]))
  if impl == "dense":
    return _dense(x, weights, experts, kernels)
  raise ValueError(f"impl must be one of {MOE_IMPLEMENTATIONS}; received {impl!r}.")


class MoE(nn.Module):
  """Router, experts and shared experts of one layer."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: Float[Array, "*tokens D"]) -> Float[Array, "*tokens D"]:
    config = self.config
    weights, experts = route(*Router(config, name="router")(x), config)
    param_dtype, dtype = jnp.dtype(config.param_dtype), config.compute_dtype
    wide = (config.num_experts, config.hidden_size, config.moe_intermediate_size)
    narrow = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
    kernels = ExpertKernels(
      gate=self.param("gate_proj", linear_init(), wide, param_dtype).astype(dtype),
      up=self.param("up_proj", linear_init(), wide, param_dtype).astype(dtype),
      down=self.param("down_proj", linear_init(residual_scale(config)), narrow, param_dtype).astype(dtype),
    )
    y = apply_experts(functools.partial(expert_mlp, impl=config.moe_impl), x, weights, experts, kernels)
    if config.num_shared_experts:
      y = y + MLP(config, config.num_shared_experts * config.moe_intermediate_size, name="shared_experts")(x)
    return y


class Router(nn.Module):
  """Router logits, and the bias that sigmoid routing adds for the choice of experts only (it has no gradient)."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: Float[Array, "*tokens D"]) -> tuple[Float32[Array, "*tokens E"], Float32[Array, "E"] | None]:
    config = self.config
    kernel = self.param("kernel", linear_init(), (x.shape[-1], config.num_experts), jnp.dtype(config.param_dtype))
    logits = jnp.dot(x.astype(jnp.float32), kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    if config.router == "softmax":
      return logits, None
    bias = self.param("correction_bias", nn.initializers.zeros, (config.num_experts,), jnp.float32)
    return logits, bias
