"""Checks of what environments return: the same prompt for the same task, and markup around observations."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from sao_jax.rollout.environment_runner import EnvironmentHolder
from sao_jax.rollout.episodes import EpisodeFailure
from sao_jax.rollout.workers import Task, Workers
from sao_jax.training.config import RunConfig
from sao_jax.types import Domain, Trajectory

_MOST_TASKS = 100_000
"""Number of tasks whose prompt is remembered."""
_TIMEOUT_S = 60.0

_log = logging.getLogger(__name__)


def check_prompts(config: RunConfig, domain: Domain) -> None:
  """Asks an environment twice for the prompt of task 0. Different prompts are logged, and refused with groups.

  An environment that fails or hangs is left to the engine, which counts it.

  Raises:
    ValueError: the prompts differ, and `group_size` > 1: the rewards of a group would be of different tasks.
  """
  holder = EnvironmentHolder(lambda: domain.make_env("train"), domain.tokenizer, config.engine)

  def ask() -> tuple[str, str]:
    try:
      return holder.reset(0).text, holder.reset(0).text
    finally:
      holder.close()

  task, workers = Task(ask, lambda _: None), Workers(1)
  workers.submit(task)
  hangs = not workers.poll(config.engine.env_timeout_s or _TIMEOUT_S) and workers.abandon(task)
  workers.close()
  if hangs:
    return
  if task.error is not None:
    if not isinstance(task.error, EpisodeFailure):
      raise task.error
    return
  first, second = task.result
  if first != second:
    message = f"the prompts of task 0 differ between two calls of reset(0): {_difference(first, second)}. {_ADVICE}"
    if config.group_size > 1:
      raise ValueError(f"Environment.reset must return the same prompt for the same index; {message}")
    _log.warning("%s", message)


_ADVICE = "Draw whatever is random in a task from task_index."


def _difference(first: str, second: str) -> str:
  """Returns the two texts from shortly before the first character in which they differ.

  >>> _difference("one plus two", "one plus three")
  "'one plus two' and 'one plus three'"
  """
  at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
  start = max(0, at - 20)
  return f"{first[start : at + 40]!r} and {second[start : at + 40]!r}"


class DataChecks:
  """Checks every batch. Each finding is logged once and counted in the metrics.

  Args:
    control_ids: token ids of the template's markup; empty: observations are not checked.
  """

  def __init__(self, control_ids: Sequence[int] = ()):
    self._control_ids = np.array(sorted(control_ids), np.int32)
    self._prompts: dict[int, int] = {}
    """Hash of each task's prompt."""
    self._warned: set[str] = set()

  def record(self, trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Returns `changed_prompts` and `unmarked_observations`: the number of trajectories with that fault."""
    changed = [x for x in trajectories if self._changed(x)]
    unmarked = [x for x in trajectories if self._unmarked(x)]
    for name, found, advice in (
      ("changed_prompts", changed, f"the prompt of a task differs from an earlier one of the same index. {_ADVICE}"),
      (
        "unmarked_observations", unmarked,
        "an observation has no control token, though the prompt has some. Texts of `step` are appended as they are, so "
        "they must carry the template's markup.",
      ),
    ):  # fmt: skip
      if found and name not in self._warned:
        self._warned.add(name)
        _log.warning("%s (logged once), task %d: %s", name, found[0].task_index, advice)
    return {"changed_prompts": len(changed), "unmarked_observations": len(unmarked)}

  def _changed(self, trajectory: Trajectory) -> bool:
    prompt = hash(trajectory.tokens[: int(trajectory.action_mask.argmax())].tobytes())
    if len(self._prompts) < _MOST_TASKS:
      return self._prompts.setdefault(trajectory.task_index, prompt) != prompt
    return self._prompts.get(trajectory.task_index, prompt) != prompt

  def _unmarked(self, trajectory: Trajectory) -> bool:
    mask = trajectory.action_mask
    if not self._control_ids.size:
      return False
    marked = np.isin(trajectory.tokens, self._control_ids)
    first = int(mask.argmax())
    if not marked[:first].any():
      return False
    starts = np.flatnonzero(mask[:-1] & ~mask[1:]) + 1  # of observations, and of what follows the last action
    ends = [int(start + (np.append(mask[start:], True)).argmax()) for start in starts]
    return any(not marked[start:end].any() for start, end in zip(starts, ends, strict=True))
