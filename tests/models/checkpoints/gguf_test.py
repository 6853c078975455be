"""GGUF files written with the `gguf` package from the fixtures of llama and qwen2."""

from __future__ import annotations

import pathlib
import struct
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import safetensors.numpy

from sao_jax import models
from sao_jax.models.layers import rope_frequencies
from sao_jax.models.token_ids import TokenIds
from sao_jax.utils import untrusted_files
from tests.models.checkpoints.huggingface_test import FIXTURES

_NAMES = {
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def _interleave(rows: np.ndarray, heads: int) -> np.ndarray:
  """Orders the rows of q and k like llama.cpp's converter."""
  return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write(
  path: pathlib.Path,
  *,
  architecture: str = "llama",
  head_dim: int = 16,
  quantized: bool = False,
  divisors: np.ndarray | None = None,
  theta: float = 1e5,
  tokens: dict[str, int] | None = None,
  **extra: Any,
) -> None:
  tensors = safetensors.numpy.load_file(FIXTURES / architecture / "model.safetensors")
  writer = gguf.GGUFWriter(path, architecture)
  writer.add_block_count(2)
  writer.add_context_length(512)
  writer.add_embedding_length(32)
  writer.add_feed_forward_length(80)
  writer.add_head_count(4)
  writer.add_head_count_kv(2)
  writer.add_key_length(head_dim)
  writer.add_rope_dimension_count(head_dim)
  writer.add_rope_freq_base(theta)
  writer.add_layer_norm_rms_eps(1e-6)
  for name, number in (tokens or {}).items():
    writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
  for name, value in extra.items():
    writer.add_float32(f"{architecture}." + name.replace("__", "."), value)
  if divisors is not None:
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
  for name, value in tensors.items():
    short = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}.get(name)
    if short is None:
      _, _, layer, module = name.rsplit(".", 1)[0].split(".", 3)
      short = f"blk.{layer}.{_NAMES[module]}.{name.rsplit('.', 1)[1]}"
      heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(module)
      value = _interleave(value, heads) if heads and architecture == "llama" else value
    if quantized and value.ndim == 2 and value.shape[1] % 32 == 0:
      kind = gguf.GGMLQuantizationType.Q8_0
      writer.add_tensor(short, gguf.quants.quantize(value, kind), raw_dtype=kind)
    else:
      writer.add_tensor(short, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


@pytest.mark.parametrize(("architecture", "head_dim", "theta"), [("llama", 16, 1e5), ("qwen2", 8, 1e6)])
def test_equals_the_safetensors_model(architecture: str, head_dim: int, theta: float, tmp_path: pathlib.Path) -> None:
  _write(tmp_path / "model.gguf", architecture=architecture, head_dim=head_dim, theta=theta)
  config, params = models.load_gguf(tmp_path / "model.gguf")
  want_config, want = models.load_hf(FIXTURES / architecture)
  assert config == want_config
  jax.tree.map(np.testing.assert_array_equal, params, want)


@pytest.mark.parametrize(
  ("tokens", "ids"),
  [
    ({}, TokenIds()),
    ({"bos": 3, "eos": 4, "padding": 5}, TokenIds(bos=3, eos=4, pad=5)),
    ({"eos": 4, "eot": 6}, TokenIds(eos=(4, 6))),
    ({"eos": 4, "eot": 4}, TokenIds(eos=4)),
    ({"eot": 6}, TokenIds(eos=6)),
  ],
)
def test_token_ids_are_kept(tokens: dict[str, int], ids: TokenIds, tmp_path: pathlib.Path) -> None:
  _write(tmp_path / "model.gguf", tokens=tokens)
  config, params = models.load_gguf(tmp_path / "model.gguf")
  assert config.token_ids == ids
  models.save_hf(tmp_path, config, params)
  assert models.load_hf(tmp_path)[0].token_ids == ids


def test_a_token_id_that_is_none_is_refused_by_file(tmp_path: pathlib.Path) -> None:
  _write(tmp_path / "model.gguf", tokens={"eos": 2**32 - 1})
  with pytest.raises(ValueError, match=r"model\.gguf: eos_token_id must be .* received 4294967295"):
    models.load_gguf(tmp_path / "model.gguf")


def test_quantized_tensors_are_expanded(tmp_path: pathlib.Path) -> None:
  _write(tmp_path / "model.gguf", quantized=True)
  _, params = models.load_gguf(tmp_path / "model.gguf")
  _, want = models.load_hf(FIXTURES / "llama")
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.01), params, want)


def _header(tensors: int, keys: int, rest: bytes) -> bytes:
  return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def _array(kind: int, count: int, values: bytes) -> bytes:
  return struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count) + values


@pytest.mark.parametrize(
  "content",
  [
    b"GGUF",
    b"not a GGUF file",
    _header(2**60, 0, b""),
    _header(0, 2**64 - 1, b""),
    _header(0, 1, struct.pack("<Q", 2**64 - 1) + b"a"),  # a name as long as that
    _header(0, 1, _array(0, 2**60, b"x" * 100)),  # bytes
    _header(0, 1, _array(9, 2**60, b"")),  # arrays
    _header(0, 1, _array(9, 1, struct.pack("<IQ", 9, 1) * 5000)),  # arrays in arrays
    _header(0, 1, _array(77, 1, b"x" * 100)),
    _header(1, 0, struct.pack("<Q", 1) + b"t" + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + b"x" * 64),
    _header(1, 0, struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 4, 0, 2**62) + b"x" * 64),
  ],
)
def test_hostile_files_are_refused_by_name_at_once(content: bytes, tmp_path: pathlib.Path) -> None:
  (tmp_path / "x.gguf").write_bytes(content)
  with pytest.raises(ValueError, match=r"x\.gguf is not a valid GGUF file: ."):
    models.load_gguf(tmp_path / "x.gguf")


def test_an_array_of_endless_values_is_not_held(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
  monkeypatch.setattr(untrusted_files, "_MOST_GGUF_VALUES", 1000)
  (tmp_path / "x.gguf").write_bytes(_header(0, 1, _array(0, 2000, b"x" * 2000)))
  with pytest.raises(ValueError, match=r"x\.gguf is not a valid GGUF file: it has more than 1000 values"):
    models.load_gguf(tmp_path / "x.gguf")


def test_unsupported_keys_are_named(tmp_path: pathlib.Path) -> None:
  _write(tmp_path / "model.gguf", logit_scale=2.0)
  with pytest.raises(ValueError, match="logit_scale"):
    models.load_gguf(tmp_path / "model.gguf")
  _write(tmp_path / "wrong.gguf", rope__dimension_sections=2.0)
  with pytest.raises(ValueError, match=r"rope\.dimension_sections"):
    models.load_gguf(tmp_path / "wrong.gguf")


def test_a_factor_without_a_type_is_linear_as_in_llama_cpp(tmp_path: pathlib.Path) -> None:
  _write(tmp_path / "model.gguf", rope__scaling__factor=4.0)
  config, _ = models.load_gguf(tmp_path / "model.gguf")
  assert config.rope_scaling == models.RopeScaling(rope_type="linear", factor=4.0)


def _llama3_divisors(theta: float, factor: float, low: float, high: float, length: int) -> np.ndarray:
  """The values of llama.cpp's converter for heads of 16."""
  wavelengths = 2 * np.pi * theta ** (np.arange(0, 16, 2) / 16)
  smooth = (length / wavelengths - low) / (high - low)
  between = 1 / ((1 - smooth) / factor + smooth)
  return np.where(wavelengths < length / high, 1, np.where(wavelengths > length / low, factor, between))


@pytest.mark.parametrize(
  ("theta", "low", "high", "length"),
  [(20.0, 1.0, 4.0, 64), (20.0, 2.0, 4.0, 64), (5e5, 1.0, 4.0, 8192), (1e9, 1.0, 4.0, 8192)],
)
def test_llama3_divisors_become_a_scaling(
  theta: float, low: float, high: float, length: int, tmp_path: pathlib.Path
) -> None:
  """Several frequencies between the bounds (which give only their ratio), one, and none."""
  divisors = _llama3_divisors(theta, 8.0, low, high, length)
  _write(tmp_path / "model.gguf", divisors=divisors, theta=theta)
  config, _ = models.load_gguf(tmp_path / "model.gguf")
  assert config.rope_scaling.rope_type == "llama3"
  plain = theta ** (-np.arange(0, 16, 2) / 16)
  np.testing.assert_allclose(rope_frequencies(config)[0], plain / divisors, rtol=1e-5)
  if length == 8192:
    assert config.rope_scaling == models.RopeScaling(
      rope_type="llama3", factor=8.0, original_max_position_embeddings=8192
    )


@pytest.mark.parametrize("divisors", [np.linspace(1, 8, 8), np.linspace(8, 1, 8), np.full(8, 0.5), np.full(4, 2.0)])
def test_other_divisors_are_refused_by_name(divisors: np.ndarray, tmp_path: pathlib.Path) -> None:
  _write(tmp_path / "model.gguf", divisors=divisors)
  with pytest.raises(ValueError, match=r"model\.gguf: rope_freqs\.weight is not supported"):
    models.load_gguf(tmp_path / "model.gguf")
