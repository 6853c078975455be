"""Which live episode has which slot of the cache: moving out and back, and prompt prefixes that are fed once.

There may be more live episodes (seats) than slots. A seat that must be fed takes a free slot, or that of a seat whose
environment is at work, the one that has waited longest. What the cache held for that one is copied to the host or
forgotten and fed again later, whichever is cheaper (`Sampler.copy_pays`). A beginning that two prompts share is fed
once per policy version; its row is copied into the slots of the others.

With `recompute_cache_on_update` nothing is sampled from keys and values of another version than the sampler's own:
rows carry the version they were computed with, wherever they are, and are dropped when it is not the current one.
Without it an episode keeps its own rows across versions; prefixes are shared within a version in either case.
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


class State(enum.Enum):
  """What a seat is doing."""

  FREE = enum.auto()
  ENV = enum.auto()
  FEED = enum.auto()
  DECODE = enum.auto()


class Seat:
  """A live episode and its environment."""

  def __init__(self, index: int, holder: EnvironmentHolder):
    self.index = index
    self.holder = holder
    self.state = State.FREE
    self.request: EpisodeRequest | None = None
    self.episode: Episode | None = None
    self.slot: int | None = None
    """Where in the cache it is; None: moved out, or not fed yet."""
    self.saved: SavedRow | None = None
    """Its part of the cache while it is moved out; None: it is fed again."""
    self.fed = 0
    """Tokens of the episode that the cache (or `saved`) holds. While it decodes: all but the last."""
    self.pending = np.zeros(0, np.int32)
    """Tokens from `fed` on; the last one is not fed but decoded from."""
    self.cache_version = -1
    """Version that computed what the cache holds last."""
    self.since = 0
    """When it entered its state, in a count of such events."""
    self.noted = False
    """Whether its prompt was compared with others."""

  @property
  def context_length(self) -> int:
    """Tokens of its episode."""
    assert self.episode is not None
    return self.episode.length

  def begin(self, request: EpisodeRequest) -> None:
    """Takes on an episode."""
    self.request = request
    self.fed = 0
    self.cache_version = -1
    self.noted = False

  def feed(self) -> None:
    """What is not in the cache yet must be fed."""
    assert self.episode is not None
    self.state = State.FEED
    self.pending = self.episode.tokens()[self.fed :]

  def restart(self) -> None:
    """Forgets what the cache holds."""
    self.fed = 0
    self.saved = None
    self.feed()


class Residency:
  """Slots of a sampler and who has them.

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
    """As new: what follows does not depend on what came before."""
    lanes = self._sampler.num_lanes
    self._free = [list(range(lane, self._config.num_slots, lanes)) for lane in range(lanes)]
    self._prefixes = PrefixStore[SavedRow](self._config.prefix_rows)
    self._version = -1

  def set_version(self, version: int) -> None:
    """The sampler has weights of `version` from now on."""
    self._version = version
    self._prefixes.clear_rows()

  def release(self, seat: Seat) -> None:
    """The seat's episode is over."""
    if seat.slot is not None:
      self._vacate(seat)
    seat.saved = None

  def lane(self, seat: Seat) -> int | None:
    """The lane of a seat's slot; None: it has no slot."""
    return None if seat.slot is None else seat.slot % self._sampler.num_lanes

  def place(self, seats: Sequence[Seat], params: Params, *, lane: int) -> list[Seat]:
    """Gives a lane's slots to seats that must be fed, first come first served; returns those that have one there."""
    idle = sorted((x for x in seats if x.state is State.ENV and self.lane(x) == lane), key=lambda x: x.since)
    feeding = (x for x in seats if x.state is State.FEED and self.lane(x) in (lane, None))
    placed = []
    for seat in sorted(feeding, key=lambda x: (x.since, x.index)):
      if seat.slot is None:
        if not any(self._free) and idle:  # a slot that is free in another lane is given at that lane's turn
          self._move_out(idle.pop(0), params)
        if not self._free[lane]:
          continue
        self._move_in(seat, lane)
      self._drop_stale(seat)
      if not seat.fed:
        self._share_prefix(seat, params)
      placed.append(seat)
    return placed

  def _move_out(self, seat: Seat, params: Params) -> None:
    assert seat.slot is not None
    stale = self._config.recompute_cache_on_update and seat.cache_version != self._version
    if not stale and self._sampler.copy_pays(params, seat.fed, to_host=True):
      seat.saved = self._sampler.save(seat.slot, to_host=True)
    else:
      seat.fed = 0
    self._vacate(seat)
    self._counts["moved_out"] += 1

  def _vacate(self, seat: Seat) -> None:
    lane = self.lane(seat)
    assert lane is not None and seat.slot is not None
    heapq.heappush(self._free[lane], seat.slot)
    seat.slot = None

  def _move_in(self, seat: Seat, lane: int) -> None:
    seat.slot = heapq.heappop(self._free[lane])
    saved, seat.saved = seat.saved, None
    if seat.fed and not self._stale(seat):
      assert saved is not None
      self._sampler.restore(seat.slot, saved)
      self._counts["copied_back"] += 1

  def _stale(self, seat: Seat) -> bool:
    return self._config.recompute_cache_on_update and seat.fed > 0 and seat.cache_version != self._version

  def _drop_stale(self, seat: Seat) -> None:
    if self._stale(seat):
      self._counts["cache_recomputes"] += 1
      seat.restart()

  def _share_prefix(self, seat: Seat, params: Params) -> None:
    """Starts a seat whose context has a shared beginning after it; feeds the beginning if it is the first."""
    assert seat.episode is not None and seat.slot is not None
    tokens = seat.episode.tokens()
    if not seat.noted:
      seat.noted = True
      self._prefixes.note(tokens)
    prefix = self._prefixes.match(tokens)
    if prefix is None or not self._sampler.copy_pays(params, len(prefix), to_host=False):
      return
    row = self._prefixes.get(self._version, prefix)
    if row is None:
      self._feed_prefix(seat.slot, prefix, params)
      self._prefixes.put(self._version, prefix, self._sampler.save(seat.slot, to_host=False))
    else:
      self._sampler.restore(seat.slot, row)
      self._counts["prefix_tokens_saved"] += len(prefix)
    seat.fed = len(prefix)
    seat.cache_version = self._version
    seat.feed()

  def _feed_prefix(self, slot: int, prefix: np.ndarray, params: Params) -> None:
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
