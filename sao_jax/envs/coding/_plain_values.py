"""Conversion of plain Python values to text and back, for messages between tested code and its tests.

For any text, `decode` returns only values of exactly the types None, bool, int, float, complex, str, bytes, list,
tuple, dict, set and frozenset. No subclass and no object with its own methods can pass. This module uses only the
standard library, since its text runs in the sandbox.
"""

from __future__ import annotations

import json
from typing import Any


def encode(value: Any) -> str:
  """Returns a value as one line of ASCII. Subclasses become their plain base. Other values raise TypeError."""
  return json.dumps(_dissolve(value))


def decode(text: str) -> Any:
  """Returns the value of an untrusted text. Raises ValueError, TypeError or RecursionError if it is invalid."""
  return _build(json.loads(text))


def _dissolve(value: Any) -> Any:
  if value is None or isinstance(value, bool):
    return value
  if isinstance(value, str):
    return str.__str__(value)
  if isinstance(value, int):
    return {"int": int.__format__(value, "x")}  # Hexadecimal has no limit of length.
  if isinstance(value, float):
    return {"float": float.__repr__(value)}
  if isinstance(value, complex):
    return {"complex": [float.__repr__(value.real), float.__repr__(value.imag)]}
  if isinstance(value, bytes | bytearray):
    return {"bytes": bytes(value).hex()}
  if isinstance(value, list):
    return [_dissolve(item) for item in value]
  for kind in (tuple, set, frozenset):
    if isinstance(value, kind):
      return {kind.__name__: [_dissolve(item) for item in value]}
  if isinstance(value, dict):
    return {"dict": [[_dissolve(key), _dissolve(item)] for key, item in value.items()]}
  raise TypeError(f"a {type(value).__name__} is not a plain value")


def _build(node: Any) -> Any:
  if node is None or isinstance(node, bool | str):
    return node
  if isinstance(node, list):
    return [_build(item) for item in node]
  if not isinstance(node, dict) or len(node) != 1:
    raise ValueError("a plain value must be null, true, false, a string, a list or one tagged value")
  ((kind, content),) = node.items()
  if kind == "int":
    return int(_text(content), 16)
  if kind == "float":
    return float(_text(content))
  if kind == "complex":
    real, imaginary = content
    return complex(float(_text(real)), float(_text(imaginary)))
  if kind == "bytes":
    return bytes.fromhex(_text(content))
  if kind == "dict":
    return {_build(key): _build(item) for key, item in content}
  if kind in ("tuple", "set", "frozenset") and isinstance(content, list):
    items = [_build(item) for item in content]
    return tuple(items) if kind == "tuple" else set(items) if kind == "set" else frozenset(items)
  raise ValueError(f"unknown kind of plain value: {kind!r}")


def _text(content: Any) -> str:
  if not isinstance(content, str):
    raise ValueError(f"the content of a number or of bytes must be a string; received {content!r:.200}")
  return content
