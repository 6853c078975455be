"""Export of a policy as a checkpoint that transformers, vLLM and this library load: weights, config and tokenizer."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil

import jax

from sao_jax import models
from sao_jax.models.checkpoints import files, peft, shards
from sao_jax.models.config import ModelConfig
from sao_jax.models.token_ids import TokenIds
from sao_jax.tokenizers import Chat
from sao_jax.tokenizers.gguf_tokenizer import hf_files
from sao_jax.training.config import RunConfig
from sao_jax.types import Params
from sao_jax.utils import untrusted_files

ADAPTER_FOLDER = "adapter"
"""Folder of the adapters in an export: beside the model, they would make transformers take it for an adapter."""
TOKENIZER_FILES = (
  "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
  "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files of a Hugging Face directory that describe its tokenizer and chat template, and are copied as they are."""
TEMPLATES_FOLDER = "additional_chat_templates"
MODEL_FILES = ("config.json", "generation_config.json", shards.INDEX_FILE)


def export(
  directory: str | os.PathLike[str],
  config: ModelConfig,
  params: Params,
  *,
  source: str | os.PathLike[str] | None,
  dtype: str | None = None,
) -> list[str]:
  """Writes a policy's weights, config, tokenizer, chat template and generation config.

  Args:
    directory: the folder; made if needed. It must not be `source`.
    config: the model.
    params: the policy's parameters.
    source: the published checkpoint whose tokenizer the policy uses; None for a tokenizer without files, which leaves
      weights and config only.
    dtype: dtype to write the weights in; None: that of `params`.

  Returns:
    The names of the written files; others in the folder are left alone, but for those of another tokenizer.

  Raises:
    ValueError: `directory` is `source`, or the model type cannot carry the config.
  """
  folder = pathlib.Path(directory)
  if source is not None and folder.exists() and folder.samefile(source):
    raise ValueError(f"directory must not be the checkpoint that the tokenizer comes from; received {folder}.")
  params = jax.device_get(params)
  if dtype is not None:
    params = jax.tree.map(lambda x: x.astype(jax.numpy.dtype(dtype)), params)
    config = dataclasses.replace(config, param_dtype=dtype)
  if source is not None:
    config = _with_token_ids(config, pathlib.Path(source))
  folder.mkdir(parents=True, exist_ok=True)
  if source is not None:
    _write_tokenizer(folder, pathlib.Path(source))
  models.save_hf(folder, config, params)
  ours = {*TOKENIZER_FILES, *MODEL_FILES, TEMPLATES_FOLDER, *shards.weight_files(folder)}
  return sorted(path.name for path in folder.iterdir() if path.name in ours)


def export_adapters(directory: str | os.PathLike[str], config: RunConfig, adapters: Params) -> list[str]:
  """Writes a policy's adapters (`config.lora`) in the format of PEFT, to the folder `adapter` of a directory.

  They apply to the run's `policy_checkpoint`. Returns the names of the files.
  """
  folder = pathlib.Path(directory) / ADAPTER_FOLDER
  names = peft.save(folder, config.policy, config.lora, adapters, base=config.policy_checkpoint)
  return [f"{ADAPTER_FOLDER}/{name}" for name in names]


def _with_token_ids(config: ModelConfig, source: pathlib.Path) -> ModelConfig:
  """Takes the ids of bos, eos and pad from the published checkpoint, as a run's config may come from a preset.

  Where its files name no id that ends a text, the stop tokens of its tokenizer do.
  """
  published = models.read_config(source)
  ids, generation = published.token_ids, published.generation_token_ids
  if ids.eos is None:
    stops = Chat.load(source).tokenizer.stop_ids if generation.eos is None else ()
    ids = dataclasses.replace(ids, eos=generation.eos or (stops[0] if len(stops) == 1 else stops))
  generation = ids if generation == TokenIds() else generation
  return dataclasses.replace(config, token_ids=ids, generation_token_ids=generation)


def _write_tokenizer(folder: pathlib.Path, source: pathlib.Path) -> None:
  """Copies the tokenizer. Files of another one are removed: transformers would prefer some of them to the copies."""
  # `save_hf` keeps what a generation config says of temperature and the like.
  names = (*TOKENIZER_FILES, "generation_config.json")
  for name in names:
    (folder / name).unlink(missing_ok=True)
  if (folder / TEMPLATES_FOLDER).is_dir():
    shutil.rmtree(folder / TEMPLATES_FOLDER)
  if files.is_gguf(source):
    for name, text in hf_files(source).items():
      (folder / name).parent.mkdir(exist_ok=True)
      (folder / name).write_text(text, encoding="utf-8")
    return
  named = (source / name for name in names)
  for path in filter(pathlib.Path.is_file, (*named, *source.glob(f"{TEMPLATES_FOLDER}/*.jinja"))):
    untrusted_files.check_regular(path)
    target = folder / path.relative_to(source)
    target.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, target)
