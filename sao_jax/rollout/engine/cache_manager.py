"""KV-cache manager: which pages are free, which are in use, and which hold prefixes that prompts share."""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Sequence

import numpy as np

NULL_PAGE = 0
"""Padding is written to this page, which belongs to no sequence."""


class CacheManager:
  """Pages of one KV cache.

  A page has as many users as sequences hold it. Full pages of a prompt are registered under a key of (policy version,
  all tokens up to the page's end), so that other prompts with the same beginning take them over instead of computing
  them. A registered page without users keeps its contents until the room is needed; the least recently used goes first.

  Args:
    num_pages: number of pages, besides the null page.
    page_size: tokens per page.
  """

  def __init__(self, num_pages: int, page_size: int):
    self._num_pages = num_pages
    self._page_size = page_size
    self.reset()

  def reset(self) -> None:
    """Frees all pages and forgets their contents."""
    self._free = list(range(self._num_pages, NULL_PAGE, -1))
    self._users = collections.Counter[int]()
    self._page_of: dict[bytes, int] = {}
    self._key_of: dict[int, bytes] = {}
    self._idle = collections.OrderedDict[int, None]()

  @property
  def num_free(self) -> int:
    """Number of pages without users."""
    return len(self._free) + len(self._idle)

  def pages_for(self, num_tokens: int) -> int:
    """Returns the number of pages that hold `num_tokens` tokens."""
    return -(-num_tokens // self._page_size)

  def allocate(self, count: int) -> list[int]:
    """Returns `count` <= `num_free` pages with one user each; their contents are arbitrary."""
    pages = []
    for _ in range(count):
      if not self._free:
        page, _ = self._idle.popitem(last=False)
        self._forget_key(page)
        self._free.append(page)
      pages.append(self._free.pop())
    self._users.update(pages)
    return pages

  def release(self, pages: Sequence[int]) -> None:
    """Removes one user of each page."""
    for page in reversed(pages):  # so that the end of a prefix is evicted before its beginning
      self._users[page] -= 1
      if self._users[page]:
        continue
      del self._users[page]
      if page in self._key_of:
        self._idle[page] = None
      else:
        self._free.append(page)

  def page_keys(self, tokens: np.ndarray, version: int) -> list[bytes]:
    """Returns the key of each full page of a context, `[n]` int32."""
    keys, key = [], str(version).encode()
    for end in range(self._page_size, len(tokens) + 1, self._page_size):
      key = hashlib.sha256(key + tokens[end - self._page_size : end].tobytes()).digest()
      keys.append(key)
    return keys

  def find(self, keys: Sequence[bytes]) -> int:
    """Returns for how many of `keys`, from the first on, there are pages."""
    return next((i for i, key in enumerate(keys) if key not in self._page_of), len(keys))

  def share(self, keys: Sequence[bytes]) -> list[int]:
    """Returns the pages of `keys`, which `find` has found, with one more user each."""
    pages = [self._page_of[key] for key in keys]
    for page in pages:
      self._idle.pop(page, None)
    self._users.update(pages)
    return pages

  def register(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
    """Lets other sequences share `pages`, whose contents are those of `keys`. Pages of known keys stay private."""
    for page, key in zip(pages, keys, strict=True):
      if key not in self._page_of and page not in self._key_of:
        self._page_of[key] = page
        self._key_of[page] = key

  def forget_prefixes(self) -> None:
    """Forgets all keys, since the weights have changed."""
    self._page_of.clear()
    self._key_of.clear()
    self._free += self._idle
    self._idle.clear()

  def _forget_key(self, page: int) -> None:
    del self._page_of[self._key_of.pop(page)]
