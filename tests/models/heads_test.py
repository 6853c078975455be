"""Initial parameters, and the callables of `types`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import models
from sao_jax.types import PolicyOutput
from tests.models import tiny


def _paths(params: Any) -> set[str]:
  return {"/".join(key.key for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}


def test_parameter_paths_are_those_that_freezing_and_sharding_use() -> None:
  paths = _paths(jax.eval_shape(lambda key: models.init_policy(tiny.sparse(), key), jax.random.key(0)))
  attention = {path for path in paths if "attention" in path.split("/")}
  names = (
    "q_proj/kernel",
    "q_proj/bias",
    "k_proj/kernel",
    "k_proj/bias",
    "v_proj/kernel",
    "v_proj/bias",
    "o_proj/kernel",
    "q_norm/scale",
    "k_norm/scale",
  )
  assert attention == {f"layers_{i}/attention/{name}" for i in range(2) for name in names}
  assert paths - attention == {
    "embed/embedding",
    "final_norm/scale",
    "lm_head/kernel",
    *(f"layers_{i}/{norm}/scale" for i in range(2) for norm in ("input_norm", "post_attention_norm")),
    *(f"layers_0/mlp/{name}_proj/kernel" for name in ("gate", "up", "down")),
    *(f"layers_1/moe/{name}_proj" for name in ("gate", "up", "down")),
    *(f"layers_1/moe/shared_experts/{name}_proj/kernel" for name in ("gate", "up", "down")),
    "layers_1/moe/router/kernel",
    "layers_1/moe/router/correction_bias",
  }


def test_initial_scales() -> None:
  config = tiny.dense(hidden_size=256, intermediate_size=512, vocab_size=500, tie_word_embeddings=False)
  params = models.init_policy(config, jax.random.key(0))
  layer = params["layers_0"]
  spreads = {
    "embed": (params["embed"]["embedding"], 0.02),
    "lm_head": (params["lm_head"]["kernel"], 0.02),
    "q_proj": (layer["attention"]["q_proj"]["kernel"], 256**-0.5),
    "down_proj": (layer["mlp"]["down_proj"]["kernel"], 512**-0.5 / 2),  # 2 layers: 1 / sqrt(2 * 2)
  }
  for name, (kernel, std) in spreads.items():
    assert abs(float(jnp.std(kernel)) / std - 1) < 0.05, name
    assert abs(float(jnp.mean(kernel))) < 0.1 * std, name
  assert float(jnp.abs(layer["attention"]["q_proj"]["kernel"]).max()) <= 2.3 * 256**-0.5  # truncated


TOKENS, POSITIONS, SEGMENTS = np.asarray([[3, 1, 4, 1, 5]]), np.arange(5)[None], np.ones((1, 5), np.int32)


def test_a_fresh_critic_predicts_zero_and_owns_its_buffers() -> None:
  config = tiny.sparse()
  policy = jax.tree.map(jnp.copy, tiny.policy_params(config))
  critic = models.init_critic(config, jax.random.key(1), policy)
  assert "lm_head" not in critic
  np.testing.assert_array_equal(critic["embed"]["embedding"], policy["embed"]["embedding"])
  values = jax.jit(models.value_apply(config))(critic, TOKENS, POSITIONS, SEGMENTS)
  assert values.dtype == jnp.float32
  np.testing.assert_array_equal(values, np.zeros((1, 5)))
  jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)(policy)
  assert np.isfinite(critic["embed"]["embedding"]).all()  # still there although the policy's buffers were donated
  fresh = jax.eval_shape(lambda key: models.init_critic(config, key), jax.random.key(1))
  assert jax.tree.structure(fresh) == jax.tree.structure(critic)


def test_the_value_head_learns() -> None:
  config = tiny.dense()
  critic = models.init_critic(config, jax.random.key(0), tiny.policy_params(config))
  apply = models.value_apply(config)
  grads = jax.jit(jax.grad(lambda p: jnp.mean((apply(p, TOKENS, POSITIONS, SEGMENTS) - 1.0) ** 2)))(critic)
  np.testing.assert_allclose(grads["value_head"]["bias"], [-2.0])
  assert np.any(grads["value_head"]["kernel"])


@pytest.mark.parametrize("config", [tiny.dense(), tiny.sparse()], ids=["tied", "untied"])
def test_policy_output_gives_the_logits(config: models.ModelConfig) -> None:
  params = tiny.policy_params(config)
  out = jax.jit(models.policy_apply(config))(params, TOKENS, POSITIONS, SEGMENTS)
  assert isinstance(out, PolicyOutput)
  assert out.hidden.shape == (1, 5, config.hidden_size)
  assert out.lm_head.shape == (config.hidden_size, config.vocab_size)
  logits = jax.jit(models.policy_logits(config))(params, TOKENS)
  assert logits.dtype == jnp.float32
  np.testing.assert_allclose(np.asarray(out.hidden) @ np.asarray(out.lm_head), logits, atol=1e-5)
  np.testing.assert_array_equal(models.lm_head(config)(params), out.lm_head)


def test_an_untied_copy_is_the_same_policy_with_a_head_of_its_own() -> None:
  config = tiny.dense(tie_word_embeddings=True)
  params = tiny.policy_params(config)
  untied, copy = models.untied(config, params)
  assert not untied.tie_word_embeddings and "lm_head" in copy and "lm_head" not in params
  tokens = jnp.array([[3, 1, 4, 1]])
  np.testing.assert_array_equal(
    models.policy_logits(untied)(copy, tokens), models.policy_logits(config)(params, tokens)
  )
  assert models.untied(untied, copy) == (untied, copy)


def test_bfloat16_computes_in_bfloat16_and_scores_in_float32() -> None:
  config = tiny.dense(dtype="bfloat16", param_dtype="bfloat16")
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.policy_params(tiny.dense()))
  shapes = jax.eval_shape(lambda key: models.init_policy(config, key), jax.random.key(0))
  assert jax.tree.map(lambda x: x.dtype, shapes) == jax.tree.map(lambda x: x.dtype, params)
  out = jax.eval_shape(models.policy_apply(config), params, TOKENS, POSITIONS, SEGMENTS)
  assert out.hidden.dtype == jnp.bfloat16
  logits = jax.jit(models.policy_logits(config))(params, TOKENS)
  assert logits.dtype == jnp.float32
  wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
  np.testing.assert_allclose(logits, jax.jit(models.policy_logits(tiny.dense()))(wide, TOKENS), atol=0.1)


def test_large_configs_by_shape_alone() -> None:
  config = models.ModelConfig(
    vocab_size=151_936,
    hidden_size=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=6144,
    model_type="qwen3_moe",
    tie_word_embeddings=False,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    dtype="bfloat16",
    param_dtype="bfloat16",
  )
  params = jax.eval_shape(lambda key: models.init_policy(config, key), jax.random.key(0))
  count = sum(x.size for x in jax.tree.leaves(params))
  assert abs(count / 30.5e9 - 1) < 0.01  # Qwen3-30B-A3B
