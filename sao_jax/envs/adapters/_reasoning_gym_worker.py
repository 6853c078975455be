"""Problems and scores of reasoning-gym, in a process of their own (see `scoring_process`).

Requests are `["check", settings]`, `["problem", settings, index]` and `["score", settings, entry, answer]`. Settings
and entries are pickled objects in base64, which only these processes read.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
import pickle
import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from sao_jax.envs.adapters._evaluated_answers import may_be_scored, read_literals

_COIN_FLIP_TOLERANCE = 1e-4
"""Largest error of a probability that the package accepts."""
_KEPT_SETS = 64


def pack(value: Any) -> str:
  """Returns a value as one word of text."""
  return base64.b64encode(pickle.dumps(value)).decode("ascii")


def _unpack(text: str) -> Any:
  return pickle.loads(base64.b64decode(text))  # noqa: S301 (from the process that started this one)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSettings:
  """The settings that determine the problems. The fields are those of `ReasoningGymConfig`."""

  task: str
  settings: Mapping[str, Any]
  level: int | None
  attribute_levels: Mapping[str, int]
  size: int
  seed: int


class TaskSet:
  """One set of problems.

  Raises:
    ValueError: the task, or one of its settings or attributes, is unknown.
  """

  def __init__(self, settings: TaskSettings):
    self.settings = settings
    _seed_globals(f"{settings.seed}")
    self.dataset = make_dataset(settings)
    for task, dataset in getattr(self.dataset, "datasets", {settings.task: self.dataset}).items():
      read_literals(task, dataset)

  def problem(self, index: int) -> dict[str, Any]:
    """Returns the package's record of problem `index`, which does not depend on earlier problems."""
    _seed_globals(f"{self.settings.seed}/{index}")
    entry: dict[str, Any] = self.dataset[index]
    return entry

  def score(self, entry: Mapping[str, Any], answer: str) -> tuple[float, str | None]:
    """Returns the score of an answer, and the error if the scorer raised one (the score is 0 then).

    Raises:
      ValueError: the score is outside [0, 1].
      Exception: the scorer raises for the package's own answer too, so the given answer is not the cause.
    """
    task = entry["metadata"].get("source_dataset", self.settings.task)  # In a composite, the task of this entry.
    if not may_be_scored(task, answer):
      return 0.0, None
    try:
      score = float(self._score(task, entry, answer))
    except Exception as error:  # noqa: BLE001 (returned, or raised again)
      if entry["answer"] is not None:
        self._score(task, entry, str(entry["answer"]))
      return 0.0, f"{type(error).__name__}: {error}"
    if math.isnan(score):
      return 0.0, "the score is not a number"
    if not 0.0 <= score <= 1.0:
      raise ValueError(f"the score of task {task!r} must be in [0, 1]; received {score} for the answer {answer!r}.")
    return score, None

  def _score(self, task: str, entry: Mapping[str, Any], answer: str) -> float:
    if task == "game_of_life_halting":  # The package only compares whether the texts are empty.
      return float(answer.strip().lower() == str(entry["answer"]).lower())
    score: float = self.dataset.score_answer(answer, entry)
    if task == "coin_flip" and score:  # The package divides the equal digits by the shorter number, so "0" is right.
      score *= _coin_flip_share(answer, str(entry["answer"]))
    return score


def start() -> Callable[[Any], Any]:
  """Loads the package and returns the function that answers requests."""
  import reasoning_gym  # noqa: F401 (loaded before memory is limited)

  return answer


def answer(request: Any) -> Any:
  """Answers a request with null, `[question, answer, entry]` or `[score, error]`."""
  kind, settings, *arguments = request
  if kind not in ("check", "problem", "score"):
    raise ValueError(f"a request must be check, problem or score; received {kind!r}.")
  task_set = _task_set(settings)
  if kind == "problem":
    entry = task_set.problem(*arguments)
    gold = entry["answer"]
    return [entry["question"], None if gold is None else str(gold), pack(entry)]
  return task_set.score(_unpack(arguments[0]), arguments[1]) if kind == "score" else None


@functools.lru_cache(maxsize=_KEPT_SETS)
def _task_set(settings: str) -> TaskSet:
  return TaskSet(_unpack(settings))


def _seed_globals(seed: str) -> None:
  """Seeds the global generators, which some sets use besides their own."""
  import numpy as np

  rng = random.Random(seed)
  random.seed(rng.getrandbits(64))
  np.random.seed(rng.getrandbits(32))  # noqa: NPY002 (the sets draw from it)


def _coin_flip_share(answer: str, gold: str) -> float:
  """Returns a factor for the package's score of a probability: the length of the shorter number over the longer one."""
  given, right = (float(Fraction(text.replace(",", ""))) for text in (answer, gold))
  if abs(given - right) <= _COIN_FLIP_TOLERANCE:
    return 1.0
  sizes = sorted(len(f"{x:.10g}") for x in (given, right))
  return sizes[0] / sizes[1]


def check_task(name: str) -> None:
  """Raises ValueError with the available names if the package has no such task."""
  import reasoning_gym.factory

  if name not in reasoning_gym.factory.DATASETS:
    raise ValueError(f"task must be one of {sorted(reasoning_gym.factory.DATASETS)}; received {name!r}.")


def make_dataset(config: TaskSettings) -> Any:
  """Returns the package's generator of a set.

  Raises:
    ValueError: the task, or one of its settings or attributes, is unknown.
  """
  import reasoning_gym
  from reasoning_gym.composite import DatasetSpec
  from reasoning_gym.factory import create_curriculum, has_curriculum

  check_task(config.task)
  settings: dict[str, Any] = {}
  if config.level is not None or config.attribute_levels:
    if not has_curriculum(config.task):
      raise ValueError(f"level must be None: task {config.task!r} has no curriculum.")
    curriculum = create_curriculum(config.task)
    curriculum.set_global_level(config.level or 0)
    for name, level in config.attribute_levels.items():
      if name not in curriculum.attributes:
        raise ValueError(f"attribute_levels must name some of {sorted(curriculum.attributes)}; received {name!r}.")
      curriculum.set_attr_level(name, level)
    settings = dict(vars(curriculum.generate_configuration()))
  settings |= {**config.settings, "size": config.size, "seed": config.seed}
  try:
    if config.task == "composite":
      settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", ())]
    return reasoning_gym.create_dataset(config.task, **settings)
  except (TypeError, AssertionError) as error:
    raise ValueError(f"settings do not fit task {config.task!r}: {error}; received {settings}.") from error
