"""Discrete-event simulation of rollout engines and a trainer, in the three ways to schedule them.

What is modelled: engines of S slots that decode at a constant time per token (continuous batching: all slots step
together), episodes that alternate between decoding and waiting for a tool, the trainer's time per step, the pause that
new weights cost, and the admission rule of `rollout.queue`: an episode starts only if, were all earlier ones trained
first, it would not come in too stale, and while the queue is not full; those that run then are still taken in. A pause
for weights holds up what decodes; tools run on, and an episode whose tool takes longer than the pause loses nothing.
Not modelled: slower decoding of fuller or longer caches, failures, episodes of one group that resemble each other, and
a network that saturates.

Schedules:
  sync: a batch is generated, then trained on, then weights go out.
  group_async: engines and trainer run at once; a trajectory can be trained on when all of its group are finished.
  async: as before, but each trajectory stands for itself (SAO).
With `in_flight`, engines take up new weights in the middle of episodes; without, an engine starts no new episode until
its live ones have finished, and then takes up the weights.
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
  """A cluster and its schedule; times in seconds."""

  schedule: Schedule = "async"
  in_flight: bool = True
  num_engines: int
  slots: int
  """Per engine."""
  token_s: float
  """One decode step of an engine: every slot that is not waiting gets one token."""
  turn_s: float = 0.0
  """Added per turn: prefill of prompt or observation, rounding to whole decode chunks."""
  batch_size: int = 128
  """Trajectories per trainer step."""
  group_size: int = 8
  """`group_async` only."""
  train_s: float
  """Trainer time per step, whatever the batch holds."""
  train_token_s: float = 0.0
  """Trainer time per action token, besides."""
  transfer_s: float = 0.0
  """Pause of an engine that takes up new weights."""
  max_staleness: int = 8
  capacity: int | None = None
  """While so many trajectories are ready for the trainer, no more episodes start; None: twice the batch."""

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
    """Time that an episode keeps its slot decoding."""
    return episode.tokens * self.token_s + episode.turns * self.turn_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What came out, over the steps after the warm-up."""

  steps_per_s: float
  trajectories_per_s: float
  tokens_per_s: float
  slot_utilisation: float
  """Share of all slots' time in which they decode (not idle, not waiting for a tool)."""
  trainer_utilisation: float
  staleness: dict[int, int]
  """Trained trajectories by staleness at use."""
  dropped: int
  """Trajectories discarded as too stale, in the whole run."""

  @property
  def staleness_mean(self) -> float:
    return sum(k * n for k, n in self.staleness.items()) / max(1, sum(self.staleness.values()))


def simulate(
  config: ClusterConfig, workload: Workload, *, num_steps: int = 40, warmup_steps: int = 10, seed: int = 0
) -> Result:
  """Runs a cluster for some trainer steps.

  Args:
    config: the cluster.
    workload: where episodes come from.
    num_steps: trainer steps that are measured.
    warmup_steps: trainer steps before, for the queues to fill.
    seed: of the episodes drawn.
  """
  if num_steps < 1 or warmup_steps < 0:
    raise ValueError(f"num_steps must be >= 1 and warmup_steps >= 0; received {num_steps} and {warmup_steps}.")
  return _Cluster(config, workload, seed).run(num_steps, warmup_steps)


@dataclasses.dataclass(eq=False)
class _Engine:
  version: int = 0
  live: int = 0
  """Episodes that hold a slot."""
  held: int = 0
  """Free slots that start nothing, because the engine drains or loads weights (without `in_flight`)."""
  loading: bool = False


class _Progress:
  """Where an episode is between its start and its end, in the time that it would take without pauses."""

  def __init__(self, decode_s: float, waits_s: Sequence[float], began: float) -> None:
    piece = decode_s / (len(waits_s) + 1)
    self._wait_ends = np.cumsum(waits_s) + piece * np.arange(1, len(waits_s) + 1)
    self._waits = waits_s
    self._began = began
    self._delay = 0.0
    self._seen: int | None = None
    self.total = decode_s + math.fsum(waits_s)

  def delay_by(self, pauses: Sequence[float], length: float) -> float:
    """What the pauses that have begun, at `pauses`, delay it by, since the last call."""
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
    """How long the tool that runs then goes on; 0 while the episode decodes."""
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
    # Admission never lets more episodes live than this; engines beyond that many stay idle and need not be simulated.
    most_live = (config.max_staleness + 1) * config.batch_size
    self.engines = [_Engine() for _ in range(min(config.num_engines, most_live))]
    # One entry per free slot, in turns over the engines, so that load spreads evenly.
    self.free = collections.deque(self.engines * config.slots)
    self.version = self.engine_version = 0
    self.started = self.dropped = 0
    self.ready: collections.deque[_Finished] = collections.deque()
    self.groups: collections.defaultdict[int, list[_Finished]] = collections.defaultdict(list)
    self.arrival = self.env.event()
    self.capacity = 2 * config.batch_size if config.capacity is None else config.capacity
    self.pauses: list[float] = []  # when all engines at once were paused (`in_flight`); they do not overlap
    self.decoding = self.decoded_s = self.integrated_to = 0.0  # slots that decode, on average over their episodes
    self.trained_s = self.measured_from = 0.0
    self.tokens = 0
    self.staleness: collections.Counter[int] = collections.Counter()

  def run(self, num_steps: int, warmup_steps: int) -> Result:
    self._start_episodes()
    self.env.run(until=self.env.process(self._train(num_steps, warmup_steps)))
    self._integrate()
    seconds = self.env.now - self.measured_from
    if not seconds:
      raise ValueError("the simulation took no time: of the episodes and the trainer's steps some must.")
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
    """The trainer: takes a batch, trains, publishes."""
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
      self._start_episodes()  # the queue may have been full
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
    """Hands the new version to the engines; returns the end of the transfer where the trainer must wait for it."""
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
    """Fills free slots as far as admission allows: never more than could come in fresh enough, none if it is full."""
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
      # What it waited for during pauses was not decoding's to lose: counted over its whole life, so partly before.
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
      self.dropped += len(members)  # the places are given out again by whoever called
      return
    self.ready.extend(members)
    if len(self.ready) >= self.config.batch_size and not self.arrival.triggered:
      self.arrival.succeed()

  def _too_stale(self, members: Sequence[_Finished]) -> bool:
    return min(member.version for member in members) < self.version - self.config.max_staleness

  def _drop_stale(self) -> None:
    """Discards what a new version has made too stale, whole groups in `group_async`."""
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
    """Adds up decoding time until now; nothing decodes during a pause."""
    unpaused = self.env.now - self._paused_s()
    self.decoded_s += self.decoding * max(0.0, unpaused - self.integrated_to)
    self.integrated_to = unpaused

  def _paused_s(self) -> float:
    """Time until now in which all engines were paused."""
    if not self.pauses:
      return 0.0
    return (len(self.pauses) - 1) * self.config.transfer_s + min(self.config.transfer_s, self.env.now - self.pauses[-1])
