"""The decoder: embedding, layers and final norm, over packed rows or, incrementally, over a key/value cache."""

from __future__ import annotations

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from sao_jax.models import latent_attention
from sao_jax.models.config import ModelConfig
from sao_jax.models.embedding import look_up
from sao_jax.models.latent_attention import LatentAttention
from sao_jax.models.layers import MLP, Attention, LayerCache, RMSNorm, rope_tables
from sao_jax.models.moe import MoE
from sao_jax.models.paged_attention import empty_pages
from sao_jax.parallel.constraints import constrain, constrain_residual, constrain_tokens
from sao_jax.types import AnyArray, Cache, RaggedBatch


class Block(nn.Module):
  """One pre-norm decoder layer."""

  config: ModelConfig
  layer: int

  def setup(self) -> None:
    config = self.config
    self.input_norm = RMSNorm(config)
    self.attention: Any = LatentAttention(config, self.layer) if config.kv_lora_rank else Attention(config)
    self.post_attention_norm = RMSNorm(config)
    if config.is_sparse(self.layer):
      self.moe = MoE(config)
    else:
      self.mlp = MLP(config, config.intermediate_size)

  def _feed_forward(self, x: jax.Array) -> jax.Array:
    return self.moe(x) if self.config.is_sparse(self.layer) else self.mlp(x)

  def __call__(
    self, x: Float[Array, "B T D"], rope: tuple[jax.Array, jax.Array], segment_ids: Int[Array, "B T"], chosen: Any
  ) -> tuple[Float[Array, "B T D"], Any]:
    """Returns the layer's output, and the tokens that its attention chose (None: it does not choose)."""
    y = constrain_tokens(self.input_norm(x))
    if self.config.kv_lora_rank:
      y, chosen = self.attention(y, rope, segment_ids, chosen)
    else:
      y = self.attention(y, rope, segment_ids)
    x = x + constrain_residual(y)
    return x + constrain_residual(self._feed_forward(constrain_tokens(self.post_attention_norm(x)))), chosen

  def extend(
    self,
    x: Float[Array, "R C D"],
    rope: tuple[jax.Array, jax.Array],
    cache: Any,
    slots: Int32[AnyArray, "R"],
    start: Int32[Array, "R"],
    count: Int32[Array, "R"],
    live_len: int,
    chosen: Any,
  ) -> tuple[Float[Array, "R C D"], Any, Any]:
    y = self.input_norm(x)
    if self.config.kv_lora_rank:
      y, cache, chosen = self.attention.extend(y, rope, cache, slots, start, count, live_len, chosen)
    else:
      y, cache = self.attention.extend(y, rope, cache, slots, start, count, live_len)
    x = x + y
    return x + self._feed_forward(self.post_attention_norm(x)), cache, chosen

  def ragged(
    self, x: Float[Array, "T D"], rope: tuple[jax.Array, jax.Array], pages: Any, batch: RaggedBatch
  ) -> tuple[Float[Array, "T D"], Any]:
    y, pages = self.attention.ragged(self.input_norm(x), rope, pages, batch)
    x = x + y
    return x + self._feed_forward(self.post_attention_norm(x)), pages


def _rematerialized(config: ModelConfig) -> type[Block]:
  if config.remat == "none":
    return Block
  policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable if config.remat == "dots" else None
  return nn.remat(Block, policy=policy)


class Transformer(nn.Module):
  """Maps tokens to final hidden states. Parameter paths: `embed`, `layers_<i>`, `final_norm`."""

  config: ModelConfig

  def setup(self) -> None:
    config = self.config
    self.embed = nn.Embed(
      config.vocab_size,
      config.hidden_size,
      dtype=config.compute_dtype,
      param_dtype=jnp.dtype(config.param_dtype),
      embedding_init=nn.initializers.normal(config.init_std),
    )
    block = _rematerialized(config)
    self.layers = [block(config, i) for i in range(config.num_layers)]
    self.final_norm = RMSNorm(config)

  def _look_up(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Embeds tokens. On a mesh the table is gathered first, since it is smaller than the embedded tokens."""
    table = self.embed.embedding.astype(self.config.compute_dtype)
    return constrain_residual(constrain(table, ("tensor",), ())[tokens])

  def __call__(
    self,
    tokens: Int[AnyArray, "B T"],
    positions: Int[AnyArray, "B T"] | None = None,
    segment_ids: Int[AnyArray, "B T"] | None = None,
  ) -> Float[Array, "B T D"]:
    """Returns hidden states after the final norm, in the config's dtype.

    Args:
      tokens: token ids.
      positions: position of each token in its own segment; None: 0 .. T - 1.
      segment_ids: 0 is padding; None: each row is one segment.
    """
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape) if positions is None else positions
    segment_ids = jnp.ones_like(tokens) if segment_ids is None else jnp.asarray(segment_ids)
    rope = rope_tables(self.config, jnp.asarray(positions))
    x, chosen = self._look_up(tokens), None
    for layer in self.layers:
      x, chosen = layer(x, rope, segment_ids, chosen)
      x = constrain_residual(x)
    return constrain_tokens(self.final_norm(x))

  def extend(
    self,
    cache: Cache,
    tokens: Int[Array, "R C"],
    slots: Int32[AnyArray, "R"],
    start: Int32[Array, "R"],
    count: Int32[Array, "R"],
    live_len: int,
  ) -> tuple[Float[Array, "R D"], Cache]:
    """Feeds up to C tokens to each of R slots; see `types.CachedPolicy.extend`."""
    rope = rope_tables(self.config, start[:, None] + jnp.arange(tokens.shape[1]))
    x, chosen = look_up(self.embed.embedding, tokens, self.config.compute_dtype), None
    new_cache = {}
    for i, layer in enumerate(self.layers):
      name = f"layers_{i}"
      x, new_cache[name], chosen = layer.extend(x, rope, cache[name], slots, start, count, live_len, chosen)
    last = jnp.maximum(count - 1, 0)[:, None, None]
    return self.final_norm(jnp.take_along_axis(x, last, axis=1)[:, 0]), new_cache

  def ragged(
    self, pages: Cache, tokens: Int32[Array, "T"], batch: RaggedBatch
  ) -> tuple[Float[Array, "T D"], Cache]:
    """Feeds a ragged batch to a paged cache; see `types.PagedPolicy.step`."""
    rope = rope_tables(self.config, batch.positions)
    x = look_up(self.embed.embedding, tokens, self.config.compute_dtype)
    written = {}
    for i, layer in enumerate(self.layers):
      x, written[f"layers_{i}"] = layer.ragged(x, rope, pages[f"layers_{i}"], batch)
    return self.final_norm(x), written


def init_pages(config: ModelConfig, num_pages: int, page_size: int) -> Cache:
  """Makes a zero cache of `num_pages` pages of `page_size` tokens."""
  zeros = functools.partial(empty_pages, num_pages, page_size, config.num_kv_heads, config.head_dim)
  return {f"layers_{i}": {"kv": zeros(config.compute_dtype)} for i in range(config.num_layers)}


def init_cache(config: ModelConfig, num_slots: int, max_len: int) -> Cache:
  """Makes a zero cache for `num_slots` sequences of up to `max_len` tokens."""
  if config.kv_lora_rank:
    layers = range(config.num_layers)
    return {f"layers_{i}": latent_attention.init_cache(config, i, num_slots, max_len) for i in layers}
  heads, dim = config.num_kv_heads, config.head_dim
  zeros = functools.partial(jnp.zeros, dtype=config.compute_dtype)
  return {
    f"layers_{i}": LayerCache(
      key=zeros((num_slots, heads, dim, max_len)), value=zeros((num_slots, heads, max_len, dim))
    )
    for i in range(config.num_layers)
  }
