"""Failed episodes of an engine: counted by kind, logged once per kind. Too many of them raise an error."""

from __future__ import annotations

import collections
import logging

from sao_jax.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao_jax.rollout.user_errors import format_traceback

_log = logging.getLogger(__name__)

_RECENT_EPISODES = (64, 256)
"""Minimum and maximum number of recent episodes over which the share of failures is taken."""


class TooManyFailuresError(RuntimeError):
  """So many episodes failed that the cause is not the single episode (a tool server that is down, say)."""


class FailureLog:
  """Counts of failed episodes, and the share of failures among the recent ones.

  Args:
    max_share: `EngineConfig.max_failed_share`, in [0, 1].
  """

  def __init__(self, max_share: float):
    self._max_share = max_share
    self._outcomes = collections.deque[bool](maxlen=_RECENT_EPISODES[1])  # True: failed
    self.by_kind = collections.Counter[str]()

  def record_successes(self, count: int) -> None:
    """Records `count` episodes that ended without failure."""
    self._outcomes.extend([False] * count)

  def record_failure(self, request: EpisodeRequest, failure: EpisodeFailure) -> None:
    """Records a failed episode. The first failure of each kind is logged."""
    if failure.kind not in self.by_kind:
      cause = "" if failure.__cause__ is None else f"\n{format_traceback(failure.__cause__)}"
      message = "episode %d failed (%s, logged once per kind): %s%s"
      _log.warning(message, request.episode_id, failure.kind, failure, cause)
    self.by_kind[failure.kind] += 1
    self._outcomes.append(True)

  def check(self, request: EpisodeRequest, failure: EpisodeFailure) -> None:
    """Raises `TooManyFailuresError` if too large a share of the recent episodes failed.

    Args:
      request: of the last failed episode, for the message.
      failure: the last failure.
    """
    failed, ended = sum(self._outcomes), len(self._outcomes)
    if ended >= _RECENT_EPISODES[0] and failed > self._max_share * ended:
      raise TooManyFailuresError(
        f"{failed} of the last {ended} episodes failed, more than EngineConfig.max_failed_share = "
        f"{self._max_share}; failures by kind: {dict(self.by_kind)}; the last one (episode {request.episode_id}): "
        f"{failure}"
      ) from failure
