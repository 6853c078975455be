"""Pages: users, shared prefixes, eviction; checked against a plain model under random calls."""

from __future__ import annotations

import collections

import hypothesis
import hypothesis.strategies as st
import numpy as np

from sao_jax.rollout.engine.cache_manager import NULL_PAGE, CacheManager


def prompt(*pieces) -> np.ndarray:
  return np.concatenate([np.full(n, value, np.int32) for value, n in pieces])


def test_prompts_share_the_full_pages_of_their_common_prefix():
  cache = CacheManager(8, 4)
  first = prompt((1, 9), (2, 5))
  keys = cache.page_keys(first, version=0)
  assert len(keys) == 3
  pages = cache.allocate(4)
  cache.register(pages[:3], keys)
  again = cache.page_keys(prompt((1, 9), (3, 5)), version=0)
  assert cache.find(again) == 2 and cache.share(again[:2]) == pages[:2]
  assert cache.find(cache.page_keys(first, version=1)) == 0
  assert cache.find(cache.page_keys(prompt((2, 4), (1, 9)), version=0)) == 0
  cache.forget_prefixes()
  assert cache.find(keys) == 0
  cache.release(pages)
  assert cache.num_free == 6  # two are still in use
  cache.release(pages[:2])
  assert cache.num_free == 8


def test_a_prefix_without_users_is_kept_until_the_room_is_needed_and_ends_first():
  cache = CacheManager(4, 2)
  keys = cache.page_keys(prompt((1, 6)), version=0)
  pages = cache.allocate(3)
  cache.register(pages, keys)
  cache.release(pages)
  assert cache.num_free == 4 and cache.find(keys) == 3
  taken = cache.allocate(2)  # the free page, and the end of the prefix
  assert cache.find(keys) == 2 and not set(taken) & set(pages[:2])
  assert cache.share(keys[:2]) == pages[:2] and cache.num_free == 0


CALLS = st.lists(st.tuples(st.sampled_from(["start", "end", "forget"]), st.integers(0, 5), st.integers(1, 9)))


@hypothesis.given(CALLS)
def test_no_page_is_given_to_two_sequences_and_none_is_lost(calls):
  """Sequences hold a shared prefix and pages of their own. A page's contents are those of its key."""
  cache, contents, live, keys = CacheManager(10, 2), {}, [], {}
  for kind, which, size in calls:
    if kind == "start":
      tokens = prompt((which % 2, 2 * size))
      keys = cache.page_keys(tokens, version=0)
      found = cache.find(keys)
      shared = cache.share(keys[:found])
      assert [contents[page] for page in shared] == keys[:found]
      if cache.num_free < size - found:
        cache.release(shared)
        continue
      own = cache.allocate(size - found)
      assert not set(own) & {page for pages in live for page in pages} and len(set(own)) == len(own)
      contents.update(zip(own, keys[found:], strict=True))
      cache.register(own, keys[found:])
      live.append(shared + own)
    elif kind == "end" and live:
      cache.release(live.pop(which % len(live)))
    elif kind == "forget":
      cache.forget_prefixes()
    users = collections.Counter(page for pages in live for page in pages)
    assert NULL_PAGE not in users and cache.num_free == 10 - len(users)
