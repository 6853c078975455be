"""A live sequence: an episode, its environment, and its pages of the KV cache."""

from __future__ import annotations

import enum

from sao_jax.rollout.engine.model_runner import SwappedPages
from sao_jax.rollout.environment_runner import EnvironmentHolder
from sao_jax.rollout.episodes import Episode, EpisodeRequest


class Status(enum.Enum):
  """Phase of a sequence: free, waiting for its environment, waiting for prefill, or decoding."""

  FREE = enum.auto()
  ENV = enum.auto()
  PREFILL = enum.auto()
  DECODE = enum.auto()


class Sequence:
  """A live episode with its environment and its pages.

  A sequence goes FREE -> ENV (reset) -> PREFILL -> DECODE -> ENV (step) -> PREFILL -> ... -> FREE. It has a request in
  every phase but FREE, and an episode from its first PREFILL on.

  Args:
    index: fixed number of this object; ties in scheduling are broken by it.
    holder: the environment.
  """

  def __init__(self, index: int, holder: EnvironmentHolder):
    self.index = index
    self.holder = holder
    self.status = Status.FREE
    self.request: EpisodeRequest | None = None
    self.episode: Episode | None = None
    self.since = 0
    """Time of the last change of phase, as a number of such events."""
    self.pages: list[int] = []
    """Pages of the cache, in the order of the tokens."""
    self.swapped: SwappedPages | None = None
    """Contents of the pages while swapped out."""
    self.num_computed = 0
    """Number of tokens whose keys and values are in `pages` or in `swapped`."""
    self.version = -1
    """Policy version of the newest keys and values."""
    self.one_version = True
    """Whether all keys and values are of `version`: only such pages are shared."""

  @property
  def length(self) -> int:
    """Number of tokens of the episode so far."""
    assert self.episode is not None
    return self.episode.length

  def set_status(self, status: Status, since: int) -> None:
    self.status, self.since = status, since

  def forget(self) -> None:
    """Marks all keys and values as not computed. The pages must have been released."""
    self.pages = []
    self.swapped = None
    self.num_computed = 0
    self.version = -1
    self.one_version = True
