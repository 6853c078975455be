"""The glossary: one row per key, the page in the documentation, and every key that a run writes."""

from __future__ import annotations

import pathlib

from sao_jax.io import metric_table
from sao_jax.io.metrics import LEARNER_KEYS, read_metrics
from sao_jax.training import loop
from sao_jax.types import Step
from tests.bare_run import BusyEnv, bare, busy_domain

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_made_from_the_table() -> None:
  assert PAGE.read_text(encoding="utf-8") == metric_table.to_markdown(), (
    "run python -m sao_jax.io.metric_table > docs/metrics.md"
  )


def test_keys_are_unique_and_cover_every_row() -> None:
  keys = [metric.key for metric in metric_table.METRICS]
  assert len(set(keys)) == len(keys) and set(LEARNER_KEYS) <= set(keys)
  assert {metric.topic for metric in metric_table.METRICS} == set(metric_table._TITLES)


def test_a_run_writes_no_other_key_and_its_own_numbers(tmp_path: pathlib.Path) -> None:
  class Env(BusyEnv):
    def reset(self, task_index: int) -> str:
      if task_index % 10 in (3, 4):
        raise ConnectionError("the tool is broken")
      return super().reset(task_index)

    def step(self, action: str) -> Step:
      step = super().step(action)
      info = {"turn": self._turns, "reward/length": 0.5, "text": "not a number", "success": True}
      return Step(observation=step.observation, reward=step.reward, done=step.done, info=info)

  summary = loop.train(bare(num_steps=2, eval_episodes=20), busy_domain(Env), tmp_path)
  learner, evaluations = read_metrics(tmp_path)
  assert len(learner) == len(evaluations) == 2
  assert [key for row in learner + evaluations for key in row if metric_table.find(key) is None] == []
  assert 1 <= learner[0]["env/turn"] <= 2 and learner[0]["reward/length"] == 0.5
  assert "env/text" not in learner[0] and "env/success" not in learner[0]
  assert 1 <= evaluations[0]["eval_env/turn"] <= 2
  # Failures of RL and of evaluations are counted apart, in all as by kind.
  assert summary is not None and summary["failed_episodes"] == learner[1]["failed/reset_error"] > 0
  assert summary["failed_by_kind"] == {"reset_error": summary["failed_episodes"]}
  assert summary["eval_failed_before"] == evaluations[0]["eval_failed/reset_error"] == 4
