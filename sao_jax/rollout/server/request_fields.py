"""Checked reading of a JSON request: each field is taken by name and type, and unknown fields are refused.

Written by hand because pydantic keeps the last of two fields with the same name and accepts `true` and `1.0` where a
`Literal` allows 1 only. Its messages would need translation, as those here name the field, the allowed values and the
received one; and the `serve` extra would gain a dependency.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


class BadRequestError(Exception):
  """A request is rejected.

  Args:
    message: names the problem; it is sent to the client.
    field: name of the wrong field, if it is one.
    status: HTTP status of the response.
  """

  def __init__(self, message: str, *, field: str | None = None, status: int = 400):
    super().__init__(message)
    self.field = field
    self.status = status


def _no_constant(name: str) -> Any:
  raise ValueError(f"{name} is not valid JSON")


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  fields: dict[str, Any] = {}
  for name, value in pairs:
    if name in fields:
      raise ValueError(f"key {name:.80} occurs twice")
    fields[name] = value
  return fields


class RequestFields:
  """Fields of a request body. Each method takes a field out; `finish` rejects those that remain.

  >>> fields = RequestFields(b'{"max_tokens": 5, "n": 2}')
  >>> fields.integer("max_tokens", low=1, high=8)
  5
  >>> fields.finish({"n": (1,)})
  Traceback (most recent call last):
  ...
  sao_jax.rollout.server.request_fields.BadRequestError: n must be 1; received 2.

  Args:
    body: JSON text, or the parsed value of a nested object.
    prefix: prefix of field names in messages.

  Raises:
    BadRequestError: the body is no JSON object. All methods raise it for a wrong value.
  """

  def __init__(self, body: bytes | Mapping[str, Any], prefix: str = ""):
    if isinstance(body, bytes):
      try:
        body = json.loads(body or b"{}", parse_constant=_no_constant, object_pairs_hook=_no_key_twice)
      except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body must be JSON: {error}") from error
    if not isinstance(body, dict):
      raise BadRequestError(f"the body must be a JSON object; received {type(body).__name__}.")
    self._rest = dict(body)
    self._prefix = prefix

  def integer(self, name: str, *, low: int, high: int, default: int | None = None) -> int | None:
    """Takes an integer in [low, high]; `default` if it is null or missing."""
    value = self._rest.pop(name, None)
    if value is None:
      return default
    if type(value) is not int or not low <= value <= high:
      raise self._wrong(name, f"an integer in [{low}, {high}]", value)
    return value

  def number(self, name: str, *, default: float) -> float:
    """Takes a finite number; `default` if it is null or missing."""
    value = self._rest.pop(name, None)
    if value is None:
      return default
    try:
      number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
      number = math.inf
    if not math.isfinite(number):
      raise self._wrong(name, "a finite number", value)
    return number

  def boolean(self, name: str, *, default: bool = False) -> bool:
    """Takes true or false; `default` if it is null or missing."""
    value = self._rest.pop(name, None)
    if value is None:
      return default
    if not isinstance(value, bool):
      raise self._wrong(name, "true or false", value)
    return value

  def text(self, name: str, *, max_chars: int = 4096) -> str | None:
    """Takes a string of 1 to `max_chars` characters; None if it is null or missing."""
    value = self._rest.pop(name, None)
    if value is None:
      return None
    if not isinstance(value, str) or not 0 < len(value) <= max_chars:
      raise self._wrong(name, f"a string of 1 to {max_chars} characters", value)
    if any("\ud800" <= character <= "\udfff" for character in value):
      raise self._wrong(name, "text without lone surrogates", value)
    return value

  def ids(self, name: str) -> list[int] | None:
    """Takes a list of integers; None if it is null or missing."""
    value = self._rest.pop(name, None)
    if value is None:
      return None
    if not isinstance(value, list) or any(type(i) is not int for i in value):
      raise self._wrong(name, "a list of token ids", value)
    return value

  def nested(self, name: str) -> RequestFields:
    """Takes a nested object; an empty one if it is null or missing."""
    value = self._rest.pop(name, None)
    if value is not None and not isinstance(value, dict):
      raise self._wrong(name, "an object", value)
    return RequestFields(value or {}, prefix=f"{self._prefix}{name}.")

  def is_text(self, name: str) -> bool:
    """Whether the field is a string; does not take it."""
    return isinstance(self._rest.get(name), str)

  def finish(self, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Rejects all remaining fields, except null and the values in `neutral`, which change nothing.

    Args:
      neutral: names of known but unsupported fields, each with the values that are accepted.
    """
    for name, value in self._rest.items():
      if name not in neutral:
        raise BadRequestError(f"unknown field {self._prefix}{name:.80}.", field=f"{self._prefix}{name:.80}")
      allowed = neutral[name]
      if value is not None and not any(type(value) is type(x) and value == x for x in allowed):
        raise self._wrong(name, " or ".join(json.dumps(x) for x in allowed) or "null", value)

  def _wrong(self, name: str, allowed: str, value: Any) -> BadRequestError:
    received = json.dumps(value)
    if len(received) > 80:
      received = received[:80] + "..."
    return BadRequestError(f"{self._prefix}{name} must be {allowed}; received {received}.", field=self._prefix + name)
