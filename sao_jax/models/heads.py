"""Policies and value models out of the trunk: fresh parameters, and the callables of `types.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from sao_jax.models import decode
from sao_jax.models.config import ModelConfig
from sao_jax.models.transformer import Transformer, init_cache
from sao_jax.types import Cache, CachedPolicy, Params, PolicyApply, PolicyOutput, ValueApply


def _init_trunk(config: ModelConfig, key: jax.Array) -> Params:
  tokens = jnp.zeros((1, 2), jnp.int32)
  return jax.jit(Transformer(config).init)(key, tokens)["params"]


def init_policy(config: ModelConfig, key: jax.Array) -> Params:
  """Fresh parameters of a policy; the key is consumed.

  Embeddings and an untied head are normal with `config.init_std`; kernels truncated normal with 1/sqrt(fan_in), those
  that write to the residual stream divided by sqrt(2 L) as well; norms one, biases zero.

  Returns:
    Nested dict with `embed`, `layers_<i>`, `final_norm` and, when embeddings are not tied, `lm_head/kernel` `[D, V]`.
  """
  trunk_key, head_key = jax.random.split(key)
  params = dict(_init_trunk(config, trunk_key))
  if not config.tie_word_embeddings:
    shape = (config.hidden_size, config.vocab_size)
    kernel = jax.random.normal(head_key, shape) * config.init_std
    params["lm_head"] = {"kernel": kernel.astype(config.param_dtype)}
  return params


def init_critic(config: ModelConfig, key: jax.Array, policy_params: Params | None = None) -> Params:
  """Fresh parameters of a value model; the key is consumed.

  Args:
    config: architecture of the trunk.
    key: PRNG key.
    policy_params: if given, the trunk is COPIED from these (new buffers: either side may be donated).

  Returns:
    Nested dict with `embed`, `layers_<i>`, `final_norm` and `value_head` `{kernel [D, 1], bias [1]}`, all zeros.
  """
  if policy_params is None:
    trunk = dict(_init_trunk(config, key))
  else:
    trunk = {name: jax.tree.map(jnp.copy, value) for name, value in policy_params.items() if name != "lm_head"}
  head = {"kernel": jnp.zeros((config.hidden_size, 1), jnp.float32), "bias": jnp.zeros((1,), jnp.float32)}
  return {**trunk, "value_head": head}


def lm_head(config: ModelConfig) -> Callable[[Params], jax.Array]:
  """`f(params) -> [D, V]`: the output projection; the transposed embedding when the two are tied."""

  def head(params: Params) -> jax.Array:
    kernel: jax.Array = params["embed"]["embedding"].T if config.tie_word_embeddings else params["lm_head"]["kernel"]
    return kernel

  return head


def policy_apply(config: ModelConfig) -> PolicyApply:
  """`f(params, tokens, positions, segment_ids) -> PolicyOutput(hidden [B, T, D], lm_head [D, V])`."""
  model, head = Transformer(config), lm_head(config)

  def apply(params: Params, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> PolicyOutput:
    hidden: Any = model.apply({"params": params}, tokens, positions, segment_ids)
    return PolicyOutput(hidden=hidden, lm_head=head(params))

  return apply


def value_apply(config: ModelConfig) -> ValueApply:
  """`f(params, tokens, positions, segment_ids) -> [B, T]` float32: value of the state AFTER each token."""
  model = Transformer(config)

  def apply(params: Params, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    hidden: Any = model.apply({"params": params}, tokens, positions, segment_ids)
    head = params["value_head"]
    values = jnp.dot(hidden.astype(jnp.float32), head["kernel"], precision=jax.lax.Precision.HIGHEST)
    shifted: jax.Array = values[..., 0] + head["bias"][0]
    return shifted

  return apply


def policy_logits(config: ModelConfig) -> Callable[[Params, jax.Array], jax.Array]:
  """`f(params, tokens [B, T]) -> [B, T, V]` float32 logits, each row one sequence: for checks and small uses."""
  model, head = Transformer(config), lm_head(config)

  def logits(params: Params, tokens: jax.Array) -> jax.Array:
    hidden: Any = model.apply({"params": params}, tokens)
    return jnp.dot(hidden.astype(jnp.float32), head(params).astype(jnp.float32))

  return logits


def cached_policy(config: ModelConfig) -> CachedPolicy:
  """The incremental form of the policy that the rollout engine drives; see `types.CachedPolicy`."""
  model = Transformer(config)

  def extend(
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    slots: jax.Array,
    start: jax.Array,
    count: jax.Array,
    *,
    live_len: int,
  ) -> tuple[jax.Array, Cache]:
    return model.apply({"params": params}, cache, tokens, slots, start, count, live_len, method="extend")

  def new_cache(num_slots: int, max_len: int) -> Cache:
    return init_cache(config, num_slots, max_len)

  return CachedPolicy(
    init_cache=new_cache,
    extend=extend,
    prepare=functools.partial(decode.prepare, config),
    window=functools.partial(decode.open_window, config),
    step=functools.partial(decode.step, config),
    lm_head=decode.lm_head,
    merge=decode.merge_window,
  )
