"""Reward functions and tools named in the options of chat tasks."""

from __future__ import annotations

import json
import math
import pathlib
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tasks import chat, rewards
from experiments.tasks.factory import FactoryError
from tests.experiments.chat_checkpoint import write_tokenizer

HERE = "tests.experiments.rewards_test"


def brevity(completion: str, row: Any) -> float:
  return 1.0 - len(completion) / row.get("limit", 10)


def returned(completion: str, row: Any) -> Any:
  return row["result"]


def alone(completion: str) -> float:
  return 1.0


def double(x: int) -> int:
  """Doubles a number.

  Args:
    x: the number.
  """
  return 2 * x


def half(x: int) -> float:
  """Halves a number.

  Args:
    x: the number.
  """
  return x / 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
  directory = tmp_path_factory.mktemp("checkpoint")
  write_tokenizer(directory)
  return str(directory)


def test_rows_of_any_kind_with_a_function_and_a_tool(checkpoint: str, tmp_path: pathlib.Path) -> None:
  path = tmp_path / "rows.jsonl"
  path.write_text(json.dumps({"problem": "Say little.", "limit": 4}) + "\n")
  domain = chat.math(
    checkpoint=checkpoint, train=str(path), held_out=str(path), tool=False, instruction="", max_turns=3,
    rewards=f"{HERE}:brevity", tools=f"{HERE}:double", success_threshold=0.5,
  )  # fmt: skip
  env = domain.make_env("train")
  assert '"name": "double"' in env.reset(0)
  call = {"name": "double", "arguments": {"x": 21}}
  assert env.step(f"<tool_call>{json.dumps(call)}</tool_call><end>").observation.startswith("<tool>42")
  step = env.step("ab<end>")
  assert (step.reward, step.done, step.info["success"]) == (0.5, True, True)
  assert step.info["reward/brevity"] == 0.5 and step.info["tool_calls"] == 1
  domain.close()


def test_the_tasks_own_grade_and_others_are_weighted(checkpoint: str) -> None:
  domain = chat.reasoning_gym(
    checkpoint=checkpoint, task="chain_sum", answer="number", size=5, num_eval_tasks=2,
    rewards={"correct": 1, f"{HERE}:brevity": 0.5},
  )  # fmt: skip
  env = domain.make_env("train")
  env.reset(0)
  step = env.step("none<end>")
  assert step.info["reward/brevity"] == pytest.approx(0.6)
  assert step.reward == pytest.approx(step.info["reward/correct"] + 0.3)
  domain.close()


def test_functions_are_named_on_the_command_line(checkpoint: str, tmp_path: pathlib.Path) -> None:
  """As texts, which is what an option whose default is None takes."""
  assert rewards.weights("{'correct': 1.0, 'mine:brevity': 0.1}") == {"correct": 1.0, "mine:brevity": 0.1}
  with pytest.raises(ValueError, match=r"rewards must be a mapping written like .*; received '\{brevity\}'"):
    rewards.weights("{brevity}")
  assert [tool.name for tool in rewards.function_tools(f"{HERE}:double, {HERE}:half")] == ["double", "half"]
  assert rewards.function_tools(None) == ()
  path = tmp_path / "rows.jsonl"
  path.write_text(json.dumps({"problem": "Double 4.", "limit": 8}) + "\n")
  options: dict[str, Any] = {"checkpoint": checkpoint, "train": str(path), "held_out": str(path), "tool": False}
  with pytest.raises(ValueError, match="max_turns must be at least 2 with tools, for a call and an answer; received 1"):
    chat.math(**options, rewards=f"{HERE}:brevity", tools=f"{HERE}:double", max_turns=1)


def test_demonstrations_may_call_ones_own_tools(checkpoint: str, tmp_path: pathlib.Path) -> None:
  call = {"type": "function", "function": {"name": "double", "arguments": {"x": 4}}}
  messages = [
    {"role": "user", "content": "Double 4."}, {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "content": "8"}, {"role": "assistant", "content": "8"},
  ]  # fmt: skip
  (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "Double 4."}) + "\n")
  (tmp_path / "shown.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
  domain = chat.math(
    checkpoint=checkpoint, train=str(tmp_path / "rows.jsonl"), held_out=str(tmp_path / "rows.jsonl"), tool=False,
    max_turns=3, rewards=f"{HERE}:brevity", tools=f"{HERE}:double", demonstrations=str(tmp_path / "shown.jsonl"),
  )  # fmt: skip
  assert domain.demonstrate is not None
  pieces = domain.demonstrate(0, np.random.default_rng(0))
  assert "double" in pieces[0][0] and [action for _, action in pieces].count(True) == 2
  domain.close()


@pytest.mark.parametrize("result", [1, True, 1.0, np.float32(1), np.bool_(True), jnp.float32(1), np.array(1)])
def test_numbers_and_scalars_are_rewards(result: Any) -> None:
  score = rewards.RewardSum(f"{HERE}:returned")("said", {"result": result}, float)
  assert score.reward == 1.0 and type(score.reward) is float


@pytest.mark.parametrize("result", [None, "0.5", [1.0], math.nan, math.inf, 10**400, np.ones(1), 1j])
def test_other_results_are_an_error_that_names_the_function(result: Any) -> None:
  told = rf"^rewards '{HERE}:returned' must return a finite number; received .* for 'said'\.$"
  with pytest.raises(rewards.RewardError, match=told):
    rewards.RewardSum(f"{HERE}:returned")("said", {"result": result}, float)


def test_an_error_in_a_function_is_named() -> None:
  told = rf"^rewards '{HERE}:returned' raised KeyError\('result'\) for 'said'\.$"
  with pytest.raises(rewards.RewardError, match=told) as caught:
    rewards.RewardSum(f"{HERE}:returned")("said", {}, float)
  assert isinstance(caught.value.__cause__, KeyError)


def test_bad_options() -> None:
  for given, message in (
    ({f"{HERE}:brevity": "1"}, "must be a finite number; received '1'"),
    ([], "at least one function"),
    ([f"{HERE}:brevity", "other:dullness"], "cannot import 'other:dullness'"),
    ("brevity", "of the form module:function"),
    (f"{HERE}:alone", f"rewards '{HERE}:alone' must take (completion, row); it takes (completion: 'str') -> 'float'."),
    (f"{HERE}:brevty", "no function 'brevty'; did you mean brevity?"),
  ):
    with pytest.raises(ValueError, match=re.escape(message)):
      rewards.RewardSum(given)  # type: ignore[arg-type]
  with pytest.raises(FactoryError, match="has no function 'x'"):
    rewards.function_tools(f"{HERE}:x")
  with pytest.raises(ValueError, match="different names"):
    rewards.function_tools([f"{HERE}:double", f"{HERE}:double"])
