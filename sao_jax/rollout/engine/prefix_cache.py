"""Which beginnings of prompts are worth computing once: found by comparing prompts, forgotten when not used."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

import numpy as np

BLOCK = 16
"""Shared beginnings are cut to a multiple of it, so that prompts that go on alike for a few tokens share one entry."""
_RECENT = 32

_Row = TypeVar("_Row")


def common_length(a: np.ndarray, b: np.ndarray) -> int:
  """Length of the longest common beginning of `a` `[n]` and `b` `[m]`.

  >>> common_length(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
  2
  """
  size = min(a.shape[0], b.shape[0])
  different = np.flatnonzero(a[:size] != b[:size])
  return int(different[0]) if different.size else size


class PrefixStore(Generic[_Row]):
  """Beginnings that two prompts had in common, and what was computed for them, keyed by (policy version, tokens).

  Args:
    capacity: beginnings kept; the one that was not used for longest makes room. 0: none.
  """

  def __init__(self, capacity: int):
    self._capacity = capacity
    self._recent = collections.deque[np.ndarray](maxlen=_RECENT)
    self._known = collections.OrderedDict[bytes, np.ndarray]()
    self._rows: dict[tuple[int, bytes], _Row] = {}

  def note(self, prompt: np.ndarray) -> None:
    """Compares a new prompt `[n]` int32 with the last ones; the longest beginning shared with one is remembered."""
    # A token must be left to go on from, also where a prompt comes again as it is.
    longest = max((common_length(prompt[:-1], other) for other in self._recent), default=0) // BLOCK * BLOCK
    self._recent.append(prompt)
    if longest and self._capacity:
      self._known[prompt[:longest].tobytes()] = prompt[:longest]
      self._known.move_to_end(prompt[:longest].tobytes())
      while len(self._known) > self._capacity:
        forgotten, _ = self._known.popitem(last=False)
        self._rows = {key: row for key, row in self._rows.items() if key[1] != forgotten}

  def match(self, tokens: np.ndarray) -> np.ndarray | None:
    """The longest remembered beginning of `tokens` that leaves at least one token; None if there is none."""
    fitting = [x for x in self._known.values() if x.shape[0] < tokens.shape[0] and common_length(x, tokens) == len(x)]
    if not fitting:
      return None
    longest = max(fitting, key=len)
    self._known.move_to_end(longest.tobytes())
    return longest

  def get(self, version: int, prefix: np.ndarray) -> _Row | None:
    """What was put for `prefix` under `version`."""
    return self._rows.get((version, prefix.tobytes()))

  def put(self, version: int, prefix: np.ndarray, row: _Row) -> None:
    """Keeps `row` for a remembered `prefix`; rows of other versions are dropped."""
    self._rows = {key: kept for key, kept in self._rows.items() if key[0] == version}
    self._rows[version, prefix.tobytes()] = row

  def clear_rows(self) -> None:
    """Drops what was computed, not what was noticed."""
    self._rows.clear()
