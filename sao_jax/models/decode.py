"""The decode loop's form of the decoder: the numbers of `Transformer`, from fewer and larger operations.

At a few dozen rows per step most of an operation's cost is that it exists, so:

* Small kernels that share an input are joined, once per version of the weights (`prepare`).
* A loop of C steps works on a window of the cache in which every slot's contents are moved right, to end where the
  loop's own tokens begin: the C last columns. Step i then writes column `W - C + i` of all slots, one slice instead of
  a scatter, and only what was fed goes back into the cache at the end (`merge_window`).
* Angles of all C steps are computed before the loop; queries and keys are normed and rotated together.

Shapes: S slots, C steps, W = live_len window columns, K key/value heads, Dh head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from sao_jax.models.config import ModelConfig
from sao_jax.models.layers import LayerCache, apply_rope, rms_norm, rope_tables, write_span
from sao_jax.models.moe import MoE
from sao_jax.types import Cache, Params

_MASKED = -1e30  # finite: a row without any allowed key gives a uniform softmax rather than NaN


class Window(TypedDict):
  """What a loop of C decode steps carries."""

  layers: dict[str, LayerCache]
  """Keys `[S, K, Dh, W]` and values `[S, K, W, Dh]`; column `W - C + i` is position `positions + i`."""
  positions: jax.Array
  """`[S]` int32: of the first step's tokens."""
  rope: tuple[jax.Array, jax.Array]
  """cos and sin `[C, S, rotary_dim]`."""


def prepare(config: ModelConfig, params: Params) -> Params:
  """Parameters in the form that `step` wants: query, key and value kernels joined, and the output projection apart.

  Gate and up stay two: joined, they are wide enough for XLA's CPU kernels to be split over threads, which took twice
  as long at 16 rows.
  """
  prepared: dict[str, Any] = {name: params[name] for name in ("embed", "final_norm")}
  tied = config.tie_word_embeddings
  prepared["lm_head"] = {"kernel": params["embed"]["embedding"].T if tied else params["lm_head"]["kernel"]}
  for i in range(config.num_layers):
    layer = params[f"layers_{i}"]
    attention = layer["attention"]
    joined = {name: layer[name] for name in ("input_norm", "post_attention_norm", "moe") if name in layer}
    joined["qkv"] = _join([attention[name] for name in ("q_proj", "k_proj", "v_proj")])
    joined["o_proj"] = attention["o_proj"]
    if config.qk_norm:
      heads = ((attention["q_norm"]["scale"], config.num_heads), (attention["k_norm"]["scale"], config.num_kv_heads))
      joined["qk_scale"] = jnp.concatenate([jnp.broadcast_to(scale, (n, config.head_dim)) for scale, n in heads])
    if "mlp" in layer:
      joined["mlp"] = layer["mlp"]
    prepared[f"layers_{i}"] = joined
  return prepared


def lm_head(prepared: Params) -> jax.Array:
  """`[D, V]`: the output projection of prepared parameters."""
  kernel: jax.Array = prepared["lm_head"]["kernel"]
  return kernel


def open_window(config: ModelConfig, cache: Cache, positions: jax.Array, *, steps: int, live_len: int) -> Window:
  """A window for `steps` steps whose first tokens stand at `positions` `[S]`; see `types.CachedPolicy.window`."""

  def move(layer: LayerCache) -> LayerCache:
    def one(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
      key, value, position = inputs
      first = position + steps  # of the columns that remain, counted in the padded copy
      around = (live_len, max(live_len - key.shape[-1], 0))
      key = jnp.pad(key[..., :live_len], ((0, 0), (0, 0), around))
      value = jnp.pad(value[:, :live_len], ((0, 0), around, (0, 0)))
      return (
        jax.lax.dynamic_slice_in_dim(key, first, live_len, axis=2),
        jax.lax.dynamic_slice_in_dim(value, first, live_len, axis=1),
      )

    # Slot by slot: one copy of contiguous rows each, where a gather would compute an address per element.
    key, value = jax.lax.map(one, (layer["key"], layer["value"], positions))
    return LayerCache(key=key, value=value)

  return Window(
    layers={name: move(layer) for name, layer in cache.items()},
    positions=positions,
    rope=rope_tables(config, positions + jnp.arange(steps)[:, None]),
  )


def merge_window(cache: Cache, window: Window, count: jax.Array) -> Cache:
  """Writes what the first `count[s]` steps fed to slot s into the cache; see `types.CachedPolicy.merge`."""
  steps = window["rope"][0].shape[0]
  slots = jnp.arange(count.shape[0])
  merged = {}
  for name, layer in cache.items():
    fresh = window["layers"][name]
    key, value = fresh["key"][..., -steps:], fresh["value"][:, :, -steps:]
    merged[name] = LayerCache(
      key=write_span(layer["key"], key, slots, window["positions"], count, time_axis=2),
      value=write_span(layer["value"], value, slots, window["positions"], count, time_axis=1),
    )
  return merged


def step(
  config: ModelConfig, prepared: Params, window: Window, tokens: jax.Array, i: jax.Array
) -> tuple[jax.Array, Window]:
  """Step i of the loop, `[S]` tokens -> `[S, D]` hidden states; see `types.CachedPolicy.step`."""
  cos, sin = (jax.lax.dynamic_index_in_dim(table, i, keepdims=False) for table in window["rope"])
  steps, live_len = window["rope"][0].shape[0], window["layers"]["layers_0"]["value"].shape[2]
  column = live_len - steps + i
  columns = jnp.arange(live_len)
  allowed = (columns >= live_len - steps - window["positions"][:, None]) & (columns <= column)
  x = prepared["embed"]["embedding"].astype(config.compute_dtype).at[tokens].get(mode="clip")
  caches = {}
  for n in range(config.num_layers):
    name = f"layers_{n}"
    layer = prepared[name]
    normed = rms_norm(x, layer["input_norm"]["scale"], config)
    y, caches[name] = _attention(config, layer, normed, (cos, sin), window["layers"][name], column, allowed)
    x = x + y
    x = x + _feed_forward(config, layer, rms_norm(x, layer["post_attention_norm"]["scale"], config))
  hidden = rms_norm(x, prepared["final_norm"]["scale"], config)
  return hidden, Window(layers=caches, positions=window["positions"], rope=window["rope"])


def _join(parts: Sequence[Params]) -> Params:
  joined = {"kernel": jnp.concatenate([part["kernel"] for part in parts], axis=1)}
  if "bias" in parts[0]:
    joined["bias"] = jnp.concatenate([part["bias"] for part in parts])
  return joined


def _linear(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
  y = jnp.dot(x, params["kernel"].astype(config.compute_dtype))
  return y + params["bias"].astype(config.compute_dtype) if "bias" in params else y


def _attention(
  config: ModelConfig,
  layer: Params,
  x: jax.Array,
  rope: tuple[jax.Array, jax.Array],
  cache: LayerCache,
  column: jax.Array,
  allowed: jax.Array,
) -> tuple[jax.Array, LayerCache]:
  """Attention of one token per slot, x `[S, D]` -> `[S, D]`, over the `allowed` `[S, W]` columns."""
  slots, heads, kv_heads, dim = x.shape[0], config.num_heads, config.num_kv_heads, config.head_dim
  qkv = _linear(config, layer["qkv"], x).reshape(slots, heads + 2 * kv_heads, dim)
  qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
  if config.qk_norm:
    qk = rms_norm(qk, layer["qk_scale"], config)
  qk = apply_rope(qk, *rope)
  cache = LayerCache(
    key=jax.lax.dynamic_update_slice_in_dim(cache["key"], qk[:, heads:, :, None], column, axis=3),
    value=jax.lax.dynamic_update_slice_in_dim(cache["value"], v[:, :, None], column, axis=2),
  )
  q = (qk[:, :heads] * config.attention_scale).reshape(slots, kv_heads, -1, dim)
  scores = jnp.einsum("skgd,skdt->skgt", q, cache["key"], preferred_element_type=jnp.float32)
  weights = jax.nn.softmax(jnp.where(allowed[:, None, None], scores, _MASKED), axis=-1).astype(x.dtype)
  mixed = jnp.einsum("skgt,sktd->skgd", weights, cache["value"])
  return _linear(config, layer["o_proj"], mixed.reshape(slots, heads * dim)), cache


def _feed_forward(config: ModelConfig, layer: Params, x: jax.Array) -> jax.Array:
  if "moe" in layer:
    y: Any = MoE(config).apply({"params": layer["moe"]}, x)
    out: jax.Array = y
    return out
  gate, up, down = (layer["mlp"][name] for name in ("gate_proj", "up_proj", "down_proj"))
  return _linear(config, down, jax.nn.silu(_linear(config, gate, x)) * _linear(config, up, x))
