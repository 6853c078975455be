"""Trajectories of the initial policy, on which the value model is pretrained."""

from __future__ import annotations

import itertools
import logging
import pathlib

import numpy as np

from sao_jax.io import trajectory_arrays
from sao_jax.io.console import Console
from sao_jax.parallel.distributed import is_main_process
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.failures import by_count, check_share_between, new_failures
from sao_jax.training.components import Components
from sao_jax.training.evaluation import counters_of
from sao_jax.training.health import RunStoppedError
from sao_jax.training.signals import Interrupted, StopSignals
from sao_jax.types import Params, Trajectory

SEED = 2**31 + 1
"""Sampling noise of these trajectories."""

_log = logging.getLogger(__name__)


def initial_trajectories(
  parts: Components, policy: Params, folder: pathlib.Path, console: Console, signals: StopSignals
) -> list[Trajectory]:
  """Generates `critic.pretraining_trajectories` trajectories, or reads those that an earlier run finished.

  Args:
    parts: the run's parts.
    policy: the initial policy.
    folder: the stage's folder; the trajectories are kept in its `partial/` until the stage has its result.
    console: where to report.
    signals: a signal raises `Interrupted`. Asynchronous runs keep what is finished by then.

  Returns:
    The trajectories by episode number. Failed episodes are missing.

  Raises:
    RunStoppedError: every episode failed.
    TooManyFailuresError: more than `EngineConfig.max_failed_share` of those failed in which the environment was called.
  """
  config = parts.config
  path = folder / "partial" / "initial_trajectories.safetensors"
  unfinished = path.with_name(f"unfinished_{path.name}")
  found = parts.placement.exchange([path.exists(), unfinished.exists()])[0]
  done = _read_or_empty(path if found[0] else unfinished) if any(found) else []
  if found[0] and done:
    return done

  def keep() -> None:
    # Other schedules generate all of them again: beside other neighbours the rest might differ in its last bits.
    if done and config.schedule == "async":
      trajectory_arrays.save(unfinished, trajectory_arrays.to_arrays(list(done)))

  with signals.interruptible(emergency_checkpoint=keep):
    weights = parts.for_engine(policy)
  requests = _requests(parts, {x.episode_id for x in done})
  before = counters_of(parts.rollouts)
  try:
    with (
      console.stage("initial trajectories", config.critic.pretraining_trajectories) as bar,
      signals.interruptible(emergency_checkpoint=keep),
    ):
      bar.advance(len(done))
      failed = itertools.count(1)

      def count_failure(_: EpisodeRequest) -> None:
        bar.advance(note=f"{next(failed)} failed")

      for trajectory in parts.rollouts.generate(
        lambda _: (weights, 0), requests, seed=SEED, on_failure=count_failure
      ):
        done.append(trajectory)
        bar.advance()
  except Interrupted:
    keep()
    raise
  after = counters_of(parts.rollouts)
  if failures := new_failures(before, after):
    console.print(f"{failures.total()} of {len(requests)} episodes failed: {by_count(failures)}")
  if not done:
    count = config.critic.pretraining_trajectories
    raise RunStoppedError(
      f"None of {count} episodes for value pretraining gave a trajectory: {by_count(failures)}. The first failure of "
      "each kind is logged above."
    )
  what = "episodes for value pretraining in which the environment was called failed."
  check_share_between(before, after, config.engine.max_failed_share, what)
  done.sort(key=lambda x: x.episode_id)  # the order of completion depends on the machine's speed; this one does not
  if is_main_process():
    trajectory_arrays.save(path, trajectory_arrays.to_arrays(done))
  return done


def _requests(parts: Components, known: set[int]) -> list[EpisodeRequest]:
  config = parts.config
  count = config.critic.pretraining_trajectories
  tasks = np.random.default_rng((config.seed, 2)).integers(parts.domain.num_train_tasks, size=count)
  return [
    EpisodeRequest(task_index=int(task), episode_id=i, group_id=i) for i, task in enumerate(tasks) if i not in known
  ]


def _read_or_empty(path: pathlib.Path) -> list[Trajectory]:
  try:
    return trajectory_arrays.read(path)
  except ValueError as error:
    _log.warning("Damaged, and generated again: %s", error)
    return []
