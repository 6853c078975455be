"""Every limit truncates the episode, and `truncated_reward` decides its reward."""

from __future__ import annotations

import numpy as np
import pytest

from sao_jax.rollout import Engine, EngineConfig, EpisodeRequest
from sao_jax.types import Step, Trajectory
from tests.rollout.fakes import POLICY, STOP, CharTokenizer, Echo, make_params

SHORT, ENDLESS = make_params(0, stop_bias=3.0), make_params(0, stop_bias=-99.0)


class Wordy(Echo):
  def step(self, action):
    return Step(observation="o" * 100, reward=0.25)


class OutOfTime(Echo):
  def step(self, action):
    return Step(reward=0.25, done=True, truncated=True, info={"success": True})


CASES = {
  "turn limit": (lambda: Echo(99, reward=0.25), SHORT, {"max_turns": 2}),
  "tokens of an action": (Echo, ENDLESS, {"max_action_tokens": 7}),
  "tokens of a trajectory, in an action": (Echo, ENDLESS, {"max_action_tokens": 999}),
  "tokens of a trajectory, at an observation": (Wordy, SHORT, {}),
  "the environment's own limit": (OutOfTime, SHORT, {}),
}


def run(make_env, params, **changes) -> list[Trajectory]:
  settings = {
    "num_slots": 4,
    "max_len": 48,
    "max_action_tokens": 20,
    "max_turns": 4,
    "chunk_steps": 4,
    "token_budget": 16,
    "page_size": 8,
    "env_workers": 0,
  }
  config = EngineConfig(**{**settings, **changes})
  with Engine(model=POLICY, make_env=make_env, tokenizer=CharTokenizer(), config=config) as engine:
    requests = [EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(6)]
    return list(engine.generate(lambda _: (params, 0), requests, seed=1))


@pytest.mark.parametrize("name", CASES)
def test_each_limit_truncates_and_the_reward_policy_reaches_the_trajectory(name: str) -> None:
  make_env, params, changes = CASES[name]
  kept, replaced = run(make_env, params, **changes), run(make_env, params, **changes, truncated_reward=-1.5)
  assert len(kept) == len(replaced) == 6
  for before, after in zip(kept, replaced, strict=True):
    assert before.ended == after.ended == "truncated"
    np.testing.assert_array_equal(before.tokens, after.tokens)
    np.testing.assert_array_equal(before.action_mask, after.action_mask)
    complete_actions = int((before.tokens[before.action_mask] == STOP).sum())
    assert before.total_reward == (0.0 if make_env is Echo else 0.25 * complete_actions)
    (where,) = np.flatnonzero(after.rewards)
    assert where == np.flatnonzero(after.action_mask)[-1] and after.total_reward == -1.5
    assert after.success == (make_env is OutOfTime)  # the success that the environment reports is kept


def test_a_terminal_episode_keeps_its_reward() -> None:
  done = run(lambda: Echo(1, reward=0.25), SHORT, truncated_reward=-1.5)
  assert {(x.ended, x.total_reward) for x in done} == {("terminal", 0.25)}


def test_a_truncated_reward_of_zero_is_not_none() -> None:
  done = run(lambda: Echo(99, reward=0.25), SHORT, max_turns=2, truncated_reward=0.0)
  assert {(x.ended, x.total_reward, x.success) for x in done} == {("truncated", 0.0, False)}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_truncated_reward_that_is_not_finite_is_rejected(value: float) -> None:
  with pytest.raises(ValueError, match="truncated_reward"):
    EngineConfig(truncated_reward=value)
