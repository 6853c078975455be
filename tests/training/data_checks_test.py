"""Prompts that change, and observations that lost their markup, are named."""

from __future__ import annotations

import dataclasses
import itertools
import logging

import numpy as np
import pytest

from sao_jax.training import data_checks
from sao_jax.types import Trajectory
from tests.bare_run import bare
from tests.tiny_domain import TinyEnv, tiny_domain


def trajectory(prompt: list[int], *turns: tuple[list[int], list[int]], task: int = 0) -> Trajectory:
  pieces = [(prompt, False)] + [piece for act, seen in turns for piece in ((act, True), (seen, False))]
  tokens = np.array([x for piece, _ in pieces for x in piece], np.int32)
  mask = np.array([is_action for piece, is_action in pieces for _ in piece])
  return Trajectory(
    tokens=tokens, action_mask=mask, behavior_logp=np.where(mask, -1.0, np.nan).astype(np.float32),
    versions=np.where(mask, 0, -1).astype(np.int32), rewards=np.zeros(len(tokens), np.float32), ended="terminal",
    task_index=task, episode_id=0, group_id=0, num_turns=len(turns), success=False,
  )  # fmt: skip


def test_batches(caplog: pytest.LogCaptureFixture) -> None:
  checks = data_checks.DataChecks(control_ids=(9,))
  marked = trajectory([9, 1], ([2], [9, 3]), ([4], []))
  assert checks.record([marked, marked]) == {"changed_prompts": 0, "unmarked_observations": 0}
  bad = trajectory([9, 2], ([2], [9, 3]), ([4], [3]), ([4], []))
  plain = trajectory([1, 2], ([2], [3]), ([4], []), task=1)  # a template without markup
  for _ in range(2):
    assert checks.record([bad, plain]) == {"changed_prompts": 1, "unmarked_observations": 1}
  assert [record.message[:16] for record in caplog.records] == ["changed_prompts ", "unmarked_observa"]
  assert data_checks.DataChecks().record([bad]) == {"changed_prompts": 0, "unmarked_observations": 0}


def test_prompts_are_asked_for_twice_before_a_run(caplog: pytest.LogCaptureFixture) -> None:
  number = itertools.count()

  class Changes(TinyEnv):
    def reset(self, task_index: int) -> str:
      super().reset(task_index)
      return f"?{next(number) % 10}"

  class Breaks(TinyEnv):
    def reset(self, task_index: int) -> str:
      raise ConnectionError("down")

  caplog.set_level(logging.WARNING)
  for make in (TinyEnv, Breaks):
    data_checks.check_prompts(bare(), dataclasses.replace(tiny_domain(), make_env=lambda split, make=make: make()))
  assert not caplog.records
  domain = dataclasses.replace(tiny_domain(), make_env=lambda split: Changes())
  data_checks.check_prompts(bare(), domain)
  assert "reset(0): '?0' and '?1'. Draw" in caplog.text
  groups = bare(algorithm="grpo", group_size=4, learner=dataclasses.replace(bare().learner, baseline="group"))
  with pytest.raises(ValueError, match="same prompt for the same index"):
    data_checks.check_prompts(groups, domain)
