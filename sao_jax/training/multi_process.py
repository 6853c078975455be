"""Rollouts in several processes: each generates a share of the episodes, and all train on all of them.

Every process then has every trajectory, packs the same batch, and places its own rows on its devices
(`parallel.place_batch`). Trajectories are small compared to activations, so they are exchanged whole, as JSON. With one
process nothing is exchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from sao_jax.io import trajectories as trajectory_io
from sao_jax.rollout.engine.engine import ParamsFor, RolloutEngine
from sao_jax.rollout.engine_group import sum_counters
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.schedules import RolloutSchedule
from sao_jax.training.config import RunConfig
from sao_jax.training.placement import Placement
from sao_jax.types import Trajectory


def check_processes(config: RunConfig, count: int) -> None:
  """Checks that a config works with `count` processes.

  Raises:
    ValueError: with several processes, the schedule is "lagged", or (async, without engines in Ray workers) the batch
      does not split into whole groups per process.
  """
  if count == 1:
    return
  if config.schedule == "lagged":
    raise ValueError(f"schedule must be async or sync with {count} processes; received 'lagged'.")
  share = count * config.group_size
  if config.schedule == "async" and not config.cluster.num_engines and config.batch_size % share:
    raise ValueError(
      f"batch_size must be a multiple of {share} (whole groups of {config.group_size} from each of {count} processes); "
      f"received {config.batch_size}."
    )


class MultiProcessRollouts:
  """Engine over all processes: each runs its share of the requests, and every process gets all trajectories.

  Args:
    engine: the engine of this process.
    placement: exchanges values with the other processes.
  """

  def __init__(self, engine: RolloutEngine, placement: Placement):
    self._engine = engine
    self._placement = placement

  def generate(
    self,
    weights: ParamsFor,
    requests: Sequence[EpisodeRequest],
    *,
    seed: int,
    on_failure: Callable[[EpisodeRequest], None] | None = None,
  ) -> Iterator[Trajectory]:
    """See `Engine.generate`. All processes must call it, with the same requests and seed.

    `on_failure` is called with the requests of this process.
    """
    index, count = jax.process_index(), jax.process_count()
    mine = itertools.islice(requests, index, None, count)
    done = self._engine.generate(weights, mine, seed=seed, on_failure=on_failure)
    return done if count == 1 else iter(exchange_trajectories(self._placement, done))

  def counters(self) -> dict[str, Any]:
    """Returns the sums of the engines' counters over all processes, and the mean of `busy_seconds`."""
    mine = self._engine.counters
    if jax.process_count() == 1:
      return mine
    return sum_counters(self._placement.exchange(mine))


class MultiProcessSchedule:
  """Asynchronous schedule over several processes: each contributes an equal share of a batch, or one contributes all.

  Every process must call every method, in the same order.

  Args:
    schedule: the schedule of this process, for its share of the batch.
    placement: exchanges values with the other processes.
    group_size: episodes per group; a group runs in one process.
    part: `(index, count)` of this process's share, see `RequestStream`.
  """

  runs_on_caller = False

  def __init__(self, schedule: RolloutSchedule, placement: Placement, group_size: int, *, part: tuple[int, int]):
    self._schedule = schedule
    self._placement = placement
    self._group_size = group_size
    self._part = part

  def next_batch(self, version: int) -> list[Trajectory]:
    return exchange_trajectories(self._placement, self._schedule.next_batch(version))

  def evaluate(self, requests: Sequence[EpisodeRequest], *, seed: int) -> list[Trajectory]:
    index, count = self._part
    mine = list(itertools.islice(requests, index, None, count))
    return exchange_trajectories(self._placement, self._schedule.evaluate(mine, seed=seed))

  def counters(self) -> dict[str, int]:
    everyone = self._placement.exchange(self._schedule.counters())
    return {name: sum(counts[name] for counts in everyone) for name in everyone[0]}

  def state(self, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
    state, waiting = self._schedule.state(step)
    return {"processes": self._placement.exchange(state)}, exchange_trajectories(self._placement, waiting)

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory]) -> None:
    index, count = self._part
    mine = [x for x in waiting if x.episode_id // self._group_size % count == index]
    self._schedule.restore(state["processes"][jax.process_index()], mine)

  def close(self) -> None:
    self._schedule.close()


def exchange_trajectories(placement: Placement, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
  """Gathers the trajectories of all processes, sorted by episode; every process must call it."""
  mine = [trajectory_io.to_json(trajectory) for trajectory in trajectories]
  everyone = [trajectory_io.from_json(row) for rows in placement.exchange(mine) for row in rows]
  return sorted(everyone, key=lambda x: x.episode_id)
