"""Failed episodes of an engine: counted by kind, logged once per kind. Too many of them raise an error."""

from __future__ import annotations

import collections
import logging
from collections.abc import Mapping
from typing import Any

from sao_jax.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao_jax.rollout.user_errors import format_traceback

_log = logging.getLogger(__name__)

_RECENT_EPISODES = (64, 256)
"""Minimum and maximum number of recent episodes over which the share of failures is taken."""
_ALL_FAILED = 16
"""Number of episodes that are enough if every one of them failed."""


class TooManyFailuresError(RuntimeError):
  """So many episodes failed that the cause is not the single episode (a tool server that is down, say)."""


def check_share(failures: Mapping[str, int], total: int, max_share: float, what: str) -> None:
  """Raises `TooManyFailuresError` if more than `max_share` of some episodes failed.

  Args:
    failures: number of failures by kind.
    total: number of episodes.
    max_share: `EngineConfig.max_failed_share`, in [0, 1].
    what: the episodes, and what follows, for the message.
  """
  failed = sum(failures.values())
  if failed > max_share * total:
    raise TooManyFailuresError(
      f"{failed} of {total} {what} Allowed is a share of EngineConfig.max_failed_share = {max_share}. Failures by "
      f"kind: {by_count(failures)}. The first of each kind is logged above."
    )


def new_failures(before: Mapping[str, Any], after: Mapping[str, Any]) -> collections.Counter[str]:
  """Returns the failures between two readings of an engine's counters, by kind."""
  return collections.Counter(after["failed_by_kind"]) - collections.Counter(before["failed_by_kind"])


def check_share_between(before: Mapping[str, Any], after: Mapping[str, Any], max_share: float, what: str) -> None:
  """`check_share` of the episodes between two readings of an engine's counters in which the environment was called."""
  failures = new_failures(before, after)
  answered = after["episodes_answered"] - before["episodes_answered"]
  check_share(failures, failures.total() + answered, max_share, what)


def by_count(by_kind: Mapping[str, int]) -> str:
  """Formats numbers of failures, the most frequent kind first.

  >>> by_count({"timeout": 2, "step_error": 58})
  'step_error (58), timeout (2)'
  """
  return ", ".join(f"{kind} ({count})" for kind, count in collections.Counter(by_kind).most_common())


class FailureLog:
  """Counts of failed episodes, and the share of failures among the recent ones.

  Args:
    max_share: `EngineConfig.max_failed_share`, in [0, 1].
  """

  def __init__(self, max_share: float):
    self._max_share = max_share
    self._outcomes = collections.deque[bool](maxlen=_RECENT_EPISODES[1])  # True: failed
    self.by_kind = collections.Counter[str]()
    self._first: dict[str, str] = {}
    """Episode and message of the first failure of each kind."""

  def record_successes(self, count: int) -> None:
    """Records `count` episodes that ended without failure, after at least one answer of the environment.

    An episode that was cut in its first action says nothing about the environment. It is neither success nor failure.
    """
    self._outcomes.extend([False] * count)

  def record_failure(self, request: EpisodeRequest, failure: EpisodeFailure) -> None:
    """Records a failed episode. The first failure of each kind is logged."""
    if failure.kind not in self._first:
      self._first[failure.kind] = f"episode {request.episode_id}: {failure}"
      cause = "" if failure.__cause__ is None else f"\n{format_traceback(failure.__cause__)}"
      message = "episode %d failed (%s, logged once per kind): %s%s"
      _log.warning(message, request.episode_id, failure.kind, failure, cause)
    self.by_kind[failure.kind] += 1
    self._outcomes.append(True)

  def check(self, failure: EpisodeFailure) -> None:
    """Raises `TooManyFailuresError` if too large a share of the recent episodes failed, or every one so far.

    Args:
      failure: the last failure, as the error's cause.
    """
    failed, ended = sum(self._outcomes), len(self._outcomes)
    enough = ended >= (_ALL_FAILED if failed == ended else _RECENT_EPISODES[0])
    if enough and failed > self._max_share * ended:
      raise TooManyFailuresError(
        f"{failed} of the last {ended} episodes failed, more than EngineConfig.max_failed_share = "
        f"{self._max_share}. Failures by kind: {by_count(self.by_kind)}. {self.first()}"
      ) from failure

  def first(self) -> str:
    """Returns a sentence with the first failure of the most frequent kind; empty if nothing failed."""
    if not self.by_kind:
      return ""
    kind = self.by_kind.most_common(1)[0][0]
    return f"The first {kind} was {self._first[kind]}"
