"""Evaluation on held-out tasks: pass@1 at the engine's temperature, with a 95 % interval."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.rollout.engine.engine import RolloutEngine
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.failures import TooManyFailuresError, by_count, new_failures
from sao_jax.training.intervals import bootstrap_interval, wilson_interval
from sao_jax.training.multi_process import MultiProcessRollouts
from sao_jax.types import Domain, Environment, Params, Step, Trajectory

EVALUATION_SEED = 2**31
"""Seed of evaluations: the same before and after training, and different from that of every training call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
  """Result of an evaluation with `n` episodes on held-out tasks."""

  success_rate: float
  """Share of successful episodes, in [0, 1]."""
  n: int
  low: float
  """Lower end of the 95 % interval of the success rate: Wilson's, or over problems if problems repeat."""
  high: float
  """Upper end of this interval."""
  turns_mean: float
  """Mean number of actions; NaN if all episodes failed."""
  failed: int
  """Number of failed episodes (an environment that raised, say). They are among the `n`, and not solved."""
  trajectories: tuple[Trajectory, ...]
  reward_mean: float = math.nan
  """Mean reward of the episodes that did not fail; NaN if all failed."""
  failed_by_kind: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def solved(self) -> int:
    """Number of successful episodes."""
    return sum(x.success for x in self.trajectories)


class BothSplits(Environment):
  """Environment over both splits, so that one engine serves both: task `num_train_tasks + i` is held-out task i.

  Args:
    domain: the task.
    prompts: further tasks after the held-out ones, with one action each and without a reward. The list may change
      between episodes.
  """

  def __init__(self, domain: Domain, prompts: Sequence[str] = ()):
    self._domain = domain
    self._prompts = prompts
    self._train = domain.make_env("train")
    self._eval: Environment | None = None
    self._current = self._train
    self._prompted = False

  def reset(self, task_index: int) -> str:
    held_out = task_index - self._domain.num_train_tasks
    self._prompted = held_out >= self._domain.num_eval_tasks
    if self._prompted:
      return self._prompts[held_out - self._domain.num_eval_tasks]
    if held_out < 0:
      self._current = self._train
      return self._train.reset(task_index)
    if self._eval is None:
      self._eval = self._domain.make_env("eval")
    self._current = self._eval
    return self._eval.reset(held_out)

  def step(self, action: str) -> Step:
    return Step(done=True) if self._prompted else self._current.step(action)

  def close(self) -> None:
    self._train.close()
    if self._eval is not None:
      self._eval.close()


def evaluate(
  engine: RolloutEngine | MultiProcessRollouts, domain: Domain, params: Params, *, num_episodes: int, version: int = 0
) -> Evaluation:
  """Runs one episode on each of the first `num_episodes` held-out tasks.

  Args:
    engine: `Components.rollouts`, or an idle engine over `BothSplits` environments.
    domain: the tasks.
    params: the policy on the engine's devices (`Placement.for_engine`); not donated.
    num_episodes: at least 1. If there are fewer tasks, they repeat with different sampling noise.
    version: policy version to record in the trajectories.

  Raises:
    ValueError: `num_episodes` is below 1.
  """
  requests = held_out_requests(domain, num_episodes)
  before = counters_of(engine)
  done = tuple(engine.generate(lambda _: (params, version), requests, seed=EVALUATION_SEED))
  return result_of(done, domain, num_episodes, new_failures(before, counters_of(engine)))


def held_out_requests(domain: Domain, num_episodes: int) -> list[EpisodeRequest]:
  """Requests for episodes 0, 1, ... on the first held-out tasks; if there are fewer, they repeat.

  Raises:
    ValueError: `num_episodes` is below 1.
  """
  if num_episodes < 1:
    raise ValueError(f"num_episodes must be >= 1; received {num_episodes}.")
  return [
    EpisodeRequest(task_index=domain.num_train_tasks + i % domain.num_eval_tasks, episode_id=i, group_id=i)
    for i in range(num_episodes)
  ]


def result_of(
  trajectories: Iterable[Trajectory], domain: Domain, num_episodes: int, failures: Mapping[str, int]
) -> Evaluation:
  """Result of the episodes of `held_out_requests`: trajectories of those that did not fail, and failures by kind."""
  done = tuple(trajectories)
  solved = np.zeros(min(num_episodes, domain.num_eval_tasks))
  for x in done:
    solved[x.task_index - domain.num_train_tasks] += x.success
  if num_episodes > domain.num_eval_tasks:
    attempts = np.bincount(np.arange(num_episodes) % domain.num_eval_tasks)
    low, high = interval_over_problems(solved / attempts, attempts)
  else:
    low, high = wilson_interval(solved.sum(), num_episodes)
  return Evaluation(
    success_rate=float(solved.sum() / num_episodes),
    n=num_episodes,
    low=low,
    high=high,
    turns_mean=float(np.mean([x.num_turns for x in done])) if done else math.nan,
    failed=num_episodes - len(done),
    trajectories=done,
    reward_mean=float(np.mean([x.total_reward for x in done])) if done else math.nan,
    failed_by_kind=dict(failures),
  )


def counters_of(engine: RolloutEngine | MultiProcessRollouts) -> Mapping[str, Any]:
  """Returns the counters of all processes' engines. Every process must call it."""
  return engine.counters() if isinstance(engine, MultiProcessRollouts) else engine.counters


def check_failures(result: Evaluation, max_failed_share: float) -> None:
  """Raises `TooManyFailuresError` if more than `max_failed_share` of an evaluation's episodes failed."""
  if result.failed > max_failed_share * result.n:
    raise TooManyFailuresError(
      f"{result.failed} of {result.n} episodes of an evaluation failed, more than EngineConfig.max_failed_share = "
      f"{max_failed_share}, so its success rate says little. Failures by kind: {by_count(result.failed_by_kind)}. The "
      "first of each kind is logged above."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassAtOne:
  """Success rate of one attempt (pass@1), averaged over several runs of the same problems."""

  mean: float
  """Mean success rate, in [0, 1]."""
  low: float
  """Lower end of the 95 % interval over problems, see `interval_over_problems`."""
  high: float
  """Upper end of this interval."""
  by_run: tuple[float, ...]
  """Success rate of each run."""
  num_runs: int
  num_problems: int
  turns_mean: float
  """Mean number of actions; NaN if all episodes failed."""
  truncated: int
  """Number of truncated episodes."""
  failed: int
  """Number of failed episodes; they count as not solved."""


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
    engine: see `evaluate`.
    domain: the tasks.
    params: see `evaluate`.
    num_runs: at least 1.
    known: trajectories of an interrupted evaluation; their episodes are not run again. Samples depend on the number of
      the episode, so the result is that of an uninterrupted evaluation.
    on_done: called with every new trajectory.

  Raises:
    ValueError: `num_runs` is below 1, or a trajectory in `known` belongs to another set of tasks.
  """
  if num_runs < 1:
    raise ValueError(f"num_runs must be >= 1; received {num_runs}.")
  n = domain.num_eval_tasks
  done = {x.episode_id: x for x in known if x.episode_id < n * num_runs}
  for x in done.values():
    if x.task_index != domain.num_train_tasks + x.episode_id % n:
      raise ValueError(
        f"known: episode {x.episode_id} must be of task {domain.num_train_tasks + x.episode_id % n}; received "
        f"{x.task_index}, from another set of tasks."
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


def interval_over_problems(rates: np.ndarray, attempts: np.ndarray | None = None) -> tuple[float, float]:
  """Computes the 95 % interval of a mean success rate: a bootstrap over problems, or Wilson's if all rates are equal.

  The bootstrap draws all attempts at a problem together, since they say nothing about other problems. If all problems
  have the same rate (none solved, or all), every resample has the same mean and the interval would have no width. Then
  Wilson's interval is used, with one attempt per problem.

  Args:
    rates: `[problems]` float, share of successful attempts per problem, in [0, 1].
    attempts: `[problems]` int, number of attempts per problem; None: the same for all.

  >>> low, high = interval_over_problems(np.zeros(30))
  >>> low, round(high, 3)
  (0.0, 0.114)
  """
  if rates.size and (rates == rates[0]).all():
    return wilson_interval(float(rates.sum()), rates.size)
  if attempts is None:
    return bootstrap_interval(rates)
  # The mean over attempts is a ratio of sums over problems; its linear terms have that mean. Exact for equal attempts.
  mean = float(np.average(rates, weights=attempts))
  return bootstrap_interval(mean + attempts / attempts.mean() * (rates - mean))
