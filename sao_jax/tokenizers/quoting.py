"""Quoting of untrusted text in a template, so that it cannot forge control tokens.

A chat template joins trusted markup with untrusted contents. `quote` marks everything in a content that looks like a
control token before the template is rendered. `split` finds the marks in the rendered text, so that a tokenizer can
encode those pieces as plain text. The marks are two characters of Unicode's private use area. If a content holds one of
them itself, that is marked too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
# A mark in a content is quoted under a name, since marks cannot be nested. No escaping changes the names.
_NAMES: Mapping[str, str] = {_OPEN: "\ue0f2", _CLOSE: "\ue0f3"}
_MARKS: Mapping[str, str] = {"\ue0f2": _OPEN, "\ue0f3": _CLOSE}
# No mark may be inside a pair of marks. So even a text of many opening marks is searched in linear time.
_QUOTED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")


def quote(content: Any, control_tokens: Sequence[str]) -> Any:
  """Marks the control tokens in a content, also in strings inside lists and mappings (but not in keys).

  >>> list(split("<|user|>" + quote("a <|end|>", ["<|user|>", "<|end|>"])))
  [('<|user|>a ', False), ('<|end|>', True)]
  """
  if isinstance(content, str):
    found = "|".join(map(re.escape, sorted({*control_tokens, *_NAMES}, key=len, reverse=True)))
    return re.sub(found, lambda match: f"{_OPEN}{_NAMES.get(match[0], match[0])}{_CLOSE}", content)
  if isinstance(content, dict):
    return {key: quote(value, control_tokens) for key, value in content.items()}
  if isinstance(content, (list, tuple)):
    return [quote(value, control_tokens) for value in content]
  return content


def split(text: str) -> Iterator[tuple[str, bool]]:
  """Splits a text at its marks; yields `(piece, is_quoted)` in order, with the marks removed."""
  for i, piece in enumerate(_QUOTED.split(text)):
    if i % 2:
      yield _MARKS.get(piece, piece), True
    elif piece:
      yield piece, False


def unquote(text: str) -> str:
  """Returns the text without marks, for people to read."""
  return "".join(piece for piece, _ in split(text))
