"""Options of a run, which may hold anything, on their way into config dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def checked(kind: type[T], fields: Mapping[str, Any]) -> T:
  """Makes a config dataclass; ValueError names the fields that it does not have, and those that it has."""
  known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
  if unknown := sorted(set(fields) - known):
    raise ValueError(f"unknown options of {kind.__name__}: {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
  return kind(**fields)
