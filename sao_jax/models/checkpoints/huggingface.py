"""Loading and saving of Hugging Face checkpoints: `load_hf` and `save_hf`.

Files are memory-mapped and read tensor by tensor. With a sharding, each host reads only the slices of its devices.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from sao_jax.models import token_ids
from sao_jax.models.checkpoints import shards
from sao_jax.models.checkpoints.hf_config import config_from_hf, config_to_hf, is_mtp_tensor
from sao_jax.models.config import ModelConfig
from sao_jax.models.heads import init_policy
from sao_jax.models.token_ids import TokenIds
from sao_jax.types import Params
from sao_jax.utils import untrusted_files

PathLike: TypeAlias = str | os.PathLike[str]
ShardingOf: TypeAlias = Callable[[tuple[str, ...], jax.ShapeDtypeStruct], jax.sharding.Sharding]
"""`(parameter path, shape and dtype) -> sharding`."""
_Index: TypeAlias = tuple[slice, ...]

_DTYPES: Mapping[str, str] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EXPONENTS: Mapping[str, tuple[Any, int]] = {
  "float32": (np.uint32, 0x7F800000), "bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00),
}  # fmt: skip
"""Integer type and exponent bits of each float type."""
_BLOCK = 1 << 22
_ALWAYS_FLOAT32 = ("e_score_correction_bias", "indexer.weights_proj.weight")
_GENERATION_FILE = "generation_config.json"
_PART = ".part-{}.safetensors"
"""Name of a file while it is written."""
_WHOLE = slice(None)
_MOST_LAYERS = 1_000
"""Largest number of layers. No model has more, and a file that claims more would keep this process busy."""


class _Files(contextlib.AbstractContextManager["_Files"]):
  """The tensors of a checkpoint directory by name, across its files."""

  def __init__(self, directory: pathlib.Path):
    self._stack = contextlib.ExitStack()
    self._slices: dict[str, Any] = {}
    names, weight_map = shards.find(directory)
    for file in names:
      untrusted_files.check_regular(directory / file)
      try:
        handle = self._stack.enter_context(safetensors.safe_open(directory / file, framework="numpy"))
      except safetensors.SafetensorError as error:  # The header is checked before tensors are read.
        raise ValueError(f"{directory / file} is not a valid safetensors file: {error}") from error
      for name in handle.keys():  # noqa: SIM118 (not a mapping)
        if weight_map.get(name, file) != file:
          where = f"tensor {name} is in {file}, but {shards.INDEX_FILE} says {weight_map[name]}"
          raise ValueError(f"{directory}: weights of two saves are there: {where}.")
        if name in self._slices:
          raise ValueError(f"{directory}: weights of two saves are there: {file} holds tensor {name} again.")
        self._slices[name] = handle.get_slice(name)
    missing = sorted(set(weight_map) - set(self._slices))
    if missing:
      raise ValueError(f"{directory}: {shards.INDEX_FILE} names tensors that the files do not hold: {missing[:5]}.")

  def __exit__(self, *exc: object) -> None:
    self._stack.close()

  def __contains__(self, name: str) -> bool:
    return name in self._slices

  def names(self) -> list[str]:
    return list(self._slices)

  def shape(self, name: str) -> tuple[int, ...]:
    return tuple(self._slices[name].get_shape())

  def dtype(self, name: str) -> str:
    stored = self._slices[name].get_dtype()
    if stored not in _DTYPES:
      raise ValueError(f"Tensor {name} has dtype {stored}; supported: {sorted(_DTYPES)}.")
    return _DTYPES[stored]

  def read(self, name: str, index: _Index) -> np.ndarray:
    value = np.asarray(self._slices[name][index])
    if not _all_finite(value):
      raise ValueError(f"Tensor {name} holds NaN or infinite values.")
    return value


def _all_finite(value: np.ndarray) -> bool:
  """Whether no exponent of a float array is all ones. In bfloat16 several times as fast as `np.isfinite`."""
  bits, exponent = _EXPONENTS[value.dtype.name]
  flat = value.reshape(-1).view(bits)
  blocks = (flat[i : i + _BLOCK] for i in range(0, flat.size, _BLOCK))  # Blocks keep intermediate arrays small.
  return not any(((block & bits(exponent)) == exponent).any() for block in blocks)


def read_config_file(path: pathlib.Path) -> ModelConfig:
  """Reads a `config.json` and the token ids of a `generation_config.json` beside it. Errors name the file."""
  values = untrusted_files.read_object(path)
  try:
    layers = values.get("num_hidden_layers")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= _MOST_LAYERS:
      raise ValueError(f"num_hidden_layers must be an int in [1, {_MOST_LAYERS}]; received {layers!r}")
    config = config_from_hf(values)
  except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
    raise ValueError(f"{path}: {error}") from error
  generation = path.with_name(_GENERATION_FILE)
  try:
    ids = token_ids.from_hf(untrusted_files.read_object_if_there(generation))
  except ValueError as error:
    raise ValueError(f"{generation}: {error}") from error
  return dataclasses.replace(config, generation_token_ids=ids)


@dataclasses.dataclass(frozen=True)
class _Stored:
  """The tensor of a checkpoint, or the range of its rows, that holds a parameter."""

  name: str
  transpose: bool = False
  rows: tuple[int, int] | None = None
  """Range on the second to last axis of the stored tensor: half of a fused gate and up projection."""
  stacked: int = 0
  """Number of experts if each has its own tensor, with {} for its number in `name`; else 0."""

  def tensors(self) -> list[str]:
    return [self.name.format(e) for e in range(self.stacked)] if self.stacked else [self.name]

  def shape(self, files: _Files) -> tuple[int, ...]:
    shapes = {files.shape(name) for name in self.tensors()}
    if len(shapes) > 1:
      raise ValueError(f"The tensors {self.name} differ in shape: {sorted(shapes)}.")
    shape = shapes.pop()
    if self.rows:
      shape = (*shape[:-2], self.rows[1] - self.rows[0], shape[-1])
    if self.transpose:
      shape = (*shape[:-2], shape[-1], shape[-2])
    return (self.stacked, *shape) if self.stacked else shape

  def read(self, files: _Files, index: _Index) -> np.ndarray:
    """Reads the part of the parameter that `index` (slices without steps) selects."""
    if self.stacked:
      experts = range(*index[0].indices(self.stacked))
      one = dataclasses.replace(self, stacked=0)
      parts = (dataclasses.replace(one, name=self.name.format(e)).read(files, index[1:]) for e in experts)
      return _stack(parts, len(experts))
    if self.transpose:
      index = (*index[:-2], index[-1], index[-2])
    if self.rows:
      low, high, _ = index[-2].indices(self.rows[1] - self.rows[0])
      index = (*index[:-2], slice(low + self.rows[0], high + self.rows[0]), index[-1])
    value = files.read(self.name, index)
    return np.swapaxes(value, -1, -2) if self.transpose else value


def _stack(parts: Iterator[np.ndarray], count: int) -> np.ndarray:
  """Like `np.stack`, but holds only one part in memory besides the result."""
  first = next(parts)
  out = np.empty((count, *first.shape), first.dtype)
  out[0] = first
  for i, part in enumerate(parts, start=1):
    out[i] = part
  return out


_TOP: Mapping[tuple[str, ...], _Stored] = {
  ("embed", "embedding"): _Stored("model.embed_tokens.weight"),
  ("final_norm", "scale"): _Stored("model.norm.weight"),
  ("lm_head", "kernel"): _Stored("lm_head.weight", transpose=True),
}
_IN_LAYER: Mapping[tuple[str, ...], str] = {
  ("input_norm", "scale"): "input_layernorm.weight",
  ("post_attention_norm", "scale"): "post_attention_layernorm.weight",
  ("attention", "q_norm", "scale"): "self_attn.q_norm.weight",
  ("attention", "k_norm", "scale"): "self_attn.k_norm.weight",
  ("attention", "q_a_norm", "scale"): "self_attn.q_a_layernorm.weight",
  ("attention", "kv_a_norm", "scale"): "self_attn.kv_a_layernorm.weight",
  ("attention", "indexer", "k_norm", "scale"): "self_attn.indexer.k_norm.weight",
  ("moe", "router", "correction_bias"): "mlp.gate.e_score_correction_bias",
}
_MODULES: Mapping[str, str] = {"attention": "self_attn", "mlp": "mlp"}
_PROJECTIONS: Mapping[str, str] = {"kv_a_proj": "kv_a_proj_with_mqa"}
"""Projections with another name."""


def _stored(path: tuple[str, ...], config: ModelConfig, fused_experts: bool = False) -> _Stored:
  """Returns the place of parameter `path` in a Hugging Face checkpoint, for loading and for saving."""
  if path in _TOP:
    return _TOP[path]
  prefix, rest = f"model.layers.{path[0].removeprefix('layers_')}.", path[1:]
  if rest in _IN_LAYER:
    return _Stored(prefix + _IN_LAYER[rest])
  if rest == ("moe", "router", "kernel"):
    return _Stored(prefix + "mlp.gate.weight", transpose=True)
  if rest[0] == "moe" and len(rest) == 2:
    return _stored_experts(prefix, rest[1], config, fused_experts)
  module = "mlp.shared_experts" if rest[0] == "moe" else ".".join((_MODULES[rest[0]], *rest[1:-2]))
  kind = {"kernel": "weight", "bias": "bias"}[rest[-1]]
  return _Stored(f"{prefix}{module}.{_PROJECTIONS.get(rest[-2], rest[-2])}.{kind}", transpose=kind == "weight")


def tensor_name(path: tuple[str, ...], config: ModelConfig) -> str:
  """Returns the name that a parameter has in a Hugging Face checkpoint."""
  return _stored(path, config).name


def _stored_experts(prefix: str, projection: str, config: ModelConfig, fused: bool) -> _Stored:
  if not fused:
    return _Stored(f"{prefix}mlp.experts.{{}}.{projection}.weight", transpose=True, stacked=config.num_experts)
  if projection == "down_proj":
    return _Stored(prefix + "mlp.experts.down_proj", transpose=True)
  first = 0 if projection == "gate_proj" else config.moe_intermediate_size
  rows = (first, first + config.moe_intermediate_size)
  return _Stored(prefix + "mlp.experts.gate_up_proj", transpose=True, rows=rows)


def _names(path: Sequence[Any]) -> tuple[str, ...]:
  return tuple(key.key for key in path)


def _shapes(config: ModelConfig) -> Params:
  return jax.eval_shape(lambda key: init_policy(config, key), jax.random.key(0))


def _common_dtype(files: _Files) -> str:
  """Returns the dtype of the tensors, or float32 if they differ. Ignores those that are always float32."""
  dtypes = {files.dtype(name) for name in files.names() if not name.endswith(_ALWAYS_FLOAT32)}
  return dtypes.pop() if len(dtypes) == 1 else "float32"


def load_hf(
  directory: PathLike, *, dtype: str = "float32", param_dtype: str | None = None, sharding: ShardingOf | None = None
) -> tuple[ModelConfig, Params]:
  """Loads a checkpoint of one of `config.MODEL_TYPES` (`config.json` and safetensors, single or sharded).

  Args:
    directory: the checkpoint's folder.
    dtype: dtype of activations and matmuls.
    param_dtype: dtype of the parameters. None keeps the stored dtype, or float32 if the files mix dtypes.
    sharding: sharding of each parameter; each host then reads only its own slices. None uses JAX's default device.

  Returns:
    `(config, params)`; params have the layout of `init_policy(config)`.

  Raises:
    FileNotFoundError: there is no `config.json`, or there are no safetensors.
    ValueError: a switch, tensor name, shape or dtype is not supported, or the folder holds weights of two saves; the
      message names it.
  """
  folder = pathlib.Path(directory)
  config = read_config_file(folder / "config.json")
  with _Files(folder) as files, _named(folder):
    config = dataclasses.replace(config, dtype=dtype, param_dtype=param_dtype or _common_dtype(files))
    _check_sizes(files, config)
    fused = any(name.endswith("mlp.experts.gate_up_proj") for name in files.names())
    shapes = _shapes(config)
    stored = {
      _names(path): _stored(_names(path), config, fused) for path, _ in jax.tree_util.tree_flatten_with_path(shapes)[0]
    }
    _check_tensors(files, config, stored)

    def load(path: Sequence[Any], want: jax.ShapeDtypeStruct) -> jax.Array:
      source = stored[_names(path)]
      received = source.shape(files)
      if received != want.shape:
        raise ValueError(
          f"{source.name}: expected a parameter of shape {want.shape} from config.json; received {received}."
        )
      if sharding is None:
        return jnp.asarray(source.read(files, (_WHOLE,) * len(want.shape)).astype(want.dtype))

      def part(index: Any) -> np.ndarray:
        return source.read(files, index).astype(want.dtype)

      return jax.make_array_from_callback(want.shape, sharding(_names(path), want), part)

    return config, jax.tree_util.tree_map_with_path(load, shapes)


@contextlib.contextmanager
def _named(folder: pathlib.Path) -> Iterator[None]:
  """Adds the folder to the message of a ValueError."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f"{folder}: {error}") from error


_LENGTHS = (
  "vocab_size", "hidden_size", "head_dim", "num_heads", "num_kv_heads", "kv_lora_rank", "q_lora_rank",
  "qk_nope_head_dim", "v_head_dim", "index_n_heads", "index_head_dim",
)  # fmt: skip
"""Fields that are at most as large as a dimension of some tensor."""


def _check_sizes(files: _Files, config: ModelConfig) -> None:
  """Refuses sizes larger than any tensor, which would keep this process busy with names and shapes."""
  shapes = [files.shape(name) for name in files.names()]
  longest = max((size for shape in shapes for size in shape), default=0)
  fused = any(name.endswith("mlp.experts.gate_up_proj") for name in files.names())
  for name in ("num_layers", "num_experts", *_LENGTHS):
    counted = name == "num_layers" or (name == "num_experts" and not fused)
    most, reason = (len(shapes), "there are {} tensors") if counted else (longest, "no tensor is longer than {}")
    if getattr(config, name) > most:
      raise ValueError(f"config.json says {name} = {getattr(config, name)}, but {reason.format(most)}.")


def _check_tensors(files: _Files, config: ModelConfig, stored: dict[tuple[str, ...], _Stored]) -> None:
  needed = {name for source in stored.values() for name in source.tensors()}
  missing = sorted(name for name in needed if name not in files)
  if missing:
    raise ValueError(f"The checkpoint has no tensor {missing[0]} ({len(missing)} missing in all).")
  extra = [name for name in files.names() if name not in needed and not name.endswith("rotary_emb.inv_freq")]
  # With n_shared_experts = 0, transformers saves shared experts of width 0.
  extra = [name for name in extra if not is_mtp_tensor(name, config) and 0 not in files.shape(name)]
  head = "lm_head.weight"
  if config.tie_word_embeddings and head in extra:
    extra.remove(head)
    whole, embed = (_WHOLE, _WHOLE), "model.embed_tokens.weight"
    if not np.array_equal(files.read(head, whole), files.read(embed, whole)):
      raise ValueError(f"tie_word_embeddings is set, but {head} and {embed} differ.")
  if extra:
    raise ValueError(f"The checkpoint has tensors that config.json does not account for: {sorted(extra)[:5]}.")


def _export(config: ModelConfig, params: Params) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the name and value of each tensor, in the names and orientation of Hugging Face."""
  for path, value in jax.tree_util.tree_flatten_with_path(params)[0]:
    stored = _stored(_names(path), config)
    if stored.stacked:
      for name, expert in zip(stored.tensors(), value, strict=True):
        yield name, np.ascontiguousarray(np.asarray(expert).T)
    else:
      array = np.asarray(value)
      yield stored.name, np.ascontiguousarray(array.T if stored.transpose else array)


def save_hf(directory: PathLike, config: ModelConfig, params: Params, *, max_shard_bytes: int = 5_000_000_000) -> None:
  """Writes a checkpoint that transformers and this library can load. Replaces an existing one.

  Files get their final names only when complete, `config.json` last. The ids of bos, eos and pad come from `config`;
  other settings of an existing `generation_config.json` are kept.

  Args:
    directory: the folder; created if needed.
    config: its `model_type` must support all its switches.
    params: parameters of a policy, addressable from this host.
    max_shard_bytes: size from which a checkpoint is split into several files.

  Raises:
    ValueError: the model type does not support a switch, or the parameters do not fit `config`.
  """
  values = config_to_hf(config)
  shapes = jax.tree.map(lambda x: x.shape, _shapes(config))
  received = jax.tree.map(jnp.shape, params)
  if shapes != received:
    raise ValueError(f"params are not those of a policy of this config: expected shapes {shapes}; received {received}.")
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  written = _write_shards(folder, _export(config, params), max_shard_bytes)
  total = sum(size for _, sizes in written for size in sizes.values())
  weight_map: dict[str, str] = {}
  stale = set(shards.weight_files(folder))
  (folder / shards.INDEX_FILE).unlink(missing_ok=True)  # First, so that a mixture of two saves cannot be loaded.
  for i, (temporary, sizes) in enumerate(written, start=1):
    name = shards.shard_name(i, len(written))
    temporary.replace(folder / name)
    stale.discard(name)
    weight_map |= dict.fromkeys(sizes, name)
  for name in (*stale, *(path.name for path in folder.glob(_PART.format("*")))):  # Killed saves leave parts.
    (folder / name).unlink()
  if len(written) > 1:
    _write_json(folder / shards.INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
  _write_generation_config(folder / _GENERATION_FILE, config)
  _write_json(folder / "config.json", values)


def _write_shards(
  folder: pathlib.Path, tensors: Iterator[tuple[str, np.ndarray]], max_bytes: int
) -> list[tuple[pathlib.Path, dict[str, int]]]:
  """Writes numbered temporary files of up to `max_bytes`; returns each with the sizes of its tensors in bytes."""
  written: list[tuple[pathlib.Path, dict[str, int]]] = []
  pending: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

  def flush() -> None:
    path = folder / _PART.format(f"{len(written):05d}")
    shards.save(pending, path)
    written.append((path, {name: value.nbytes for name, value in pending.items()}))
    pending.clear()

  for name, value in tensors:
    if pending and sum(x.nbytes for x in pending.values()) + value.nbytes > max_bytes:
      flush()
    pending[name] = value
  flush()
  return written


def _write_generation_config(path: pathlib.Path, config: ModelConfig) -> None:
  """Writes the token ids if the config has ids for generation, or if an existing file may have others."""
  existing = untrusted_files.read_object_if_there(path)
  ids = config.generation_token_ids
  if ids == TokenIds() and existing:
    ids = config.token_ids
  if ids != TokenIds():
    _write_json(path, token_ids.generation_config(ids, existing))


def _write_json(path: pathlib.Path, value: Any) -> None:
  temporary = path.with_name(f".{path.name}.part")
  temporary.write_text(json.dumps(value, indent=2) + "\n")
  temporary.replace(path)
