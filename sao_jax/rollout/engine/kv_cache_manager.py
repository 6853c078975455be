"""KV-cache manager: slots of the cache for live sequences, swapping, and shared prefixes.

There may be more live sequences than slots. A sequence that needs prefill takes a free slot, or the slot of the
sequence that has waited longest for its environment. The keys and values of that sequence are swapped out to the host,
or dropped and recomputed later, whichever is cheaper (`Sampler.copy_is_cheaper`). A prefix that two prompts share is
prefilled once per policy version and copied into the slots of the others.

With `recompute_cache_on_update`, tokens are sampled only from keys and values of the current policy version. Every row,
on the device or on the host, carries the version that computed it, and is dropped if that is not the current one.
Without it, a sequence keeps its own rows across versions. In either case prefixes are shared only within a version.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sao_jax.rollout.engine.config import EngineConfig, bucket
from sao_jax.rollout.engine.prefix_cache import PrefixStore
from sao_jax.rollout.engine.sampler import CacheRow, PrefillRow, Sampler
from sao_jax.rollout.environment_runner import EnvironmentHolder
from sao_jax.rollout.episodes import Episode, EpisodeRequest
from sao_jax.types import Params


class Status(enum.Enum):
  """Phase of a sequence: free, waiting for its environment, waiting for prefill, or decoding."""

  FREE = enum.auto()
  ENV = enum.auto()
  PREFILL = enum.auto()
  DECODE = enum.auto()


class LiveSequence:
  """A live episode with its environment and its place in the KV cache.

  Args:
    index: fixed number of this object; ties in scheduling are broken by it.
    holder: the environment.
  """

  def __init__(self, index: int, holder: EnvironmentHolder):
    self.index = index
    self.holder = holder
    self.state = Status.FREE
    self.request: EpisodeRequest | None = None
    self.episode: Episode | None = None
    self.slot: int | None = None
    """Row of the cache; None before the first prefill and while swapped out."""
    self.swapped: CacheRow | None = None
    """Keys and values while swapped out; None if they must be recomputed."""
    self.num_computed = 0
    """Number of tokens whose keys and values are in the cache or in `swapped`; all but the last while decoding."""
    self.pending = np.zeros(0, np.int32)
    """`[n]` int32: the tokens from `num_computed` on. The last one is not prefilled: decoding starts from it."""
    self.cache_version = -1
    """Policy version of the newest keys and values."""
    self.since = 0
    """Time of the last change of phase, as a number of such events."""
    self.prefix_noted = False
    """Whether the prompt was compared with other prompts."""

  @property
  def context_length(self) -> int:
    """Number of tokens of the episode so far."""
    assert self.episode is not None
    return self.episode.length

  def begin(self, request: EpisodeRequest) -> None:
    """Starts an episode without any computed tokens."""
    self.request = request
    self.num_computed = 0
    self.cache_version = -1
    self.prefix_noted = False

  def start_prefill(self) -> None:
    """Enters the prefill phase with all tokens that are not in the cache."""
    assert self.episode is not None
    self.state = Status.PREFILL
    self.pending = self.episode.tokens()[self.num_computed :]

  def restart(self) -> None:
    """Drops the keys and values, and enters the prefill phase to recompute them."""
    self.num_computed = 0
    self.swapped = None
    self.start_prefill()


class KVCacheManager:
  """Assigns the slots of a sampler's cache to live sequences.

  Args:
    config: settings.
    sampler: owner of the cache.
    counts: counter to add to.
  """

  def __init__(self, config: EngineConfig, sampler: Sampler, counts: Counter[str]):
    self._config = config
    self._sampler = sampler
    self._counts = counts
    self.reset()

  def reset(self) -> None:
    """Returns to the initial state, so that results do not depend on earlier calls of the engine."""
    streams = self._sampler.num_streams
    self._free = [list(range(stream, self._config.num_slots, streams)) for stream in range(streams)]
    self._prefixes = PrefixStore[CacheRow](self._config.prefix_rows)
    self._version = -1

  def set_version(self, version: int) -> None:
    """Records the version of the weights that the sampler uses from now on."""
    self._version = version
    self._prefixes.clear_rows()

  def release(self, sequence: LiveSequence) -> None:
    """Frees the slot and the swapped-out row of a sequence, at the end of its episode."""
    if sequence.slot is not None:
      self._free_slot(sequence)
    sequence.swapped = None

  def stream(self, sequence: LiveSequence) -> int | None:
    """Returns the decode stream of a sequence's slot; None if it has no slot."""
    return None if sequence.slot is None else sequence.slot % self._sampler.num_streams

  def allocate(self, sequences: Sequence[LiveSequence], params: Params, *, stream: int) -> list[LiveSequence]:
    """Assigns a stream's slots to sequences that need prefill, first come, first served.

    Returns:
      The sequences that need prefill and have a slot in this stream.
    """
    idle = sorted((x for x in sequences if x.state is Status.ENV and self.stream(x) == stream), key=lambda x: x.since)
    waiting = (x for x in sequences if x.state is Status.PREFILL and self.stream(x) in (stream, None))
    placed = []
    for sequence in sorted(waiting, key=lambda x: (x.since, x.index)):
      if sequence.slot is None:
        if not any(self._free) and idle:  # no swap while any stream has a free slot: it is assigned in that turn
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
    if not stale and self._sampler.copy_is_cheaper(params, sequence.num_computed, to_host=True):
      sequence.swapped = self._sampler.read_row(sequence.slot, to_host=True)
    else:
      sequence.num_computed = 0
    self._free_slot(sequence)
    self._counts["swapped_out"] += 1

  def _free_slot(self, sequence: LiveSequence) -> None:
    stream = self.stream(sequence)
    assert stream is not None and sequence.slot is not None
    heapq.heappush(self._free[stream], sequence.slot)
    sequence.slot = None

  def _swap_in(self, sequence: LiveSequence, stream: int) -> None:
    sequence.slot = heapq.heappop(self._free[stream])
    row, sequence.swapped = sequence.swapped, None
    if sequence.num_computed and not self._stale(sequence):
      assert row is not None
      self._sampler.write_row(sequence.slot, row)
      self._counts["swapped_in"] += 1

  def _stale(self, sequence: LiveSequence) -> bool:
    recompute = self._config.recompute_cache_on_update
    return recompute and sequence.num_computed > 0 and sequence.cache_version != self._version

  def _drop_stale(self, sequence: LiveSequence) -> None:
    if self._stale(sequence):
      self._counts["cache_recomputes"] += 1
      sequence.restart()

  def _share_prefix(self, sequence: LiveSequence, params: Params) -> None:
    """Copies the shared prefix of a sequence's context into its slot; the first such sequence prefills the prefix."""
    assert sequence.episode is not None and sequence.slot is not None
    tokens = sequence.episode.tokens()
    if not sequence.prefix_noted:
      sequence.prefix_noted = True
      self._prefixes.note(tokens)
    prefix = self._prefixes.match(tokens)
    if prefix is None or not self._sampler.copy_is_cheaper(params, len(prefix), to_host=False):
      return
    row = self._prefixes.get(self._version, prefix)
    if row is None:
      self._prefill_prefix(sequence.slot, prefix, params)
      self._prefixes.put(self._version, prefix, self._sampler.read_row(sequence.slot, to_host=False))
    else:
      self._sampler.write_row(sequence.slot, row)
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
