"""The tokenizer and chat template in the metadata of a GGUF file, read with the optional `gguf` package."""

from __future__ import annotations

import json
import os
from typing import Any

from sao_jax.tokenizers.chat_template import ChatTemplate
from sao_jax.tokenizers.hf_tokenizer import HFTokenizer
from sao_jax.utils import untrusted_files

_CONTROL, _USER_DEFINED = 3, 4  # GGUF's token types that are matched whole in a text
_SPLITS = ("gpt-2", "smollm")


def load_gguf_tokenizer(path: str | os.PathLike[str]) -> tuple[HFTokenizer, ChatTemplate]:
  """Loads the tokenizer of a GGUF file, with its end-of-sequence token as stop token, and its chat template.

  Args:
    path: a file with a byte-level BPE vocabulary (`tokenizer.ggml.model` "gpt2") and the split of GPT-2
      (`tokenizer.ggml.pre` "gpt-2"), perhaps with single digits ("smollm").

  Raises:
    ValueError: the vocabulary or split is not supported, or there is no chat template; the message names it.
  """
  serialized, variables, source = _read(path)
  stop = variables["eos_token"]
  try:
    tokenizer = HFTokenizer(serialized, stop_tokens=[stop])
    template = ChatTemplate(source, stop_tokens=[stop], control_tokens=tokenizer.control_tokens, variables=variables)
  except ValueError as error:
    raise ValueError(f"{os.fspath(path)}: {error}") from error
  return tokenizer, template


def hf_files(path: str | os.PathLike[str]) -> dict[str, str]:
  """Returns the tokenizer and chat templates of a GGUF file as the files of a Hugging Face directory, by name.

  Raises:
    ValueError: see `load_gguf_tokenizer`.
  """
  serialized, variables, source = _read(path)
  settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **variables}
  found = {
    "tokenizer.json": serialized,
    "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    "chat_template.jinja": source["default"],
  }
  if "tool_use" in source:
    found["additional_chat_templates/tool_use.jinja"] = source["tool_use"]
  return found


def _read(path: str | os.PathLike[str]) -> tuple[str, dict[str, str], dict[str, str]]:
  """Returns the text of a `tokenizer.json`, the template's special tokens, and the templates by name."""
  fields = untrusted_files.open_gguf(path).fields

  def get(name: str, kind: type[Any] = str, of: type[Any] | None = None) -> Any:
    if name not in fields:
      raise ValueError(f"{os.fspath(path)} lacks {name}.")
    try:
      value: Any = fields[name].contents()
    except (ValueError, IndexError, TypeError) as error:
      raise ValueError(f"{os.fspath(path)}: {name} cannot be read: {error}") from error
    if not isinstance(value, kind) or (of is not None and not all(isinstance(x, of) for x in value)):
      wanted = kind.__name__ if of is None else f"{kind.__name__} of {of.__name__}"
      raise ValueError(f"{os.fspath(path)}: {name} must be a {wanted}; received {value!r:.100}.")
    return value

  model, split = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
  if model != "gpt2" or split not in _SPLITS:
    raise ValueError(
      f"{os.fspath(path)}: the tokenizer must be a 'gpt2' vocabulary with a split of {', '.join(_SPLITS)}; "
      f"received {model!r} with {split!r}."
    )
  tokens, kinds = get("tokenizer.ggml.tokens", list, str), get("tokenizer.ggml.token_type", list, int)
  merges = get("tokenizer.ggml.merges", list, str)
  if len(kinds) != len(tokens):
    raise ValueError(f"{os.fspath(path)} must have a type for each token; received {len(kinds)} for {len(tokens)}.")

  def token(name: str) -> str:
    number = get(name, int)
    if not 0 <= number < len(tokens):
      raise ValueError(f"{os.fspath(path)}: {name} must be in [0, {len(tokens)}); received {number}.")
    return str(tokens[number])

  variables = {
    "eos_token": token("tokenizer.ggml.eos_token_id"), "bos_token": token("tokenizer.ggml.bos_token_id")
  }  # fmt: skip
  source = {"default": get("tokenizer.chat_template")}
  if "tokenizer.chat_template.tool_use" in fields:
    source["tool_use"] = get("tokenizer.chat_template.tool_use")
  return _serialize(tokens, merges, kinds, split), variables, source


def _serialize(tokens: list[str], merges: list[str], types: list[int], split: str) -> str:
  """Returns the vocabulary as the text of a `tokenizer.json`."""
  byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
  digits = [{"type": "Digits", "individual_digits": True}] if split == "smollm" else []
  plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
  added = [
    {**plain, "id": i, "content": token, "special": kind == _CONTROL}
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
    if kind in (_CONTROL, _USER_DEFINED)
  ]
  pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
  values = {
    "version": "1.0",
    "added_tokens": added,
    "normalizer": None,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*digits, byte_level]},
    "post_processor": None,
    "decoder": byte_level,
    "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": pairs},
  }
  return json.dumps(values)
