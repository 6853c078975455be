"""Speed-up by asynchronous training on this machine: `python -m experiments.benchmarks.async_speedup`.

Compares three schedules in one process, with the same policy, learner and number of trajectories per step:
  sync    a batch is generated up to its last episode, then trained on;
  group   asynchronous, but a trajectory waits for the slowest of the 8 rollouts of its prompt;
  async   asynchronous single rollouts, with weights updated in flight (SAO).
Episodes have 1 to 6 turns of about 16 action tokens (random weights; one token in 16 stops the action). Every turn but
the last calls a tool that sleeps for a log-normal time: the median is 50 ms and sigma 1.2, so that the mean is 103 ms
and one call in 400 takes 1.4 s. Turns and latencies depend on the task's number only, so that sync and async run the
same episodes. The learning rates are so small that no schedule changes what is generated. The first steps compile and
fill the queues and do not count.

Each schedule is also simulated (`experiments.simulate_cluster`), on the episodes of the sync run and with the measured
seconds per decode step, per turn and per learner step. `share_of_simulated` is the measured speed-up over sync as a
share of the simulated one. `share_of_separate` uses the stage times of the sync run, in which nothing overlaps, for all
schedules: it estimates what engine and learner would reach on separate machines. The difference between the two is the
loss from sharing these cores.

In this setting the learner is busy all the time, so that async and group train equally many trajectories.
`fast_learner` repeats both with tools that take 8 times as long (median 0.4 s): the learner waits for trajectories, as
it does where rollouts take most of the time, and what groups cost shows in throughput and staleness.

Prediction before the first run: a sync step waits about 2 s for its slowest episode and works for about 1 s. An async
step works for about 0.7 s and is bound by the learner, which makes it 4 times as fast as sync, or 90 % of the simulated
speed-up. Groups lose little throughput, because slots are refilled while members wait, but their staleness is higher.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from experiments.simulator.simulator import ClusterConfig, Result, Schedule, simulate
from experiments.simulator.workload import Episode, LogNormal
from experiments.support import command
from sao_jax.learner import LearnerState, OptimizerConfig, learner_config
from sao_jax.models import ModelConfig
from sao_jax.rollout import EngineConfig, TrajectoryQueue
from sao_jax.rollout.requests import RequestStream
from sao_jax.rollout.schedules import AsyncSchedule, RolloutSchedule
from sao_jax.rollout.weight_sync import WeightStore, WeightSync
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig
from sao_jax.types import Domain, Environment, Split, Step, Trajectory

SCHEDULES = ("sync", "group", "async")
GROUP_SIZE = 8
MAX_TURNS = 6
MAX_STALENESS = 8
TOOL_S = LogNormal(median=0.05, sigma=1.2)
SLOW_TOOL_S = LogNormal(median=0.4, sigma=1.2)
VOCABULARY = 128
NUM_STOP_IDS = 8


class LetterTokenizer:
  """One token per character."""

  vocab_size = VOCABULARY
  stop_ids = tuple(range(NUM_STOP_IDS))

  def encode(self, text: str) -> list[int]:
    return [ord(c) % VOCABULARY for c in text]

  def decode(self, ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
  """The seconds of an episode by what they were spent on."""

  tool_s: float
  other_s: float


class SlowTool(Environment):
  """An environment of 1 to 6 turns that calls a slow tool in each but the last; half of the episodes earn reward 1.

  Args:
    salt: together with the task's number, the seed of turns and latencies.
    spans: receives the seconds of every episode by its task's number.
    tool_s: seconds of a call.
  """

  def __init__(self, salt: int, spans: dict[int, Span], tool_s: LogNormal = TOOL_S) -> None:
    self._salt = salt
    self._spans = spans
    self._latency = tool_s

  def reset(self, task_index: int) -> str:
    self._task = task_index
    self._rng = np.random.default_rng((task_index, self._salt))
    self._turns = int(self._rng.integers(1, MAX_TURNS + 1))
    self._began, self._tool_s = time.perf_counter(), 0.0
    self._note()
    return "p" * 16

  def step(self, action: str) -> Step:
    self._turns -= 1
    self._note()
    if not self._turns:
      return Step(reward=float(self._rng.integers(2)), done=True)
    began = time.perf_counter()
    time.sleep(float(self._latency.draw(self._rng, 1)[0]))
    self._tool_s += time.perf_counter() - began
    self._note()
    return Step(observation="o" * 8)

  def _note(self) -> None:
    """Records the seconds at every turn, since the environment is not informed when its episode is truncated."""
    other_s = time.perf_counter() - self._began - self._tool_s
    self._spans[self._task] = Span(tool_s=self._tool_s, other_s=other_s)

  def close(self) -> None:
    """Does nothing: there are no resources."""


def make_domain(schedule: str, spans: dict[int, Span], tool_s: LogNormal = TOOL_S) -> Domain:
  """Makes the task. With `group`, the members of a group differ in turns and latencies."""
  salts = itertools.count() if schedule == "group" else itertools.repeat(0)

  def make_env(split: Split) -> SlowTool:
    return SlowTool(next(salts), spans, tool_s)

  return Domain(make_env=make_env, tokenizer=LetterTokenizer(), num_train_tasks=1_000_000, num_eval_tasks=1)


@dataclasses.dataclass
class Replay:
  """A workload that repeats recorded episodes in their order."""

  episodes: Sequence[Episode]
  place: int = 0

  def draw(self, rng: np.random.Generator) -> Episode:
    self.place += 1
    return self.episodes[(self.place - 1) % len(self.episodes)]


def make_config(schedule: str, *, batch_size: int, slots: int) -> RunConfig:
  """Makes the config of a schedule's run. `group` has the async config; `make_schedule` adds its groups."""
  still = OptimizerConfig(learning_rate=1e-12)
  return RunConfig(
    schedule="sync" if schedule == "sync" else "async",
    num_steps=0,
    batch_size=batch_size,
    max_staleness=MAX_STALENESS,
    policy=ModelConfig(
      vocab_size=VOCABULARY, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
      intermediate_size=192,
    ),
    learner=learner_config(
      "sao", eps_low=0.3, eps_high=5.0, row_length=256, rows_per_microbatch=4,
      min_microbatches=max(1, batch_size // 8),
      policy_optimizer=still, critic_optimizer=still,
    ),
    engine=EngineConfig(
      num_slots=slots, max_len=256, max_action_tokens=96, max_turns=MAX_TURNS, chunk_steps=8, env_workers=slots,
    ),
  )  # fmt: skip


def make_schedule(parts: Components, schedule: str) -> tuple[RolloutSchedule, WeightSync]:
  """Makes the config's own schedule; for `group`, the asynchronous schedule with whole groups."""
  if schedule != "group":
    return parts.make_schedule()
  config = parts.config
  requests = RequestStream(num_tasks=parts.domain.num_train_tasks, group_size=GROUP_SIZE, seed=config.seed)
  queue = TrajectoryQueue(
    batch_size=config.batch_size, group_size=GROUP_SIZE, max_staleness=config.max_staleness,
    capacity=2 * config.batch_size,
  )  # fmt: skip
  store = WeightStore()
  return AsyncSchedule(engine=parts.engine, requests=requests, queue=queue, weights=store), store


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """Measurements of a schedule's run over the steps that count."""

  trajectories_per_s: float
  engine_busy_fraction: float
  learner_busy_fraction: float
  staleness_mean: float
  dropped_stale: int
  # With `sync`, these are the times of each stage alone; otherwise the stages slow each other down.
  token_s: float
  """Seconds per decode step, including prefill."""
  turn_s: float
  """Seconds of a turn beyond its decode steps and its tool: rounding up to chunks, and waiting for chunks to end."""
  train_s: float
  """Seconds of a learner step, including the publication of weights."""
  episodes: tuple[Episode, ...]
  """The episodes of the trained trajectories, in the order of their requests."""


def measure(
  schedule: str, *, batch_size: int, slots: int, steps: int, warmup_steps: int, tool_s: LogNormal = TOOL_S
) -> Measured:
  """Runs the loop of a schedule and measures it after the warm-up."""
  spans: dict[int, Span] = {}
  domain = make_domain(schedule, spans, tool_s)
  with Components(make_config(schedule, batch_size=batch_size, slots=slots), domain) as parts:
    policy = parts.init_policy()
    state = parts.init_state(policy, parts.init_critic(policy))
    source, weights = make_schedule(parts, schedule)
    with contextlib.closing(source):
      weights.publish(state.policy, 0)
      for step in range(1, warmup_steps + 1):
        state, _ = _step(parts, state, step, source, weights)
      before = {**parts.engine.counters, "dropped_stale": source.counters()["dropped_stale"]}
      began, learner_s, done = time.perf_counter(), 0.0, []
      for step in range(warmup_steps + 1, warmup_steps + steps + 1):
        state, (trajectories, seconds) = _step(parts, state, step, source, weights)
        learner_s += seconds
        done += [(x, step - 1 - x.oldest_version) for x in trajectories]
      elapsed = time.perf_counter() - began
      return _summary(parts, source, before, elapsed, learner_s, steps, done, spans)


def _step(
  parts: Components, state: LearnerState, step: int, source: RolloutSchedule, weights: WeightSync
) -> tuple[LearnerState, tuple[list[Trajectory], float]]:
  """Runs one step of the loop in `sao_jax.training.loop`; also returns its trajectories and the learner's seconds."""
  trajectories = source.next_batch(version=step - 1)
  began = time.perf_counter()
  state, report = parts.update(state, parts.pack(trajectories))
  weights.publish(state.policy, step)
  jax.device_get(report)
  return state, (trajectories, time.perf_counter() - began)


def _summary(
  parts: Components,
  source: RolloutSchedule,
  before: Mapping[str, Any],
  seconds: float,
  learner_s: float,
  steps: int,
  done: Sequence[tuple[Trajectory, int]],
  spans: Mapping[int, Span],
) -> Measured:
  counts = {key: parts.engine.counters[key] - before[key] for key in ("busy_seconds", "chunks")}
  if not counts["chunks"]:
    raise ValueError(f"steps must be larger: the engine was ahead and decoded nothing during {steps} measured steps.")
  token_s = counts["busy_seconds"] / (counts["chunks"] * parts.config.engine.chunk_steps)
  trajectories = sorted((x for x, _ in done), key=lambda x: x.episode_id)
  episodes = tuple(
    Episode(tokens=x.num_actions, turns=x.num_turns, waits_s=(spans[x.task_index].tool_s,)) for x in trajectories
  )
  other_s = sum(spans[x.task_index].other_s for x in trajectories)
  decode_s = token_s * sum(x.tokens for x in episodes)
  return Measured(
    trajectories_per_s=len(done) / seconds,
    engine_busy_fraction=counts["busy_seconds"] / seconds,
    learner_busy_fraction=learner_s / seconds,
    staleness_mean=float(np.mean([staleness for _, staleness in done])),
    dropped_stale=source.counters()["dropped_stale"] - before["dropped_stale"],
    token_s=token_s,
    turn_s=max(0.0, (other_s - decode_s) / sum(x.turns for x in episodes)),
    train_s=learner_s / steps,
    episodes=episodes,
  )


def predict(schedule: str, stages: Measured, episodes: Sequence[Episode], *, batch_size: int, slots: int) -> Result:
  """Simulates a schedule with the stage times of `stages`."""
  names: dict[str, Schedule] = {"sync": "sync", "group": "group_async", "async": "async"}
  config = ClusterConfig(
    schedule=names[schedule], num_engines=1, slots=slots, token_s=stages.token_s, turn_s=stages.turn_s,
    batch_size=batch_size, group_size=GROUP_SIZE, train_s=stages.train_s, max_staleness=MAX_STALENESS,
  )  # fmt: skip
  steps = len(episodes) // batch_size
  return simulate(config, Replay(episodes), num_steps=10 * steps, warmup_steps=steps)


def run(*, batch_size: int, slots: int, steps: int, warmup_steps: int) -> dict[str, object]:
  """Measures and simulates every schedule, prints rows and returns the object of the last line."""
  print("schedule   traj/s  simulated  engine busy  learner busy  staleness  (simulated)  dropped")
  measured: dict[str, Measured] = {}
  simulated: dict[str, Result] = {}
  for schedule in SCHEDULES:
    m = measured[schedule] = measure(
      schedule, batch_size=batch_size, slots=slots, steps=steps, warmup_steps=warmup_steps
    )
    s = simulated[schedule] = predict(schedule, m, measured["sync"].episodes, batch_size=batch_size, slots=slots)
    print(
      f"{schedule:8}{m.trajectories_per_s:9.1f}{s.trajectories_per_s:11.1f}{m.engine_busy_fraction:13.0%}"
      f"{m.learner_busy_fraction:14.0%}{m.staleness_mean:11.2f}{s.staleness_mean:13.2f}{m.dropped_stale:9d}"
    )
  alone, together = measured["sync"], measured["async"]
  for label, m in (("alone (sync)", alone), ("together (async)", together)):
    print(
      f"{label}: {m.token_s * 1e3:.2f} ms per decode step of {slots} slots, {m.turn_s * 1e3:.1f} ms per turn, "
      f"{m.train_s * 1e3:.0f} ms per learner step of {batch_size} trajectories"
    )
  speed = {schedule: m.trajectories_per_s for schedule, m in measured.items()}
  speedup = speed["async"] / speed["sync"]
  expected = simulated["async"].trajectories_per_s / simulated["sync"].trajectories_per_s
  apart = predict("async", alone, alone.episodes, batch_size=batch_size, slots=slots).trajectories_per_s
  separate = apart / simulated["sync"].trajectories_per_s
  print(f"async: {speedup:.2f} times as fast as sync (simulated: {expected:.2f}; on separate machines: {separate:.2f})")
  return {
    "trajectories_per_s": speed,
    "speedup_async_over_sync": speedup,
    "speedup_async_over_group": speed["async"] / speed["group"],
    "simulated_speedup": expected,
    "share_of_simulated": speedup / expected,
    "share_of_separate": speedup / separate,
    "staleness_mean": {schedule: m.staleness_mean for schedule, m in measured.items()},
    "engine_busy_fraction": {schedule: m.engine_busy_fraction for schedule, m in measured.items()},
    "learner_busy_fraction": {schedule: m.learner_busy_fraction for schedule, m in measured.items()},
    "simulated_trajectories_per_s": {schedule: s.trajectories_per_s for schedule, s in simulated.items()},
  }


def fast_learner(*, batch_size: int, slots: int, steps: int, warmup_steps: int) -> dict[str, object]:
  """Measures single rollouts and groups where the learner waits for trajectories; prints rows, returns the figures."""
  sizes = {"batch_size": batch_size, "slots": slots, "steps": steps, "warmup_steps": warmup_steps}
  measured = {schedule: measure(schedule, **sizes, tool_s=SLOW_TOOL_S) for schedule in ("group", "async")}
  print(f"tools of {SLOW_TOOL_S.median} s in the median, so that the learner waits")
  for schedule, m in measured.items():
    print(
      f"{schedule:8}{m.trajectories_per_s:9.1f} traj/s, learner busy {m.learner_busy_fraction:.0%}, "
      f"staleness {m.staleness_mean:.2f}, {m.dropped_stale} dropped"
    )
  speed = {schedule: m.trajectories_per_s for schedule, m in measured.items()}
  return {
    "trajectories_per_s": speed,
    "speedup_async_over_group": speed["async"] / speed["group"],
    "staleness_mean": {schedule: m.staleness_mean for schedule, m in measured.items()},
    "dropped_stale": {schedule: m.dropped_stale for schedule, m in measured.items()},
    "learner_busy_fraction": {schedule: m.learner_busy_fraction for schedule, m in measured.items()},
  }


def define_flags() -> None:
  """Defines the command's flags. Importing the module does not, since other commands use the same names."""
  flags.DEFINE_integer(
    "batch_size", 64, f"The trajectories per step, a multiple of {GROUP_SIZE}.", lower_bound=GROUP_SIZE
  )
  flags.DEFINE_integer("slots", 64, "The number of episodes at a time.", lower_bound=1)
  flags.DEFINE_integer("steps", 30, "The number of learner steps to measure.", lower_bound=1)
  flags.DEFINE_integer(
    "fast_learner_steps", 20, "The number of learner steps to measure with slow tools; 0: none.", lower_bound=0
  )
  flags.DEFINE_integer("warmup_steps", 10, "The number of learner steps before the measurement.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  del argv
  if flags.FLAGS["batch_size"].value % GROUP_SIZE:
    raise app.UsageError(
      f"--batch_size must be a multiple of {GROUP_SIZE}; received {flags.FLAGS['batch_size'].value}."
    )
  names = ("batch_size", "slots", "steps", "warmup_steps")
  settings = {name: flags.FLAGS[name].value for name in names}
  result, slow_steps = run(**settings), flags.FLAGS["fast_learner_steps"].value
  slow = fast_learner(**{**settings, "steps": slow_steps}) if slow_steps else None
  print(json.dumps({**result, "fast_learner": slow}))


if __name__ == "__main__":
  define_flags()
  command.run(main)
