"""Success on held-out tasks: pass@1 at the engine's temperature, with an interval that says how much to believe."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from sao_jax.rollout.engine.engine import RolloutEngine
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.training.intervals import bootstrap_interval, wilson_interval
from sao_jax.training.multi_process import MultiProcessRollouts
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
  engine: RolloutEngine | MultiProcessRollouts, domain: Domain, params: Params, *, num_episodes: int, version: int = 0
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtOne:
  """Success of one attempt, averaged over several runs of the same problems."""

  mean: float
  low: float
  """Ends of the 95 % interval over problems, `interval_over_problems`."""
  high: float
  by_run: tuple[float, ...]
  num_runs: int
  num_problems: int
  turns_mean: float
  truncated: int
  failed: int
  """Episodes that broke; they count as not solved."""


def evaluate_runs(
  engine: RolloutEngine | MultiProcessRollouts,
  domain: Domain,
  params: Params,
  *,
  num_runs: int,
  known: Sequence[Trajectory] = (),
  on_done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> PassAtOne:
  """Runs every held-out task `num_runs` times, and measures pass@1.

  Args:
    engine: as for `evaluate`.
    domain: the tasks.
    params: as for `evaluate`.
    num_runs: at least 1.
    known: trajectories of an evaluation that was stopped; their episodes are not run again. An episode's samples are
      those of its number, so the result is that of an evaluation in one go.
    on_done: told of every new trajectory as it ends.

  Raises:
    ValueError: `num_runs` < 1, or `known` holds an episode that this evaluation does not have.
  """
  if num_runs < 1:
    raise ValueError(f"num_runs must be >= 1; received {num_runs}.")
  n = domain.num_eval_tasks
  done = {x.episode_id: x for x in known if x.episode_id < n * num_runs}
  for x in done.values():
    if x.task_index != domain.num_train_tasks + x.episode_id % n:
      raise ValueError(
        f"known: episode {x.episode_id} must be of task {domain.num_train_tasks + x.episode_id % n}; received "
        f"{x.task_index}: it is of another set of tasks."
      )
  requests = [
    EpisodeRequest(task_index=domain.num_train_tasks + i % n, episode_id=i, group_id=i)
    for i in range(n * num_runs)
    if i not in done
  ]
  for trajectory in engine.generate(lambda _: (params, 0), requests, seed=EVALUATION_SEED):
    on_done(trajectory)
    done[trajectory.episode_id] = trajectory
  solved = np.zeros((num_runs, n))
  for i, trajectory in done.items():
    solved[i // n, i % n] = trajectory.success
  low, high = interval_over_problems(solved.mean(axis=0))
  return PassAtOne(
    mean=float(solved.mean()),
    low=low,
    high=high,
    by_run=tuple(solved.mean(axis=1).tolist()),
    num_runs=num_runs,
    num_problems=n,
    turns_mean=float(np.mean([x.num_turns for x in done.values()])) if done else math.nan,
    truncated=sum(x.ended == "truncated" for x in done.values()),
    failed=n * num_runs - len(done),
  )


def interval_over_problems(rates: np.ndarray) -> tuple[float, float]:
  """The 95 % interval of a mean success rate: a bootstrap over problems, or Wilson's where all problems are alike.

  All attempts at a problem are drawn together, so that they do not count as evidence about other problems. Where every
  problem has the same rate (none solved, all solved) each resample has the same mean, which is no certainty: there
  Wilson's interval is taken, each problem as one attempt.

  Args:
    rates: `[problems]`, share of a problem's attempts that solved it.

  >>> low, high = interval_over_problems(np.zeros(30))
  >>> low, round(high, 3)
  (0.0, 0.114)
  """
  if rates.size and (rates == rates[0]).all():
    return wilson_interval(float(rates.sum()), rates.size)
  return bootstrap_interval(rates)
