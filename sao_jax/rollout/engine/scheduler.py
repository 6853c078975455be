"""Scheduler of one decode stream: which sequences a step decodes, which it prefills, and which give up their pages.

Sequences that decode come first, since they have waited longest, then those that need prefill, first come, first
served, as long as there are rows, tokens of the budget and pages. If there are no pages left, the sequence that has
waited longest for its environment gives up its own, then the one that is last in line. They are swapped out to the
host, or computed again later, whichever is cheaper (`ModelRunner.swap_is_cheaper`). So the first in line always
proceeds.

With `recompute_cache_on_update`, tokens are sampled only from keys and values of the current policy version: a sequence
whose cache is of an older version starts anew. Without it, a sequence keeps its pages across versions. In either case
prefixes are shared only within a version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as AnySequence
from typing import NamedTuple

import numpy as np

from sao_jax.rollout.engine.cache_manager import CacheManager
from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.model_runner import ModelRunner, Row
from sao_jax.rollout.engine.sequence import Sequence, Status
from sao_jax.types import Params


class ScheduledRow(NamedTuple):
  """A row of a step, and its sequence."""

  sequence: Sequence
  row: Row


class Scheduler:
  """Scheduler of the sequences of one decode stream. Not thread-safe.

  Args:
    config: settings.
    runner: runs the steps and copies pages; its cache is used by nothing else.
    sequences: all sequences of the stream.
    counts: counter to add to.
  """

  def __init__(self, config: EngineConfig, runner: ModelRunner, sequences: AnySequence[Sequence], counts: Counter[str]):
    self._config = config
    self._runner = runner
    self._sequences = sequences
    self._counts = counts
    self._num_rows = config.num_slots // config.num_streams
    self._cache = CacheManager(config.num_pages // config.num_streams, config.page_size)
    self._version = -1

  def reset(self) -> None:
    """Returns to the initial state, so that results do not depend on earlier calls of the engine."""
    self._runner.reset()
    self._cache.reset()
    self._version = -1

  def release(self, sequence: Sequence) -> None:
    """Frees the pages of a sequence."""
    self._cache.release(sequence.pages)
    sequence.forget()

  def schedule(self, params: Params, version: int) -> list[ScheduledRow]:
    """Returns the rows of the next step, and records their tokens as computed.

    Args:
      params: weights of the step.
      version: their policy version.
    """
    if version != self._version:
      self._version = version
      self._cache.forget_prefixes()
    line = self._line()
    rows: list[ScheduledRow] = []
    computed_prefixes: list[tuple[Sequence, int, list[bytes]]] = []
    computing: set[bytes] = set()
    tokens_left = self._config.token_budget
    waiting = sorted((x for x in self._sequences if x.status is Status.ENV and x.pages), key=lambda x: x.since)
    for i, sequence in enumerate(line):
      if len(rows) == self._num_rows:
        break
      if not tokens_left and sequence.length - sequence.num_computed > 1:
        continue  # Before it takes pages, or shares a prefix that another one is still computing.
      victims = waiting + line[:i:-1]
      keys = self._keys(sequence)
      if not sequence.num_computed and self._await_prefix(keys, computing):
        continue
      if not self._resume(sequence, keys, victims, params):
        continue
      row = self._next_row(sequence, tokens_left, victims, params)
      if row is None:
        continue
      tokens_left -= row.num_prefilled
      rows.append(ScheduledRow(sequence, row))
      first = sequence.num_computed // self._config.page_size
      self._record(sequence, row)
      if sequence.one_version and keys:
        computed_prefixes.append((sequence, first, keys))
        computing.update(keys[first : sequence.num_computed // self._config.page_size])
    for sequence, first, keys in computed_prefixes:
      last = min(sequence.num_computed // self._config.page_size, len(keys))
      self._cache.register(sequence.pages[first:last], keys[first:last])
    return rows

  def _line(self) -> list[Sequence]:
    """Returns the sequences that can proceed, in order of priority. Stale caches are dropped."""
    decoding = [x for x in self._sequences if x.status is Status.DECODE]
    waiting = [x for x in self._sequences if x.status is Status.PREFILL]
    line = decoding + sorted(waiting, key=lambda x: (x.since, x.index))
    for sequence in line:
      if self._stale(sequence):
        self._counts["cache_recomputes"] += 1
        self.release(sequence)
    return line

  def _stale(self, sequence: Sequence) -> bool:
    recompute = self._config.recompute_cache_on_update
    return recompute and sequence.num_computed > 0 and sequence.version != self._version

  def _keys(self, sequence: Sequence) -> list[bytes]:
    """Returns the keys of the pages that a sequence could share; none while it decodes."""
    if sequence.length - sequence.num_computed <= 1 or not sequence.one_version:
      return []
    assert sequence.episode is not None
    # The last token is left out: it must be computed for the first sampled token.
    return self._cache.page_keys(sequence.episode.tokens()[:-1], self._version)

  def _await_prefix(self, keys: list[bytes], computing: set[bytes]) -> bool:
    """Whether another sequence of this step computes the next page of this one, which can share it in the next step."""
    found = self._cache.find(keys)
    return found < len(keys) and keys[found] in computing

  def _resume(self, sequence: Sequence, keys: list[bytes], victims: list[Sequence], params: Params) -> bool:
    """Swaps a sequence in, or gives a new one the pages of its prefix. Returns False if there is no room."""
    if sequence.swapped is not None:
      count = sequence.swapped.num_pages
      if not self._make_room(count, victims, params):
        return False
      sequence.pages = self._cache.allocate(count)
      self._runner.write_pages(sequence.pages, sequence.swapped)
      sequence.swapped = None
      self._counts["swapped_in"] += 1
    elif not sequence.num_computed:
      self._cache.release(sequence.pages)
      found = self._cache.find(keys)
      sequence.pages = self._cache.share(keys[:found])
      sequence.num_computed = found * self._config.page_size
      sequence.version = self._version if found else -1
      self._counts["prefix_tokens_saved"] += sequence.num_computed
    return True

  def _next_row(self, sequence: Sequence, most: int, victims: list[Sequence], params: Params) -> Row | None:
    """Returns the row of a sequence in this step, with at most `most` tokens of prefill; None if it must wait."""
    episode, start = sequence.episode, sequence.num_computed
    assert episode is not None
    missing = sequence.length - start
    count = missing if missing - 1 <= most else most
    budget = episode.budget(self._config) if count == missing else 0
    if not count:
      return None
    end = start + count + max(min(budget, self._config.chunk_steps) - 1, 0)
    more = self._cache.pages_for(end) - len(sequence.pages)
    if more > 0:
      if not self._make_room(more, victims, params):
        return None
      sequence.pages += self._cache.allocate(more)
    tokens = np.array([episode.last_token], np.int32) if missing == 1 else episode.tokens()[start : start + count]
    return Row(episode.request.episode_id, start, tokens, budget, list(sequence.pages))

  def _record(self, sequence: Sequence, row: Row) -> None:
    if sequence.num_computed and sequence.version != self._version:
      sequence.one_version = False
    sequence.version = self._version
    sequence.num_computed += row.num_prefilled
    self._counts["prefill_tokens"] += row.num_prefilled
    if row.budget:
      sequence.status = Status.DECODE

  def _make_room(self, count: int, victims: list[Sequence], params: Params) -> bool:
    """Takes pages from `victims`, first to last, until `count` are free. Returns False if that is not enough."""
    while self._cache.num_free < count:
      if not victims:
        return False
      victim = victims.pop(0)
      if victim.pages:
        self._swap_out(victim, params)
    return True

  def _swap_out(self, sequence: Sequence, params: Params) -> None:
    kept = sequence.pages[: self._cache.pages_for(sequence.num_computed)]
    if kept and not self._stale(sequence) and self._runner.swap_is_cheaper(params, sequence.num_computed):
      sequence.swapped = self._runner.read_pages(kept)
      self._cache.release(sequence.pages)
      sequence.pages = []
    else:
      self.release(sequence)
    self._counts["swapped_out"] += 1
