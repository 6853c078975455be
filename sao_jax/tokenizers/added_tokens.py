"""Tokens that a checkpoint names in other files than `tokenizer.json`, read as transformers reads them."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from sao_jax import foreign

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SETTINGS, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_MAX_ID = 2**31


def token_text(path: pathlib.Path, key: str, token: Any) -> str:
  """The text of a token as `tokenizer_config.json` writes it: a string, or an object with its `content`."""
  text = token.get("content") if isinstance(token, dict) else token
  if not isinstance(text, str):
    raise ValueError(f"{path}: {key} must be a token; received {token!r:.200}.")
  return text


def special_tokens(directory: pathlib.Path) -> dict[str, str]:
  """The special tokens by the names that templates read them by: `bos_token`, `eos_token`, ...

  Where `tokenizer_config.json` and the older `special_tokens_map.json` differ, the older file counts unless the first
  has an `added_tokens_decoder`; a warning names both.

  Raises:
    ValueError: a file that cannot be read, or a name with anything else than a token; the message names it.
  """
  settings = _texts(directory / _SETTINGS)
  older = _texts(directory / _MAP)
  differing = [key for key in settings if older.get(key, settings[key]) != settings[key]]
  newer_counts = "added_tokens_decoder" in foreign.read_object_if_there(directory / _SETTINGS)
  tokens = {**older, **settings} if newer_counts else {**settings, **older}
  for key in differing:
    logging.warning(
      "%s: %s is %r in %s and %r in %s; taken is %r.", directory, key, settings[key], _SETTINGS, older[key], _MAP,
      tokens[key],
    )  # fmt: skip
  return tokens


def _texts(path: pathlib.Path) -> dict[str, str]:
  values = foreign.read_object_if_there(path)
  named = {key: value for key, value in values.items() if key.endswith("_token") and isinstance(value, str | dict)}
  named |= {key: values[key] for key in _NAMED if values.get(key) is not None}
  return {key: token_text(path, key, value) for key, value in named.items()}


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
  """All tokens that the files beside `tokenizer.json` name, with the ids that they give them.

  Returns:
    Objects with `content` and `special`, `id` where a file gives one, and `flags` (those of `tokenizers.AddedToken`)
    where a file sets some, which count more than those in `tokenizer.json`; each token once, those with ids first.

  Raises:
    ValueError: a file that cannot be read as what it should be, a token with two ids, or an id with two tokens.
  """
  settings = foreign.read_object_if_there(directory / _SETTINGS)
  special = {**dict.fromkeys(_listed(directory / _SETTINGS)), **dict.fromkeys(_listed(directory / _MAP))}
  tokens: dict[str, dict[str, Any]] = {}
  owners: dict[int, str] = {}
  for where, content, token in (*_from_settings(directory, settings), *_from_added(directory, special)):
    first = tokens.setdefault(content, token)["id"]
    owner = owners.setdefault(token["id"], content)
    if first != token["id"] or owner != content:
      raise ValueError(
        f"{where}: an added token must have one id of its own; received {token['id']} for {content!r:.100}, and before "
        f"{first} for {content!r:.100} and {token['id']} for {owner!r:.100}."
      )
  for content in special:
    tokens.setdefault(content, {"content": content, "special": True})
  return list(tokens.values())


def _from_settings(directory: pathlib.Path, settings: Mapping[str, Any]) -> Iterator[tuple[pathlib.Path, str, Any]]:
  """Yields `(file, content, token)` of `added_tokens_decoder`."""
  path = directory / _SETTINGS
  decoder = settings.get("added_tokens_decoder", {})
  if not isinstance(decoder, dict):
    raise ValueError(f"{path}: added_tokens_decoder must be an object; received {decoder!r:.200}.")
  for key, value in decoder.items():
    content = token_text(path, f"added_tokens_decoder[{key!r:.50}]", value)
    flags = {name: value[name] for name in _FLAGS if name in value} if isinstance(value, dict) else {}
    if any(not isinstance(flag, bool) for flag in flags.values()):
      raise ValueError(f"{path}: the flags of {content!r:.100} must be true or false; received {flags!r:.200}.")
    number = int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else key
    token = {"content": content, "id": _checked_id(path, content, number), "special": flags.get("special", False)}
    yield path, content, token | {"flags": flags}


def _from_added(directory: pathlib.Path, special: Mapping[str, Any]) -> Iterator[tuple[pathlib.Path, str, Any]]:
  """Yields the same of `added_tokens.json`, where a token's flags are not said."""
  path = directory / _ADDED
  for content, number in foreign.read_object_if_there(path).items():
    yield path, content, {"content": content, "id": _checked_id(path, content, number), "special": content in special}


def _checked_id(path: pathlib.Path, content: str, number: Any) -> int:
  if type(number) is not int or not 0 <= number < _MAX_ID:
    raise ValueError(f"{path}: the id of {content!r:.100} must be an int in [0, {_MAX_ID}); received {number!r:.50}.")
  return number


def _listed(path: pathlib.Path) -> list[str]:
  """The special tokens that a file lists, those without a name of their own too."""
  values = foreign.read_object_if_there(path)
  found = [(key, values[key]) for key in _NAMED if values.get(key) is not None]
  for key in _LISTS:
    more = values.get(key) or []
    each = more.values() if isinstance(more, dict) else more if isinstance(more, list) else [more]
    found += [(key, token) for token in each]
  return [text for text in (token_text(path, key, token) for key, token in found) if text]
