"""Hugging Face checkpoints against references made with transformers (tests/models/fixtures)."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from sao_jax import models
from sao_jax.models import sparse_attention
from sao_jax.models.checkpoints import huggingface
from sao_jax.models.checkpoints.hf_config import config_from_hf, config_to_hf
from sao_jax.types import Params
from tests.models import tiny, torch_ties

FIXTURES = pathlib.Path(__file__).parents[1] / "fixtures"
TYPES = (
  "llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v3_yarn", "glm_moe_dsa",
  "glm_moe_dsa_shared",
)  # fmt: skip


@functools.cache
def _loaded(model_type: str) -> tuple[models.ModelConfig, Params]:
  return models.load_hf(FIXTURES / model_type)


@functools.cache
def _logits(config: models.ModelConfig) -> Any:
  return jax.jit(models.policy_logits(config))


def _reference(model_type: str) -> dict[str, np.ndarray]:
  return safetensors.numpy.load_file(FIXTURES / model_type / "reference.safetensors")


def _values(model_type: str, /, **changes: Any) -> dict[str, Any]:
  return {**json.loads((FIXTURES / model_type / "config.json").read_text()), **changes}


def _copy(
  model_type: str, directory: pathlib.Path, *, drop: tuple[str, ...] = (), **changes: Any
) -> dict[str, np.ndarray]:
  """Writes the config of a fixture with changes; returns the tensors for the test to store."""
  directory.mkdir(parents=True, exist_ok=True)
  values = {name: value for name, value in _values(model_type, **changes).items() if name not in drop}
  (directory / "config.json").write_text(json.dumps(values))
  return safetensors.numpy.load_file(FIXTURES / model_type / "model.safetensors")


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_and_log_probs_equal_transformers(model_type: str) -> None:
  config, params = _loaded(model_type)
  reference = _reference(model_type)
  with pytest.MonkeyPatch.context() as patch:  # for the time of tracing, at the first call
    patch.setattr(sparse_attention, "top_mask", torch_ties.top_mask)
    logits = np.asarray(_logits(config)(params, reference["input_ids"]))
  np.testing.assert_allclose(logits, reference["logits"], atol=1e-4)
  logp = np.asarray(jax.nn.log_softmax(logits))[:, :-1]
  picked = np.take_along_axis(logp, reference["input_ids"][:, 1:, None], axis=-1)[..., 0]
  np.testing.assert_allclose(picked, reference["logprobs"], atol=1e-4)


@pytest.mark.parametrize("model_type", TYPES)
def test_greedy_tokens_equal_transformers(model_type: str) -> None:
  """The reference is 8 prompt tokens and 24 that transformers chose, each the likeliest after those before it."""
  config, params = _loaded(model_type)
  reference = _reference(model_type)
  greedy = reference["greedy"][0]
  tokens = np.zeros_like(reference["input_ids"])  # the shape that is compiled already
  tokens[0, : greedy.size] = greedy
  chosen = np.argmax(_logits(config)(params, tokens)[0], axis=-1)
  np.testing.assert_array_equal(chosen[7 : greedy.size - 1], greedy[8:])


def _equal_trees(a: Params, b: Params) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("model_type", TYPES)
def test_save_then_load_gives_the_same_model(model_type: str, tmp_path: pathlib.Path) -> None:
  config, params = _loaded(model_type)
  models.save_hf(tmp_path, config, params)
  read, again = models.load_hf(tmp_path)
  assert read == config
  _equal_trees(again, params)
  written = safetensors.numpy.load_file(tmp_path / "model.safetensors")
  jax.tree.map(
    np.testing.assert_array_equal, written, safetensors.numpy.load_file(FIXTURES / model_type / "model.safetensors")
  )
  with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
    assert file.metadata() == {"format": "pt"}  # transformers asks for it


def test_sharded_files_in_bfloat16(tmp_path: pathlib.Path) -> None:
  config, params = _loaded("glm4_moe")
  half = dataclasses.replace(config, param_dtype="bfloat16")
  cast = jax.tree_util.tree_map_with_path(
    lambda path, x: x if "correction_bias" in jax.tree_util.keystr(path) else x.astype(jnp.bfloat16), params
  )
  models.save_hf(tmp_path, half, cast, max_shard_bytes=40_000)
  assert len(list(tmp_path.glob("model-*.safetensors"))) >= 3
  assert not list(tmp_path.glob(".*"))
  assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}
  read, again = models.load_hf(tmp_path)
  assert (read.param_dtype, read.dtype) == ("bfloat16", "float32")
  _equal_trees(again, cast)
  wide, upcast = models.load_hf(tmp_path, param_dtype="float32")
  assert wide.param_dtype == "float32"
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(upcast))
  models.save_hf(tmp_path, config, params)  # over a sharded one
  assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
  _equal_trees(models.load_hf(tmp_path)[1], params)


def test_a_sharding_places_every_parameter() -> None:
  config, params = _loaded("qwen3_moe")
  mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
  seen: dict[tuple[str, ...], tuple[int, ...]] = {}

  def sharding(path: tuple[str, ...], struct: jax.ShapeDtypeStruct) -> jax.sharding.Sharding:
    seen[path] = struct.shape
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))

  read, placed = models.load_hf(FIXTURES / "qwen3_moe", sharding=sharding)
  assert read == config
  _equal_trees(placed, params)
  assert seen["layers_0", "moe", "gate_proj"] == (6, 32, 24)
  assert all(isinstance(x.sharding, jax.sharding.NamedSharding) for x in jax.tree.leaves(placed))


@pytest.mark.parametrize("fused", [False, True])
def test_parts_of_stored_tensors(fused: bool, tmp_path: pathlib.Path) -> None:
  """Reading a shard equals slicing the whole parameter, for every form of stored tensor."""
  tensors = _copy("qwen3_moe", tmp_path)
  safetensors.numpy.save_file(_fuse(tensors) if fused else tensors, tmp_path / "model.safetensors")
  config, params = _loaded("qwen3_moe")
  with huggingface._Files(tmp_path) as files:
    for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
      source = huggingface._stored(huggingface._names(path), config, fused)
      assert source.shape(files) == value.shape
      part = tuple(slice(n // 4, n - n // 3) for n in value.shape)
      np.testing.assert_array_equal(source.read(files, part), value[part], err_msg=str(path))


def _fuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Converts per-expert tensors to the fused form that transformers 5 keeps in memory."""
  out = {name: value for name, value in tensors.items() if ".experts." not in name}
  for layer in range(2):
    prefix = f"model.layers.{layer}.mlp.experts."
    if f"{prefix}0.gate_proj.weight" not in tensors:
      continue
    names = ("gate_proj", "up_proj", "down_proj")
    stack = {p: np.stack([tensors[f"{prefix}{e}.{p}.weight"] for e in range(6)]) for p in names}
    out[prefix + "gate_up_proj"] = np.concatenate([stack["gate_proj"], stack["up_proj"]], axis=1)
    out[prefix + "down_proj"] = stack["down_proj"]
  return out


@pytest.mark.parametrize("model_type", ["qwen3_moe", "glm4_moe"])
def test_fused_experts_and_other_spellings(model_type: str, tmp_path: pathlib.Path) -> None:
  config, params = _loaded(model_type)
  new = "n_routed_experts" if model_type == "glm4_moe" else "num_local_experts"
  rope = _values(model_type)["rope_parameters"]
  old = {"num_experts": 6, "rope_theta": rope["rope_theta"], "rope_scaling": None, "torch_dtype": "float32"}
  if model_type == "glm4_moe":
    old["partial_rotary_factor"] = 0.5
  tensors = _copy(model_type, tmp_path, drop=(new, "rope_parameters", "dtype"), **old)
  extra = {"model.layers.2.eh_proj.weight": np.zeros((2, 2), np.float32)} if model_type == "glm4_moe" else {}
  safetensors.numpy.save_file({**_fuse(tensors), **extra}, tmp_path / "model.safetensors")
  read, again = models.load_hf(tmp_path)
  assert read == config
  _equal_trees(again, params)


@pytest.mark.parametrize(
  ("model_type", "changes", "field", "want"),
  [
    ("llama", {"rope_parameters": None, "rope_theta": 5e5}, "rope_theta", 5e5),
    ("llama", {"rope_parameters": None}, "rope_theta", 1e4),
    ("llama", {"head_dim": None}, "head_dim", 8),
    ("llama", {"num_key_value_heads": None}, "num_kv_heads", 4),
    ("llama", {"attention_bias": True}, "attention_out_bias", True),
    ("glm4_moe", {"attention_bias": True}, "attention_out_bias", False),
    ("glm4_moe", {"use_qk_norm": None}, "qk_norm", False),
    ("qwen3_moe", {"norm_topk_prob": None}, "norm_topk_prob", True),
    ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers", (1,)),
    (
      "llama",
      {"rope_scaling": {"type": "linear", "factor": 2.0}},
      "rope_scaling",
      models.RopeScaling(rope_type="linear", factor=2.0),
    ),
    (
      "llama",
      {
        "rope_scaling": {
          "rope_type": "llama3",
          "factor": 8.0,
          "low_freq_factor": 1.0,
          "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192,
        }
      },
      "rope_scaling",
      models.RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=8192),
    ),
    (
      "qwen3",
      {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
      "rope_scaling",
      models.RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
    ),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}, "num_layers", 2),  # from 28 on
    ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, "rope_theta", 7.0),
    ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}, "qk_norm", True),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "layer_types": None}, "num_layers", 2),  # from 28 on
    ("qwen2", {"attention_bias": False, "use_mrope": False}, "attention_bias", True),  # as in transformers
    ("qwen2", {"is_causal": True, "finetuned": True, "num_labels": 2}, "attention_out_bias", False),
    ("deepseek_v3", {"q_lora_rank": None, "qk_head_dim": 7, "ep_size": 1, "seq_aux": True}, "q_lora_rank", 1536),
    ("deepseek_v3", {"num_key_value_heads": None}, "num_kv_heads", 4),
    ("deepseek_v3_yarn", {}, "attention_scale", (0.06 * np.log(8.0) + 1.0) ** 2 / np.sqrt(10.0)),
    ("glm_moe_dsa", {"head_dim": 192, "index_share_for_mtp_iteration": True, "mlp_bias": True}, "head_dim", 8),
    ("glm_moe_dsa", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "mlp_only_layers", (1,)),
    ("glm_moe_dsa", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "first_dense_layers", 2),
    ("glm_moe_dsa", {"indexer_types": None}, "indexer_types", ("full", "full", "full")),
    ("glm_moe_dsa", {"indexer_types": None, "index_topk_pattern": "FSF"}, "indexer_types", ("full", "shared", "full")),
    (
      "glm_moe_dsa",
      {"indexer_types": None, "index_topk_freq": 4, "index_skip_topk_offset": 1},
      "indexer_types",
      ("full", "shared", "shared"),
    ),
    ("llama", {"max_length": 4096, "temperature": 0.6, "top_p": 0.9, "num_beams": 1}, "num_layers", 2),
  ],
)
def test_config_keys(model_type: str, changes: dict[str, Any], field: str, want: Any) -> None:
  drop = {name for name, value in changes.items() if value is None}
  values = {name: value for name, value in _values(model_type, **changes).items() if name not in drop}
  if changes.get("norm_topk_prob", "") is None:
    assert not config_from_hf(values).norm_topk_prob  # transformers' default for the family
    return
  assert getattr(config_from_hf(values), field) == want


@pytest.mark.parametrize(
  ("model_type", "changes", "message"),
  [
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_kv_heads must be num_heads = 4 with latent attention; received 2"),
    ("deepseek_v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ("deepseek_v3", {"index_topk": 4}, "index_topk"),
    ("deepseek_v3", {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim"),
    ("glm_moe_dsa", {"rope_interleave": False}, "rope_interleave = False"),
    ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave = False"),
    ("glm_moe_dsa", {"q_lora_rank": None}, "q_lora_rank must be positive with an indexer"),
    ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "indexer_types must be 'full' in the first layer"),
    ("glm_moe_dsa", {"indexer_types": ["full", "full"]}, "one for each of 3 layers"),
    ("glm_moe_dsa", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("glm_moe_dsa", {"mlp_layer_types": ["dense", "moe", "moe"]}, "mlp_layer_types must be a list of"),
    ("glm_moe_dsa", {"index_head_dim": 4}, "index_head_dim must be at least head_dim = 8"),
    ("llama", {"model_type": "gemma"}, "model_type must be one of"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
    ("llama", {"vocab_size": None}, "has no vocab_size"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("llama", {"logit_scale": 2.0}, "logit_scale"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported in type llama"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic'"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mrope_section": [1, 2]}}, "mrope_section"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows are not supported"),
    (
      "qwen2",
      {"use_sliding_window": True, "layer_types": None, "sliding_window": 9, "max_window_layers": 1},
      "sliding windows are not supported; received use_sliding_window = True, sliding_window = 9",
    ),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows are not supported"),
    ("qwen2", {"qkv_bias": False}, "qkv_bias = False"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("llama", {"is_causal": False}, "is_causal = False"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}, "sliding windows are not supported"),
    ("qwen3_moe", {"num_experts": 8}, "mean the same but differ"),
    ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm = False"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}}, "'full_attention': "),
    (
      "glm4_moe",
      {"head_dim": 10, "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}},
      "partial_rotary_factor must be such that 'yarn' turns whole pairs; received 0.5",
    ),
    ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func"),
    ("glm4_moe", {"n_group": 4}, "n_group must be a divisor"),
  ],
)
def test_unsupported_switches_are_named(model_type: str, changes: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    config_from_hf(_values(model_type, **changes))


def test_a_sliding_window_may_be_the_familys_default() -> None:
  values = _values("qwen2", use_sliding_window=True, max_window_layers=1)
  with pytest.raises(ValueError, match="sliding_window = 4096"):
    config_from_hf({name: value for name, value in values.items() if name not in ("sliding_window", "layer_types")})


def test_wrong_tensors_are_named(tmp_path: pathlib.Path) -> None:
  tensors = _copy("qwen3", tmp_path)
  file = tmp_path / "model.safetensors"
  with pytest.raises(FileNotFoundError, match="holds neither"):
    models.load_hf(tmp_path)
  norm = "model.layers.1.self_attn.q_norm.weight"
  for change, message in (
    ({norm: None}, f"no tensor {norm}"),
    ({norm: np.ones(8, np.float32)}, f"{norm}: expected a parameter of shape"),
    ({"model.layers.0.self_attn.q_proj.bias": np.ones(64, np.float32)}, r"does not account for: \['model.layers.0"),
    ({"lm_head.weight": np.ones((160, 32), np.float32)}, "tie_word_embeddings is set, but lm_head.weight"),
    ({norm: np.ones(16, np.int8)}, f"{norm} has dtype I8"),
  ):
    changed = {name: value for name, value in {**tensors, **change}.items() if value is not None}
    safetensors.numpy.save_file(changed, file)
    with pytest.raises(ValueError, match=message):
      models.load_hf(tmp_path)
  safetensors.numpy.save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, file)
  _equal_trees(models.load_hf(tmp_path)[1], _loaded("qwen3")[1])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"num_hidden_layers": 10**12}, r"config\.json: num_hidden_layers must be an int in \[1, 1000\]"),
    ({"num_hidden_layers": 2.5}, r"config\.json: num_hidden_layers must be"),
    ({"rms_norm_eps": "x"}, r"config\.json: "),
    ({"vocab_size": True}, r"config\.json: ModelConfig.vocab_size must be an int below 2\*\*31; received True"),
    ({"head_dim": [1]}, r"config\.json: ModelConfig.head_dim"),
    ({"rope_parameters": "x"}, r"config\.json: "),
  ],
)
def test_hostile_configs_are_refused_by_file(changes: dict[str, Any], message: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / "config.json").write_text(json.dumps(_values("qwen3", **changes)))
  with pytest.raises(ValueError, match=message):
    models.load_hf(tmp_path)


@pytest.mark.parametrize("text", [b"[]", b"\xff", b"{", b"[" * 100_000, b'"x"'])
def test_a_config_that_is_no_object_is_refused_by_file(text: bytes, tmp_path: pathlib.Path) -> None:
  (tmp_path / "config.json").write_bytes(text)
  with pytest.raises(ValueError, match=r"config\.json must be"):
    models.load_hf(tmp_path)


@pytest.mark.parametrize(
  "content",
  [b"", b"\x00" * 8, (2**63).to_bytes(8, "little"), (2**33).to_bytes(8, "little") + b"{}", b"\x80\x04\x95pickle"],
)
def test_hostile_safetensors_are_refused_by_file(content: bytes, tmp_path: pathlib.Path) -> None:
  _copy("qwen3", tmp_path)
  (tmp_path / "model.safetensors").write_bytes(content)
  with pytest.raises(ValueError, match=r"model\.safetensors is not a valid safetensors file"):
    models.load_hf(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_never_ends_is_not_opened(name: str, tmp_path: pathlib.Path) -> None:
  _copy("qwen3", tmp_path)
  (tmp_path / name).unlink(missing_ok=True)
  os.mkfifo(tmp_path / name)
  with pytest.raises(ValueError, match=rf"{name} must be a regular file"):
    models.load_hf(tmp_path)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_named(value: float, dtype: Any, tmp_path: pathlib.Path) -> None:
  tensors = {name: tensor.astype(dtype) for name, tensor in _copy("qwen3", tmp_path).items()}
  file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
  tensors[name][3, 5] = jnp.finfo(dtype).max  # the largest exponent that a number can have
  safetensors.numpy.save_file(tensors, file)
  models.load_hf(tmp_path)
  tensors[name][3, 5] = value
  safetensors.numpy.save_file(tensors, file)
  with pytest.raises(ValueError, match=f"{tmp_path}: Tensor {name} holds NaN or infinite values"):
    models.load_hf(tmp_path)


@pytest.mark.parametrize(
  ("model_type", "changes", "message"),
  [
    ("qwen3", {"num_hidden_layers": 1000}, r"num_layers = 1000, but there are \d+ tensors"),
    ("qwen3_moe", {"num_experts": 10**9}, r"num_experts = 1000000000, but there are \d+ tensors"),
    ("qwen3", {"head_dim": 10**9}, r"head_dim = 1000000000, but no tensor is longer than \d+"),
    ("qwen3", {"vocab_size": 10**400}, r"ModelConfig.vocab_size must be an int below 2\*\*31"),
    ("qwen3", {"rms_norm_eps": float("inf")}, "ModelConfig.norm_eps must be a finite number; received inf"),
    ("qwen3", {"tie_word_embeddings": "no"}, "ModelConfig.tie_word_embeddings must be true or false; received 'no'"),
    ("qwen3_moe", {"mlp_only_layers": ["a"]}, "ModelConfig.mlp_only_layers must be numbers of layers"),
    ("qwen3_moe", {"moe_intermediate_size": 1.5}, "ModelConfig.moe_intermediate_size must be an int"),
  ],
)
def test_numbers_past_what_the_files_hold_are_refused_at_once(
  model_type: str, changes: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
  tensors = _copy(model_type, tmp_path, drop=("layer_types", "num_local_experts"), **changes)
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=message):
    models.load_hf(tmp_path)


@pytest.mark.parametrize(
  ("index", "message"),
  [
    ({"weight_map": {"a": "../../etc/passwd"}}, "tensor 'a' must name a .safetensors file of the same folder"),
    ({"weight_map": {"a": "/etc/passwd"}}, "tensor 'a' must name a .safetensors file of the same folder"),
    ({"weight_map": {"a": 3}}, "received 3"),
    ({"weight_map": ["a"]}, "'weight_map' must be an object"),
    ({"weight_map": {"a": "config.json"}}, "tensor 'a' must name a .safetensors file of the same folder"),
    ({}, "'weight_map' must be an object"),
    ([], "must be a JSON object; received list"),
  ],
)
def test_hostile_indices_are_refused_by_file(index: Any, message: str, tmp_path: pathlib.Path) -> None:
  _copy("qwen3", tmp_path)
  (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
  with pytest.raises(ValueError, match=rf"index\.json.*{message}"):
    models.load_hf(tmp_path)


def test_a_type_that_cannot_carry_a_switch_is_refused() -> None:
  with pytest.raises(ValueError, match=r"'llama' cannot carry {'qk_norm': True}"):
    config_to_hf(tiny.dense(model_type="llama"))
  with pytest.raises(ValueError, match=r"cannot carry .*num_experts"):
    config_to_hf(tiny.sparse(model_type="qwen3"))
  config = tiny.sparse(model_type="glm4_moe", attention_bias=False)
  assert config_from_hf(config_to_hf(config)) == config


def test_no_shared_experts(tmp_path: pathlib.Path) -> None:
  """transformers then saves shared experts of width 0."""
  tensors = _copy("glm4_moe", tmp_path, n_shared_experts=0)
  empty = {
    name: value[:, :0] if "down_proj" in name else value[:0]
    for name, value in tensors.items()
    if "shared_experts" in name
  }
  assert {value.size for value in empty.values()} == {0}
  safetensors.numpy.save_file({**tensors, **empty}, tmp_path / "model.safetensors")
  config, params = models.load_hf(tmp_path)
  assert config.num_shared_experts == 0 and "shared_experts" not in params["layers_1"]["moe"]
  models.save_hf(tmp_path / "again", config, params)
  _equal_trees(models.load_hf(tmp_path / "again")[1], params)


def test_params_of_another_config_are_refused(tmp_path: pathlib.Path) -> None:
  with pytest.raises(ValueError, match="params are not those of a policy of this config"):
    models.save_hf(tmp_path, tiny.dense(), tiny.policy_params(tiny.dense(tie_word_embeddings=False)))
