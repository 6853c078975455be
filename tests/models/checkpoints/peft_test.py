"""Adapters in PEFT's format: applied to the base's files as PEFT does, they give the merged model."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

from sao_jax import models
from sao_jax.models import lora
from sao_jax.models.checkpoints import peft
from tests.models import tiny
from tests.models.lora_test import LORA, TOKENS, moved

IN_PEFT = """
import sys
import numpy as np, peft, torch, transformers

base, adapter, tokens, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(base)
model = peft.PeftModel.from_pretrained(model, adapter).eval()
with torch.no_grad():
  np.save(out, model(torch.tensor(np.load(tokens))).logits.float().numpy())
"""
MLPS = dataclasses.replace(LORA, modules=".*/(mlp|shared_experts)/.*")


@pytest.mark.parametrize("make", [lambda: tiny.dense(model_type="qwen3"), lambda: tiny.sparse(model_type="glm4_moe")])
def test_base_and_adapters_give_the_merged_model(make, tmp_path):
  config = make()
  params = tiny.policy_params(config)
  adapters = moved(lora.init_adapters(config, LORA, jax.random.key(1)))
  models.save_hf(tmp_path / "base", config, params)
  assert peft.save(tmp_path / "adapter", config, LORA, adapters, base="org/base") == [
    "adapter_config.json", "adapter_model.safetensors",
  ]  # fmt: skip
  assert {path.stat().st_mode & 0o777 for path in (tmp_path / "adapter").iterdir()} == {0o644}
  settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
  assert settings["peft_type"] == "LORA" and settings["base_model_name_or_path"] == "org/base"
  assert settings["task_type"] == "CAUSAL_LM" and not settings["fan_in_fan_out"] and settings["bias"] == "none"

  # PEFT's rule: W + lora_alpha / r · B A for every module that is named.
  weights = safetensors.numpy.load_file(tmp_path / "base" / "model.safetensors")
  tensors = safetensors.numpy.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
  first = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
  assert tensors[f"{first}A.weight"].shape == (2, 24) and tensors[f"{first}B.weight"].shape == (32, 2)
  scale = settings["lora_alpha"] / settings["r"]
  named = [*settings["target_modules"], *(x.removesuffix(".weight") for x in settings.get("target_parameters", ()))]
  for module in named:
    a, b = (tensors.pop(f"base_model.model.{module}.lora_{x}.weight") for x in "AB")
    weights[f"{module}.weight"] += (scale * b.astype(np.float64) @ a).astype(np.float32)
  assert not tensors
  safetensors.numpy.save_file(weights, tmp_path / "base" / "model.safetensors")
  loaded, found = models.load_hf(tmp_path / "base")
  wanted = models.policy_logits(config)(lora.merge_all(LORA, params, adapters), TOKENS)
  np.testing.assert_allclose(models.policy_logits(loaded)(found, TOKENS), wanted, rtol=1e-4, atol=1e-4)
  assert np.max(np.abs(models.policy_logits(config)(params, TOKENS) - wanted)) > 0.05


@pytest.mark.parametrize(
  ("make", "settings"),
  [
    (lambda: tiny.dense(model_type="qwen3"), LORA),
    (
      lambda: tiny.dense(
        model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, mlp_only_layers=(0,)
      ),
      LORA,
    ),
    (lambda: tiny.sparse(model_type="glm4_moe"), LORA),
    (tiny.latent, MLPS),
  ],
  ids=["qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"],
)  # fmt: skip
def test_peft_reads_them(make, settings, tmp_path):
  missing = [package for package in ("peft", "torch", "transformers") if importlib.util.find_spec(package) is None]
  if missing:
    pytest.skip(f"needs {', '.join(missing)}, which no extra of this package brings")
  config = make()
  params = tiny.policy_params(config)
  adapters = moved(lora.init_adapters(config, settings, jax.random.key(1)))
  models.save_hf(tmp_path / "base", config, params)
  peft.save(tmp_path / "adapter", config, settings, adapters, base=str(tmp_path / "base"))
  np.save(tmp_path / "tokens.npy", np.asarray(TOKENS))
  names = ("base", "adapter", "tokens.npy", "logits.npy")
  done = subprocess.run(
    [sys.executable, "-c", IN_PEFT, *(tmp_path / name for name in names)],
    capture_output=True, text=True, timeout=300, check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-2_000:]
  assert "missing adapter keys" not in done.stderr
  wanted = models.policy_logits(config)(lora.merge_all(settings, params, adapters), TOKENS)
  np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), wanted, atol=1e-4)
  assert np.max(np.abs(models.policy_logits(config)(params, TOKENS) - wanted)) > 0.05


def test_mlps_beside_experts_are_named_by_their_weights(tmp_path):
  """PEFT takes modules named `up_proj` in such a model for its experts, and would leave these adapters out."""
  config = tiny.sparse(model_type="glm4_moe")
  peft.save(tmp_path, config, LORA, lora.init_adapters(config, LORA, jax.random.key(1)), base=None)
  settings = json.loads((tmp_path / "adapter_config.json").read_text())
  assert settings["target_modules"] and all(".self_attn." in name for name in settings["target_modules"])
  assert "model.layers.0.mlp.up_proj.weight" in settings["target_parameters"]
  assert "model.layers.1.mlp.shared_experts.up_proj.weight" in settings["target_parameters"]
