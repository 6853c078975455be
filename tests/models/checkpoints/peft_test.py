"""Adapters in PEFT's format: applied to the base's files as PEFT does, they give the merged model."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from sao_jax import models
from sao_jax.models import lora
from sao_jax.models.checkpoints import peft
from tests.models import tiny
from tests.models.lora_test import LORA, TOKENS, moved


@pytest.mark.parametrize("make", [lambda: tiny.dense(model_type="qwen3"), lambda: tiny.sparse(model_type="glm4_moe")])
def test_base_and_adapters_give_the_merged_model(make, tmp_path):
  config = make()
  params = tiny.policy_params(config)
  adapters = moved(lora.init_adapters(config, LORA, jax.random.key(1)))
  models.save_hf(tmp_path / "base", config, params)
  assert peft.save(tmp_path / "adapter", config, LORA, adapters, base="org/base") == [
    "adapter_config.json", "adapter_model.safetensors",
  ]  # fmt: skip
  settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  assert settings["peft_type"] == "LORA" and settings["base_model_name_or_path"] == "org/base"
  assert settings["task_type"] == "CAUSAL_LM" and not settings["fan_in_fan_out"] and settings["bias"] == "none"

  # PEFT's rule: W + lora_alpha / r · B A for every module that `target_modules` names.
  weights = safetensors.numpy.load_file(tmp_path / "base" / "model.safetensors")
  tensors = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  first = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
  assert tensors[f"{first}A.weight"].shape == (2, 24) and tensors[f"{first}B.weight"].shape == (32, 2)
  scale = settings["lora_alpha"] / settings["r"]
  for module in settings["target_modules"]:
    a, b = (tensors.pop(f"base_model.model.{module}.lora_{x}.weight") for x in "AB")
    weights[f"{module}.weight"] += (scale * b.astype(np.float64) @ a).astype(np.float32)
  assert not tensors
  safetensors.numpy.save_file(weights, tmp_path / "base" / "model.safetensors")
  loaded, found = models.load_hf(tmp_path / "base")
  wanted = models.policy_logits(config)(lora.merge_all(LORA, params, adapters), TOKENS)
  np.testing.assert_allclose(models.policy_logits(loaded)(found, TOKENS), wanted, rtol=1e-4, atol=1e-4)
  assert np.max(np.abs(models.policy_logits(config)(params, TOKENS) - wanted)) > 0.05
