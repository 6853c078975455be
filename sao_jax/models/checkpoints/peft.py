"""Saving of low-rank adapters in the format of PEFT, which transformers and vLLM load on top of the base model."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sao_jax.models.checkpoints import shards
from sao_jax.models.checkpoints.huggingface import tensor_name
from sao_jax.models.config import ModelConfig
from sao_jax.models.lora import A, B, LoraConfig
from sao_jax.types import Params

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save(
  directory: str | os.PathLike[str], config: ModelConfig, lora: LoraConfig, adapters: Params, *, base: str | None
) -> list[str]:
  """Writes `adapter_config.json` and `adapter_model.safetensors`. Replaces existing ones.

  Tensors are named as in `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight` `[r, in]` and
  `....lora_B.weight` `[out, r]`. In models with experts, the config names adapted MLPs under `target_parameters`, which
  PEFT knows since 0.17. The folder must not be that of a model, which transformers would then take for an adapter.

  Args:
    directory: the folder; made if needed.
    config: the base model.
    lora: rank and α.
    adapters: from `lora.init_adapters` or a run; addressable from this host.
    base: name or folder of the base model, for the config; None: not named.

  Returns:
    The names of the files.
  """
  tensors: dict[str, np.ndarray] = {}
  modules = []
  for path, a, b in _modules(adapters):
    module = tensor_name((*path, "kernel"), config).removesuffix(".weight")
    modules.append(module)
    tensors[f"{_PREFIX}{module}.lora_A.weight"] = np.ascontiguousarray(a.T)
    tensors[f"{_PREFIX}{module}.lora_B.weight"] = np.ascontiguousarray(b.T)
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  temporary = folder / f".{WEIGHTS_FILE}.part"
  shards.save(tensors, temporary)
  temporary.replace(folder / WEIGHTS_FILE)
  temporary = folder / f".{CONFIG_FILE}.part"
  temporary.write_text(json.dumps(_config(config, lora, modules, base), indent=2) + "\n", encoding="utf-8")
  temporary.replace(folder / CONFIG_FILE)
  return [CONFIG_FILE, WEIGHTS_FILE]


def _modules(adapters: Params, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], np.ndarray, np.ndarray]]:
  """Yields path, A and B of every adapted module."""
  if A in adapters:
    yield path, np.asarray(adapters[A]), np.asarray(adapters[B])
    return
  for name, value in adapters.items():
    if isinstance(value, Mapping):
      yield from _modules(value, (*path, name))


def _config(config: ModelConfig, lora: LoraConfig, modules: list[str], base: str | None) -> dict[str, Any]:
  # In models with experts, PEFT takes every module named `gate_proj`, `up_proj` or `down_proj` for one of the experts,
  # also in a dense layer or a shared expert, and would leave its adapter out. Named by their weights, they are found.
  by_weight = [module for module in modules if config.num_experts and ".mlp." in module]
  return {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": base,
    "r": lora.rank,
    "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
    # Whole paths: a short name such as "up_proj" would also match the experts of a layer.
    "target_modules": [module for module in modules if module not in by_weight],
    **({"target_parameters": [f"{module}.weight" for module in by_weight]} if by_weight else {}),
    "lora_dropout": 0.0,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
  }
