"""The KV-cache manager: which live sequence has which slot of the cache, swapping, and shared prefixes.

There may be more live sequences than slots. A sequence that needs prefill takes a free slot, or the slot of the
sequence that has waited longest for its environment. The keys and values of that sequence are swapped out to the host,
or dropped and computed again later, whichever is cheaper (`Sampler.copy_pays`). A prefix that two prompts share is
computed once per policy version, and copied into the slots of the others.

With `recompute_cache_on_update` no token is sampled from keys and values of another version than the sampler's. Every
row carries the version that computed it, on the device or on the host, and is dropped when that is not the current one.
Without it a sequence keeps its own rows across versions. Prefixes are shared only within a version in either case.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sao_jax.rollout.engine.config import EngineConfig, bucket
from sao_jax.rollout.engine.prefix_cache import PrefixStore
from sao_jax.rollout.engine.sampler import PrefillRow, Sampler, SavedRow
from sao_jax.rollout.environment_runner import EnvironmentHolder
from sao_jax.rollout.episodes import Episode, EpisodeRequest
from sao_jax.types import Params


class Status(enum.Enum):
  """The phase that a sequence is in."""

  FREE = enum.auto()
  ENV = enum.auto()
  PREFILL = enum.auto()
  DECODE = enum.auto()


class LiveSequence:
  """A live episode and its environment."""

  def __init__(self, index: int, holder: EnvironmentHolder):
    self.index = index
    self.holder = holder
    self.state = Status.FREE
    self.request: EpisodeRequest | None = None
    self.episode: Episode | None = None
    self.slot: int | None = None
    """Its row of the cache; None while it is swapped out, or before its first prefill."""
    self.swapped: SavedRow | None = None
    """Its keys and values while it is swapped out; None if they are to be computed again."""
    self.num_computed = 0
    """Tokens whose keys and values are in the cache, or in `swapped`. While it decodes: all but the last."""
    self.pending = np.zeros(0, np.int32)
    """The tokens from `num_computed` on. The last of them is not prefilled: decoding starts from it."""
    self.cache_version = -1
    """Policy version of its newest keys and values."""
    self.since = 0
    """When it entered its phase, as the number of such events."""
    self.prefix_noted = False
    """Whether its prompt was compared with other prompts."""

  @property
  def context_length(self) -> int:
    """Number of tokens of its episode."""
    assert self.episode is not None
    return self.episode.length

  def begin(self, request: EpisodeRequest) -> None:
    """Starts an episode."""
    self.request = request
    self.num_computed = 0
    self.cache_version = -1
    self.prefix_noted = False

  def start_prefill(self) -> None:
    """Enters the prefill phase, with every token that is not in the cache."""
    assert self.episode is not None
    self.state = Status.PREFILL
    self.pending = self.episode.tokens()[self.num_computed :]

  def restart(self) -> None:
    """Drops its keys and values, so that all of them are computed again."""
    self.num_computed = 0
    self.swapped = None
    self.start_prefill()


class KVCacheManager:
  """Assigns the slots of a sampler's cache to live sequences.

  Args:
    config: settings.
    sampler: owns the cache.
    counts: counts are added here.
  """

  def __init__(self, config: EngineConfig, sampler: Sampler, counts: Counter[str]):
    self._config = config
    self._sampler = sampler
    self._counts = counts
    self.reset()

  def reset(self) -> None:
    """Returns to the initial state, so that what follows does not depend on what came before."""
    streams = self._sampler.num_streams
    self._free = [list(range(stream, self._config.num_slots, streams)) for stream in range(streams)]
    self._prefixes = PrefixStore[SavedRow](self._config.prefix_rows)
    self._version = -1

  def set_version(self, version: int) -> None:
    """Records that the sampler uses the weights of `version` from now on."""
    self._version = version
    self._prefixes.clear_rows()

  def release(self, sequence: LiveSequence) -> None:
    """Frees what a sequence holds, at the end of its episode."""
    if sequence.slot is not None:
      self._vacate(sequence)
    sequence.swapped = None

  def stream(self, sequence: LiveSequence) -> int | None:
    """The decode stream of a sequence's slot; None if it has no slot."""
    return None if sequence.slot is None else sequence.slot % self._sampler.num_streams

  def allocate(self, sequences: Sequence[LiveSequence], params: Params, *, stream: int) -> list[LiveSequence]:
    """Gives a stream's slots to sequences that need prefill, first come first served.

    Returns:
      The sequences that need prefill and have a slot of this stream.
    """
    idle = sorted((x for x in sequences if x.state is Status.ENV and self.stream(x) == stream), key=lambda x: x.since)
    waiting = (x for x in sequences if x.state is Status.PREFILL and self.stream(x) in (stream, None))
    placed = []
    for sequence in sorted(waiting, key=lambda x: (x.since, x.index)):
      if sequence.slot is None:
        if not any(self._free) and idle:  # a slot that is free in another stream is given at that stream's turn
          self._swap_out(idle.pop(0), params)
        if not self._free[stream]:
          continue
        self._swap_in(sequence, stream)
      self._drop_stale(sequence)
      if not sequence.num_computed:
        self._share_prefix(sequence, params)
      placed.append(sequence)
    return placed

  def _swap_out(self, sequence: LiveSequence, params: Params) -> None:
    assert sequence.slot is not None
    stale = self._config.recompute_cache_on_update and sequence.cache_version != self._version
    if not stale and self._sampler.copy_pays(params, sequence.num_computed, to_host=True):
      sequence.swapped = self._sampler.save(sequence.slot, to_host=True)
    else:
      sequence.num_computed = 0
    self._vacate(sequence)
    self._counts["swapped_out"] += 1

  def _vacate(self, sequence: LiveSequence) -> None:
    stream = self.stream(sequence)
    assert stream is not None and sequence.slot is not None
    heapq.heappush(self._free[stream], sequence.slot)
    sequence.slot = None

  def _swap_in(self, sequence: LiveSequence, stream: int) -> None:
    sequence.slot = heapq.heappop(self._free[stream])
    saved, sequence.swapped = sequence.swapped, None
    if sequence.num_computed and not self._stale(sequence):
      assert saved is not None
      self._sampler.restore(sequence.slot, saved)
      self._counts["swapped_in"] += 1

  def _stale(self, sequence: LiveSequence) -> bool:
    recompute = self._config.recompute_cache_on_update
    return recompute and sequence.num_computed > 0 and sequence.cache_version != self._version

  def _drop_stale(self, sequence: LiveSequence) -> None:
    if self._stale(sequence):
      self._counts["cache_recomputes"] += 1
      sequence.restart()

  def _share_prefix(self, sequence: LiveSequence, params: Params) -> None:
    """Starts a sequence after the shared prefix of its context, which the first such sequence computes."""
    assert sequence.episode is not None and sequence.slot is not None
    tokens = sequence.episode.tokens()
    if not sequence.prefix_noted:
      sequence.prefix_noted = True
      self._prefixes.note(tokens)
    prefix = self._prefixes.match(tokens)
    if prefix is None or not self._sampler.copy_pays(params, len(prefix), to_host=False):
      return
    row = self._prefixes.get(self._version, prefix)
    if row is None:
      self._prefill_prefix(sequence.slot, prefix, params)
      self._prefixes.put(self._version, prefix, self._sampler.save(sequence.slot, to_host=False))
    else:
      self._sampler.restore(sequence.slot, row)
      self._counts["prefix_tokens_saved"] += len(prefix)
    sequence.num_computed = len(prefix)
    sequence.cache_version = self._version
    sequence.start_prefill()

  def _prefill_prefix(self, slot: int, prefix: np.ndarray, params: Params) -> None:
    config = self._config
    widest = config.prefill_tokens[-1]
    for start in range(0, len(prefix), widest):
      piece = prefix[start : start + widest]
      self._sampler.prefill(
        params,
        [PrefillRow(slot, start, piece, None)],
        num_rows=config.prefill_rows[0],
        width=bucket(config.prefill_tokens, len(piece)),
        live_len=bucket(config.live_lengths(), start + len(piece)),
      )
      self._counts["prefills"] += 1
      self._counts["prefill_tokens"] += len(piece)
