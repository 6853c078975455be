"""Held-out success and its interval."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import scipy.stats

from sao_jax.training import evaluation
from sao_jax.training.evaluation import BothSplits
from sao_jax.training.intervals import bootstrap_interval, wilson_interval
from sao_jax.types import Trajectory
from tests.tiny_domain import TinyEnv, tiny_domain


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (0, 20), (7, 20), (20, 20), (333, 512)])
def test_wilson_interval_is_scipys(successes: int, n: int) -> None:
  expected = scipy.stats.binomtest(successes, n).proportion_ci(method="wilson")
  np.testing.assert_allclose(wilson_interval(successes, n), (expected.low, expected.high), atol=1e-6)


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_interval_refuses(successes: int, n: int) -> None:
  with pytest.raises(ValueError, match=f"received {successes} of {n}"):
    wilson_interval(successes, n)


def test_both_splits_serves_held_out_tasks_behind_the_training_tasks() -> None:
  made: list[str] = []
  domain = tiny_domain()

  def make_env(split: str) -> TinyEnv:
    made.append(split)
    return TinyEnv()

  object.__setattr__(domain, "make_env", make_env)
  env = BothSplits(domain)
  assert env.reset(domain.num_train_tasks - 1) == "?9" and made == ["train"]
  assert env.reset(domain.num_train_tasks + 3) == "?3" and made == ["train", "eval"]
  assert env.step(".3;").reward == 1.0
  assert env.reset(4) == "?4" and made == ["train", "eval"]
  env.close()


def test_evaluate_counts_what_failed_as_not_solved() -> None:
  class Engine:
    counters: dict = {"failed_by_kind": {"timeout": 4}}  # noqa: RUF012 (of earlier episodes)

    def generate(self, weights: object, requests: list, *, seed: int) -> list:
      self.counters = {"failed_by_kind": {"timeout": 5, "step_error": 20}}
      assert seed == evaluation.EVALUATION_SEED
      assert [r.task_index for r in requests[:3]] == [50, 51, 52] and requests[20].task_index == 50
      return []

  result = evaluation.evaluate(Engine(), tiny_domain(), None, num_episodes=21)  # type: ignore[arg-type]
  assert result.success_rate == 0.0 and result.failed == 21 and result.n == 21 and math.isnan(result.turns_mean)


def test_where_problems_repeat_the_interval_is_over_problems() -> None:
  """All attempts at a problem agree, so 200 episodes of 20 problems say no more than 20 episodes."""

  class Engine:
    counters: Mapping[str, Any] = {"failed_by_kind": {}}

    def generate(self, weights: object, requests: list, *, seed: int) -> list:
      return [
        types.SimpleNamespace(task_index=r.task_index, success=r.task_index % 2, num_turns=1, total_reward=0.0)
        for r in requests
      ]

  def width(n: int) -> float:
    result = evaluation.evaluate(Engine(), tiny_domain(), None, num_episodes=n)  # type: ignore[arg-type]
    assert result.success_rate == pytest.approx(0.5, abs=0.03)
    return result.high - result.low

  assert width(200) == pytest.approx(width(20), rel=0.15)
  assert width(210) == pytest.approx(width(20), rel=0.15)  # ten problems have one attempt more


class PatternEngine:
  """Solves task t in run r when (t + r) % 3 == 0; fails to run the episodes it is told to."""

  def __init__(self, num_tasks: int, broken: tuple[int, ...] = ()):
    self.asked: list[int] = []
    self._n = num_tasks
    self._broken = broken

  def generate(self, weights: object, requests: list, *, seed: int) -> list:
    assert seed == evaluation.EVALUATION_SEED
    self.asked += [r.episode_id for r in requests]
    return [self.trajectory(r.episode_id, r.task_index) for r in requests if r.episode_id not in self._broken]

  def trajectory(self, episode: int, task: int) -> Trajectory:
    solved = (episode % self._n + episode // self._n) % 3 == 0
    return Trajectory(
      tokens=np.array([1, 2], np.int32), action_mask=np.array([False, True]),
      behavior_logp=np.array([np.nan, -1.0], np.float32), versions=np.array([-1, 0], np.int32),
      rewards=np.array([0.0, solved], np.float32), ended="terminal", task_index=task, episode_id=episode,
      group_id=episode, num_turns=1, success=solved,
    )  # fmt: skip


def test_runs_are_averaged_and_stopped_ones_go_on() -> None:
  domain, engine = tiny_domain(), PatternEngine(20, broken=(0, 41))
  written: list[Trajectory] = []
  result = evaluation.evaluate_runs(engine, domain, None, num_runs=3, on_done=written.append)  # type: ignore[arg-type]
  solved = np.array([[(t + r) % 3 == 0 for t in range(20)] for r in range(3)], float)
  assert solved[0, 0] == 1.0 and solved[2, 1] == 1.0  # the broken ones would have been solved
  solved[0, 0] = solved[2, 1] = 0.0
  assert result.mean == pytest.approx(solved.mean()) and result.by_run == pytest.approx(tuple(solved.mean(axis=1)))
  assert (result.num_runs, result.num_problems, result.failed, result.truncated) == (3, 20, 2, 0)
  again = PatternEngine(20)
  whole = evaluation.evaluate_runs(again, domain, None, num_runs=3, known=written)  # type: ignore[arg-type]
  assert sorted(again.asked) == [0, 41] and whole.failed == 0 and whole.mean == pytest.approx(20 / 60, abs=0.02)
  fewer = evaluation.evaluate_runs(PatternEngine(20), domain, None, num_runs=1, known=written)  # type: ignore[arg-type]
  assert fewer.num_runs == 1 and len(fewer.by_run) == 1


def test_known_episodes_of_other_tasks_are_refused() -> None:
  domain = tiny_domain()
  wrong = PatternEngine(20).trajectory(3, 51)
  with pytest.raises(ValueError, match="episode 3 must be of task 53; received 51"):
    evaluation.evaluate_runs(PatternEngine(20), domain, None, num_runs=1, known=[wrong])  # type: ignore[arg-type]
  with pytest.raises(ValueError, match="num_runs must be >= 1; received 0"):
    evaluation.evaluate_runs(PatternEngine(20), domain, None, num_runs=0)  # type: ignore[arg-type]


def test_interval_over_problems_is_scipys_bootstrap() -> None:
  values = np.random.default_rng(1).beta(0.5, 0.5, size=60)
  found = bootstrap_interval(values)
  want = scipy.stats.bootstrap((values,), np.mean, method="percentile", rng=0).confidence_interval
  np.testing.assert_allclose(found, (want.low, want.high), atol=0.01)
  assert evaluation.interval_over_problems(values) == found
  with pytest.raises(ValueError, match=r"received shape \(0,\)"):
    bootstrap_interval(np.zeros(0))
  with pytest.raises(ValueError, match=r"received shape \(0,\)"):
    evaluation.interval_over_problems(np.zeros(0))


@pytest.mark.parametrize(("solved", "n"), [(0, 30), (30, 30), (0, 1)])
def test_problems_that_are_all_alike_are_no_certainty(solved: int, n: int) -> None:
  """Whatever the number of runs: attempts at the same problem say nothing about others."""
  found = evaluation.interval_over_problems(np.full(n, solved / n))
  want = scipy.stats.binomtest(solved, n).proportion_ci(method="wilson")
  np.testing.assert_allclose(found, (want.low, want.high), atol=1e-6)
  assert found[1] - found[0] > 0.1
  low, high = evaluation.interval_over_problems(np.full(n, 0.3))
  assert low < 0.3 < high


def test_interval_of_runs_of_which_none_succeeds() -> None:
  result = evaluation.evaluate_runs(PatternEngine(20, range(40)), tiny_domain(), None, num_runs=2)  # type: ignore[arg-type]
  assert (result.mean, result.low, result.failed) == (0.0, 0.0, 40) and 0.1 < result.high < 0.2
