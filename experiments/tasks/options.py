"""Checks the options of a run, which may hold anything, against config dataclasses, and suggests similar names."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def checked(kind: type[T], fields: Mapping[str, Any]) -> T:
  """Makes a config dataclass from options.

  Raises:
    ValueError: the dataclass lacks some of the fields; the message names them and the most similar field.
  """
  known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
  if unknown := sorted(set(fields) - known):
    raise ValueError(f"unknown options of {kind.__name__}: {', '.join(unknown)}{closest(unknown[0], sorted(known))}")
  return kind(**fields)


def closest(name: str, known: Iterable[str]) -> str:
  """Returns the end of an error message about an unknown name: the most similar known names, or all of them.

  >>> closest("tran_size", ["train_size", "seed"]), closest("x", ["train_size", "seed"])
  ('; did you mean train_size?', '; it has train_size, seed.')
  """
  names = list(known)
  matches = difflib.get_close_matches(name, names, n=3)
  return f"; did you mean {' or '.join(matches)}?" if matches else f"; it has {', '.join(names) or 'none'}."
