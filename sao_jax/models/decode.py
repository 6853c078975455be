"""The decoder in the form that the decode loop uses: the results of `Transformer`, from fewer and larger operations.

At a few dozen rows per step, most of the cost of an operation is its overhead. Therefore:

* Small kernels that share an input are joined, once per version of the weights (`prepare`).
* A loop of C steps works on a window: the context, and C more columns for the loop's own tokens. Step i then writes
  column `W - C + i` of all rows with one slice instead of a scatter. The order of columns has no influence on
  attention, so a row whose context is shorter leaves a gap, which is masked. At the end, only the tokens that were fed
  go back into the cache (`merge_window`).
* Rows may come in groups whose windows differ in length, so that a long context is not paid for by all rows.
* The angles of all C steps are computed before the loop. Queries and keys are normalised and rotated together.

Shapes: S slots and as many rows, in G groups of R = S / G; C steps; W window columns of a group; H query heads, K
key/value heads; Dh head_dim; D hidden_size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from sao_jax.models import latent_attention
from sao_jax.models.config import ModelConfig
from sao_jax.models.embedding import look_up
from sao_jax.models.layers import LayerCache, all_in_order, apply_rope, rms_norm, rope_tables, write_span
from sao_jax.models.moe import MoE
from sao_jax.types import AnyArray, Cache, Params

_TIME: Mapping[str, int] = {"key": 2, "value": 1, "latent": 0, "index_key": 0}
"""Axis of time of each cached array, in one slot."""
_MASKED = -1e30  # finite: a row without allowed keys gives a uniform softmax, not NaN


class Window(TypedDict):
  """State of a loop of C decode steps."""

  groups: tuple[dict[str, Any], ...]
  """By group and layer: keys `[R, K, Dh, W]` and values `[R, K, W, Dh]`, or a `latent_attention.LatentCache` of W
  columns. Columns before `W - C` are the positions of those numbers. Column `W - C + i` is position `positions + i`."""
  slots: Int32[Array, "S"]
  """Slot of each row."""
  positions: Int32[Array, "S"]
  """Position of each row's token in the first step."""
  rope: tuple[Float32[Array, "C S rotary_dim"], Float32[Array, "C S rotary_dim"]]
  """cos and sin of each step and row."""


def prepare(config: ModelConfig, params: Params) -> Params:
  """Converts parameters for `step`: joins the query, key and value kernels, and adds the output projection.

  Gate and up are not joined. Their joint kernel would be wide enough for XLA's CPU kernels to be split over threads,
  which took twice as long at 16 rows.
  """
  prepared: dict[str, Any] = {name: params[name] for name in ("embed", "final_norm")}
  tied = config.tie_word_embeddings
  prepared["lm_head"] = {"kernel": params["embed"]["embedding"].T if tied else params["lm_head"]["kernel"]}
  for i in range(config.num_layers):
    layer = params[f"layers_{i}"]
    attention = layer["attention"]
    joined = {name: layer[name] for name in ("input_norm", "post_attention_norm", "moe") if name in layer}
    if config.kv_lora_rank:
      joined["attention"] = latent_attention.prepare(config, attention)
    else:
      joined["qkv"] = _join([attention[name] for name in ("q_proj", "k_proj", "v_proj")])
      joined["o_proj"] = attention["o_proj"]
    if config.qk_norm:
      heads = ((attention["q_norm"]["scale"], config.num_heads), (attention["k_norm"]["scale"], config.num_kv_heads))
      joined["qk_scale"] = jnp.concatenate([jnp.broadcast_to(scale, (n, config.head_dim)) for scale, n in heads])
    if "mlp" in layer:
      joined["mlp"] = layer["mlp"]
    prepared[f"layers_{i}"] = joined
  return prepared


def lm_head(prepared: Params) -> Float[Array, "D V"]:
  """Returns the output projection of prepared parameters."""
  kernel: jax.Array = prepared["lm_head"]["kernel"]
  return kernel


def open_window(
  config: ModelConfig,
  cache: Cache,
  slots: Int32[AnyArray, "S"],
  positions: Int32[Array, "S"],
  *,
  steps: int,
  live_lens: tuple[int, ...],
) -> Window:
  """Opens a window for `steps` steps whose first tokens stand at `positions`; see `types.CachedPolicy.window`."""

  rows = len(slots) // len(live_lens)

  def take(name: str, array: jax.Array, group: int, live_len: int) -> jax.Array:
    """The context of a group's slots, and zeros for the loop's own tokens."""
    time = 1 + _TIME[name]
    context = jax.lax.slice_in_dim(array, 0, min(live_len - steps, array.shape[time]), axis=time)
    part = slice(group * rows, (group + 1) * rows)
    context = context[part] if all_in_order(slots, array.shape[0]) else context[slots[part]]
    padding = [(0, 0)] * array.ndim
    padding[time] = (0, live_len - context.shape[time])
    return jnp.pad(context, padding)

  def group(g: int, live_len: int) -> dict[str, Any]:
    return {
      layer: {name: take(name, array, g, live_len) for name, array in arrays.items()}
      for layer, arrays in cache.items()
    }

  return Window(
    groups=tuple(group(g, live_len) for g, live_len in enumerate(live_lens)),
    slots=jnp.asarray(slots),
    positions=positions,
    rope=rope_tables(config, positions + jnp.arange(steps)[:, None]),
  )


def merge_window(cache: Cache, window: Window, count: Int32[Array, "S"]) -> Cache:
  """Writes the tokens of each row's first `count[r]` steps into the cache; see `types.CachedPolicy.merge`."""
  steps = window["rope"][0].shape[0]

  def last(array: jax.Array, axis: int) -> jax.Array:
    return jax.lax.slice_in_dim(array, array.shape[axis] - steps, None, axis=axis)

  merged: dict[str, Any] = {layer: {} for layer in cache}
  for layer, arrays in cache.items():
    for name, array in arrays.items():
      new = jnp.concatenate([last(group[layer][name], 1 + _TIME[name]) for group in window["groups"]])
      merged[layer][name] = write_span(array, new, window["slots"], window["positions"], count, time_axis=_TIME[name])
  return merged


def step(
  config: ModelConfig, prepared: Params, window: Window, tokens: Int[Array, "S"], i: Int[Array, ""]
) -> tuple[Float[Array, "S D"], Window]:
  """Runs step i of the loop: one token to one hidden state per row; see `types.CachedPolicy.step`."""
  rope = tuple(jax.lax.dynamic_index_in_dim(table, i, keepdims=False) for table in window["rope"])
  groups = window["groups"]
  steps = window["rope"][0].shape[0]
  name = next(iter(groups[0]["layers_0"]))
  lengths = [group["layers_0"][name].shape[1 + _TIME[name]] for group in groups]
  columns = [length - steps + i for length in lengths]
  allowed = [
    (jnp.arange(length) < jnp.minimum(first[:, None], length - steps))
    | ((jnp.arange(length) >= length - steps) & (jnp.arange(length) <= column))
    for length, column, first in zip(lengths, columns, jnp.split(window["positions"], len(groups)), strict=True)
  ]
  x = look_up(prepared["embed"]["embedding"], tokens, config.compute_dtype)
  written: list[dict[str, Any]] = [{} for _ in groups]
  chosen: list[Any] = [None for _ in groups]
  for n in range(config.num_layers):
    name = f"layers_{n}"
    layer = prepared[name]
    y = rms_norm(x, layer["input_norm"]["scale"], config)
    windows = [group[name] for group in groups]
    if config.kv_lora_rank:
      y, windows, chosen = latent_attention.step(config, layer["attention"], y, rope, windows, columns, allowed, chosen)
    else:
      y, windows = _attention(config, layer, y, rope, windows, columns, allowed)
    for group, window_of_layer in zip(written, windows, strict=True):
      group[name] = window_of_layer
    x = x + y
    x = x + _feed_forward(config, layer, rms_norm(x, layer["post_attention_norm"]["scale"], config))
  hidden = rms_norm(x, prepared["final_norm"]["scale"], config)
  return hidden, Window(
    groups=tuple(written), slots=window["slots"], positions=window["positions"], rope=window["rope"]
  )


def _join(parts: Sequence[Params]) -> Params:
  joined = {"kernel": jnp.concatenate([part["kernel"] for part in parts], axis=1)}
  if "bias" in parts[0]:
    joined["bias"] = jnp.concatenate([part["bias"] for part in parts])
  return joined


def _linear(config: ModelConfig, params: Params, x: jax.Array) -> jax.Array:
  y = jnp.dot(x, params["kernel"].astype(config.compute_dtype))
  return y + params["bias"].astype(config.compute_dtype) if "bias" in params else y


def _project(
  config: ModelConfig, layer: Params, x: jax.Array, rope: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Maps x `[S, D]` to scaled queries `[S, K, H / K, Dh]`, keys and values `[S, K, Dh]`."""
  heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
  qkv = _linear(config, layer["qkv"], x).reshape(-1, heads + 2 * kv_heads, dim)
  qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
  if config.qk_norm:
    qk = rms_norm(qk, layer["qk_scale"], config)
  qk = apply_rope(qk, *rope)
  q = (qk[:, :heads] * config.attention_scale).reshape(-1, kv_heads, heads // kv_heads, dim)
  return q, qk[:, heads:], v


def _attention(
  config: ModelConfig,
  layer: Params,
  x: jax.Array,
  rope: tuple[jax.Array, ...],
  windows: Sequence[LayerCache],
  columns: Sequence[jax.Array],
  allowed: Sequence[jax.Array],
) -> tuple[jax.Array, list[LayerCache]]:
  """Grouped-query attention of all groups, and their windows with the new tokens."""
  q, k, v = (jnp.split(y, len(windows)) for y in _project(config, layer, x, rope))
  parts = [_attend(*group) for group in zip(q, k, v, windows, columns, allowed, strict=True)]
  return _linear(config, layer["o_proj"], jnp.concatenate([mixed for mixed, _ in parts])), [new for _, new in parts]


def _attend(
  q: jax.Array, k: jax.Array, v: jax.Array, cache: LayerCache, column: jax.Array, allowed: jax.Array
) -> tuple[jax.Array, LayerCache]:
  """Attention of one token per row to the `allowed` `[R, W]` columns, including its own; returns `[R, H Dh]`."""
  cache = LayerCache(
    key=jax.lax.dynamic_update_slice_in_dim(cache["key"], k[..., None], column, axis=3),
    value=jax.lax.dynamic_update_slice_in_dim(cache["value"], v[:, :, None], column, axis=2),
  )
  scores = jnp.einsum("skgd,skdt->skgt", q, cache["key"], preferred_element_type=jnp.float32)
  weights = jax.nn.softmax(jnp.where(allowed[:, None, None], scores, _MASKED), axis=-1).astype(q.dtype)
  mixed = jnp.einsum("skgt,sktd->skgd", weights, cache["value"])
  return mixed.reshape(q.shape[0], -1), cache


def _feed_forward(config: ModelConfig, layer: Params, x: jax.Array) -> jax.Array:
  if "moe" in layer:
    y: Any = MoE(config).apply({"params": layer["moe"]}, x)
    out: jax.Array = y
    return out
  gate, up, down = (layer["mlp"][name] for name in ("gate_proj", "up_proj", "down_proj"))
  return _linear(config, down, jax.nn.silu(_linear(config, gate, x)) * _linear(config, up, x))
