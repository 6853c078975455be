"""Prefix cache: prompts are compared with recent ones, and the cache rows of shared prefixes are kept for reuse."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

import numpy as np

BLOCK = 16
"""Shared prefixes are cut to a multiple of this many tokens. So prompts with nearly the same prefix share one entry."""
_RECENT = 32

_Row = TypeVar("_Row")


def common_length(a: np.ndarray, b: np.ndarray) -> int:
  """Returns the length of the longest common prefix of `a` `[n]` and `b` `[m]`.

  >>> common_length(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
  2
  """
  size = min(a.shape[0], b.shape[0])
  different = np.flatnonzero(a[:size] != b[:size])
  return int(different[0]) if different.size else size


class PrefixStore(Generic[_Row]):
  """Prefixes that two prompts had in common, and the cache row of each, keyed by (policy version, tokens).

  Args:
    capacity: number of prefixes to keep; the least recently used one is evicted. 0 keeps none.
  """

  def __init__(self, capacity: int):
    self._capacity = capacity
    self._recent = collections.deque[np.ndarray](maxlen=_RECENT)
    self._known = collections.OrderedDict[bytes, np.ndarray]()
    self._rows: dict[tuple[int, bytes], _Row] = {}

  def note(self, prompt: np.ndarray) -> None:
    """Compares a new prompt, `[n]` int32, with recent ones, and remembers the longest prefix shared with one."""
    # The last token is left out: decoding starts from it, also when a prompt occurs twice.
    longest = max((common_length(prompt[:-1], other) for other in self._recent), default=0) // BLOCK * BLOCK
    self._recent.append(prompt)
    if longest and self._capacity:
      self._known[prompt[:longest].tobytes()] = prompt[:longest]
      self._known.move_to_end(prompt[:longest].tobytes())
      while len(self._known) > self._capacity:
        evicted, _ = self._known.popitem(last=False)
        self._rows = {key: row for key, row in self._rows.items() if key[1] != evicted}

  def match(self, tokens: np.ndarray) -> np.ndarray | None:
    """Returns the longest remembered prefix of `tokens` that leaves at least one token; None if there is none."""
    fitting = [x for x in self._known.values() if x.shape[0] < tokens.shape[0] and common_length(x, tokens) == len(x)]
    if not fitting:
      return None
    longest = max(fitting, key=len)
    self._known.move_to_end(longest.tobytes())
    return longest

  def get(self, version: int, prefix: np.ndarray) -> _Row | None:
    """Returns the row that was stored for `prefix` under `version`; None if there is none."""
    return self._rows.get((version, prefix.tobytes()))

  def put(self, version: int, prefix: np.ndarray, row: _Row) -> None:
    """Stores `row` for a remembered `prefix`, and drops the rows of other versions."""
    self._rows = {key: kept for key, kept in self._rows.items() if key[0] == version}
    self._rows[version, prefix.tobytes()] = row

  def clear_rows(self) -> None:
    """Drops all rows; the prefixes stay known."""
    self._rows.clear()
