"""Foreign text inside a template: a control token that a tool or a user spells out is text, never the token.

A chat template joins markup that we trust with contents that we do not. `quote` marks whatever looks like a control
token in a content before it is rendered; `split` finds the marks in the rendered text, so that a tokenizer can encode
those pieces as plain text. The marks are two characters of Unicode's private use area; where a content holds one of
them itself, it is marked too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
# A mark that a content holds is quoted under a name, for it cannot stand between marks. No escaping changes the names.
_NAMES: Mapping[str, str] = {_OPEN: "\ue0f2", _CLOSE: "\ue0f3"}
_MARKS: Mapping[str, str] = {"\ue0f2": _OPEN, "\ue0f3": _CLOSE}
# No mark stands between marks; so a text of nothing but opening ones, from elsewhere, is read in linear time.
_QUOTED = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}")


def quote(content: Any, control_tokens: Sequence[str]) -> Any:
  """`content` with the control tokens in it marked, in strings inside lists and mappings too (their keys stay).

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
  """Yields `(piece, whether it was quoted)` in order, the pieces without their marks."""
  for i, piece in enumerate(_QUOTED.split(text)):
    if i % 2:
      yield _MARKS.get(piece, piece), True
    elif piece:
      yield piece, False


def unquote(text: str) -> str:
  """The text without marks: for people to read."""
  return "".join(piece for piece, _ in split(text))
