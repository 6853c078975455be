"""Policies and value models: initial parameters, and the callables of `types`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32, Key

from sao_jax.models import decode
from sao_jax.models.config import ModelConfig
from sao_jax.models.paged_attention import has_kernel
from sao_jax.models.transformer import Transformer, init_cache, init_pages
from sao_jax.types import (
  AnyArray,
  Cache,
  CachedPolicy,
  PagedPolicy,
  Params,
  PolicyApply,
  PolicyOutput,
  RaggedBatch,
  ValueApply,
)


def _init_trunk(config: ModelConfig, key: Key[Array, ""]) -> Params:
  tokens = jnp.zeros((1, 2), jnp.int32)
  return jax.jit(Transformer(config).init)(key, tokens)["params"]


def init_policy(config: ModelConfig, key: Key[Array, ""]) -> Params:
  """Initial parameters of a policy; the key is consumed.

  Embeddings and an untied head are normal with standard deviation `config.init_std`. Kernels are truncated normal with
  1/sqrt(fan_in); those that write to the residual stream are also divided by sqrt(2 L). Norms are one, biases zero.

  Returns:
    Nested dict with `embed`, `layers_<i>`, `final_norm` and, if embeddings are not tied, `lm_head/kernel` `[D, V]`.

  >>> config = ModelConfig(
  ...   vocab_size=8, hidden_size=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=4
  ... )
  >>> params = init_policy(config, jax.random.key(0))
  >>> sorted(params), params["embed"]["embedding"].shape
  (['embed', 'final_norm', 'layers_0'], (8, 4))
  """
  trunk_key, head_key = jax.random.split(key)
  params = dict(_init_trunk(config, trunk_key))
  if not config.tie_word_embeddings:
    shape = (config.hidden_size, config.vocab_size)
    kernel = jax.random.normal(head_key, shape) * config.init_std
    params["lm_head"] = {"kernel": kernel.astype(config.param_dtype)}
  return params


def init_critic(config: ModelConfig, key: Key[Array, ""], policy_params: Params | None = None) -> Params:
  """Initial parameters of a value model; the key is consumed.

  Args:
    config: architecture of the trunk.
    key: PRNG key.
    policy_params: if given, the trunk is COPIED from these, so that either side may be donated.

  Returns:
    Nested dict with `embed`, `layers_<i>`, `final_norm` and `value_head`: `kernel` `[D, 1]` and `bias` `[1]`, both
    zero.
  """
  if policy_params is None:
    trunk = dict(_init_trunk(config, key))
  else:
    trunk = {name: jax.tree.map(jnp.copy, value) for name, value in policy_params.items() if name != "lm_head"}
  head = {"kernel": jnp.zeros((config.hidden_size, 1), jnp.float32), "bias": jnp.zeros((1,), jnp.float32)}
  return {**trunk, "value_head": head}


def lm_head(config: ModelConfig) -> Callable[[Params], jax.Array]:
  """Returns `f(params) -> [D, V]`: the output projection, or the transposed embedding if the two are tied."""

  def head(params: Params) -> Float[Array, "D V"]:
    kernel: jax.Array = params["embed"]["embedding"].T if config.tie_word_embeddings else params["lm_head"]["kernel"]
    return kernel

  return head


def untied(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
  """Returns the same policy with an output head of its own, a copy of the embedding where the two are tied.

  For servers that cannot update a tied head: `save_hf(directory, *untied(config, params))`.
  """
  if not config.tie_word_embeddings:
    return config, params
  kernel = jnp.asarray(params["embed"]["embedding"]).T
  return dataclasses.replace(config, tie_word_embeddings=False), {**params, "lm_head": {"kernel": kernel}}


def policy_apply(config: ModelConfig, *, num_tokens: int | None = None) -> PolicyApply:
  """Returns `f(params, tokens, positions, segment_ids) -> PolicyOutput(hidden [B, T, D], lm_head [D, V])`.

  Args:
    config: the architecture.
    num_tokens: see `PolicyOutput.num_tokens`.

  >>> config = ModelConfig(
  ...   vocab_size=8, hidden_size=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=4
  ... )
  >>> params = init_policy(config, jax.random.key(0))
  >>> tokens, positions, segment_ids = jnp.array([[3, 1, 4]]), jnp.array([[0, 1, 2]]), jnp.array([[1, 1, 1]])
  >>> output = policy_apply(config)(params, tokens, positions, segment_ids)
  >>> output.hidden.shape, output.lm_head.shape
  ((1, 3, 4), (4, 8))
  """
  model, head = Transformer(config), lm_head(config)

  def apply(
    params: Params, tokens: Int[AnyArray, "B T"], positions: Int[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"]
  ) -> PolicyOutput:
    hidden: Any = model.apply({"params": params}, tokens, positions, segment_ids)
    return PolicyOutput(hidden=hidden, lm_head=head(params), num_tokens=num_tokens)

  return apply


def value_apply(config: ModelConfig) -> ValueApply:
  """Returns `f(params, tokens, positions, segment_ids) -> [B, T]` float32: the value of the state AFTER each token."""
  model = Transformer(config)

  def apply(
    params: Params, tokens: Int[AnyArray, "B T"], positions: Int[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"]
  ) -> Float32[Array, "B T"]:
    hidden: Any = model.apply({"params": params}, tokens, positions, segment_ids)
    head = params["value_head"]
    values = jnp.dot(hidden.astype(jnp.float32), head["kernel"], precision=jax.lax.Precision.HIGHEST)
    shifted: jax.Array = values[..., 0] + head["bias"][0]
    return shifted

  return apply


def policy_logits(config: ModelConfig) -> Callable[[Params, jax.Array], jax.Array]:
  """Returns `f(params, tokens [B, T]) -> [B, T, V]` float32 logits, with one sequence per row: for small inputs.

  >>> config = ModelConfig(
  ...   vocab_size=8, hidden_size=4, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, intermediate_size=4
  ... )
  >>> policy_logits(config)(init_policy(config, jax.random.key(0)), jnp.array([[3, 1, 4]])).shape
  (1, 3, 8)
  """
  model, head = Transformer(config), lm_head(config)

  def logits(params: Params, tokens: Int[AnyArray, "B T"]) -> Float32[Array, "B T V"]:
    hidden: Any = model.apply({"params": params}, tokens)
    return jnp.dot(hidden.astype(jnp.float32), head(params).astype(jnp.float32))

  return logits


def cached_policy(config: ModelConfig, *, num_tokens: int | None = None) -> CachedPolicy:
  """Returns the policy in the incremental form that the rollout engine uses; see `types.CachedPolicy`."""
  model = Transformer(config)

  def extend(
    params: Params,
    cache: Cache,
    tokens: Int[AnyArray, "R C"],
    slots: Int32[AnyArray, "R"],
    start: Int32[AnyArray, "R"],
    count: Int32[AnyArray, "R"],
    *,
    live_len: int,
  ) -> tuple[Float[Array, "R D"], Cache]:
    return model.apply({"params": params}, cache, tokens, slots, start, count, live_len, method="extend")

  def ragged(
    params: Params, pages: Cache, tokens: Int32[Array, "T"], batch: RaggedBatch
  ) -> tuple[Float[Array, "T D"], Cache]:
    return model.apply({"params": params}, pages, tokens, batch, method="ragged")

  def new_cache(num_slots: int, max_len: int) -> Cache:
    return init_cache(config, num_slots, max_len)

  return CachedPolicy(
    init_cache=new_cache,
    extend=extend,
    prepare=functools.partial(decode.prepare, config),
    window=functools.partial(decode.open_window, config),
    step=functools.partial(decode.step, config),
    lm_head=decode.lm_head,
    num_tokens=num_tokens,
    merge=decode.merge_window,
    paged=None if config.kv_lora_rank else PagedPolicy(
      functools.partial(init_pages, config), ragged, lm_head(config),
      functools.partial(has_kernel, config.num_kv_heads, config.head_dim, config.compute_dtype),
    ),
  )
