"""The keys of latent attention and of its indexer in the `config.json` of deepseek_v3 and glm_moe_dsa."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.models.checkpoints.hf_keys import Keys
from sao_jax.models.config import INDEXER_TYPES, ModelConfig

LATENT_TYPES = ("deepseek_v3", "glm_moe_dsa")
_DEFAULTS: Mapping[str, Any] = {
  "n_routed_experts": 256,
  "num_experts_per_tok": 8,
  "moe_intermediate_size": 2048,
  "norm_topk_prob": True,
  "n_shared_experts": 1,
  "routed_scaling_factor": 2.5,
  "first_k_dense_replace": 3,
  "kv_lora_rank": 512,
  "qk_rope_head_dim": 64,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
  "deepseek_v3": {
    **_DEFAULTS,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 4096,
  },
  "glm_moe_dsa": {
    **_DEFAULTS,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
  },
}
"""Defaults of transformers."""
INERT = frozenset({"aux_loss_alpha", "ep_size", "index_share_for_mtp_iteration", "mlp_bias", "qk_head_dim", "seq_aux"})
"""Keys without an effect. transformers, too, computes `qk_head_dim` and `head_dim` itself, and has no biases in these
MLPs."""
_LAYER_TYPE: Mapping[str, str] = {"deepseek_v3": "full_attention", "glm_moe_dsa": "indexed_attention"}


def read(keys: Keys, model_type: str, layers: int) -> dict[str, Any]:
  """Reads the fields of latent attention and of the layers' kinds.

  Raises:
    ValueError: a value is not supported; the message names the key.
  """
  keys.require("moe_layer_freq", (1,))
  keys.require("moe_router_dtype", ("float32", "fp32"))
  keys.require("layer_types", ([_LAYER_TYPE[model_type]] * layers,))
  fields: dict[str, Any] = {
    "kv_lora_rank": keys.take("kv_lora_rank"),
    "q_lora_rank": keys.take("q_lora_rank", default=0),
    "head_dim": keys.take("qk_rope_head_dim"),
    "qk_nope_head_dim": keys.take("qk_nope_head_dim"),
    "v_head_dim": keys.take("v_head_dim"),
    "rope_interleave": True,
  }
  if model_type == "deepseek_v3":
    return fields | {"rope_interleave": keys.take("rope_interleave", default=True)}
  for name in ("rope_interleave", "indexer_rope_interleave"):
    keys.require(name, (True,))
  fields |= {name: keys.take(name) for name in ("index_topk", "index_n_heads", "index_head_dim")}
  fields["indexer_types"] = _indexer_types(keys, layers)
  return fields | _dense_layers(keys, layers)


def _indexer_types(keys: Keys, layers: int) -> tuple[str, ...]:
  """The kind of each layer, from a list, else from a pattern such as "FSSS", else from a frequency and an offset."""
  types, pattern = keys.take("indexer_types", default=None), keys.take("index_topk_pattern", default=None)
  every, offset = keys.take("index_topk_freq", default=1), keys.take("index_skip_topk_offset", default=2)
  if types is None and pattern is not None:
    types = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
  if types is None:
    types = ["shared" if max(i - offset + 1, 0) % max(every, 1) else "full" for i in range(layers)]
  _check_list("indexer_types", types, INDEXER_TYPES, layers)
  return tuple(types)


def _dense_layers(keys: Keys, layers: int) -> dict[str, Any]:
  """Reads the layers without experts: those that `mlp_layer_types` names, else the first ones."""
  types, first = keys.take("mlp_layer_types", default=None), keys.take("first_k_dense_replace")
  if types is None:
    return {"first_dense_layers": first}
  _check_list("mlp_layer_types", types, ("dense", "sparse"), layers)
  first = next((i for i, kind in enumerate(types) if kind == "sparse"), layers)
  return {
    "first_dense_layers": first,
    "mlp_only_layers": tuple(i for i in range(first, layers) if types[i] == "dense"),
  }


def _check_list(name: str, received: Any, allowed: Sequence[str], layers: int) -> None:
  if not isinstance(received, list) or len(received) != layers or any(kind not in allowed for kind in received):
    raise ValueError(
      f"{name} must be a list of {allowed}, one for each of {layers} layers; received {received!r:.200}."
    )


def write(config: ModelConfig) -> dict[str, Any]:
  """The keys of `read`."""
  values = {
    "kv_lora_rank": config.kv_lora_rank,
    "q_lora_rank": config.q_lora_rank or None,
    "qk_rope_head_dim": config.head_dim,
    "qk_nope_head_dim": config.qk_nope_head_dim,
    "qk_head_dim": config.qk_nope_head_dim + config.head_dim,
    "v_head_dim": config.v_head_dim,
    "rope_interleave": config.rope_interleave,
  }
  if config.model_type == "deepseek_v3":
    return values
  layers = range(config.num_layers)
  return values | {
    "indexer_rope_interleave": config.rope_interleave,
    "index_topk": config.index_topk,
    "index_n_heads": config.index_n_heads,
    "index_head_dim": config.index_head_dim,
    "indexer_types": list(config.indexer_types),
    "mlp_layer_types": ["sparse" if config.is_sparse(i) else "dense" for i in layers],
  }
