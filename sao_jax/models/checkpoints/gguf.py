"""Loading of GGUF files of llama and qwen2 with the optional `gguf` package: `load_gguf`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.models.config import ModelConfig, RopeScaling
from sao_jax.models.heads import init_policy
from sao_jax.models.layers import rope_frequencies
from sao_jax.models.token_ids import TokenIds
from sao_jax.types import Params
from sao_jax.utils import untrusted_files

_ARCHITECTURES = ("llama", "qwen2")
# Metadata that needs no field of the config. Any other unread key of the architecture is an error.
_INERT = frozenset({"vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length"})

_FREQUENCIES = "rope_freqs.weight"
"""Tensor that files of Llama 3.1 and later hold instead of keys: a divisor for each frequency."""
_TOP: Mapping[str, str] = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
_MODULES: Mapping[str, str] = {
  "input_norm": "attn_norm",
  "post_attention_norm": "ffn_norm",
  "q_proj": "attn_q",
  "k_proj": "attn_k",
  "v_proj": "attn_v",
  "o_proj": "attn_output",
  "gate_proj": "ffn_gate",
  "up_proj": "ffn_up",
  "down_proj": "ffn_down",
}


def load_gguf(
  path: str | os.PathLike[str], *, dtype: str = "float32", param_dtype: str = "float32"
) -> tuple[ModelConfig, Params]:
  """Loads a GGUF file of architecture "llama" or "qwen2". Quantised tensors are expanded one at a time.

  Args:
    path: the file.
    dtype: dtype of activations and matmuls.
    param_dtype: dtype of the parameters.

  Returns:
    `(config, params)`; params have the layout of `init_policy(config)`.

  Raises:
    MissingExtraError: the optional package `gguf` is not installed.
    ValueError: the architecture, a key or a tensor is not supported; the message names it.
  """
  config, tensors = _read(path, dtype, param_dtype)
  import gguf.quants

  shapes = jax.eval_shape(lambda key: init_policy(config, key), jax.random.key(0))
  names = {_name(_names(p)): _names(p) for p, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]}
  unknown, missing = sorted(set(tensors) - set(names)), sorted(set(names) - set(tensors))
  if unknown or missing:
    raise ValueError(f"{path}: unsupported tensors: {unknown[:5]}; missing tensors: {missing[:5]}.")

  def load(tree_path: Any, want: jax.ShapeDtypeStruct) -> jax.Array:
    stored = tensors[_name(_names(tree_path))]
    shape = tuple(int(size) for size in reversed(stored.shape))
    stored_shape = want.shape[::-1] if _names(tree_path)[-1] == "kernel" else want.shape
    if shape != stored_shape:
      raise ValueError(f"{path}: {stored.name} must have shape {list(stored_shape)}; received {list(shape)}.")
    try:
      value = gguf.quants.dequantize(stored.data, stored.tensor_type)
    except (NotImplementedError, ValueError) as error:
      raise ValueError(f"{path}: {stored.name} of type {stored.tensor_type.name}: {error}") from error
    if not np.isfinite(value).all():
      raise ValueError(f"{path}: {stored.name} holds NaN or infinite values.")
    value = _to_half_split(value, _names(tree_path), config)
    value = value.T if _names(tree_path)[-1] == "kernel" else value
    return jnp.asarray(value, want.dtype)

  return config, jax.tree_util.tree_map_with_path(load, shapes)


def read_gguf_config(
  path: str | os.PathLike[str], *, dtype: str = "float32", param_dtype: str = "float32"
) -> ModelConfig:
  """Reads the architecture of a GGUF file, and none of its weights; see `load_gguf`."""
  return _read(path, dtype, param_dtype)[0]


def _read(path: str | os.PathLike[str], dtype: str, param_dtype: str) -> tuple[ModelConfig, dict[str, Any]]:
  """Returns the model's config and the tensors by name, without the one that the config stands for."""
  reader = untrusted_files.open_gguf(path)
  import gguf.quants

  tensors = {tensor.name: tensor for tensor in reader.tensors}
  try:
    config = _config(reader, tensors, dtype, param_dtype)
    if _FREQUENCIES in tensors:
      stored = tensors.pop(_FREQUENCIES)
      config = _with_divisors(config, gguf.quants.dequantize(stored.data, stored.tensor_type).astype(np.float64))
    if config.num_layers > len(tensors):
      raise ValueError(f"block_count = {config.num_layers} needs more than the {len(tensors)} tensors of the file.")
  except (ValueError, KeyError, TypeError, IndexError, ArithmeticError) as error:
    raise ValueError(f"{path}: {error if isinstance(error, ValueError) else repr(error)}") from error
  return config, tensors


def _names(path: Any) -> tuple[str, ...]:
  return tuple(key.key for key in path)


def _name(path: tuple[str, ...]) -> str:
  if path[0] in _TOP:
    return _TOP[path[0]]
  kind = "bias" if path[-1] == "bias" else "weight"
  return f"blk.{path[0].removeprefix('layers_')}.{_MODULES[path[-2]]}.{kind}"


def _to_half_split(value: np.ndarray, path: tuple[str, ...], config: ModelConfig) -> np.ndarray:
  """Undoes the row order of q and k in files of llama, where the two rows of a rotated pair are adjacent."""
  heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(path[-2])
  if heads is None or config.model_type != "llama":
    return value
  return value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _metadata(reader: Any, architecture: str) -> Iterator[tuple[str, Any]]:
  for name, field in reader.fields.items():
    if name.startswith(f"{architecture}."):
      yield name.removeprefix(f"{architecture}."), field.contents()


def _config(reader: Any, tensors: dict[str, Any], dtype: str, param_dtype: str) -> ModelConfig:
  field = reader.fields.get("general.architecture")
  architecture = None if field is None else field.contents()
  if architecture not in _ARCHITECTURES:
    raise ValueError(f"load_gguf reads the architectures {_ARCHITECTURES}; received {architecture!r}.")
  values = dict(_metadata(reader, architecture))
  heads, hidden = values.pop("attention.head_count"), values.pop("embedding_length")
  head_dim = values.get("attention.key_length", hidden // heads)
  for name in ("rope.dimension_count", "attention.value_length"):
    if values.get(name, head_dim) != head_dim:
      raise ValueError(f"{architecture}.{name} = {values[name]} is not supported with heads of {head_dim} dimensions.")
  config = ModelConfig(
    model_type=architecture,
    vocab_size=int(tensors["token_embd.weight"].shape[1]),
    hidden_size=hidden,
    num_heads=heads,
    num_kv_heads=values.pop("attention.head_count_kv", heads),
    head_dim=head_dim,
    num_layers=values.pop("block_count"),
    intermediate_size=values.pop("feed_forward_length"),
    norm_eps=_decimal(values.pop("attention.layer_norm_rms_epsilon")),
    rope_theta=_decimal(values.pop("rope.freq_base", 10_000.0)),
    rope_scaling=_scaling(values),
    max_position_embeddings=values.pop("context_length"),
    qk_norm=False,
    tie_word_embeddings="output.weight" not in tensors,
    attention_bias="blk.0.attn_q.bias" in tensors,
    attention_out_bias="blk.0.attn_output.bias" in tensors,
    mlp_bias="blk.0.ffn_gate.bias" in tensors,
    token_ids=_token_ids(reader),
    dtype=dtype,
    param_dtype=param_dtype,
  )
  unknown = {name: value for name, value in values.items() if name not in _INERT and value}
  if unknown:
    raise ValueError(f"These {architecture}.* keys of the GGUF file are not supported: {unknown}.")
  return config


def _token_ids(reader: Any) -> TokenIds:
  """Returns bos, eos and pad. If the file names a token that ends a turn, it counts as an eos."""
  names = ("bos", "eos", "eot", "padding")
  fields = {name: reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in names}
  bos, eos, eot, pad = (None if field is None else field.contents() for field in fields.values())
  return TokenIds(bos=bos, eos=eos if eot in (None, eos) else eot if eos is None else (eos, eot), pad=pad)


def _decimal(value: float) -> float:
  """Returns the intended number. The file rounds it to float32, so 1e-6 would read as 9.99999997e-07."""
  return float(str(np.float32(value)))


def _scaling(values: dict[str, Any]) -> RopeScaling:
  kind = values.pop("rope.scaling.type", "linear")  # llama.cpp's default
  factor = float(values.pop("rope.scaling.factor", 0.0))
  if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
    return RopeScaling()
  if kind == "linear":
    return RopeScaling(rope_type="linear", factor=factor)
  raise ValueError(f"rope.scaling.type = {kind!r} is not supported; allowed: none, linear.")


def _with_divisors(config: ModelConfig, divisors: np.ndarray) -> ModelConfig:
  """Returns the config with "llama3" scaling that divides the frequencies by `divisors` `[head_dim / 2]`.

  The divisors determine the factor and, up to a common scale, the bounds and the length. The rest comes from
  Llama 3.1. The result is checked against the divisors.
  """
  plain, most = rope_frequencies(config)[0], float(np.max(divisors, initial=1.0))
  refused = ValueError(f"{_FREQUENCIES} is not supported: it does not have the form of Llama 3.1 ('llama3').")
  if divisors.shape != plain.shape or config.rope_scaling != RopeScaling() or not (divisors >= 1.0).all():
    raise refused
  if most == 1.0:
    return config
  high, length = 4.0, 8192
  kept = (1.0 / divisors - 1.0 / most) / (1.0 - 1.0 / most)  # For each frequency: 1 is unchanged, 0 is fully divided.
  between = (kept > 1e-5) & (kept < 1.0 - 1e-5)
  turns, kept = plain[between] / (2.0 * math.pi), kept[between]
  if kept.size >= 2:  # kept = (length * turns - 1) / (high - 1)
    slope, offset = np.polyfit(turns, kept, 1)
    high = round(1.0 - 1.0 / min(offset, -1e-9), 3)
    length = round(slope * (high - 1.0))
  elif kept.size == 1:
    length = round((kept[0] * (high - 1.0) + 1.0) / turns[0])
  if high <= 1.0 or not 0 < length < 2**31:
    raise refused
  scaling = RopeScaling(rope_type="llama3", factor=most, original_max_position_embeddings=length, high_freq_factor=high)
  scaled = dataclasses.replace(config, rope_scaling=scaling)
  if not np.allclose(plain / rope_frequencies(scaled)[0], divisors, rtol=1e-4):
    raise refused
  return scaled
