"""The share of failed episodes that ends a run, and its message."""

from __future__ import annotations

import pytest

from sao_jax.rollout.episodes import EpisodeFailure, EpisodeRequest
from sao_jax.rollout.failures import FailureLog, TooManyFailuresError, check_share, check_share_between, new_failures


def fail(log: FailureLog, number: int, kind: str = "step_error") -> None:
  failure = EpisodeFailure(kind, f"the tool is broken, {number}")
  log.record_failure(EpisodeRequest(task_index=0, episode_id=number, group_id=number), failure)
  log.check(failure)


def test_sixteen_failures_in_place_of_any_success_are_enough() -> None:
  log = FailureLog(0.5)
  fail(log, 0, "timeout")
  for number in range(1, 15):
    fail(log, number)
  told = r"16 of the last 16 .*: step_error \(15\), timeout \(1\). The first step_error was episode 1: .* broken, 1$"
  with pytest.raises(TooManyFailuresError, match=told):
    fail(log, 15)


def test_one_success_asks_for_64_episodes() -> None:
  log = FailureLog(0.5)
  log.record_successes(1)
  for number in range(62):
    fail(log, number)
  with pytest.raises(TooManyFailuresError, match="63 of the last 64"):
    fail(log, 62)
  never = FailureLog(1.0)
  for number in range(100):
    fail(never, number)
  assert never.by_kind == {"step_error": 100}


def test_the_share_of_all_episodes_has_no_least_number() -> None:
  check_share({}, 0, 0.0, "episodes failed.")
  check_share({"step_error": 17}, 34, 0.5, "episodes failed.")
  told = r"^18 of 34 episodes failed. .*max_failed_share = 0.5. .*: step_error \(17\), timeout \(1\)"
  with pytest.raises(TooManyFailuresError, match=told):
    check_share({"step_error": 17, "timeout": 1}, 34, 0.5, "episodes failed.")


def test_what_happened_between_two_readings_counts():
  before = {"failed_by_kind": {"timeout": 5}, "episodes_answered": 100}
  after = {"failed_by_kind": {"timeout": 6, "step_error": 2}, "episodes_answered": 103}
  assert new_failures(before, after) == {"timeout": 1, "step_error": 2}
  check_share_between(before, after, 0.5, "episodes failed.")
  with pytest.raises(TooManyFailuresError, match=r"3 of 6 episodes failed\..* step_error \(2\), timeout \(1\)"):
    check_share_between(before, after, 0.4, "episodes failed.")
