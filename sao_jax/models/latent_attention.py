"""Multi-head latent attention (arXiv 2405.04434, Section 2.1), dense or with the tokens that an indexer chooses.

A token's keys and values of all heads are linear maps of one latent c = norm(W_a x). Beside it stands one rotated key r
that all heads share. Only [c, r] is cached, not the keys and values of H heads.

* Over packed rows, keys and values are computed from the latents (expanded form), which takes the fewest operations.
* Over the cache, the maps are applied to the other side instead (absorbed form): q·(W_k c) = (W_kᵀ q)·c, and the values
  are mixed before W_v is applied. Then a query of H heads reads each cached latent once.

Where `index_topk` is set, the layers of type "full" also cache a key of the indexer (`sparse_attention`). A step of
decoding then reads as many latents as `index_topk` says. The indexer receives no gradient. The tokens that it chose are
passed on to the "shared" layers after it (arXiv 2603.12201).

The functions take the module's weights as a dict, since the decode loop uses them, too.

Shapes: B packed rows of T tokens; R rows of C tokens for the cache, which has S slots of max_len positions; H heads;
N = qk_nope_head_dim, Dr = head_dim (rotated), V = v_head_dim; L = kv_lora_rank, Lq = q_lora_rank, Lr = L + Dr; J heads
of Di dimensions in the indexer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8

from sao_jax.models import sparse_attention
from sao_jax.models.attention import packed_attention
from sao_jax.models.config import ModelConfig
from sao_jax.models.layers import apply_rope, linear_init, residual_scale, rms_norm, write_span
from sao_jax.models.sparse_attention import IndexerQueries
from sao_jax.types import Params

NORM_EPS = 1e-6
"""Epsilon of the norms of latents and of the indexer's keys: fixed in the published models, whatever `norm_eps` is."""

Rope: TypeAlias = tuple[jax.Array, ...]
"""cos and sin, each `[..., Dr]`."""
LatentCache: TypeAlias = dict[str, jax.Array]
"""Cached arrays of one layer: `latent` `[S, max_len, Lr]`, and `index_key` `[S, max_len, Di]` if it has an indexer."""
_Init: TypeAlias = Callable[[jax.Array], Any]


class Chosen(NamedTuple):
  """Entries of a window that a step of decoding attends to."""

  columns: Int32[Array, "R k"]
  valid: Bool[Array, "R k"]
  """False where a row has fewer entries than k."""


class LatentAttention(nn.Module):
  """The weights of one layer's latent attention, and its forms."""

  config: ModelConfig
  layer: int

  def setup(self) -> None:
    initializers = _initializers(self.config, self.config.has_indexer(self.layer))
    self.weights = {name: self.param(name, init) for name, init in initializers.items()}

  def __call__(
    self, x: Float[Array, "B T D"], rope: Rope, segment_ids: Int[Array, "B T"], chosen: UInt8[Array, "B T bytes"] | None
  ) -> tuple[Float[Array, "B T D"], UInt8[Array, "B T bytes"] | None]:
    """Attention over packed rows.

    Args:
      x: the layer's normalised input.
      rope: cos and sin of each token.
      segment_ids: tokens attend only to tokens with the same id.
      chosen: tokens chosen by the indexer of a layer before this one; None: all.

    Returns:
      The output, and the tokens that this layer attended to.
    """
    config, weights = self.config, self.weights
    nope, rotary, q_latent = project_queries(config, weights, x, rope)
    latent = project_latents(config, weights, x, rope)
    expanded = linear(config, weights["kv_b_proj"], latent[..., : config.kv_lora_rank])
    k_nope, v = jnp.split(expanded.reshape(*nope.shape[:-1], -1), [config.qk_nope_head_dim], axis=-1)
    k_rotary = jnp.broadcast_to(latent[..., None, config.kv_lora_rank :], rotary.shape)
    q, k = jnp.concatenate([nope, rotary], axis=-1), jnp.concatenate([k_nope, k_rotary], axis=-1)
    scale = config.attention_scale
    if 0 < config.index_topk < x.shape[1]:
      if "indexer" in weights:
        queries, keys = indexer_inputs(config, weights["indexer"], x, q_latent, rope)
        chosen = sparse_attention.choose_packed(queries, keys, segment_ids, k=config.index_topk)
      assert chosen is not None  # the first layer has an indexer
      heads = sparse_attention.attend_chosen(q, k, v, chosen, scale)
    else:
      width = max(q.shape[-1], v.shape[-1])  # kernels want one width
      q, k, padded = (_widen(array, width) for array in (q, k, v))
      heads = packed_attention(q, k, padded, segment_ids, scale, config.attention_impl)[..., : v.shape[-1]]
    return output(config, weights, heads), chosen

  def extend(
    self,
    x: Float[Array, "R C D"],
    rope: Rope,
    cache: LatentCache,
    slots: Int32[Array, "R"],
    start: Int32[Array, "R"],
    count: Int32[Array, "R"],
    live_len: int,
    chosen: Bool[Array, "R C live_len"] | None,
  ) -> tuple[Float[Array, "R C D"], LatentCache, Bool[Array, "R C live_len"] | None]:
    """Attention of up to C new tokens for each of R slots, over the cache; `chosen` is as in `__call__`, as a mask."""
    config, weights = self.config, self.weights

    def write(name: str, new: jax.Array) -> jax.Array:
      return write_span(cache[name], new, slots, start, count, time_axis=0)

    def read(name: str) -> jax.Array:
      return written[name][:, :live_len].at[slots].get(mode="clip")

    nope, rotary, q_latent = project_queries(config, weights, x, rope)
    written = {"latent": write("latent", project_latents(config, weights, x, rope))}
    allowed = jnp.arange(live_len) <= (start[:, None] + jnp.arange(x.shape[1]))[..., None]
    if "indexer" in weights:
      queries, keys = indexer_inputs(config, weights["indexer"], x, q_latent, rope)
      written["index_key"] = write("index_key", keys)
      if live_len > config.index_topk:
        scores = sparse_attention.index_scores(queries, read("index_key"))
        chosen = sparse_attention.top_mask(scores, allowed, config.index_topk)
    mask = allowed if chosen is None else chosen
    absorbed = absorb(config, weights["kv_b_proj"])
    return output(config, weights, attend(config, absorbed, nope, rotary, read("latent"), mask)), written, chosen


def project_queries(
  config: ModelConfig, weights: Params, x: Float[Array, "*tokens D"], rope: Rope
) -> tuple[Float[Array, "*tokens H N"], Float[Array, "*tokens H Dr"], Float[Array, "*tokens Lq"] | None]:
  """Queries: their part that is not rotated, the rotated part, and the latent that both come from, if there is one."""
  latent = None
  if config.q_lora_rank:
    latent = _norm(config, weights["q_a_norm"], linear(config, weights["q_a_proj"], x))
  heads = linear(config, weights["q_proj"], x) if latent is None else linear(config, weights["q_b_proj"], latent)
  heads = heads.reshape(*x.shape[:-1], config.num_heads, -1)
  nope, rotary = jnp.split(heads, [config.qk_nope_head_dim], axis=-1)
  return nope, rotate(config, rotary, rope), latent


def project_latents(
  config: ModelConfig, weights: Params, x: Float[Array, "*tokens D"], rope: Rope
) -> Float[Array, "*tokens Lr"]:
  """The cached entry of each token: its normalised latent, then its rotated key."""
  latent, key = jnp.split(linear(config, weights["kv_a_proj"], x), [config.kv_lora_rank], axis=-1)
  latent, key = _norm(config, weights["kv_a_norm"], latent), rotate(config, key[..., None, :], rope)[..., 0, :]
  return jnp.concatenate([latent, key], axis=-1)


def indexer_inputs(
  config: ModelConfig,
  weights: Params,
  x: Float[Array, "*tokens D"],
  q_latent: Float[Array, "*tokens Lq"] | None,
  rope: Rope,
) -> tuple[IndexerQueries, Float[Array, "*tokens Di"]]:
  """The indexer's queries and keys. No gradient passes through them."""
  assert q_latent is not None  # checked by the config
  weights, x, q_latent = jax.lax.stop_gradient((weights, x, q_latent))
  q = linear(config, weights["wq_b"], q_latent).reshape(*x.shape[:-1], config.index_n_heads, -1)
  k = _layer_norm(config, weights["k_norm"], linear(config, weights["wk"], x))[..., None, :]

  def rotate_first(heads: jax.Array) -> jax.Array:
    rotary, rest = jnp.split(heads, [config.head_dim], axis=-1)
    return jnp.concatenate([rotate(config, rotary, rope), rest], axis=-1)

  kernel = weights["weights_proj"]["kernel"].astype(jnp.float32)
  per_head = jnp.dot(x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
  scale = (config.index_n_heads * config.index_head_dim) ** -0.5
  return IndexerQueries(rotate_first(q), per_head * scale), rotate_first(k)[..., 0, :]


def absorb(config: ModelConfig, kv_b_proj: Params) -> tuple[Float[Array, "H N L"], Float[Array, "H L V"]]:
  """The maps from latents to keys and to values, by head."""
  kernel = kv_b_proj["kernel"].astype(config.compute_dtype).reshape(config.kv_lora_rank, config.num_heads, -1)
  keys, values = jnp.split(kernel, [config.qk_nope_head_dim], axis=-1)
  return keys.transpose(1, 2, 0), values.transpose(1, 0, 2)


def attend(
  config: ModelConfig,
  absorbed: tuple[Float[Array, "H N L"], Float[Array, "H L V"]],
  nope: Float[Array, "R C H N"],
  rotary: Float[Array, "R C H Dr"],
  entries: Float[Array, "R S Lr"],
  allowed: Bool[Array, "R C S"],
) -> Float[Array, "R C H V"]:
  """Attention to cached entries in the absorbed form."""
  to_keys, to_values = absorbed
  query = jnp.concatenate([jnp.einsum("rchn,hnl->rchl", nope, to_keys), rotary], axis=-1)
  rows, chunk, heads, width = query.shape
  # All queries of a row form one matrix, since they share their keys.
  matrix = query.reshape(rows, chunk * heads, width)
  scores = jnp.einsum("rmd,rsd->rms", matrix, entries, preferred_element_type=jnp.float32) * config.attention_scale
  scores = jnp.where(allowed[:, :, None], scores.reshape(rows, chunk, heads, -1), sparse_attention.MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(nope.dtype).reshape(rows, chunk * heads, -1)
  mixed = jnp.einsum("rms,rsl->rml", weights, entries[..., : config.kv_lora_rank])
  return jnp.einsum("rchl,hlv->rchv", mixed.reshape(rows, chunk, heads, -1), to_values)


def prepare(config: ModelConfig, weights: Params) -> Params:
  """Converts a layer's weights for `step`."""
  kept = {name: value for name, value in weights.items() if name != "kv_b_proj"}
  return {**kept, "absorbed": absorb(config, weights["kv_b_proj"])}


def step(
  config: ModelConfig,
  weights: Params,
  x: Float[Array, "S D"],
  rope: Rope,
  groups: Sequence[LatentCache],
  columns: Sequence[Int[Array, ""]],
  allowed: Sequence[Bool[Array, "R W"]],
  chosen: Sequence[Chosen | None],
) -> tuple[Float[Array, "S D"], list[LatentCache], list[Chosen | None]]:
  """Attention of one token per row in the decode loop, over windows of the cache; see `decode.step`.

  Args:
    config: of the model.
    weights: prepared weights of the layer.
    x: the layer's normalised input.
    rope: cos and sin of each row.
    groups: the layer's window for each group of rows.
    columns: the column that each group writes.
    allowed: columns of each group that hold tokens of the row, the new one included.
    chosen: for each group, the columns that a layer before this one chose.

  Returns:
    The output, the windows with the new tokens, and the columns that each group attended to (None: all).
  """
  nope, rotary, q_latent = project_queries(config, weights, x, rope)
  new = {"latent": project_latents(config, weights, x, rope)}
  queries = None
  if "indexer" in weights:
    queries, new["index_key"] = indexer_inputs(config, weights["indexer"], x, q_latent, rope)
  mixed, windows, passed_on = [], [], []
  inputs = _by_group((nope, rotary, new, queries), len(groups))
  for window, column, mask, before, (nope_g, rotary_g, new_g, queries_g) in zip(
    groups, columns, allowed, chosen, inputs, strict=True
  ):
    written = {name: _write_column(window[name], value, column) for name, value in new_g.items()}
    now = before
    if queries_g is not None and mask.shape[1] > config.index_topk:
      now = choose_columns(queries_g, written["index_key"], mask, k=config.index_topk)
    entries = written["latent"]
    if now is not None:
      entries, mask = jax.vmap(lambda row, at: row.at[at].get(mode="clip"))(entries, now.columns), now.valid
    mixed.append(attend(config, weights["absorbed"], nope_g[:, None], rotary_g[:, None], entries, mask[:, None])[:, 0])
    windows.append(written)
    passed_on.append(now)
  return output(config, weights, jnp.concatenate(mixed)), windows, passed_on


def choose_columns(
  queries: IndexerQueries, keys: Float[Array, "R W Di"], allowed: Bool[Array, "R W"], *, k: int
) -> Chosen:
  """Chooses the k allowed columns of each row with the largest scores, as `sparse_attention.top_mask` does."""
  one = IndexerQueries(queries.heads[:, None], queries.weights[:, None])
  scores = jnp.where(allowed, sparse_attention.index_scores(one, keys)[:, 0], -jnp.inf)
  values, columns = jax.lax.top_k(scores, k)
  return Chosen(columns, values > -jnp.inf)


def init_cache(config: ModelConfig, layer: int, num_slots: int, max_len: int) -> LatentCache:
  """A layer's zero cache."""
  widths = {"latent": config.kv_lora_rank + config.head_dim}
  if config.has_indexer(layer):
    widths["index_key"] = config.index_head_dim
  return {name: jnp.zeros((num_slots, max_len, width), config.compute_dtype) for name, width in widths.items()}


def rotate(config: ModelConfig, x: Float[Array, "*tokens heads Dr"], rope: Rope) -> Float[Array, "*tokens heads Dr"]:
  """Rotates heads. Interleaved pairs end up half of the dimensions apart, in queries and keys alike."""
  if config.rope_interleave:
    x = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
  return apply_rope(x, *rope)


def linear(config: ModelConfig, weights: Params, x: Float[Array, "*tokens I"]) -> Float[Array, "*tokens O"]:
  """`x @ kernel (+ bias)` in the config's dtype."""
  y = jnp.dot(x.astype(config.compute_dtype), weights["kernel"].astype(config.compute_dtype))
  return y + weights["bias"].astype(config.compute_dtype) if "bias" in weights else y


def output(config: ModelConfig, weights: Params, heads: Float[Array, "*tokens H V"]) -> Float[Array, "*tokens D"]:
  """The output projection of the joined heads."""
  return linear(config, weights["o_proj"], heads.reshape(*heads.shape[:-2], -1))


def _norm(config: ModelConfig, weights: Params, x: jax.Array) -> jax.Array:
  return rms_norm(x, weights["scale"], dataclasses.replace(config, norm_eps=NORM_EPS))


def _layer_norm(config: ModelConfig, weights: Params, x: jax.Array) -> jax.Array:
  x32 = x.astype(jnp.float32)
  centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
  normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + NORM_EPS)
  scaled = normed * weights["scale"].astype(jnp.float32) + weights["bias"].astype(jnp.float32)
  return scaled.astype(config.compute_dtype)


def _widen(x: jax.Array, width: int) -> jax.Array:
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])


def _write_column(window: jax.Array, new: jax.Array, column: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(window, new[:, None], column, axis=1)


def _by_group(tree: Any, count: int) -> list[Any]:
  """Splits the rows of a tree of arrays into groups."""
  leaves, treedef = jax.tree.flatten(tree)
  split = [jnp.split(leaf, count) for leaf in leaves]
  return [jax.tree.unflatten(treedef, [parts[g] for parts in split]) for g in range(count)]


def _initializers(config: ModelConfig, indexer: bool) -> Mapping[str, _Init]:
  dtype = jnp.dtype(config.param_dtype)

  def kernel(fan_in: int, features: int, bias: bool = False, scale: float = 1.0, dtype: jnp.dtype = dtype) -> _Init:
    def init(key: jax.Array) -> dict[str, jax.Array]:
      values = {"kernel": linear_init(scale)(key, (fan_in, features), dtype)}
      return {**values, "bias": jnp.zeros((features,), dtype)} if bias else values

    return init

  def scale_of(features: int) -> _Init:
    return lambda key: {"scale": jnp.ones((features,), dtype)}

  hidden, heads, bias = config.hidden_size, config.num_heads, config.attention_bias
  queries = heads * (config.qk_nope_head_dim + config.head_dim)
  rank, q_rank = config.kv_lora_rank, config.q_lora_rank
  initializers: dict[str, _Init] = {
    "kv_a_proj": kernel(hidden, rank + config.head_dim, bias),
    "kv_a_norm": scale_of(rank),
    "kv_b_proj": kernel(rank, heads * (config.qk_nope_head_dim + config.v_head_dim)),
    "o_proj": kernel(heads * config.v_head_dim, hidden, config.attention_out_bias, residual_scale(config)),
  }
  if q_rank:
    compressed = {"q_a_proj": kernel(hidden, q_rank, bias), "q_a_norm": scale_of(q_rank)}
    initializers |= {**compressed, "q_b_proj": kernel(q_rank, queries)}
  else:
    initializers["q_proj"] = kernel(hidden, queries)
  if indexer:
    parts = {
      "wq_b": kernel(q_rank, config.index_n_heads * config.index_head_dim),
      "wk": kernel(hidden, config.index_head_dim),
      "k_norm": lambda key: {**scale_of(config.index_head_dim)(key), "bias": jnp.zeros(config.index_head_dim, dtype)},
      # float32, as transformers keeps it: it decides which tokens are read
      "weights_proj": kernel(hidden, config.index_n_heads, dtype=jnp.dtype("float32")),
    }
    initializers["indexer"] = lambda key: {
      name: init(k) for (name, init), k in zip(parts.items(), jax.random.split(key, len(parts)), strict=True)
    }
  return initializers
