"""Any task of the reasoning-gym package as a single-turn environment: a question, an answer between tags, a score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from sao_jax.envs._evaluated_answers import may_be_scored, read_literals
from sao_jax.envs.adapters.text_game import Reply, Template, TextGame

_MAX_ANSWER_CHARS = 20_000
"""A longer answer scores 0, unless the package's own is as long: some scorers take seconds for texts without end."""

_COIN_FLIP_TOLERANCE = 1e-4
"""Up to here the package takes a probability for right."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
  """Which task, and how hard.

  Raises:
    ValueError: a field outside its range.
  """

  task: str
  """The package's name of the task: `"chain_sum"`, `"graph_color"`, ..."""
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Difficulty settings of the task, by the package's names: `{"min_terms": 2}`. They win over the curriculum's. Task
  "composite" mixes others: `{"datasets": [{"name": "chain_sum", "weight": 1.0, "config": {}}, ...]}`."""
  level: int | None = None
  """Level of the task's curriculum, from 0, for all its attributes (each stops at its highest); None: the defaults."""
  attribute_levels: Mapping[str, int] = dataclasses.field(default_factory=dict)
  """Levels of single attributes of the curriculum, over `level`."""
  size: int = 10_000
  """Number of problems; task indices beyond it start again from the first."""
  seed: int = 0
  """Which problems: use different seeds, at least `size` apart, for training and evaluation."""
  instruction: str = "Give the final answer between <answer> and </answer>."
  """Stands below the question; empty for none."""
  success_threshold: float = 1.0
  """Score from which an episode counts as a success. The reward is the score itself, in [0, 1]."""
  max_turns: int = 1
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.size < 1:
      raise ValueError(f"ReasoningGymConfig.size must be at least 1; received {self.size!r}.")
    if self.level is not None and self.level < 0:
      raise ValueError(f"ReasoningGymConfig.level must be None or at least 0; received {self.level!r}.")
    if not 0.0 < self.success_threshold <= 1.0:
      raise ValueError(f"ReasoningGymConfig.success_threshold must be in (0, 1]; received {self.success_threshold!r}.")


class ReasoningGym(TextGame):
  """One problem per episode; the answer is what stands between the last `<answer>` and `</answer>`, else nothing.

  Answers that a task's scorer would evaluate as Python are scored only in harmless forms (see `_evaluated_answers`). An
  answer that the scorer stumbles over scores 0, with the reason as `info["scorer_error"]`.

  Raises:
    ValueError: an unknown task, setting, curriculum or attribute.
  """

  def __init__(self, config: ReasoningGymConfig):
    super().__init__(max_turns=config.max_turns, template=config.template)
    self.config = config
    self._dataset = _make_dataset(config)
    for task, dataset in getattr(self._dataset, "datasets", {config.task: self._dataset}).items():
      read_literals(task, dataset)
    self._entry: dict[str, Any] = {}

  @property
  def gold_answer(self) -> str | None:
    """The package's answer to the present problem; None where it gives none (there may be many right ones)."""
    answer = self._entry["answer"]
    return None if answer is None else str(answer)

  def start(self, task_index: int) -> str:
    self._entry = self._dataset[task_index % self.config.size]
    return "\n".join(filter(None, (self._entry["question"], self.config.instruction)))

  def play(self, text: str) -> Reply:
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(text)
    info: dict[str, Any] = {"answered": answer is not None}
    score = 0.0
    task = self._entry["metadata"].get("source_dataset", self.config.task)  # of a composite, the one it is from
    longest = max(_MAX_ANSWER_CHARS, 2 * len(self.gold_answer or ""))
    if answer is not None and len(answer) <= longest and may_be_scored(task, answer):
      try:
        score = float(self._score(task, answer))
      except Exception as error:  # noqa: BLE001 (told in `info`; if it is no fault of the answer, raised again below)
        if self.gold_answer is not None:
          self._score(task, self.gold_answer)
        info["scorer_error"] = f"{type(error).__name__}: {error}"
    if math.isnan(score):
      score, info["scorer_error"] = 0.0, "the score is not a number"
    if not 0.0 <= score <= 1.0:
      raise ValueError(f"task {task!r} scores {score}, which must be in [0, 1], for the answer {answer!r}.")
    return Reply(
      reward=score, done=True, info=info | {"success": score >= self.config.success_threshold, "score": score}
    )

  def _score(self, task: str, answer: str) -> float:
    if task == "game_of_life_halting":  # the package compares whether the texts are empty: every answer would be right
      return float(answer.strip().lower() == str(self.gold_answer).lower())
    score: float = self._dataset.score_answer(answer, self._entry)
    if task == "coin_flip" and score:  # the package divides the digits that agree by the shorter number: "0" is right
      score *= _coin_flip_share(answer, str(self.gold_answer))
    return score


def _coin_flip_share(answer: str, gold: str) -> float:
  """What the package's score of a probability is to be multiplied by: the shorter number's part of the longer one."""
  given, right = (float(Fraction(text.replace(",", ""))) for text in (answer, gold))
  if abs(given - right) <= _COIN_FLIP_TOLERANCE:
    return 1.0
  sizes = sorted(len(f"{x:.10g}") for x in (given, right))
  return sizes[0] / sizes[1]


def check_task(name: str) -> None:
  """Raises ValueError, with the names that there are, if the package has no task of that name."""
  import reasoning_gym.factory

  if name not in reasoning_gym.factory.DATASETS:
    raise ValueError(f"task must be one of {sorted(reasoning_gym.factory.DATASETS)}; received {name!r}.")


def _make_dataset(config: ReasoningGymConfig) -> Any:
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
    raise ValueError(f"settings do not fit task {config.task!r}: {error}; they are {settings}.") from error
