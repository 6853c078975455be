"""Tokens named in files other than `tokenizer.json`, read as transformers reads them."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from sao_jax.utils import untrusted_files

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SETTINGS, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_MAX_ID = 2**31


def token_text(path: pathlib.Path, key: str, token: Any) -> str:
  """Returns the text of a token in `tokenizer_config.json`, where it is a string or an object with `content`."""
  text = token.get("content") if isinstance(token, dict) else token
  if not isinstance(text, str):
    raise ValueError(f"{path}: {key} must be a token; received {token!r:.200}.")
  return text


def special_tokens(directory: pathlib.Path) -> dict[str, str]:
  """Returns the special tokens by the names that templates use: `bos_token`, `eos_token`, ...

  As in transformers, the older `special_tokens_map.json` takes precedence over `tokenizer_config.json`, but is ignored
  if that has an `added_tokens_decoder`. Logs a warning for each token on which the files differ.

  Raises:
    ValueError: a file cannot be read, or a name has a value that is not a token; the message names it.
  """
  settings, older = _texts(directory / _SETTINGS), _texts(directory / _MAP)
  only_newer = "added_tokens_decoder" in untrusted_files.read_object_if_there(directory / _SETTINGS)
  tokens = settings if only_newer else {**settings, **older}
  for key, value in older.items():
    if settings.get(key, None if only_newer else value) != value:
      logging.warning(
        "%s: %s is %.100r in %s and %.100r in %s; using %.100r.",
        directory, key, settings.get(key), _SETTINGS, value, _MAP, tokens.get(key),
      )  # fmt: skip
  return tokens


def _texts(path: pathlib.Path) -> dict[str, str]:
  values = untrusted_files.read_object_if_there(path)
  named = {key: value for key, value in values.items() if key.endswith("_token") and isinstance(value, str | dict)}
  named |= {key: values[key] for key in _NAMED if values.get(key) is not None}
  return {key: token_text(path, key, value) for key, value in named.items()}


def read(directory: pathlib.Path) -> list[dict[str, Any]]:
  """Reads all tokens that the files beside `tokenizer.json` name.

  Returns:
    One object per token, those with ids first. Each has `content` and `special`, an `id` if a file gives one, and
    `flags` (those of `tokenizers.AddedToken`) if a file sets some. Flags override those in `tokenizer.json`.

  Raises:
    ValueError: a file is invalid, a token has two ids, or an id has two tokens.
  """
  settings = untrusted_files.read_object_if_there(directory / _SETTINGS)
  special = dict.fromkeys(_special(directory, settings))
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
  """Yields `(file, content, token)` of `added_tokens.json`, which holds no flags."""
  path = directory / _ADDED
  for content, number in untrusted_files.read_object_if_there(path).items():
    yield path, content, {"content": content, "id": _checked_id(path, content, number), "special": content in special}


def _checked_id(path: pathlib.Path, content: str, number: Any) -> int:
  if type(number) is not int or not 0 <= number < _MAX_ID:
    raise ValueError(f"{path}: the id of {content!r:.100} must be an int in [0, {_MAX_ID}); received {number!r:.50}.")
  return number


def _special(directory: pathlib.Path, settings: Mapping[str, Any]) -> list[str]:
  """The special tokens that files list, in the order in which transformers adds those without ids.

  It does not read the older file if there is an `added_tokens_decoder`.
  """
  names = (_SETTINGS,) if "added_tokens_decoder" in settings else (_SETTINGS, _MAP)
  files = [_listed(directory / name) for name in names]
  named = sorted((pair for first, _ in files for pair in first), key=lambda pair: _NAMED.index(pair[0]))
  return [token for _, token in (*named, *(pair for _, others in files for pair in others)) if token]


def _listed(path: pathlib.Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
  """Lists `(key, token)` of the special tokens in a file: those of single-token keys, and those of list keys."""
  values = untrusted_files.read_object_if_there(path)
  named = [(key, values[key]) for key in _NAMED if values.get(key) is not None]
  others = []
  for key in _LISTS:
    more = values.get(key) or []
    each = more.values() if isinstance(more, dict) else more if isinstance(more, list) else [more]
    others += [(key, token) for token in each]
  first, second = ([(key, token_text(path, key, token)) for key, token in pairs] for pairs in (named, others))
  return first, second
