"""Small configs and NumPy references, shared by the tests of this package."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.models import ModelConfig, init_policy
from sao_jax.types import Params

VOCAB = 40


def dense(**changes: Any) -> ModelConfig:
  settings: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
  }
  return ModelConfig(**{**settings, **changes})


def sparse(**changes: Any) -> ModelConfig:
  """First layer dense, second a mixture with shared experts and sigmoid routing."""
  settings: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "router": "sigmoid",
    "first_dense_layers": 1,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "n_group": 2,
    "topk_group": 1,
  }
  return dense(**{**settings, **changes})


def latent(**changes: Any) -> ModelConfig:
  """`sparse` with latent attention, whose value heads are narrower than its key heads."""
  settings: dict[str, Any] = {
    "num_kv_heads": 4,
    "head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "kv_lora_rank": 10,
    "q_lora_rank": 12,
    "rope_interleave": True,
    "qk_norm": False,
    "partial_rotary_factor": 1.0,
    "attention_out_bias": True,
    "model_type": "deepseek_v3",
  }
  return sparse(**{**settings, **changes})


def indexed(**changes: Any) -> ModelConfig:
  """`latent` with an indexer in two of three layers, which chooses fewer tokens than most sequences have."""
  settings: dict[str, Any] = {
    "num_layers": 3,
    "index_topk": 6,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "indexer_types": ("full", "shared", "full"),
    "model_type": "glm_moe_dsa",
  }
  return latent(**{**settings, **changes})


@functools.cache
def policy_params(config: ModelConfig) -> Params:
  """Fresh parameters moved off their neutral start (norms of one, biases of zero), so that a forgotten one shows."""
  params = init_policy(config, jax.random.key(0))
  rng = np.random.default_rng(1)
  return jax.tree.map(lambda x: jnp.asarray(x + 0.1 * rng.normal(size=x.shape), x.dtype), params)


def silu(x: np.ndarray) -> np.ndarray:
  return x / (1.0 + np.exp(-x))
