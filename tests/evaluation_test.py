"""Held-out success and its interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats

from sao_jax import evaluation
from sao_jax.evaluation import BothSplits, wilson_interval
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
    def generate(self, weights: object, requests: list, *, seed: int) -> list:
      assert seed == evaluation.EVALUATION_SEED
      assert [r.task_index for r in requests[:3]] == [50, 51, 52] and requests[20].task_index == 50
      return []

  result = evaluation.evaluate(Engine(), tiny_domain(), None, num_episodes=21)  # type: ignore[arg-type]
  assert result.success_rate == 0.0 and result.failed == 21 and result.n == 21 and math.isnan(result.turns_mean)
