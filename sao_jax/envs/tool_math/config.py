"""Settings of the tool-math task: problems, difficulty, limits of the tool, and demonstrations."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, TypeAlias

Split: TypeAlias = Literal["train", "eval"]


def _check_weights(config: object) -> None:
  """Raises ValueError unless all weights are finite and >= 0, with a positive sum."""
  weights = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}  # type: ignore[arg-type]
  if not all(math.isfinite(w) and w >= 0 for w in weights.values()) or sum(weights.values()) <= 0:
    raise ValueError(f"{type(config).__name__} must hold weights >= 0 with a positive sum; received {weights}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskWeights:
  """Relative frequency of each kind of problem. Numbers of operations are in brackets."""

  arithmetic: float = 0.25
  """basic_arithmetic without parentheses: + - * with precedence. [terms - 1]"""
  parentheses: float = 0.10
  """basic_arithmetic with parentheses, negations and negative numbers. [terms - 1]"""
  chain_sum: float = 0.30
  """chain_sum: a row of additions and subtractions. [terms - 1]"""
  products: float = 0.10
  """products: two numbers. [1]"""
  equations: float = 0.15
  """simple_equations: `12*x - 5 = 31`. [1 or 2]"""
  lcm: float = 0.10
  """lcm: least common multiple of two numbers, through their greatest common divisor. [3]"""

  def __post_init__(self) -> None:
    _check_weights(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategyWeights:
  """Relative frequency of each demonstrated strategy. A problem uses only the strategies that fit it.

  Imitated perfectly, the default mixture solves about 40 % of the problems; `steps` alone solves all of them.
  """

  direct: float = 0.30
  """Answers at once with a number of plausible size. Nearly always wrong."""
  whole: float = 0.10
  """One call with the whole expression, if the tool allows as many operations. Right."""
  steps: float = 0.28
  """One call per operation, respecting precedence. Right."""
  early_stop: float = 0.17
  """Like `steps`, but answers with the result of the last operation but one. Wrong."""
  left_to_right: float = 0.08
  """One call per operation from left to right, ignoring precedence. Wrong; used only if precedence matters."""
  wrong_operation: float = 0.10
  """Like `steps`, with a wrong operator in one call. Wrong."""
  corrected: float = 0.06
  """A first call that the tool refuses (a syntax error, or too many operations), then `steps`. Right, but longer."""

  def __post_init__(self) -> None:
    _check_weights(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolMathConfig:
  """Settings of the tool-math task.

  Raises:
    ValueError: a field is outside its range; the message shows its value and the range.
  """

  tasks: TaskWeights = TaskWeights()
  strategies: StrategyWeights = StrategyWeights()
  min_digits: int = 2
  """Fewest digits of the numbers in arithmetic, chain sums and products. One-digit problems can be memorised."""
  max_digits: int = 3
  arithmetic_max_terms: int = 3
  """Terms of an arithmetic problem: 2 to this many."""
  chain_max_terms: int = 5
  """Terms of a chain sum: 2 to this many."""
  equation_max_value: int = 100
  """Largest constant and largest solution of an equation."""
  lcm_max_value: int = 100

  train_size: int = 20_000
  """Number of training problems. Larger task indices start again from the first."""
  eval_size: int = 1_000
  """Number of held-out problems. None of their questions occurs in training."""
  problem_seed: int = 0
  """Seed of the problems. Runs with different seeds can share it to have the same held-out problems."""

  max_turns: int = 6
  """Actions per episode. Without an answer by then, the episode is truncated with reward 0."""
  max_operations_per_call: int | None = 1
  """Most operators and function calls in one call; a call with more gets an error text. None allows any program.

  With 1, an expression of n operations takes n calls, so the policy has to learn how often to call. With None, one call
  solves every problem.
  """
  tool_prelude: str = "from math import gcd"
  """Code that runs before each call and does not count as an operation. Empty for none."""
  echo_calls: bool = False
  """Whether an observation repeats the code before its output, as in a notebook. It is then longer than the call."""
  max_output_chars: int = 24
  """Most characters of the tool's output that are shown. Errors show only their name: `error: NameError`."""
  success_threshold: float = 1.0
  """Score of the package's `score_answer` from which an answer counts as right.

  The reward is 1 from this score on and 0 below. The scorer gives 1.0 only to an exact answer, and a fraction to a text
  with other characters around the answer. With the default, such a text earns nothing.
  """
  tool_sleep_s: float = 0.0
  """Extra seconds per tool call, for experiments about asynchrony."""
  tool_sleep_sigma: float = 0.0
  """Shape of a log-normal distribution with median `tool_sleep_s`, drawn from the task and the turn; 0 is constant."""

  def __post_init__(self) -> None:
    for name, low, high in (
      ("min_digits", 1, 6),
      ("max_digits", self.min_digits, 6),
      ("arithmetic_max_terms", 2, 6),
      ("chain_max_terms", 2, 8),
      ("equation_max_value", 10, 100_000),
      ("lcm_max_value", 10, 100_000),
      ("train_size", 1, 2**24),
      ("eval_size", 1, 100_000),
      ("problem_seed", 0, 2**32 - 1),
      ("max_turns", 1, 1_000),
      ("max_output_chars", 8, 100_000),
      ("success_threshold", 1e-6, 1.0),
      ("tool_sleep_s", 0.0, 3_600.0),
      ("tool_sleep_sigma", 0.0, 5.0),
    ):
      value = getattr(self, name)
      if not low <= value <= high:
        raise ValueError(f"ToolMathConfig.{name} must be in [{low}, {high}]; received {value!r}.")
    if self.max_operations_per_call is not None and self.max_operations_per_call < 1:
      raise ValueError(
        f"ToolMathConfig.max_operations_per_call must be None or at least 1; received {self.max_operations_per_call!r}."
      )
