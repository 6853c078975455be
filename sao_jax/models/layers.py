"""Parts of a decoder layer: RMS norm, rotary embedding, attention (packed and cached) and SwiGLU.

Shapes: B packed rows of T tokens; R rows of C tokens for the cache, which has S slots of max_len positions; H query
heads, K key/value heads, Dh head_dim, D hidden_size.
"""

from __future__ import annotations

import math
from typing import TypedDict

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from sao_jax.models.attention import packed_attention
from sao_jax.models.config import ModelConfig, RopeScaling
from sao_jax.types import AnyArray

_MASKED = -1e30  # finite: a row without allowed keys gives a uniform softmax, not NaN


class LayerCache(TypedDict):
  """Keys and values of one layer. Time is the keys' last axis, so that scores are sums of contiguous vectors."""

  key: Float[Array, "S K Dh max_len"]
  value: Float[Array, "S K max_len Dh"]


def linear_init(scale: float = 1.0) -> nn.initializers.Initializer:
  """Truncated normal initializer of `[..., fan_in, fan_out]` kernels, with deviation `scale / sqrt(fan_in)`."""

  def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    std = scale / math.sqrt(shape[-2])
    # Truncation at two standard deviations reduces the spread to 0.8796 of it.
    return (jax.random.truncated_normal(key, -2.0, 2.0, shape) * (std / 0.87962566)).astype(dtype)

  return init


def residual_scale(config: ModelConfig) -> float:
  """Initial scale of the 2 L branches that write to the residual stream, so that together they add unit variance."""
  return 1.0 / math.sqrt(2 * config.num_layers)


class Linear(nn.Module):
  """Affine map `x @ kernel (+ bias)`, in the config's dtype."""

  config: ModelConfig
  features: int
  use_bias: bool = False
  init_scale: float = 1.0

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    dtype = self.config.compute_dtype
    shape = (x.shape[-1], self.features)
    kernel = self.param("kernel", linear_init(self.init_scale), shape, jnp.dtype(self.config.param_dtype))
    y = jnp.dot(x.astype(dtype), kernel.astype(dtype))
    if self.use_bias:
      bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.dtype(self.config.param_dtype))
      y = y + bias.astype(dtype)
    return y


def rms_norm(
  x: Float[Array, "*batch D"], scale: Float[Array, "*#batch D"], config: ModelConfig
) -> Float[Array, "*batch D"]:
  """x / sqrt(mean(x²) + eps) · scale over the last axis, in float32; returned in the config's dtype."""
  x32 = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + config.norm_eps)
  return (x32 * inverse * scale.astype(jnp.float32)).astype(config.compute_dtype)


class RMSNorm(nn.Module):
  """`rms_norm` with a trainable scale."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.dtype(self.config.param_dtype))
    return rms_norm(x, scale, self.config)


def rope_frequencies(config: ModelConfig) -> tuple[Float[np.ndarray, "frequencies"], float]:
  """Angular frequencies of the ceil(rotary_dim / 2) pairs in radians per position, and the factor of cos and sin.

  As published: "linear" divides frequencies by the factor. "llama3" (Llama 3.1) divides only those of long wavelengths,
  with a smooth transition. "yarn" (arXiv 2309.00071) ramps over dimensions and rescales attention.
  """
  dim = config.rotary_dim
  scaling = config.rope_scaling
  inverse = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
  if scaling.rope_type == "linear":
    return inverse / scaling.factor, 1.0
  if scaling.rope_type == "llama3":
    turns = scaling.original_max_position_embeddings * inverse / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return inverse * (smooth + (1.0 - smooth) / scaling.factor), 1.0
  if scaling.rope_type == "yarn":
    return _yarn(inverse, config.rope_theta, dim, scaling)
  return inverse, 1.0


def _yarn(inverse: np.ndarray, theta: float, dim: int, scaling: RopeScaling) -> tuple[np.ndarray, float]:
  def dimension_of(turns: float) -> float:
    length = scaling.original_max_position_embeddings
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

  low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, dim - 1)
  if low == high:
    high += 0.001
  ramp = np.clip((np.arange(inverse.size) - low) / (high - low), 0.0, 1.0)
  return inverse * (1.0 - ramp) + inverse / scaling.factor * ramp, scaling.cos_factor


def rope_tables(
  config: ModelConfig, positions: Int[Array, "*batch"]
) -> tuple[Float32[Array, "*batch rotary_dim"], Float32[Array, "*batch rotary_dim"]]:
  """cos and sin of the rotation at each position. Both halves of the last axis hold the same angles."""
  frequencies, factor = rope_frequencies(config)
  angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
  angles = jnp.concatenate([angles, angles], axis=-1)
  return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def apply_rope(
  x: Float[Array, "*batch heads Dh"],
  cos: Float32[Array, "*batch rotary_dim"],
  sin: Float32[Array, "*batch rotary_dim"],
) -> Float[Array, "*batch heads Dh"]:
  """Rotates the first `rotary_dim` dimensions of each head (half-split form), in float32; returns x's dtype."""
  dim = cos.shape[-1]
  x32 = x.astype(jnp.float32)
  rotary, rest = x32[..., :dim], x32[..., dim:]
  first, second = rotary[..., : dim // 2], rotary[..., dim // 2 :]
  turned = jnp.concatenate([-second, first], axis=-1)
  rotated = rotary * cos[..., None, :] + turned * sin[..., None, :]
  return jnp.concatenate([rotated, rest], axis=-1).astype(x.dtype) if rest.shape[-1] else rotated.astype(x.dtype)


def all_in_order(slots: Int32[AnyArray, "R"], num_slots: int) -> bool:
  """Whether `slots` are known, while tracing, to be 0 .. num_slots - 1: then no copy is needed to select them."""
  return isinstance(slots, np.ndarray) and np.array_equal(slots, np.arange(num_slots))


def extend_attention(
  q: Float[Array, "R C H Dh"],
  cache: LayerCache,
  slots: Int32[AnyArray, "R"],
  positions: Int32[Array, "R C"],
  *,
  live_len: int,
  scale: float,
) -> Float[Array, "R C H Dh"]:
  """Attention of each row's queries to the entries of its slot, up to each query's position.

  Entries at or past `live_len` are not read.
  """
  key, value = cache["key"][:, :, :, :live_len], cache["value"][:, :, :live_len]
  if not all_in_order(slots, key.shape[0]):
    key, value = (x.at[slots].get(mode="clip") for x in (key, value))
  rows, chunk, heads, dim = q.shape
  # The queries of a key head form the rows of one matrix: other orders make the CPU copy scores and values.
  grouped = (q * scale).reshape(rows, chunk, key.shape[1], -1, dim).transpose(0, 2, 3, 1, 4)
  matrix = grouped.reshape(rows, key.shape[1], -1, dim)
  scores = jnp.einsum("rkmd,rkdt->rkmt", matrix, key, preferred_element_type=jnp.float32)
  allowed = jnp.tile(jnp.arange(live_len) <= positions[:, :, None], (1, heads // key.shape[1], 1))
  weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, _MASKED), axis=-1).astype(q.dtype)
  mixed = jnp.einsum("rkmt,rktd->rkmd", weights, value).reshape(grouped.shape)
  return mixed.transpose(0, 3, 1, 2, 4).reshape(rows, chunk, heads, dim)


def write_span(
  array: Shaped[Array, "S *cached"],
  new: Shaped[Array, "R *new"],
  slots: Int32[AnyArray, "R"],
  start: Int32[Array, "R"],
  count: Int32[Array, "R"],
  *,
  time_axis: int,
) -> Shaped[Array, "S *cached"]:
  """Writes the first `count[r]` entries of row r of `new` into slot `slots[r]` of `array`, from time `start[r]` on.

  It reads, changes and writes back one slice per row. A scatter would compute an address per element.

  Args:
    array: one entry per slot.
    new: same shape as `array`, except for R rows and C entries in time.
    slots: slot of each row; a row outside [0, S) writes nothing.
    start: time of each row's first entry.
    count: at most C, with `start + count` at most the length of `array` in time.
    time_axis: axis of time in a slot's array.

  Returns:
    `array` with the entries replaced.
  """
  width = min(new.shape[1 + time_axis], array.shape[1 + time_axis])
  new = jax.lax.slice_in_dim(new, 0, width, axis=1 + time_axis)
  last = array.shape[1 + time_axis] - width
  shape = [1] * (array.ndim - 1)
  shape[time_axis] = width
  at = jnp.arange(width).reshape(shape)
  padding = [(0, 0)] * (array.ndim - 1)
  padding[time_axis] = (width, 0)

  def one(r: jax.Array, array: jax.Array) -> jax.Array:
    # A slice that would reach past the end starts earlier, and the new entries move right within it.
    shift = jnp.maximum(start[r] - last, 0)
    slot = jnp.clip(slots[r], 0, array.shape[0] - 1)
    inside = (slots[r] == slot) & (at >= shift) & (at < shift + count[r])
    where = [slot] + [jnp.int32(0)] * (array.ndim - 1)
    where[1 + time_axis] = start[r] - shift
    sizes = list(array.shape[1:])
    sizes[time_axis] = width
    old = jax.lax.dynamic_slice(array, where, [1, *sizes])
    moved = jax.lax.dynamic_slice_in_dim(jnp.pad(new[r], padding), width - shift, width, axis=time_axis)
    return jax.lax.dynamic_update_slice(array, jnp.where(inside, moved, old[0])[None], where)

  slots = jnp.asarray(slots)
  written: jax.Array = jax.lax.fori_loop(0, slots.shape[0], one, array)
  return written


def write_rows(
  cache: LayerCache,
  k: Float[Array, "R C K Dh"],
  v: Float[Array, "R C K Dh"],
  slots: Int32[AnyArray, "R"],
  start: Int32[Array, "R"],
  count: Int32[Array, "R"],
) -> LayerCache:
  """Writes `k[r, :count[r]]` and `v[r, :count[r]]` into slot `slots[r]`, from position `start[r]` on."""
  return LayerCache(
    key=write_span(cache["key"], k.transpose(0, 2, 3, 1), slots, start, count, time_axis=2),
    value=write_span(cache["value"], v.transpose(0, 2, 1, 3), slots, start, count, time_axis=1),
  )


class Attention(nn.Module):
  """Grouped-query attention with optional q/k norm."""

  config: ModelConfig

  def setup(self) -> None:
    config = self.config
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    self.q_proj = Linear(config, queries, config.attention_bias)
    self.k_proj = Linear(config, keys, config.attention_bias)
    self.v_proj = Linear(config, keys, config.attention_bias)
    self.o_proj = Linear(config, config.hidden_size, config.attention_out_bias, residual_scale(config))
    if config.qk_norm:
      self.q_norm = RMSNorm(config)
      self.k_norm = RMSNorm(config)

  def _project(self, x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
    head_dim = self.config.head_dim
    q, k, v = (proj(x).reshape(*x.shape[:-1], -1, head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    return apply_rope(q, *rope), apply_rope(k, *rope), v

  def _output(self, heads: jax.Array) -> jax.Array:
    return self.o_proj(heads.reshape(*heads.shape[:-2], -1))

  def __call__(
    self, x: Float[Array, "B T D"], rope: tuple[jax.Array, jax.Array], segment_ids: Int[Array, "B T"]
  ) -> Float[Array, "B T D"]:
    """Attention over packed rows."""
    q, k, v = self._project(x, rope)
    config = self.config
    return self._output(packed_attention(q, k, v, segment_ids, config.attention_scale, config.attention_impl))

  def extend(
    self,
    x: Float[Array, "R C D"],
    rope: tuple[jax.Array, jax.Array],
    cache: LayerCache,
    slots: Int32[AnyArray, "R"],
    start: Int32[Array, "R"],
    count: Int32[Array, "R"],
    live_len: int,
  ) -> tuple[Float[Array, "R C D"], LayerCache]:
    """Attention of up to C new tokens for each of R slots, over the cache."""
    q, k, v = self._project(x, rope)
    cache = write_rows(cache, k, v, slots, start, count)
    positions = start[:, None] + jnp.arange(x.shape[1])
    heads = extend_attention(q, cache, slots, positions, live_len=live_len, scale=self.config.attention_scale)
    return self._output(heads), cache


class MLP(nn.Module):
  """SwiGLU: `down(silu(gate(x)) * up(x))`."""

  config: ModelConfig
  width: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    config = self.config
    gate = Linear(config, self.width, config.mlp_bias, name="gate_proj")(x)
    up = Linear(config, self.width, config.mlp_bias, name="up_proj")(x)
    down = Linear(config, config.hidden_size, config.mlp_bias, residual_scale(config), name="down_proj")
    return down(jax.nn.silu(gate) * up)
