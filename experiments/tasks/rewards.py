"""Reward functions and tools of one's own, named as `module:function` in a task's options.

    def brevity(completion, row):
      return 1.0 - min(len(completion), 1_000) / 1_000

    'rewards': 'mine:brevity'                                   one function
    'rewards': {'correct': 1.0, 'mine:brevity': 0.1}            several, with weights; `correct` is the task's own grade

A reward function takes the completion (the text of the last action without its thought) and the row (the problem's
line in the data file), and returns a number. The reward is the weighted sum. Each function's mean is a metric,
`reward/NAME`.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from experiments.support.config_flags import parse_mapping
from experiments.tasks.factory import FactoryError, import_named
from experiments.tasks.options import closest
from sao_jax.envs.chat import Score
from sao_jax.envs.function_tools import FunctionTool
from sao_jax.rollout.user_errors import describe

RewardFunction: TypeAlias = Callable[[str, Mapping[str, Any]], float]
Rewards: TypeAlias = str | Sequence[str] | Mapping[str, float]

CORRECT = "correct"
"""Name of the task's own grade among the rewards."""


def weights(rewards: Rewards | None) -> dict[str, float]:
  """Returns the weight of each function; a name alone weighs 1, and None is the task's own grade.

  A mapping may be text, as on a command line: "{'correct': 1.0, 'mine:brevity': 0.1}".

  >>> weights(None), weights("mine:brevity"), weights({"correct": 1, "mine:brevity": 0.1})
  ({'correct': 1.0}, {'mine:brevity': 1.0}, {'correct': 1.0, 'mine:brevity': 0.1})

  Raises:
    ValueError: there is no function, or a weight is not a finite number.
  """
  if rewards is None:
    rewards = CORRECT
  if isinstance(rewards, str) and rewards.lstrip().startswith("{"):
    mapping = parse_mapping(rewards)
    if mapping is None:
      raise ValueError(f"rewards must be a mapping written like {{'mine:brevity': 1.0}}; received {rewards!r:.200}.")
    rewards = mapping
  names = {rewards: 1.0} if isinstance(rewards, str) else rewards
  found = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, 1.0)
  if not found:
    raise ValueError("rewards must name at least one function; received none.")
  for name, weight in found.items():
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
      raise ValueError(f"rewards: the weight of {name!r} must be a finite number; received {weight!r}.")
  return {name: float(weight) for name, weight in found.items()}


class RewardError(RuntimeError):
  """A reward function that raises, or returns something else than a finite number."""


class RewardSum:
  """The weighted sum of reward functions.

  Args:
    rewards: see `weights`.

  Raises:
    FactoryError: a function does not exist. ValueError: two functions have the same name, or one takes other arguments.
  """

  def __init__(self, rewards: Rewards | None):
    self._parts: dict[str, tuple[float, RewardFunction | None]] = {}
    for name, weight in weights(rewards).items():
      short = name.rpartition(":")[2]
      if short in self._parts:
        raise ValueError(f"rewards must have different names, since each is a metric; received {short!r} twice.")
      self._parts[short] = weight, None if name == CORRECT else _reward_function(name)
    self._only_grade = rewards is None

  @property
  def needs_grade(self) -> bool:
    """Whether the task's own grade is among the functions."""
    return any(function is None for _, function in self._parts.values())

  def __call__(self, completion: str, row: Mapping[str, Any], grade: Callable[[], float]) -> Score:
    """Scores a completion.

    Args:
      completion: text of the last action.
      row: the problem.
      grade: computes the task's own grade.

    Raises:
      RewardError: a function raised, or returned something else than a finite number.
    """
    values = {
      name: float(grade()) if function is None else function(completion, row)
      for name, (_, function) in self._parts.items()
    }
    total = sum(weight * values[name] for name, (weight, _) in self._parts.items())
    return Score(reward=total, parts={} if self._only_grade else values)


def _reward_function(name: str) -> RewardFunction:
  """Returns the function named as `module:function`, with a check of its results (`_call`).

  Raises:
    FactoryError: it does not exist. ValueError: it does not take a completion and a row.
  """
  function = named_function(name, "rewards")
  checked = functools.partial(_call, name, function)
  try:
    signature = inspect.signature(function)
  except ValueError:  # some functions in C have none
    return checked
  try:
    signature.bind("", {})
  except TypeError:
    raise ValueError(f"rewards {name!r} must take (completion, row); it takes {signature}.") from None
  return checked


def _call(name: str, function: RewardFunction, completion: str, row: Mapping[str, Any]) -> float:
  """Calls a reward function, and checks its result: a number, a bool, or a scalar of NumPy or JAX."""
  try:
    result: Any = function(completion, row)
  except Exception as error:
    raise RewardError(f"rewards {name!r} raised {describe(error)} for {describe(completion, most=100)}.") from error
  plain = result.item() if getattr(result, "shape", None) == () else result
  try:
    number = float(plain) if isinstance(plain, numbers.Real) else math.nan
  except OverflowError:  # an int may be too large for a float
    number = math.nan
  if not math.isfinite(number):
    received = f"{describe(result, most=100)} for {describe(completion, most=100)}"
    raise RewardError(f"rewards {name!r} must return a finite number; received {received}.")
  return number


def function_tools(names: str | Sequence[str] | None) -> tuple[FunctionTool, ...]:
  """Makes tools of functions named as `module:function`, in a list or separated by commas; see `FunctionTool`.

  Raises:
    FactoryError: a function does not exist. ValueError: one cannot be a tool, or two have the same name.
  """
  names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names or ())
  tools = tuple(FunctionTool(named_function(name, "tools")) for name in names)
  if len({tool.name for tool in tools}) < len(tools):
    raise ValueError(f"tools must have different names; received {', '.join(names)}.")
  return tools


def named_function(name: str, option: str) -> Callable[..., Any]:
  """Returns the function named as `module:function`.

  Raises:
    FactoryError: it does not exist; the message names the option.
  """
  module, _, attribute = name.partition(":")
  if not module or not attribute:
    raise FactoryError(f"{option} must be of the form module:function; received {name!r}.")
  try:
    found = import_named(module)
  except FactoryError as error:
    raise FactoryError(f"{option}: cannot import {name!r}: {error}. Your file must be on PYTHONPATH.") from error
  function = getattr(found, attribute, None)
  if not callable(function):
    defined = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
    raise FactoryError(f"{option} {name!r}: {module} has no function {attribute!r}{closest(attribute, defined)}")
  return function  # type: ignore[no-any-return]
