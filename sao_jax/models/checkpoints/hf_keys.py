"""The keys of a JSON object, each read once: a key that nothing reads is an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MISSING = object()


class Keys:
  """Keys of a JSON object. Each can be taken once, and `finish` refuses keys that are left."""

  def __init__(self, values: Mapping[str, Any], source: str):
    self._left = dict(values)
    self._source = source

  def take(self, *names: str, default: Any = _MISSING) -> Any:
    """Returns the value of the first of `names` (old and new spellings) that is present and not null."""
    found = [self._left.pop(name) for name in names if name in self._left]
    found = [value for value in found if value is not None]
    if any(value != found[0] for value in found):
      raise ValueError(f"{self._source}: {' and '.join(names)} mean the same but differ: {found}.")
    if found:
      return found[0]
    if default is _MISSING:
      raise ValueError(f"{self._source} has no {' or '.join(names)}.")
    return default

  def take_all(self, *names: str) -> dict[str, Any]:
    """Returns the values of those `names` that are present, including nulls."""
    return {name: self._left.pop(name) for name in names if name in self._left}

  def require(self, name: str, allowed: tuple[Any, ...]) -> None:
    """Raises ValueError if the value of `name` is not allowed. The first allowed value is the default."""
    value = self.take(name, default=allowed[0])
    if value not in allowed:
      raise ValueError(f"{self._source}: {name} = {value!r:.200} is not supported; allowed: {list(allowed)}.")

  def finish(self, inert: frozenset[str] = frozenset()) -> None:
    """Raises ValueError if a key is left that is neither inert nor empty."""
    left = {k: v for k, v in self._left.items() if k not in inert and not k.startswith("_")}
    unknown = {k: v for k, v in left.items() if v is not None and v is not False and v not in ([], {})}
    if unknown:
      raise ValueError(f"{self._source}: these keys are not supported: {unknown!r:.500}.")
