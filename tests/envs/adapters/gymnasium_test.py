from __future__ import annotations

from typing import Any

import pytest

from sao_jax.envs.adapters.gymnasium import Gymnasium, GymnasiumConfig
from sao_jax.envs.base import Step

gymnasium = pytest.importorskip("gymnasium", reason="needs the extra 'envs'")


def test_frozen_lake_is_won_by_the_known_path() -> None:
  env = Gymnasium(GymnasiumConfig(env_id="FrozenLake-v1", settings={"is_slippery": False}))
  prompt = env.reset(0)
  assert prompt == "<|user|>[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up.<|assistant|>"
  for move in ("down", "down", "Right", "right", "down"):
    step = env.step(f"{move}<|end|>")
    assert not step.done and step.reward == 0.0
  assert "HF[F]G" in step.observation and "\x1b" not in step.observation
  step = env.step("right<|end|>")
  assert step.done and not step.truncated and step.reward == 1.0 and step.info["success"]
  env.close()


def test_frozen_lake_is_lost_in_a_hole() -> None:
  env = Gymnasium(GymnasiumConfig(env_id="FrozenLake-v1", settings={"is_slippery": False}))
  env.reset(0)
  env.step("right<|end|>")
  step = env.step("down<|end|>")
  assert step.done and not step.truncated and not step.info["success"]


def test_other_toy_texts_describe_themselves() -> None:
  taxi = Gymnasium(GymnasiumConfig(env_id="Taxi-v4"))
  assert "Passenger at" in taxi.reset(3) and "Destination: " in taxi.reset(3) and "\x1b" not in taxi.reset(3)
  assert taxi.step("pickup<|end|>").reward in (-1.0, -10.0)
  cliff = Gymnasium(GymnasiumConfig(env_id="CliffWalking-v1"))
  assert cliff.reset(0).count("o") > 30
  assert cliff.step("right<|end|>").reward == -100.0
  jack = Gymnasium(GymnasiumConfig(env_id="Blackjack-v1"))
  assert jack.reset(3) == jack.reset(3) and "Your sum is" in jack.reset(3)
  step = jack.step("stick<|end|>")
  assert step.done and step.reward in (-1.0, 0.0, 1.0)


def test_every_toy_text_environment_has_its_actions() -> None:
  ids = [name for name, spec in gymnasium.registry.items() if "toy_text" in str(spec.entry_point)]
  assert {"FrozenLake8x8-v1", "CliffWalkingSlippery-v1", "Taxi-v4", "Blackjack-v1"} <= set(ids)
  for env_id in ids:
    env = Gymnasium(GymnasiumConfig(env_id=env_id))
    assert f"Actions: {', '.join(env.actions)}." in env.reset(1)
    assert "the actions are" not in env.step(f"{env.actions[0]}<|end|>").observation
    env.close()


def play(env_id: str, moves: list[str], **config: Any) -> Step:
  """Plays the moves and returns the last step."""
  env = Gymnasium(GymnasiumConfig(env_id=env_id, **config))
  env.reset(0)
  steps = [env.step(f"{move}<|end|>") for move in moves]
  env.close()
  assert all(not step.done for step in steps[:-1]) and steps[-1].done
  return steps[-1]


def test_the_goal_of_the_cliff_is_a_success_though_its_rewards_are_negative() -> None:
  best = ["up", *["right"] * 11, "down"]
  assert play("CliffWalking-v1", best).info["success"]
  assert not play("CliffWalking-v1", ["up"] * 5, max_turns=5).info["success"]
  assert play("CliffWalking-v1", best, success_total=-13).info["success"]
  assert not play("CliffWalking-v1", ["left", *best], success_total=-13).info["success"]


def test_a_sum_of_rewards_counts_also_when_the_turns_run_out() -> None:
  last = play("CartPole-v1", ["left", "right"] * 5, actions=("left", "right"), max_turns=10, success_total=10)
  assert last.truncated and last.info["success"]


def test_an_unknown_action_costs_a_turn_and_the_last_turn_truncates() -> None:
  env = Gymnasium(GymnasiumConfig(env_id="FrozenLake-v1", max_turns=2))
  env.reset(0)
  assert env.step("jump<|end|>").observation == ("<|output|>error: the actions are left, down, right, up.<|assistant|>")
  step = env.step("jump<|end|>")
  assert step.done and step.truncated and not step.info["success"]


def test_environments_without_named_actions_are_refused() -> None:
  with pytest.raises(ValueError, match="actions must name each discrete action of CartPole-v1"):
    Gymnasium(GymnasiumConfig(env_id="CartPole-v1"))
  named = Gymnasium(GymnasiumConfig(env_id="CartPole-v1", actions=("left", "right")))
  assert "Actions: left, right." in named.reset(0)
  with pytest.raises(ValueError, match="max_turns must be at least 1"):
    GymnasiumConfig(env_id="FrozenLake-v1", max_turns=0)
