"""Conversion between `ModelConfig` and the Hugging Face `config.json` of the types in `config.MODEL_TYPES`.

An unknown key is an error unless its value is empty (null, false, [] or {}). A switch that the decoder does not support
is an error that names it. Missing keys get the defaults of transformers, which differ by family.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from sao_jax.models import token_ids
from sao_jax.models.checkpoints import hf_latent
from sao_jax.models.checkpoints.hf_keys import Keys
from sao_jax.models.config import DTYPES, MODEL_TYPES, ModelConfig, RopeScaling

# Keys without an effect on the decoder: bookkeeping, special tokens, initial values, training-only losses.
_INERT = frozenset(
  {
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "finetuned",
    "finetuning_task",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
    "max_window_layers",
    "model_type",
    "num_labels",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "output_router_logits",
    "pretraining_tp",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "sep_token_id",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unk_token_id",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
  }
)

# Settings of sampling and of transformers itself, found in old files. transformers ignores them too.
_OF_GENERATION = frozenset(
  {
    "attn_implementation",
    "diversity_penalty",
    "do_sample",
    "encoder_no_repeat_ngram_size",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "repetition_penalty",
    "return_dict_in_generate",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
  }
)

# Fields of ModelConfig that do not change the model, or that are saved in another file.
_NOT_IN_CONFIG = frozenset({
  "dtype", "param_dtype", "remat", "moe_impl", "attention_impl", "init_std", "generation_token_ids",
})  # fmt: skip

_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
  "llama": {"max_position_embeddings": 2048},
  "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
  "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
  "qwen3_moe": {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
  },
  "glm4_moe": {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": True,
    "max_position_embeddings": 131_072,
  },
  **hf_latent.DEFAULTS,
}


def config_from_hf(values: Mapping[str, Any]) -> ModelConfig:
  """Reads the contents of a `config.json`.

  Args:
    values: the parsed JSON object.

  Returns:
    The config of the model. `param_dtype` is the dtype of the file; `dtype` is float32.

  Raises:
    ValueError: a required key is missing, or a key or value is not supported; the message names it.
  """
  model_type = values.get("model_type")
  if model_type not in MODEL_TYPES:
    raise ValueError(f"config.json: model_type must be one of {MODEL_TYPES}; received {model_type!r:.200}.")
  keys = Keys({**_aliases_of_defaults(model_type, values), **values}, f"config.json of type {model_type}")
  _refuse_unsupported(keys, model_type)
  heads = keys.take("num_attention_heads")
  hidden = keys.take("hidden_size")
  layers = keys.take("num_hidden_layers")
  fields: dict[str, Any] = {
    "model_type": model_type,
    "vocab_size": keys.take("vocab_size"),
    "hidden_size": hidden,
    "num_layers": layers,
    "num_heads": heads,
    "num_kv_heads": keys.take("num_key_value_heads", default=heads),
    "head_dim": keys.take("head_dim", default=hidden // heads),
    "intermediate_size": keys.take("intermediate_size"),
    "tie_word_embeddings": keys.take("tie_word_embeddings", default=False),
    "norm_eps": keys.take("rms_norm_eps", default=1e-6),
    "max_position_embeddings": keys.take("max_position_embeddings", default=32_768),
    "qk_norm": keys.take("use_qk_norm", default=False) if model_type == "glm4_moe" else model_type.startswith("qwen3"),
    "attention_bias": keys.take("attention_bias", default=False) or model_type == "qwen2",  # always there
    "mlp_bias": keys.take("mlp_bias", default=False) if model_type == "llama" else False,
    "token_ids": token_ids.from_hf(keys.take_all(*token_ids.KEYS.values()), model_type),
    "param_dtype": str(keys.take("dtype", "torch_dtype", default="float32")).removeprefix("torch."),
  }
  fields["attention_out_bias"] = fields["attention_bias"] and model_type not in ("qwen2", "glm4_moe")
  fields |= _rope(keys, model_type, fields["max_position_embeddings"])
  fields |= _experts(keys, model_type)
  if model_type in hf_latent.LATENT_TYPES:
    fields |= hf_latent.read(keys, model_type, layers)
  _refuse_sliding_window(keys, layers)
  keys.finish(_INERT | _OF_GENERATION | (hf_latent.INERT if model_type in hf_latent.LATENT_TYPES else frozenset()))
  if fields["param_dtype"] not in DTYPES:
    raise ValueError(f"config.json: dtype must be one of {DTYPES}; received {fields['param_dtype']!r}.")
  return ModelConfig(**fields)


def _aliases_of_defaults(model_type: str, values: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the defaults of the family, without those that the file sets under another name."""
  given = set(values)
  names = {"num_experts", "num_local_experts", "n_routed_experts"}
  if given & names:
    given |= names
  if any("partial_rotary_factor" in (values.get(name) or {}) for name in ("rope_parameters", "rope_scaling")):
    given.add("partial_rotary_factor")
  return {name: value for name, value in _DEFAULTS[model_type].items() if name not in given}


def _refuse_unsupported(keys: Keys, model_type: str) -> None:
  keys.require("hidden_act", ("silu", "swish"))
  keys.require("attention_dropout", (0.0,))
  keys.require("rope_interleaved", (False,))
  keys.require("is_causal", (True,))
  if model_type == "qwen2":
    keys.require("qkv_bias", (True,))
  if model_type in ("qwen3", "qwen3_moe"):  # Published files of Qwen3-Coder have it.
    keys.require("use_qk_norm", (True,))
  if model_type == "qwen3_moe":
    keys.require("shared_expert_intermediate_size", (0,))


def _refuse_sliding_window(keys: Keys, layers: int) -> None:
  used = keys.take("use_sliding_window", default=False)
  window = keys.take("sliding_window", default=None)
  first = keys.take("max_window_layers", default=0)
  types = keys.take("layer_types", default=None)
  if types is None:
    types = ["sliding_attention" if used and window and i >= first else "full_attention" for i in range(layers)]
  if set(types) != {"full_attention"}:
    raise ValueError(
      f"config.json: sliding windows are not supported; received use_sliding_window = {used}, "
      f"sliding_window = {window}, max_window_layers = {first}, layer_types = {sorted(set(types))}."
    )


def _rope(keys: Keys, model_type: str, max_position_embeddings: int) -> dict[str, Any]:
  """Reads the rotary settings from `rope_parameters` (new) or `rope_theta` and `rope_scaling` (old)."""
  new, old = keys.take("rope_parameters", default=None), keys.take("rope_scaling", default=None)
  values = dict(old or new or {})
  # There may be one entry per layer type, and only one type is supported. In the other families transformers ignores
  # such entries, so they are unknown keys.
  if model_type == "qwen3" and isinstance(values.get("full_attention"), Mapping):
    values = dict(values["full_attention"])
  outer_theta = keys.take("rope_theta", default=10_000.0)
  outer_factor = keys.take("partial_rotary_factor", default=1.0)
  outer_length = keys.take("original_max_position_embeddings", default=None)
  rope = Keys(values, "config.json: rope parameters")
  theta = rope.take("rope_theta", default=outer_theta)
  rotated = rope.take("partial_rotary_factor", default=outer_factor)
  if rotated != 1.0 and model_type != "glm4_moe":
    raise ValueError(f"config.json: partial_rotary_factor = {rotated} is not supported in type {model_type}.")
  rope_type = rope.take("rope_type", "type", default="default")
  # A file may hold a length that its rope type does not use.
  length = rope.take("original_max_position_embeddings", default=max_position_embeddings)
  scaling = _scaling(rope, rope_type, outer_length or length, max_position_embeddings)
  rope.finish()
  return {"rope_theta": float(theta), "partial_rotary_factor": rotated, "rope_scaling": scaling}


def _scaling(rope: Keys, rope_type: str, length: int, max_position_embeddings: int) -> RopeScaling:
  if rope_type == "default":
    rope.take("factor", default=None)  # transformers ignores it too
    return RopeScaling()
  if rope_type == "linear":
    return RopeScaling(rope_type=rope_type, factor=float(rope.take("factor")))
  if rope_type == "llama3":
    return RopeScaling(
      rope_type=rope_type,
      factor=float(rope.take("factor")),
      original_max_position_embeddings=length,
      low_freq_factor=float(rope.take("low_freq_factor")),
      high_freq_factor=float(rope.take("high_freq_factor")),
    )
  if rope_type == "yarn":
    factor = float(rope.take("factor", default=max_position_embeddings / length))
    attention_factor = rope.take("attention_factor", default=None)
    return RopeScaling(
      rope_type=rope_type,
      factor=factor,
      original_max_position_embeddings=length,
      attention_factor=None if attention_factor is None else float(attention_factor),
      mscale=float(rope.take("mscale", default=0.0)),
      mscale_all_dim=float(rope.take("mscale_all_dim", default=0.0)),
      beta_fast=float(rope.take("beta_fast", default=32.0)),
      beta_slow=float(rope.take("beta_slow", default=1.0)),
      truncate=rope.take("truncate", default=True),
    )
  raise ValueError(f"config.json: rope_type = {rope_type!r} is not supported; allowed: default, linear, llama3, yarn.")


def _experts(keys: Keys, model_type: str) -> dict[str, Any]:
  if model_type not in ("qwen3_moe", "glm4_moe", *hf_latent.LATENT_TYPES):
    return {}
  fields: dict[str, Any] = {
    "num_experts": keys.take("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_tok": keys.take("num_experts_per_tok"),
    "moe_intermediate_size": keys.take("moe_intermediate_size"),
    "norm_topk_prob": keys.take("norm_topk_prob"),
  }
  if model_type == "qwen3_moe":
    return fields | {
      "router": "softmax",
      "decoder_sparse_step": keys.take("decoder_sparse_step", default=1),
      "mlp_only_layers": tuple(keys.take("mlp_only_layers", default=())),
    }
  keys.require("scoring_func", ("sigmoid",))
  keys.require("topk_method", ("noaux_tc",))
  fields |= {
    "router": "sigmoid",
    "routed_scaling_factor": float(keys.take("routed_scaling_factor", default=1.0)),
    "n_group": keys.take("n_group", default=1),
    "topk_group": keys.take("topk_group", default=1),
    "num_shared_experts": keys.take("n_shared_experts", default=1),
  }
  if model_type != "glm_moe_dsa":  # see `hf_latent`
    fields["first_dense_layers"] = keys.take("first_k_dense_replace", default=1)
  return fields


_ARCHITECTURES: Mapping[str, str] = {
  "llama": "LlamaForCausalLM",
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "qwen3_moe": "Qwen3MoeForCausalLM",
  "glm4_moe": "Glm4MoeForCausalLM",
  "deepseek_v3": "DeepseekV3ForCausalLM",
  "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """Returns the `config.json` of a model, in a form that old and new versions of transformers can read.

  Raises:
    ValueError: the config has a switch that its `model_type` does not support; the message names it.
  """
  values: dict[str, Any] = {
    "architectures": [_ARCHITECTURES[config.model_type]],
    "model_type": config.model_type,
    "vocab_size": config.vocab_size,
    "hidden_size": config.hidden_size,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "intermediate_size": config.intermediate_size,
    "hidden_act": "silu",
    "tie_word_embeddings": config.tie_word_embeddings,
    "rms_norm_eps": config.norm_eps,
    "max_position_embeddings": config.max_position_embeddings,
    "attention_bias": config.attention_bias,
    "attention_dropout": 0.0,
    "rope_theta": config.rope_theta,
    "rope_scaling": _scaling_to_hf(config.rope_scaling),
    "torch_dtype": config.param_dtype,
    **token_ids.to_hf(config.token_ids),
    "use_cache": True,
  }
  values |= {
    "llama": {"mlp_bias": config.mlp_bias},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False},
    "qwen3_moe": {"use_sliding_window": False, **_softmax_experts_to_hf(config)},
    "glm4_moe": {
      "use_qk_norm": config.qk_norm,
      "partial_rotary_factor": config.partial_rotary_factor,
      **_sigmoid_experts_to_hf(config),
    },
  }.get(config.model_type, {})
  if config.model_type in hf_latent.LATENT_TYPES:
    values |= _sigmoid_experts_to_hf(config) | hf_latent.write(config)
  _check_round_trip(config, values)
  return values


def _scaling_to_hf(scaling: RopeScaling) -> dict[str, Any] | None:
  if scaling.rope_type == "default":
    return None
  names = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
             "mscale", "mscale_all_dim"),
  }[scaling.rope_type]  # fmt: skip
  values = {name: getattr(scaling, name) for name in names}
  unset = {"attention_factor": None, "mscale": 0.0, "mscale_all_dim": 0.0}
  return {"rope_type": scaling.rope_type, **{k: v for k, v in values.items() if k not in unset or v != unset[k]}}


def _softmax_experts_to_hf(config: ModelConfig) -> dict[str, Any]:
  return {
    "num_experts": config.num_experts,
    "num_experts_per_tok": config.num_experts_per_tok,
    "moe_intermediate_size": config.moe_intermediate_size,
    "norm_topk_prob": config.norm_topk_prob,
    "decoder_sparse_step": config.decoder_sparse_step,
    "mlp_only_layers": list(config.mlp_only_layers),
  }


def _sigmoid_experts_to_hf(config: ModelConfig) -> dict[str, Any]:
  return {
    "n_routed_experts": config.num_experts,
    "num_experts_per_tok": config.num_experts_per_tok,
    "moe_intermediate_size": config.moe_intermediate_size,
    "norm_topk_prob": config.norm_topk_prob,
    "routed_scaling_factor": config.routed_scaling_factor,
    "n_group": config.n_group,
    "topk_group": config.topk_group,
    "n_shared_experts": config.num_shared_experts,
    "first_k_dense_replace": config.first_dense_layers,
    "num_nextn_predict_layers": 0,
  }


def _check_round_trip(config: ModelConfig, values: Mapping[str, Any]) -> None:
  read = config_from_hf(values)
  lost = {
    field.name: getattr(config, field.name)
    for field in dataclasses.fields(config)
    if field.name not in _NOT_IN_CONFIG and getattr(config, field.name) != getattr(read, field.name)
  }
  if lost:
    raise ValueError(f"model_type {config.model_type!r} cannot carry {lost}; choose another of {MODEL_TYPES}.")


def is_mtp_tensor(name: str, config: ModelConfig) -> bool:
  """Whether a tensor is of the multi-token-prediction layers that GLM and DeepSeek append; the decoder has none."""
  match = re.match(r"model\.layers\.(\d+)\.", name)
  appended = match is not None and int(match.group(1)) >= config.num_layers
  return appended and config.model_type in ("glm4_moe", *hf_latent.LATENT_TYPES)
