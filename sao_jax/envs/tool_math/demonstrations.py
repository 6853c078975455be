"""Demonstrations for the supervised warm start: good and bad ways to solve a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sao_jax.envs import base
from sao_jax.envs.tool_math.config import ToolMathConfig
from sao_jax.envs.tool_math.expressions import evaluate, left_to_right, operators_in_order, reduce_stepwise
from sao_jax.envs.tool_math.problems import Problem, ProblemBank

SYNTAX_ERROR = "error: SyntaxError"
TOO_MANY_OPERATIONS = "error: too many operations"
MALFORMED = "error: malformed action"

_EXCHANGED: Mapping[str, str] = {"+": "-", "-": "+", "*": "+", "//": "*", "gcd": "+"}


class Piece(NamedTuple):
  """A part of an episode's text."""

  text: str
  is_action: bool
  """True for text that the policy should imitate, False for prompt and observations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstration:
  """One possible episode. Its text is the pieces joined."""

  pieces: tuple[Piece, ...]
  strategy: str
  """Its strategy, a field of `StrategyWeights`."""
  success: bool
  """Whether the package's scorer accepts its answer."""
  task: str
  """Kind of its problem, a field of `TaskWeights`."""

  @property
  def text(self) -> str:
    return "".join(piece.text for piece in self.pieces)

  @property
  def num_actions(self) -> int:
    return sum(piece.is_action for piece in self.pieces)


def echo(code: str, output: str) -> str:
  """Returns the text that shows a call and its output, one after the other."""
  return f"{code}\n{output}"


class _Script:
  """Collects the pieces of one demonstration."""

  def __init__(self, problem: Problem, config: ToolMathConfig, rng: np.random.Generator):
    self.problem = problem
    self.limit = config.max_operations_per_call
    self.echo_calls = config.echo_calls
    self.rng = rng
    self.steps, self.value = reduce_stepwise(problem.expression)
    self.pieces = [Piece(base.user_prompt(problem.question), False)]
    self.answered = ""

  def call(self, code: str, output: str) -> None:
    shown = echo(code, output) if self.echo_calls else output
    self.pieces += [Piece(base.call(code), True), Piece(base.observation(shown), False)]

  def call_each(self, steps: Sequence[tuple[str, int]]) -> None:
    for code, result in steps:
      self.call(code, repr(result))

  def answer(self, value: int) -> None:
    self.answered = str(value)
    self.pieces.append(Piece(base.answer(self.answered), True))

  @property
  def whole_is_allowed(self) -> bool:
    return self.limit is None or len(self.steps) <= self.limit


def _direct(script: _Script) -> None:
  digits = len(str(abs(script.value)))
  guess = int(script.rng.integers(0 if digits == 1 else 10 ** (digits - 1), 10 ** min(digits, 18)))
  script.answer(-guess if script.value < 0 else guess)


def _whole(script: _Script) -> None:
  script.call(script.problem.expression_text, repr(script.value))
  script.answer(script.value)


def _steps(script: _Script) -> None:
  script.call_each(script.steps)
  script.answer(script.value)


def _early_stop(script: _Script) -> None:
  script.call_each(script.steps[:-1])
  script.answer(script.steps[-2][1])


def _left_to_right(script: _Script) -> None:
  tree = left_to_right(script.problem.expression_text)
  if tree is None:
    raise ValueError(f"{script.problem.expression_text!r} has no reading from left to right.")
  steps, value = reduce_stepwise(tree)
  script.call_each(steps)
  script.answer(value)


def _wrong_operation(script: _Script) -> None:
  operators = operators_in_order(script.problem.expression)
  which = int(script.rng.integers(len(operators)))
  steps, value = reduce_stepwise(script.problem.expression, exchange={which: _EXCHANGED[operators[which]]})
  script.call_each(steps)
  script.answer(value)


def _corrected(script: _Script) -> None:
  if not script.whole_is_allowed and script.rng.random() < 0.5:
    script.call(script.problem.expression_text, TOO_MANY_OPERATIONS)
  else:  # Leave out the last operand, or the closing parenthesis.
    code = script.steps[0][0]
    script.call(code[:-1] if code.endswith(")") else code[: code.rindex(" ")], SYNTAX_ERROR)
  _steps(script)


_STRATEGIES: Mapping[str, Callable[[_Script], None]] = {
  "direct": _direct,
  "whole": _whole,
  "steps": _steps,
  "early_stop": _early_stop,
  "left_to_right": _left_to_right,
  "wrong_operation": _wrong_operation,
  "corrected": _corrected,
}


def _fits(name: str, script: _Script) -> bool:
  """Whether a strategy fits the problem and, if it is a wrong one, gives a wrong answer."""
  if name == "whole":
    return script.whole_is_allowed
  if name == "early_stop":
    return len(script.steps) > 1 and script.steps[-2][1] != script.value
  if name == "left_to_right":
    tree = left_to_right(script.problem.expression_text)
    return tree is not None and evaluate(tree) != script.value
  return True


def demonstrate(bank: ProblemBank, task_index: int, rng: np.random.Generator) -> Demonstration:
  """Demonstrates one problem with a strategy drawn from those that fit, by the weights of the config.

  The outputs of calls are those that the environment would show, so replaying the actions gives the same episode.

  Args:
    bank: the problems and their settings.
    task_index: number of the problem.
    rng: draws the strategy and its mistakes; it advances.

  Raises:
    ValueError: no strategy with a positive weight fits the problem.
  """
  config = bank.config
  problem = bank.problem(task_index)
  script = _Script(problem, config, rng)
  weights = {name: w for name, w in dataclasses.asdict(config.strategies).items() if w > 0 and _fits(name, script)}
  if not weights:
    raise ValueError(f"no strategy of {config.strategies} fits problem {problem.index}, {problem.question!r}.")
  shares = np.asarray(list(weights.values())) / sum(weights.values())
  strategy = list(weights)[int(rng.choice(len(weights), p=shares))]
  _STRATEGIES[strategy](script)
  return Demonstration(
    pieces=tuple(script.pieces), strategy=strategy, success=bank.is_right(problem, script.answered), task=problem.task
  )


class DemonstrationStats(NamedTuple):
  """Means over demonstrations."""

  num: int
  success_rate: float
  mean_actions: float
  """Calls plus the answer."""
  median_tokens: float
  max_tokens: int


def demonstration_stats(
  demonstrations: Iterable[Demonstration], encode: Callable[[str], Sequence[int]]
) -> dict[str, DemonstrationStats]:
  """Returns statistics by strategy, by task (`"task:lcm"`) and over all (`"all"`), with lengths in tokens."""
  groups: dict[str, list[tuple[bool, int, int]]] = {}
  for demonstration in demonstrations:
    row = (demonstration.success, demonstration.num_actions, len(encode(demonstration.text)))
    for key in ("all", demonstration.strategy, f"task:{demonstration.task}"):
      groups.setdefault(key, []).append(row)
  stats = {}
  for key, rows in sorted(groups.items()):
    success, actions, lengths = np.asarray(rows).T
    stats[key] = DemonstrationStats(
      len(rows), float(success.mean()), float(actions.mean()), float(np.median(lengths)), int(lengths.max())
    )
  return stats
