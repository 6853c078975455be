from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from sao_jax.envs import (
  Demonstration,
  Environment,
  ProblemBank,
  StrategyWeights,
  TaskWeights,
  Tool,
  ToolMath,
  ToolMathConfig,
  base,
  demonstrate,
  demonstration_stats,
  tool_math_factory,
)
from sao_jax.envs.sandbox.python_tool import PythonTool, PythonToolConfig
from sao_jax.envs.tool_math.env import shorten_output
from sao_jax.envs.tool_math.expressions import evaluate
from sao_jax.tokenizers import MathTokenizer
from tests.envs.fake_tool import FakeTool

CONFIG = ToolMathConfig(train_size=2_000, eval_size=100)
RIGHT = ("whole", "steps", "corrected")
WRONG = ("direct", "early_stop", "left_to_right", "wrong_operation")


@pytest.fixture(scope="module")
def bank() -> ProblemBank:
  return ProblemBank(CONFIG, "train")


@pytest.fixture(scope="module")
def demonstrations(bank: ProblemBank) -> list[Demonstration]:
  rng = np.random.default_rng(0)
  return [demonstrate(bank, i, rng) for i in range(2_000)]


@pytest.fixture
def env(bank: ProblemBank) -> ToolMath:
  return ToolMath(CONFIG, FakeTool(), "train", bank=bank)


@pytest.fixture(scope="module")
def python_tool() -> Iterator[PythonTool]:
  with PythonTool(PythonToolConfig()) as tool:
    yield tool


def replay(env: Environment, index: int, demonstration: Demonstration) -> base.Step:
  """Plays the actions of a demonstration and compares every returned text."""
  assert demonstration.pieces[0] == (env.reset(index), False)
  pieces = list(demonstration.pieces[1:])
  while True:
    piece = pieces.pop(0)
    assert piece.is_action
    step = env.step(piece.text)
    if step.done:
      assert not pieces
      return step
    assert pieces.pop(0) == (step.observation, False)


def test_right_strategies_are_always_right_and_wrong_ones_nearly_never(demonstrations: list[Demonstration]) -> None:
  stats = demonstration_stats(demonstrations, MathTokenizer().encode)
  for strategy in RIGHT:
    assert stats[strategy].success_rate == 1.0
  for strategy in WRONG:
    assert stats[strategy].success_rate <= 0.03, (strategy, stats[strategy])
  assert 0.35 <= stats["all"].success_rate <= 0.50
  for task in dataclasses.asdict(CONFIG.tasks):
    assert 0.30 <= stats[f"task:{task}"].success_rate <= 0.58, (task, stats[f"task:{task}"])
  assert 20 <= stats["all"].median_tokens <= 60 and stats["all"].max_tokens <= 100


def test_numbers_of_actions_vary(demonstrations: list[Demonstration]) -> None:
  actions = [d.num_actions for d in demonstrations if d.strategy == "steps"]
  for n, share in ((2, 0.2), (3, 0.2), (4, 0.1), (5, 0.04)):
    assert actions.count(n) >= share * len(actions)


def test_demonstrations_replayed_in_the_environment(env: ToolMath, demonstrations: list[Demonstration]) -> None:
  for i, demonstration in enumerate(demonstrations):
    step = replay(env, i, demonstration)
    assert step.info["success"] == demonstration.success == (step.reward == 1.0) and not step.truncated


def test_demonstrations_replayed_with_the_real_tool(
  bank: ProblemBank, demonstrations: list[Demonstration], python_tool: PythonTool
) -> None:
  env = ToolMath(CONFIG, python_tool, "train", bank=bank)
  assert isinstance(env, Environment)
  tool: Tool = python_tool
  assert tool is python_tool
  for i, demonstration in enumerate(demonstrations[:150]):
    assert replay(env, i, demonstration).info["success"] == demonstration.success
  env.close()


def test_observations_with_echo_repeat_the_call_and_are_longer() -> None:
  env = ToolMath(dataclasses.replace(CONFIG, echo_calls=True), FakeTool(), "train")
  encode, rng = MathTokenizer().encode, np.random.default_rng(2)
  for i in range(200):
    demonstration = env.demonstrate(i, rng)
    replay(env, i, demonstration)
    for action, shown in zip(demonstration.pieces[1::2], demonstration.pieces[2::2], strict=False):
      assert len(encode(shown.text)) > len(encode(action.text))
  env.reset(0)
  assert env.step(base.call("12 +")).observation == base.observation("12 +\nerror: SyntaxError")
  assert env.step("?").observation == base.observation("error: malformed action")


def test_demonstrations_replayed_without_a_limit_on_operations() -> None:
  config = dataclasses.replace(CONFIG, max_operations_per_call=None)
  env = ToolMath(config, FakeTool(), "train")
  rng = np.random.default_rng(1)
  seen = set()
  for i in range(300):
    demonstration = env.demonstrate(i, rng)
    replay(env, i, demonstration)
    seen.add((demonstration.strategy, env.bank.problem(i).num_operations))
  assert ("whole", 4) in seen


def test_demonstrations_are_repeatable(bank: ProblemBank) -> None:
  one, two = np.random.default_rng(3), np.random.default_rng(3)
  assert [demonstrate(bank, i, one) for i in range(50)] == [demonstrate(bank, i, two) for i in range(50)]


def test_weights_choose_the_strategies(bank: ProblemBank) -> None:
  only = StrategyWeights(direct=0, whole=0, steps=2, early_stop=0, left_to_right=0, wrong_operation=0, corrected=0)
  steps_only = ProblemBank(dataclasses.replace(CONFIG, strategies=only), "train")
  rng = np.random.default_rng(0)
  assert {demonstrate(steps_only, i, rng).strategy for i in range(50)} == {"steps"}
  nothing_fits = dataclasses.replace(only, steps=0, early_stop=1)
  with pytest.raises(ValueError, match=r"no strategy of .* fits problem"):
    for i in range(50):
      demonstrate(ProblemBank(dataclasses.replace(CONFIG, strategies=nothing_fits), "train"), i, rng)


def test_an_episode(env: ToolMath) -> None:
  index = next(i for i in range(100) if env.bank.problem(i).task == "chain_sum")
  problem = env.bank.problem(index)
  assert env.reset(index) == f"<|user|>{problem.question}<|assistant|>"
  step = env.step("<|python|>2 + 3<|end|>")
  assert (step.observation, step.reward, step.done) == ("<|output|>5<|assistant|>", 0.0, False)
  step = env.step(f"<|answer|> {evaluate(problem.expression)}<|end|>")
  assert step.done and not step.truncated and step.reward == 1.0 and step.observation == ""
  assert step.info == {
    "success": True,
    "task": "chain_sum",
    "num_operations": problem.num_operations,
    "turns": 2,
    "tool_calls": 1,
    "tool_errors": 0,
  }
  with pytest.raises(RuntimeError, match="step was called before reset"):
    env.step("<|answer|>1<|end|>")


@pytest.mark.parametrize(
  "action",
  [
    "",
    "12",
    "<|end|>",
    "<|python|><|end|>",
    "<|python|> \n<|end|>",
    "<|python|>1",
    "<|answer|>1<|python|>2<|end|>",
    "x<|answer|>1<|end|>",
    "<|answer|>1<|end|><|end|>",
    "<|user|>1<|end|>",
    "<|answer|>1<|assistant|><|end|>",
  ],
)
def test_malformed_actions_get_an_error_and_the_episode_goes_on(env: ToolMath, action: str) -> None:
  env.reset(0)
  step = env.step(action)
  assert not step.done and step.reward == 0.0
  assert step.observation == "<|output|>error: malformed action<|assistant|>"
  assert env.step("<|python|>1<|end|>").observation == "<|output|>1<|assistant|>"


def test_errors_and_long_outputs_are_shortened(env: ToolMath) -> None:
  env.reset(0)
  assert env.step("<|python|>1 // 0<|end|>").observation == "<|output|>error: ZeroDivisionError<|assistant|>"
  assert env.step("<|python|>1 +<|end|>").observation == "<|output|>error: SyntaxError<|assistant|>"
  assert env.step("<|python|>1 + 2 * 3<|end|>").observation == "<|output|>error: too many operations<|assistant|>"
  assert env.step("<|python|>'ab' * 50<|end|>").observation == f"<|output|>'{'ab' * 11}a...<|assistant|>"
  assert shorten_output("Traceback\n  a\njson.JSONDecodeError: b", 20) == "error: JSONDecodeError"
  assert shorten_output("\n\n", 20) == ""
  assert shorten_output("1\n2\n", 20) == "1\n2"


def test_outputs_cannot_fake_a_turn(env: ToolMath) -> None:
  env.reset(0)
  step = env.step("<|python|>'<' + '|answer|>'<|end|>")
  assert step.observation == "<|output|>'< |answer|>'<|assistant|>"


def test_out_of_turns_is_truncated_with_no_reward(env: ToolMath) -> None:
  env.reset(0)
  for _ in range(CONFIG.max_turns - 1):
    assert not env.step("<|python|>1<|end|>").done
  step = env.step("<|python|>1<|end|>")
  assert step.done and step.truncated and step.reward == 0.0 and step.info["success"] is False
  env.reset(0)
  for _ in range(CONFIG.max_turns - 1):
    env.step("malformed")
  last = env.step(f"<|answer|>{evaluate(env.bank.problem(0).expression)}<|end|>")
  assert last.done and not last.truncated and last.reward == 1.0


def test_a_session_lives_for_one_episode_and_opens_at_the_first_call(bank: ProblemBank) -> None:
  tool = FakeTool()
  env = ToolMath(CONFIG, tool, "train", bank=bank)
  env.reset(0)
  env.step("<|answer|>1<|end|>")
  assert not tool.sessions
  env.reset(0)
  env.step("<|python|>x = 41<|end|>")
  assert env.step("<|python|>x + 1<|end|>").observation == "<|output|>42<|assistant|>"
  assert len(tool.sessions) == 1 and tool.sessions[0].open
  env.reset(1)  # Abandons the episode.
  assert not tool.sessions[0].open
  assert env.step("<|python|>x<|end|>").observation == "<|output|>error: NameError<|assistant|>"
  env.close()
  assert not tool.sessions[1].open


def test_a_broken_tool_raises_and_the_environment_can_be_used_again(bank: ProblemBank) -> None:
  class Broken(FakeTool):
    broken = True

    def session(self):  # type: ignore[no-untyped-def]
      if self.broken:
        raise OSError("no interpreter")
      return super().session()

  tool = Broken()
  env = ToolMath(CONFIG, tool, "train", bank=bank)
  env.reset(0)
  with pytest.raises(OSError, match="no interpreter"):
    env.step("<|python|>1<|end|>")
  tool.broken = False
  env.reset(0)
  assert env.step("<|python|>1<|end|>").observation == "<|output|>1<|assistant|>"


def test_latency_is_added_per_call(bank: ProblemBank) -> None:
  config = dataclasses.replace(CONFIG, tool_sleep_s=0.05)
  env = ToolMath(config, FakeTool(), "train", bank=ProblemBank(config, "train"))
  env.reset(0)
  start = time.perf_counter()
  env.step("<|python|>1<|end|>")
  assert time.perf_counter() - start >= 0.05


def test_environments_of_one_factory_share_their_problems_and_run_in_threads(python_tool: PythonTool) -> None:
  make = tool_math_factory(CONFIG, python_tool, "eval")
  results: list[bool] = []

  def episodes(number: int) -> None:
    env = make()
    assert isinstance(env, ToolMath)
    for i in range(number, 24, 4):
      demonstration = env.demonstrate(i, np.random.default_rng(i))
      results.append(replay(env, i, demonstration).info["success"] == demonstration.success)
    env.close()

  threads = [threading.Thread(target=episodes, args=(n,)) for n in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(300)
  assert results == [True] * 24


def test_bad_settings_are_refused(bank: ProblemBank) -> None:
  with pytest.raises(ValueError, match=r"max_turns must be in \[1, 1000\]; received 0"):
    ToolMathConfig(max_turns=0)
  with pytest.raises(ValueError, match=r"max_digits must be in \[3, 6\]; received 2"):
    ToolMathConfig(min_digits=3, max_digits=2)
  with pytest.raises(ValueError, match="must be None or at least 1; received 0"):
    ToolMathConfig(max_operations_per_call=0)
  with pytest.raises(ValueError, match="StrategyWeights must hold weights >= 0"):
    StrategyWeights(direct=-1)
  with pytest.raises(ValueError, match="TaskWeights must hold weights >= 0"):
    TaskWeights(arithmetic=0, parentheses=0, chain_sum=0, products=0, equations=0, lcm=0)
  with pytest.raises(ValueError, match="bank must be made from"):
    ToolMath(dataclasses.replace(CONFIG, max_turns=3), FakeTool(), "train", bank=bank)
