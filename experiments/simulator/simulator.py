"""Discrete-event simulation of rollout engines and a trainer under three schedules.

The model contains:
  engines    S slots decode at a constant time per token; all slots step together (continuous batching);
  episodes   they alternate between decoding and waiting for a tool;
  trainer    a time per step, and a pause of the engines for new weights;
  admission  the rule of `rollout.trajectory_queue`: an episode starts only if the queue is not full and the episode
             would not be too stale after all earlier ones are trained on; episodes that run when the queue fills
             still enter.
A pause for weights stops decoding. Tools continue, so an episode whose tool outlasts the pause loses nothing. The model
leaves out slower decoding with fuller or longer caches, failures, similar lengths within a group, and a saturated
network.

Schedules:
  sync         a batch is generated, then trained on, then weights are published;
  group_async  engines and trainer run concurrently; a trajectory is ready when its whole group has finished;
  async        as group_async, but each trajectory is ready by itself (SAO).
With `in_flight`, engines load new weights in the middle of episodes. Without it, an engine starts no new episode until
its live ones have finished, and then loads the weights.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import simpy

from experiments.simulator.workload import Episode, Workload

Schedule = Literal["sync", "group_async", "async"]
_ROUNDING_S = 1e-9
Event = simpy.events.Event
Process: TypeAlias = Generator[Event, Any, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterConfig:
  """A cluster and its schedule. Times are in seconds."""

  schedule: Schedule = "async"
  in_flight: bool = True
  num_engines: int
  slots: int
  """Number of slots per engine."""
  token_s: float
  """Time of one decode step of an engine, which gives one token to every slot that is not waiting."""
  turn_s: float = 0.0
  """Additional time per turn, for prefill of the prompt or observation and for rounding up to whole decode chunks."""
  batch_size: int = 128
  """Number of trajectories per trainer step."""
  group_size: int = 8
  """Number of rollouts per prompt. Only `group_async` uses it."""
  train_s: float
  """Fixed trainer time per step."""
  train_token_s: float = 0.0
  """Additional trainer time per action token."""
  transfer_s: float = 0.0
  """Pause of an engine while it loads new weights."""
  max_staleness: int = 8
  capacity: int | None = None
  """No episode starts while this many trajectories are ready for the trainer; None stands for twice the batch."""

  def __post_init__(self) -> None:
    if self.capacity is not None and self.capacity < self.batch_size:
      raise ValueError(f"capacity must be >= batch_size = {self.batch_size}; received {self.capacity}.")
    for name in ("num_engines", "slots", "batch_size", "group_size"):
      if getattr(self, name) < 1:
        raise ValueError(f"{name} must be >= 1; received {getattr(self, name)}.")
    for name in ("token_s", "turn_s", "train_s", "train_token_s", "transfer_s", "max_staleness"):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f"{name} must be >= 0 and finite; received {getattr(self, name)}.")
    if self.schedule not in get_args(Schedule):
      raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}; received {self.schedule!r}.")
    if self.schedule == "group_async" and self.batch_size % self.group_size:
      raise ValueError(f"group_size must divide batch_size = {self.batch_size}; received {self.group_size}.")

  def generate_s(self, episode: Episode) -> float:
    """Returns the time for which an episode's slot decodes."""
    return episode.tokens * self.token_s + episode.turns * self.turn_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """Results over the steps after the warm-up."""

  steps_per_s: float
  trajectories_per_s: float
  tokens_per_s: float
  slot_utilisation: float
  """Share of the time of all slots that is spent decoding (not idle, not waiting for a tool)."""
  trainer_utilisation: float
  staleness: dict[int, int]
  """Number of trained trajectories by staleness at use."""
  dropped: int
  """Number of trajectories dropped as too stale, in the whole run."""

  @property
  def staleness_mean(self) -> float:
    return sum(k * n for k, n in self.staleness.items()) / max(1, sum(self.staleness.values()))


def simulate(
  config: ClusterConfig, workload: Workload, *, num_steps: int = 40, warmup_steps: int = 10, seed: int = 0
) -> Result:
  """Simulates a cluster for a number of trainer steps.

  Args:
    config: the cluster.
    workload: source of the episodes.
    num_steps: number of measured trainer steps.
    warmup_steps: number of trainer steps before them, which fill the queues.
    seed: seed of the episodes.
  """
  if num_steps < 1 or warmup_steps < 0:
    raise ValueError(f"num_steps must be >= 1 and warmup_steps >= 0; received {num_steps} and {warmup_steps}.")
  return _Cluster(config, workload, seed).run(num_steps, warmup_steps)


@dataclasses.dataclass(eq=False)
class _Engine:
  version: int = 0
  live: int = 0
  """Number of episodes in the slots."""
  held: int = 0
  """Number of free slots that start nothing while the engine drains or loads weights (without `in_flight`)."""
  loading: bool = False


class _Progress:
  """The progress of an episode in the time that it would take without pauses."""

  def __init__(self, decode_s: float, waits_s: Sequence[float], began: float) -> None:
    piece = decode_s / (len(waits_s) + 1)
    self._wait_ends = np.cumsum(waits_s) + piece * np.arange(1, len(waits_s) + 1)
    self._waits = waits_s
    self._began = began
    self._delay = 0.0
    self._seen: int | None = None
    self.total = decode_s + math.fsum(waits_s)

  def delay_by(self, pauses: Sequence[float], length: float) -> float:
    """Returns the additional delay since the last call, by the pauses that have begun at the times `pauses`."""
    before = self._delay
    if self._seen is None:
      self._seen = bisect.bisect_right(pauses, self._began - length)
    while self._seen < len(pauses):
      start = max(pauses[self._seen], self._began)
      at = start - self._began - self._delay
      if at >= self.total - _ROUNDING_S:
        break
      self._delay += max(0.0, pauses[self._seen] + length - start - self._wait_left(at))
      self._seen += 1
    return self._delay - before

  def _wait_left(self, at: float) -> float:
    """Returns the remaining time of the tool call at that moment; 0 while the episode decodes."""
    index = int(np.searchsorted(self._wait_ends, at, side="right"))
    if index == len(self._waits):
      return 0.0
    left = float(self._wait_ends[index]) - at
    return left if left <= self._waits[index] else 0.0


@dataclasses.dataclass(frozen=True)
class _Finished:
  tokens: int
  version: int


class _Cluster:
  """One run of the simulation."""

  def __init__(self, config: ClusterConfig, workload: Workload, seed: int) -> None:
    self.config = config
    self.workload = workload
    self.rng = np.random.default_rng(seed)
    self.env = simpy.Environment()
    # Admission never allows more live episodes than this. Engines beyond that number stay idle and are not simulated.
    most_live = (config.max_staleness + 1) * config.batch_size
    self.engines = [_Engine() for _ in range(min(config.num_engines, most_live))]
    # One entry per free slot, alternating between engines, so that the load spreads evenly.
    self.free = collections.deque(self.engines * config.slots)
    self.version = self.engine_version = 0
    self.started = self.dropped = 0
    self.ready: collections.deque[_Finished] = collections.deque()
    self.groups: collections.defaultdict[int, list[_Finished]] = collections.defaultdict(list)
    self.arrival = self.env.event()
    self.capacity = 2 * config.batch_size if config.capacity is None else config.capacity
    self.pauses: list[float] = []  # starts of the pauses of all engines (`in_flight`); they do not overlap
    self.decoding = self.decoded_s = self.integrated_to = 0.0  # decoding slots, averaged over each episode's life
    self.trained_s = self.measured_from = 0.0
    self.tokens = 0
    self.staleness: collections.Counter[int] = collections.Counter()

  def run(self, num_steps: int, warmup_steps: int) -> Result:
    self._start_episodes()
    self.env.run(until=self.env.process(self._train(num_steps, warmup_steps)))
    self._integrate()
    seconds = self.env.now - self.measured_from
    if not seconds:
      raise ValueError("the simulation took no time: episodes or trainer steps must take longer than 0 s.")
    return Result(
      steps_per_s=num_steps / seconds,
      trajectories_per_s=num_steps * self.config.batch_size / seconds,
      tokens_per_s=self.tokens / seconds,
      slot_utilisation=self.decoded_s / (seconds * self.config.num_engines * self.config.slots),
      trainer_utilisation=self.trained_s / seconds,
      staleness=dict(sorted(self.staleness.items())),
      dropped=self.dropped,
    )

  def _train(self, num_steps: int, warmup_steps: int) -> Process:
    """Runs the trainer: take a batch, train, publish."""
    transfer: Event | None = None
    for step in range(warmup_steps + num_steps):
      if step == warmup_steps:
        self._integrate()
        self.measured_from, self.decoded_s, self.trained_s, self.tokens = self.env.now, 0.0, 0.0, 0
        self.staleness.clear()
      while len(self.ready) < self.config.batch_size:
        self.arrival = self.env.event()
        yield self.arrival
      batch = [self.ready.popleft() for _ in range(self.config.batch_size)]
      self._start_episodes()  # taking the batch may have made room in the queue
      self.staleness.update(self.version - finished.version for finished in batch)
      tokens = sum(finished.tokens for finished in batch)
      seconds = self.config.train_s + self.config.train_token_s * tokens
      yield self.env.timeout(seconds)
      self.trained_s += seconds
      self.tokens += tokens
      if transfer is not None:
        yield transfer  # one transfer at a time
      self.version += 1
      if self.config.schedule == "sync":
        yield self.env.timeout(self.config.transfer_s)
      transfer = self._publish()
      self._drop_stale()
      self._start_episodes()

  def _publish(self) -> Event | None:
    """Gives the new version to the engines; returns the end of the transfer if the trainer must wait for it."""
    if self.config.schedule == "sync":
      self.engine_version = self.version
      for engine in self.engines:
        engine.version = self.version
      return None
    if not self.config.in_flight:
      for engine in self.engines:
        self._load_if_drained(engine)
      return None
    self._integrate()
    self.engine_version = self.version
    self.pauses.append(self.env.now)
    return self.env.timeout(self.config.transfer_s)

  def _start_episodes(self) -> None:
    """Fills free slots as far as admission allows: no episode that could be too stale, none if the queue is full."""
    config = self.config
    ahead = 0 if config.schedule == "sync" else config.max_staleness
    admitted = (self.version + ahead + 1) * config.batch_size
    while self.free and len(self.ready) < self.capacity and self.started - self.dropped < admitted:
      engine = self.free.popleft()
      if self._must_drain(engine):
        engine.held += 1
        continue
      engine.live += 1
      self.env.process(self._episode(engine, self.workload.draw(self.rng), self.started // config.group_size))
      self.started += 1

  def _episode(self, engine: _Engine, episode: Episode, group: int) -> Process:
    version = self.engine_version if self._swaps_at_once else engine.version
    decode = self.config.generate_s(episode)
    progress = _Progress(decode, episode.waits_s, self.env.now)
    share = decode / progress.total if progress.total else 0.0
    self._integrate()
    self.decoding += share
    began, paused = self.env.now, self._paused_s()
    remaining = progress.total
    while remaining > 0:
      yield self.env.timeout(remaining)
      remaining = progress.delay_by(self.pauses, self.config.transfer_s)
    self._integrate()
    self.decoding -= share
    if (seconds := self.env.now - began) > 0:
      # Waits during pauses cost no decoding time. The correction covers the episode's whole life, part of which may lie
      # before the measurement.
      counted = share * (seconds - (self._paused_s() - paused))
      self.decoded_s += (decode - counted) * min(1.0, (self.env.now - self.measured_from) / seconds)
    engine.live -= 1
    self.free.append(engine)
    self._finish(_Finished(episode.tokens, version), group)
    self._load_if_drained(engine)
    self._start_episodes()

  @property
  def _swaps_at_once(self) -> bool:
    return self.config.in_flight or self.config.schedule == "sync"

  def _must_drain(self, engine: _Engine) -> bool:
    return not self._swaps_at_once and (engine.loading or engine.version < self.version)

  def _load_if_drained(self, engine: _Engine) -> None:
    if self._must_drain(engine) and not engine.live and not engine.loading:
      engine.loading = True
      self.env.process(self._load(engine))

  def _load(self, engine: _Engine) -> Process:
    version = self.version
    yield self.env.timeout(self.config.transfer_s)
    engine.version, engine.loading = version, False
    self.free.extend([engine] * engine.held)
    engine.held = 0
    self._load_if_drained(engine)
    self._start_episodes()

  def _finish(self, finished: _Finished, group: int) -> None:
    members = [finished]
    if self.config.schedule == "group_async":
      self.groups[group].append(finished)
      if len(self.groups[group]) < self.config.group_size:
        return
      members = self.groups.pop(group)
    if self._too_stale(members):
      self.dropped += len(members)  # the caller refills their places
      return
    self.ready.extend(members)
    if len(self.ready) >= self.config.batch_size and not self.arrival.triggered:
      self.arrival.succeed()

  def _too_stale(self, members: Sequence[_Finished]) -> bool:
    return min(member.version for member in members) < self.version - self.config.max_staleness

  def _drop_stale(self) -> None:
    """Drops trajectories that a new version has made too stale; with `group_async`, whole groups."""
    size = self.config.group_size if self.config.schedule == "group_async" else 1
    fresh: collections.deque[_Finished] = collections.deque()
    waiting = list(self.ready)
    for first in range(0, len(waiting), size):
      members = waiting[first : first + size]
      if self._too_stale(members):
        self.dropped += size
      else:
        fresh.extend(members)
    self.ready = fresh

  def _integrate(self) -> None:
    """Adds up the decoding time until now. Nothing decodes during a pause."""
    unpaused = self.env.now - self._paused_s()
    self.decoded_s += self.decoding * max(0.0, unpaused - self.integrated_to)
    self.integrated_to = unpaused

  def _paused_s(self) -> float:
    """Returns the time until now for which all engines were paused."""
    if not self.pauses:
      return 0.0
    return (len(self.pauses) - 1) * self.config.transfer_s + min(self.config.transfer_s, self.env.now - self.pauses[-1])
