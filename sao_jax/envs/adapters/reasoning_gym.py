"""Tasks of the package reasoning-gym as single-turn environments: a question, an answer between tags, a score."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sao_jax.envs.adapters._reasoning_gym_worker import TaskSettings, pack
from sao_jax.envs.adapters._reasoning_gym_worker import check_task as check_task
from sao_jax.envs.adapters.text_game import Reply, Template, TextGame
from sao_jax.envs.grading.scoring_process import NoReplyError, Workers, shared_pool

_MAX_ANSWER_CHARS = 20_000
"""Longest answer; longer ones score 0, unless the right one is long too. Some scorers are slow for very long texts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
  """Task and difficulty.

  Raises:
    ValueError: a field is outside its range.
  """

  task: str
  """Name of the task in the package: `"chain_sum"`, `"graph_color"`, ..."""
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Difficulty settings of the task in the package: `{"min_terms": 2}`. They override the curriculum. The task
  "composite" mixes others: `{"datasets": [{"name": "chain_sum", "weight": 1.0, "config": {}}, ...]}`."""
  level: int | None = None
  """Level of the task's curriculum, from 0, for all attributes (each stops at its highest). None for the defaults."""
  attribute_levels: Mapping[str, int] = dataclasses.field(default_factory=dict)
  """Levels of single attributes of the curriculum, which override `level`."""
  size: int = 10_000
  """Number of problems. Larger task indices start again from the first."""
  seed: int = 0
  """Seed of the problems. Use seeds at least `size` apart for training and evaluation."""
  instruction: str = "Give the final answer between <answer> and </answer>."
  """Text below the question. Empty for none."""
  success_threshold: float = 1.0
  """Score from which an episode counts as a success. The reward is the score itself, in [0, 1]."""
  score_timeout_s: float = 10.0
  """Seconds to score an answer; a slower one scores 0."""
  make_timeout_s: float = 600.0
  """Seconds to make a problem; a slower one fails the episode. Most sets take milliseconds."""
  max_turns: int = 1
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.size < 1:
      raise ValueError(f"ReasoningGymConfig.size must be at least 1; received {self.size!r}.")
    if self.level is not None and self.level < 0:
      raise ValueError(f"ReasoningGymConfig.level must be None or at least 0; received {self.level!r}.")
    if not 0.0 < self.success_threshold <= 1.0:
      raise ValueError(f"ReasoningGymConfig.success_threshold must be in (0, 1]; received {self.success_threshold!r}.")
    for name in ("score_timeout_s", "make_timeout_s"):
      if getattr(self, name) <= 0:
        raise ValueError(f"ReasoningGymConfig.{name} must be positive; received {getattr(self, name)!r}.")


class ReasoningGym(TextGame):
  """An environment with one problem per episode. The answer is the text between the last `<answer>` and `</answer>`.

  The package runs in child processes (see `scoring_process`), which all environments share. So an index is the same
  problem everywhere. An answer scores 0 if scoring it takes too long, takes too much memory or crashes the process.
  Some scorers evaluate answers as Python; they get only answers of harmless forms (see `_evaluated_answers`). An answer
  that the package cannot score scores 0, and `info["scorer_error"]` holds the reason.

  Args:
    config: the task.
    workers: pool that makes problems and scores answers. None uses the shared pool.

  Raises:
    ValueError: the task, or one of its settings or attributes, is unknown.
  """

  def __init__(self, config: ReasoningGymConfig, *, workers: Workers | None = None):
    super().__init__(max_turns=config.max_turns, template=config.template)
    self.config = config
    self._workers = shared_pool("sao_jax.envs.adapters._reasoning_gym_worker") if workers is None else workers
    names = [field.name for field in dataclasses.fields(TaskSettings)]
    self._settings = pack(TaskSettings(**{name: getattr(config, name) for name in names}))
    self._question, self._entry = "", ""
    self._gold: str | None = None
    self._workers.call(["check", self._settings], timeout_s=config.make_timeout_s)

  @property
  def gold_answer(self) -> str | None:
    """The package's answer to the current problem. None if it has none, since many answers may be right."""
    return self._gold

  def start(self, task_index: int) -> str:
    request = ["problem", self._settings, task_index % self.config.size]
    self._question, self._gold, self._entry = self._workers.call(request, timeout_s=self.config.make_timeout_s)
    return "\n".join(filter(None, (self._question, self.config.instruction)))

  def play(self, text: str) -> Reply:
    answer = _last_answer(text)
    info: dict[str, Any] = {"answered": answer is not None}
    score, error = 0.0, None
    longest = max(_MAX_ANSWER_CHARS, 2 * len(self.gold_answer or ""))
    if answer is not None and len(answer) <= longest:
      request = ["score", self._settings, self._entry, answer]
      try:
        score, error = self._workers.call(request, timeout_s=self.config.score_timeout_s)
      except NoReplyError as reason:
        error = str(reason)
    if error is not None:
      info["scorer_error"] = error
    return Reply(
      reward=score, done=True, info=info | {"success": score >= self.config.success_threshold, "score": score}
    )


def _last_answer(text: str) -> str | None:
  """Returns the last answer between tags, like the package's `extract_answer` but in linear time.

  >>> _last_answer("<answer>1</answer> no, <answer> 2 </answer>"), _last_answer("2</answer>"), _last_answer("<answer>2")
  ('2', None, None)
  """
  found = None
  for part in text.split("</answer>")[:-1]:
    _, tag, rest = part.partition("<answer>")
    found = rest if tag else found
  return None if found is None else found.strip()
