"""Models: a Linen decoder of the Llama, Qwen3 and GLM families, checkpoints, and the callables of `types`."""

from __future__ import annotations

from sao_jax.models.checkpoints.files import read_config
from sao_jax.models.checkpoints.gguf import load_gguf
from sao_jax.models.checkpoints.huggingface import load_hf, save_hf
from sao_jax.models.config import ModelConfig, RopeScaling
from sao_jax.models.heads import (
  cached_policy,
  init_critic,
  init_policy,
  lm_head,
  policy_apply,
  policy_logits,
  untied,
  value_apply,
)
from sao_jax.models.lora import LoraConfig
from sao_jax.models.nnx_adapter import nnx_policy, nnx_value
from sao_jax.models.transformer import Transformer

__all__ = [
  "LoraConfig",
  "ModelConfig",
  "RopeScaling",
  "Transformer",
  "cached_policy",
  "init_critic",
  "init_policy",
  "lm_head",
  "load_gguf",
  "load_hf",
  "nnx_policy",
  "nnx_value",
  "policy_apply",
  "policy_logits",
  "read_config",
  "save_hf",
  "untied",
  "value_apply",
]
