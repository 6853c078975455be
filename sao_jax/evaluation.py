"""Success on held-out tasks: pass@1 at the engine's temperature, with an interval that says how much to believe."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from sao_jax.processes import SharedRollouts
from sao_jax.rollout.engine import RolloutEngine
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.types import Domain, Environment, Params, Step, Trajectory

EVALUATION_SEED = 2**31
"""Sampling noise of evaluations: the same before and after training, and no training call's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """Result over `n` episodes, one per held-out task."""

  success_rate: float
  n: int
  low: float
  """Ends of the 95 % Wilson interval of the success rate."""
  high: float
  turns_mean: float
  failed: int
  """Episodes that broke (an environment that raised, say); they count as not solved."""
  trajectories: tuple[Trajectory, ...]


class BothSplits(Environment):
  """One environment over both splits: task `num_train_tasks + i` is held-out task i. So one engine serves both."""

  def __init__(self, domain: Domain):
    self._domain = domain
    self._train = domain.make_env("train")
    self._eval: Environment | None = None
    self._current = self._train

  def reset(self, task_index: int) -> str:
    held_out = task_index - self._domain.num_train_tasks
    if held_out < 0:
      self._current = self._train
      return self._train.reset(task_index)
    if self._eval is None:
      self._eval = self._domain.make_env("eval")
    self._current = self._eval
    return self._eval.reset(held_out)

  def step(self, action: str) -> Step:
    return self._current.step(action)

  def close(self) -> None:
    self._train.close()
    if self._eval is not None:
      self._eval.close()


def evaluate(
  engine: RolloutEngine | SharedRollouts, domain: Domain, params: Params, *, num_episodes: int, version: int = 0
) -> Evaluation:
  """Runs one episode on each of the first `num_episodes` held-out tasks.

  Args:
    engine: `Components.rollouts`, or an engine over `BothSplits` environments; nothing else may be running in it.
    domain: the tasks.
    params: the policy on the engine's devices (`Placement.for_engine`); not donated.
    num_episodes: at least 1; more than there are tasks starts over with new noise.
    version: recorded in the trajectories.
  """
  if num_episodes < 1:
    raise ValueError(f"num_episodes must be >= 1; received {num_episodes}.")
  requests = [
    EpisodeRequest(task_index=domain.num_train_tasks + i % domain.num_eval_tasks, episode_id=i, group_id=i)
    for i in range(num_episodes)
  ]
  done = tuple(engine.generate(lambda _: (params, version), requests, seed=EVALUATION_SEED))
  successes = sum(x.success for x in done)
  low, high = wilson_interval(successes, num_episodes)
  return Evaluation(
    success_rate=successes / num_episodes,
    n=num_episodes,
    low=low,
    high=high,
    turns_mean=float(np.mean([x.num_turns for x in done])) if done else math.nan,
    failed=num_episodes - len(done),
    trajectories=done,
  )


def wilson_interval(successes: int, n: int, *, z: float = 1.959964) -> tuple[float, float]:
  """The Wilson score interval of a success rate: its ends stay in [0, 1], and 0 of n is not taken for certainty.

  (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), p = successes / n (Wilson 1927).

  >>> low, high = wilson_interval(50, 100)
  >>> round(low, 4), round(high, 4)
  (0.4038, 0.5962)
  """
  if n < 1 or not 0 <= successes <= n:
    raise ValueError(f"successes must be in [0, n] with n >= 1; received {successes} of {n}.")
  p = successes / n
  middle = p + z * z / (2 * n)
  spread = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
  scale = 1 + z * z / n
  return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)
