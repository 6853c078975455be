"""Failed episodes of an engine: counted by kind, the first of each kind logged, and too many of them an error."""

from __future__ import annotations

import collections
import logging

from sao_jax.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao_jax.rollout.user_errors import trace

_log = logging.getLogger(__name__)

_EPISODES_TO_JUDGE = (64, 256)
"""The share of failures is taken over the last episodes: at least, at most so many."""


class TooManyFailuresError(RuntimeError):
  """So many episodes fail that something other than the episodes is broken."""


class FailureLog:
  """What failed so far.

  Args:
    max_share: `EngineConfig.max_failed_share`.
  """

  def __init__(self, max_share: float):
    self._max_share = max_share
    self._outcomes = collections.deque[bool](maxlen=_EPISODES_TO_JUDGE[1])  # of the last episodes: failed?
    self.by_kind = collections.Counter[str]()

  def succeeded(self, count: int) -> None:
    """Notes that episodes ended as they should."""
    self._outcomes.extend([False] * count)

  def failed(self, request: EpisodeRequest, failure: EpisodeFailure) -> None:
    """Notes a failed episode."""
    if failure.kind not in self.by_kind:
      cause = "" if failure.__cause__ is None else f"\n{trace(failure.__cause__)}"
      message = "episode %d failed (%s, logged once per kind): %s%s"
      _log.warning(message, request.episode_id, failure.kind, failure, cause)
    self.by_kind[failure.kind] += 1
    self._outcomes.append(True)

  def judge(self, request: EpisodeRequest, failure: EpisodeFailure) -> None:
    """Raises `TooManyFailuresError` if that is so; the arguments are the last failure."""
    failed, ended = sum(self._outcomes), len(self._outcomes)
    if ended >= _EPISODES_TO_JUDGE[0] and failed > self._max_share * ended:
      raise TooManyFailuresError(
        f"{failed} of the last {ended} episodes failed, more than EngineConfig.max_failed_share = "
        f"{self._max_share}; failures by kind: {dict(self.by_kind)}; the last one (episode {request.episode_id}): "
        f"{failure}"
      ) from failure
