"""Options of a run, which may hold anything, on their way into config dataclasses; and names that are nearly right."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def checked(kind: type[T], fields: Mapping[str, Any]) -> T:
  """Makes a config dataclass; ValueError names the fields that it does not have, and the closest that it has."""
  known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
  if unknown := sorted(set(fields) - known):
    raise ValueError(f"unknown options of {kind.__name__}: {', '.join(unknown)}{closest(unknown[0], sorted(known))}")
  return kind(**fields)


def closest(name: str, known: Iterable[str]) -> str:
  """The end of a sentence that refuses a name: the known ones that are nearest to it, or all of them.

  >>> closest("tran_size", ["train_size", "seed"]), closest("x", ["train_size", "seed"])
  ('; did you mean train_size?', '; it has train_size, seed.')
  """
  names = list(known)
  matches = difflib.get_close_matches(name, names, n=3)
  return f"; did you mean {' or '.join(matches)}?" if matches else f"; it has {', '.join(names) or 'none'}."
