"""Published architectures by name, as described in the `config.json` of their checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from sao_jax.models import ModelConfig


def qwen3_0p6b() -> ModelConfig:
  """Qwen3-0.6B: dense."""
  return ModelConfig(
    model_type="qwen3", vocab_size=151_936, hidden_size=1024, num_layers=28, num_heads=16, num_kv_heads=8,
    head_dim=128, intermediate_size=3072, rope_theta=1e6, max_position_embeddings=40_960,
  )  # fmt: skip


def qwen3_8b() -> ModelConfig:
  """Qwen3-8B: dense."""
  return ModelConfig(
    model_type="qwen3", vocab_size=151_936, hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8,
    head_dim=128, intermediate_size=12_288, rope_theta=1e6, max_position_embeddings=40_960, tie_word_embeddings=False,
  )  # fmt: skip


def qwen3_30b_a3b() -> ModelConfig:
  """Qwen3-30B-A3B-Thinking-2507, the paper's backbone: 30.5B parameters, 3.3B per token."""
  return ModelConfig(
    model_type="qwen3_moe", vocab_size=151_936, hidden_size=2048, num_layers=48, num_heads=32, num_kv_heads=4,
    head_dim=128, intermediate_size=6144, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768,
    rope_theta=1e7, max_position_embeddings=262_144, tie_word_embeddings=False,
  )  # fmt: skip


def glm4_moe_106b() -> ModelConfig:
  """GLM-4.5-Air: 106B parameters, 12B per token."""
  return ModelConfig(
    model_type="glm4_moe", vocab_size=151_552, hidden_size=4096, num_layers=46, num_heads=96, num_kv_heads=8,
    head_dim=128, intermediate_size=10_944, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408,
    num_shared_experts=1, first_dense_layers=1, router="sigmoid", routed_scaling_factor=1.0, qk_norm=False,
    attention_bias=True, partial_rotary_factor=0.5, rope_theta=1e6, norm_eps=1e-5, tie_word_embeddings=False,
    max_position_embeddings=131_072,
  )  # fmt: skip


def glm4_moe_355b() -> ModelConfig:
  """GLM-4.5 and GLM-4.6 without their multi-token-prediction layer: 355B parameters, 32B per token."""
  return ModelConfig(
    model_type="glm4_moe", vocab_size=151_552, hidden_size=5120, num_layers=92, num_heads=96, num_kv_heads=8,
    head_dim=128, intermediate_size=12_288, num_experts=160, num_experts_per_tok=8, moe_intermediate_size=1536,
    num_shared_experts=1, first_dense_layers=3, router="sigmoid", routed_scaling_factor=2.5, qk_norm=True,
    attention_bias=True, partial_rotary_factor=0.5, rope_theta=1e6, norm_eps=1e-5, tie_word_embeddings=False,
    max_position_embeddings=202_752,
  )  # fmt: skip


def glm5_744b() -> ModelConfig:
  """GLM-5 without its multi-token-prediction layer: 744B parameters, 40B per token; every layer has an indexer."""
  return ModelConfig(
    model_type="glm_moe_dsa", vocab_size=154_880, hidden_size=6144, num_layers=78, num_heads=64, num_kv_heads=64,
    head_dim=64, qk_nope_head_dim=192, v_head_dim=256, kv_lora_rank=512, q_lora_rank=2048, rope_interleave=True,
    index_topk=2048, index_n_heads=32, index_head_dim=128, indexer_types=("full",) * 78, intermediate_size=12_288,
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048, num_shared_experts=1, first_dense_layers=3,
    router="sigmoid", routed_scaling_factor=2.5, qk_norm=False, rope_theta=1e6, norm_eps=1e-5,
    tie_word_embeddings=False, max_position_embeddings=202_752,
  )  # fmt: skip


def glm5_2_744b() -> ModelConfig:
  """GLM-5.2, on which the paper's method was deployed.

  Three of four layers reuse the tokens that an earlier layer's indexer chose.
  """
  kinds = tuple("full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(78))
  return dataclasses.replace(glm5_744b(), indexer_types=kinds, rope_theta=8e6, max_position_embeddings=1_048_576)


def smollm2_135m() -> ModelConfig:
  """SmolLM2-135M-Instruct: dense, llama-type."""
  return ModelConfig(
    model_type="llama", vocab_size=49_152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, qk_norm=False, rope_theta=1e5, norm_eps=1e-5, max_position_embeddings=8192,
  )  # fmt: skip


def tiny_moe() -> ModelConfig:
  """Two layers that compile in seconds, to try out a mesh."""
  return ModelConfig(
    model_type="qwen3_moe", vocab_size=512, hidden_size=64, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=16,
    intermediate_size=128, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, tie_word_embeddings=False,
  )  # fmt: skip


MODELS: Mapping[str, Callable[[], ModelConfig]] = {
  make.__name__: make
  for make in (
    qwen3_0p6b, qwen3_8b, qwen3_30b_a3b, glm4_moe_106b, glm4_moe_355b, glm5_744b, glm5_2_744b, smollm2_135m, tiny_moe,
  )
}  # fmt: skip
