"""Mixture of experts without dropping: routing, and one `expert_mlp` with several implementations.

Every token passes exactly its `num_experts_per_tok` experts, whatever the imbalance. Implementations (`moe_impl`):

* "ragged": tokens sorted by expert and `jax.lax.ragged_dot`: accelerators.
* "blocks": tokens sorted by expert, each expert's run padded to whole blocks: CPU, where ragged_dot computes every expert
  on every token.
* "dense": all experts on all tokens: few tokens (decode), where sorting costs more than it saves.
* "auto": "ragged" on accelerators; on CPU one of the other two by the static number of tokens.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from sao_jax.models.config import ModelConfig
from sao_jax.models.layers import MLP, linear_init, residual_scale


def route(logits: jax.Array, correction_bias: jax.Array | None, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
  """Chooses experts: router logits `[N, E]` float32 -> weights `[N, k]` float32, expert ids `[N, k]` int32.

  "softmax" (Qwen3-MoE): the k largest probabilities. "sigmoid" (DeepSeek-V3, GLM-4.5): the k largest of score + correction
  bias among the `topk_group` groups whose two best sum highest; the weights are the scores without the bias.
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
  grouped = choice.reshape(choice.shape[0], config.n_group, -1)
  group_scores = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
  _, best = jax.lax.top_k(group_scores, config.topk_group)
  kept = jnp.any(jax.nn.one_hot(best, config.n_group, dtype=jnp.bool_), axis=1)
  return jnp.where(kept[..., None], grouped, 0.0).reshape(choice.shape)


def _dense(x: jax.Array, weights: jax.Array, experts: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
  num_experts = gate.shape[0]
  chosen = jax.nn.one_hot(experts, num_experts, dtype=jnp.float32)
  combine = jnp.einsum("nk,nke->en", weights, chosen)
  hidden = jax.nn.silu(jnp.einsum("nd,edf->enf", x, gate)) * jnp.einsum("nd,edf->enf", x, up)
  return jnp.einsum("enf,efd->nd", hidden * combine[..., None].astype(x.dtype), down)


def _ragged(x: jax.Array, weights: jax.Array, experts: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
  top_k, num_experts = experts.shape[-1], gate.shape[0]
  flat = experts.reshape(-1)
  order = jnp.argsort(flat, stable=True)
  sizes = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
  rows = x[order // top_k]
  hidden = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
  out = jax.lax.ragged_dot(hidden, down, sizes).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
  return jnp.zeros(x.shape, jnp.float32).at[order // top_k].add(out).astype(x.dtype)


def expert_mlp(
  x: jax.Array, weights: jax.Array, experts: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, *, impl: str
) -> jax.Array:
  """Weighted sum of the chosen experts' SwiGLUs: `y[n] = sum_j weights[n, j] * swiglu(experts[n, j])(x[n])`.

  Args:
    x: `[N, D]`.
    weights: `[N, k]` float32.
    experts: `[N, k]` int32.
    gate: `[E, D, F]`.
    up: `[E, D, F]`.
    down: `[E, F, D]`.
    impl: one of `config.MOE_IMPLEMENTATIONS`.

  Returns:
    `[N, D]` in x's dtype.
  """
  if impl == "ragged":
    return _ragged(x, weights, experts, gate, up, down)
  return _dense(x, weights, experts, gate, up, down)


class MoE(nn.Module):
  """Router, experts and shared experts of one layer: x `[..., D]` -> `[..., D]`."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    config = self.config
    flat = x.reshape(-1, x.shape[-1])
    weights, experts = route(*Router(config, name="router")(flat), config)
    param_dtype, dtype = jnp.dtype(config.param_dtype), config.compute_dtype
    wide = (config.num_experts, config.hidden_size, config.moe_intermediate_size)
    narrow = (config.num_experts, config.moe_intermediate_size, config.hidden_size)
    gate = self.param("gate_proj", linear_init(), wide, param_dtype).astype(dtype)
    up = self.param("up_proj", linear_init(), wide, param_dtype).astype(dtype)
    down = self.param("down_proj", linear_init(residual_scale(config)), narrow, param_dtype).astype(dtype)
    y = expert_mlp(flat, weights, experts, gate, up, down, impl=config.moe_impl).reshape(x.shape)
    if config.num_shared_experts:
      y = y + MLP(config, config.num_shared_experts * config.moe_intermediate_size, name="shared_experts")(x)
    return y


class Router(nn.Module):
  """Router logits in float32, and the bias that sigmoid routing adds for the choice only (no gradient reaches it)."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    config = self.config
    kernel = self.param("kernel", linear_init(), (x.shape[-1], config.num_experts), jnp.dtype(config.param_dtype))
    logits = jnp.dot(x.astype(jnp.float32), kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    if config.router == "softmax":
      return logits, None
    bias = self.param("correction_bias", nn.initializers.zeros, (config.num_experts,), jnp.float32)
    return logits, bias
