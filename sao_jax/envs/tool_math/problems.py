"""Problems of the package reasoning-gym by number, each with the expression to compute."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
from collections.abc import Mapping
from typing import Any, get_args

from sao_jax.envs.adapters._reasoning_gym_worker import TaskSettings, make_dataset, pack
from sao_jax.envs.grading.scoring_process import NoReplyError, shared_pool
from sao_jax.envs.tool_math.config import Split, ToolMathConfig
from sao_jax.envs.tool_math.expressions import Expression, Operation, evaluate, num_operations, parse_expression

_MAX_DRAWS = 1_000
_EVAL_OFFSET = 2**40
_SCORE_TIMEOUT_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
  """One problem."""

  index: int
  """Its number in the bank."""
  task: str
  """Its kind, a field of `TaskWeights`."""
  question: str
  """Text of the package."""
  entry: Mapping[str, Any]
  """The package's own record: question, answer, metadata."""
  expression: Expression
  """The expression to compute; its value is the answer."""
  expression_text: str
  """The expression as a line of Python, spelled as in the question if it occurs there."""

  @property
  def num_operations(self) -> int:
    return num_operations(self.expression)


class ProblemBank:
  """The problems of one split, made on demand and kept in memory. Thread-safe.

  Problem i depends only on the config, the split and i. A training problem with a held-out question is drawn again, so
  the splits share no question (and no seed). Held-out questions are all different. Training questions may repeat if a
  task set is small. The first training problem makes all held-out problems.
  """

  def __init__(self, config: ToolMathConfig, split: Split):
    if split not in get_args(Split):
      raise ValueError(f"split must be one of {get_args(Split)}; received {split!r}.")
    self.config = config
    self.split = split
    self.size = config.train_size if split == "train" else config.eval_size
    settings = task_settings(config)
    self._datasets = {task: make_dataset(found) for task, found in settings.items()}
    self._settings = {task: pack(found) for task, found in settings.items()}
    self._weights = dataclasses.asdict(config.tasks)
    self._problems: dict[int, Problem] = {}
    self._held_out: frozenset[str] | None = None
    self._lock = threading.Lock()

  def problem(self, task_index: int) -> Problem:
    """Returns problem `task_index` modulo the size of the bank.

    Raises:
      ValueError: the index is negative or not an integer.
    """
    if isinstance(task_index, bool) or not isinstance(task_index, int) or task_index < 0:
      raise ValueError(f"task_index must be an int >= 0; received {task_index!r}.")
    index = task_index % self.size
    found = self._problems.get(index)
    if found is None:
      with self._lock:
        if self.split == "eval":
          self._make_held_out()
        elif index not in self._problems:
          self._problems[index] = self._draw(index, self._held_out_questions())
        found = self._problems[index]
    return found

  def questions(self) -> frozenset[str]:
    """Returns all questions of the bank, and makes the problems that do not exist yet."""
    return frozenset(self.problem(i).question for i in range(self.size))

  def score(self, problem: Problem, text: str) -> float:
    """Returns the package's score of an answer, in [0, 1]; 0 if its process gives none in time."""
    request = ["score", self._settings[problem.task], pack(problem.entry), text]
    try:
      score, _ = shared_pool("sao_jax.envs.adapters._reasoning_gym_worker").call(request, timeout_s=_SCORE_TIMEOUT_S)
    except NoReplyError:  # The pool logs and counts it.
      return 0.0
    return float(score)

  def is_right(self, problem: Problem, text: str) -> bool:
    """Whether the score reaches `success_threshold`."""
    return self.score(problem, text) >= self.config.success_threshold

  def _held_out_questions(self) -> frozenset[str]:
    if self._held_out is None:
      self._held_out = ProblemBank(self.config, "eval").questions()
    return self._held_out

  def _make_held_out(self) -> None:
    """Makes all held-out problems, since a question must differ from those before it."""
    seen: set[str] = set()
    for index in range(self.size):
      if index not in self._problems:
        self._problems[index] = self._draw(index, seen)
      seen.add(self._problems[index].question)

  def _draw(self, index: int, excluded: frozenset[str] | set[str]) -> Problem:
    """Draws until the question is new and its form is known. The task is drawn once, to keep the weights."""
    names, weights = zip(*self._weights.items(), strict=True)
    rng = random.Random(f"{self.config.problem_seed}/{self.split}/{index}")
    task = rng.choices(names, weights)[0]
    offset = _EVAL_OFFSET if self.split == "eval" else 0
    for attempt in range(_MAX_DRAWS):
      entry = self._datasets[task][offset + attempt * self.size + index]
      plan = plan_solution(task, entry)
      if plan is not None and entry["question"] not in excluded:
        expression, text = plan
        return Problem(
          index=index, task=task, question=entry["question"], entry=entry, expression=expression, expression_text=text
        )
    raise ValueError(
      f"no new question for {self.split} problem {index} of task {task!r} in {_MAX_DRAWS} draws: its difficulty "
      f"settings allow too few different questions for eval_size={self.config.eval_size}."
    )


def task_settings(config: ToolMathConfig) -> dict[str, TaskSettings]:
  """Returns the settings of the package's sets, by field of `TaskWeights`."""
  digits = {"min_digits": config.min_digits, "max_digits": config.max_digits}
  arithmetic = {"min_terms": 2, "max_terms": config.arithmetic_max_terms, "operators": ["+", "-", "*"], **digits}
  # Both need allow_parentheses, the default. Without it the package computes answers from left to right.
  settings: dict[str, tuple[str, dict[str, Any]]] = {
    "arithmetic": ("basic_arithmetic", arithmetic),
    "parentheses": ("basic_arithmetic", arithmetic),
    "chain_sum": ("chain_sum", {"min_terms": 2, "max_terms": config.chain_max_terms, **digits}),
    "products": ("products", {"min_terms": 2, "max_terms": 2, **digits}),
    "equations": ("simple_equations", {"min_terms": 2, "max_terms": 3, "max_value": config.equation_max_value}),
    "lcm": ("lcm", {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": config.lcm_max_value}),
  }
  size = 2**62  # Virtual: the package makes item i from seed + i when it is asked for.
  common: dict[str, Any] = {"level": None, "attribute_levels": {}, "size": size, "seed": config.problem_seed << 64}
  return {task: TaskSettings(task=name, settings=options, **common) for task, (name, options) in settings.items()}


def plan_solution(task: str, entry: Mapping[str, Any]) -> tuple[Expression, str] | None:
  """Returns the expression to compute for a problem, as a tree and as a line of Python.

  Returns None to reject a problem: one of unknown form, one of the other arithmetic task, one without an operation, or
  one whose answer by the package differs from Python's.
  """
  metadata = entry["metadata"]
  if task == "equations":
    plan = _solve_equation(metadata["equation"], metadata["variable"])
  elif task == "lcm":
    a, b = metadata["numbers"]
    plan = Operation("*", Operation("//", a, Operation("gcd", a, b)), b), f"{a} // gcd({a}, {b}) * {b}"
  else:
    text = metadata["expression"]
    if ("(" in text) != (task == "parentheses"):
      return None
    plan = parse_expression(text), text
  if plan is None or num_operations(plan[0]) == 0 or str(evaluate(plan[0])) != entry["answer"]:
    return None
  return plan


def _solve_equation(equation: str, variable: str) -> tuple[Expression, str] | None:
  """`12*x - 5 = 31` -> (31 + 5) // 12; `7 - 3*x = -20` -> (-20 - 7) // -3."""
  sides = equation.split(" = ")
  x = rf"(?P<sign>-?)(?:(?P<factor>\d+)\*)?{variable}"
  if len(sides) != 2 or not re.fullmatch(r"-?\d+", sides[1]):
    return None
  right = int(sides[1])
  match = re.fullmatch(rf"{x}(?: (?P<op>[+-]) (?P<constant>\d+))?", sides[0])
  if match:
    constant, sign = int(match["constant"] or 0), match["sign"]
    move = None if not constant else Operation("-" if match["op"] == "+" else "+", right, constant)
  else:
    match = re.fullmatch(rf"(?P<constant>\d+) - {x}", sides[0])
    if not match or match["sign"]:
      return None
    constant, sign = int(match["constant"]), "-"
    move = Operation("-", right, constant)
  factor = int(f"{sign}{match['factor'] or 1}")
  rest: Expression = right if move is None else move
  text = str(right) if move is None else f"{right} {move.op} {constant}"
  if factor == 1:
    return rest, text
  return Operation("//", rest, factor), f"{text} // {factor}" if move is None else f"({text}) // {factor}"
