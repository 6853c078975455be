"""Math problems to solve with a Python tool over several turns. The package reasoning-gym scores the answers."""

from __future__ import annotations

import contextlib
import math
import random
import re
import time
from typing import Any

import numpy as np

from sao_jax.envs import base
from sao_jax.envs.tool_math.config import Split, ToolMathConfig
from sao_jax.envs.tool_math.demonstrations import MALFORMED, TOO_MANY_OPERATIONS, Demonstration, echo
from sao_jax.envs.tool_math.demonstrations import demonstrate as _demonstrate
from sao_jax.envs.tool_math.expressions import count_code_operations
from sao_jax.envs.tool_math.problems import Problem, ProblemBank

_ERROR_LINE = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit))\b")


class ToolMath(base.Environment):
  """An environment that asks one math problem per episode: tool calls with their outputs, then an answer.

      <|user|>Calculate 12 * 345 - 6.<|assistant|>                    prompt
      <|python|>12 * 345<|end|>      <|output|>4140<|assistant|>      action, observation
      <|python|>4140 - 6<|end|>      <|output|>4134<|assistant|>
      <|answer|>4134<|end|>                                           reward 1

  A malformed action, a failing call and a call with too many operations get a short error text, and the episode goes
  on. Without an answer after `max_turns` actions the episode is truncated (a call in the last turn is not run). The
  reward comes with the answer: 1 if the package's scorer gives it at least `success_threshold`, else 0.

  Args:
    config: problems, limits and latency.
    tool: runs the calls, with one session per episode from the first call on. It is shared, so it is not closed here.
    split: `"train"` or `"eval"`.
    bank: the problems, if several environments share them (see `tool_math_factory`). None makes them from the config.
  """

  def __init__(self, config: ToolMathConfig, tool: base.Tool, split: Split, *, bank: ProblemBank | None = None):
    self.config = config
    self.bank = ProblemBank(config, split) if bank is None else bank
    if (self.bank.config, self.bank.split) != (config, split):
      raise ValueError(f"bank must be made from the environment's config and split {split!r}; received another.")
    self._tool = tool
    self._stack = contextlib.ExitStack()
    self._session: base.ToolSession | None = None
    self._problem: Problem | None = None
    self._turns = self._calls = self._errors = 0

  def reset(self, task_index: int) -> str:
    self._end_episode()
    self._problem = self.bank.problem(task_index)
    self._turns = self._calls = self._errors = 0
    return base.user_prompt(self._problem.question)

  def step(self, action: str) -> base.Step:
    if self._problem is None:
      raise RuntimeError("step was called before reset, or after the end of the episode.")
    self._turns += 1
    kind, body = base.parse_action(action)
    if kind == "answer":
      right = self.bank.is_right(self._problem, body.strip())
      return self._done(success=right, truncated=False)
    if self._turns >= self.config.max_turns:
      return self._done(success=False, truncated=True)
    text = self._call(body) if kind == "python" else MALFORMED
    self._errors += text.startswith("error: ")
    if kind == "python" and self.config.echo_calls:
      text = echo(body, text)
    return base.Step(observation=base.observation(text))

  def close(self) -> None:
    self._end_episode()

  def demonstrate(self, task_index: int, rng: np.random.Generator) -> Demonstration:
    """Demonstrates problem `task_index`; see `demonstrations.demonstrate`."""
    return _demonstrate(self.bank, task_index, rng)

  def _done(self, *, success: bool, truncated: bool) -> base.Step:
    problem = self._problem
    assert problem is not None
    info: dict[str, Any] = {
      "success": success,
      "task": problem.task,
      "num_operations": problem.num_operations,
      "turns": self._turns,
      "tool_calls": self._calls,
      "tool_errors": self._errors,
    }
    self._end_episode()
    return base.Step(reward=float(success), done=True, truncated=truncated, info=info)

  def _call(self, code: str) -> str:
    """Runs one call and returns the text to show."""
    limit = self.config.max_operations_per_call
    operations = None if limit is None else count_code_operations(code)
    if limit is not None and operations is not None and operations > limit:
      return TOO_MANY_OPERATIONS
    if self._session is None:
      self._session = self._stack.enter_context(self._tool.session())
    self._calls += 1
    self._sleep()
    prelude = self.config.tool_prelude
    return shorten_output(self._session.run(f"{prelude}\n{code}" if prelude else code), self.config.max_output_chars)

  def _sleep(self) -> None:
    median, sigma = self.config.tool_sleep_s, self.config.tool_sleep_sigma
    if median > 0:
      assert self._problem is not None
      rng = random.Random(f"{self.config.problem_seed}/{self._problem.index}/{self._turns}")
      time.sleep(median * math.exp(sigma * rng.gauss(0.0, 1.0)))

  def _end_episode(self) -> None:
    self._problem = None
    self._session = None
    self._stack.close()


def tool_math_factory(config: ToolMathConfig, tool: base.Tool, split: Split) -> base.EnvironmentFactory:
  """Makes environments that share one bank of problems."""
  bank = ProblemBank(config, split)
  return lambda: ToolMath(config, tool, split, bank=bank)


def shorten_output(text: str, max_chars: int) -> str:
  """Shortens the output of a tool: to the name of an error (`error: NameError`), else to `max_chars` characters."""
  text = text.strip("\n")
  last_line = text.rsplit("\n", 1)[-1]
  match = _ERROR_LINE.match(last_line)
  if match:
    return f"error: {match[1]}"
  return text if len(text) <= max_chars else text[:max_chars] + "..."
