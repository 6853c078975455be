"""Tests overload and endurance: runs the asynchronous loop under an abnormal load and watches resources.

    python -m experiments.soak --scenario=mixed --minutes=30
    python -m experiments.soak --scenario=long_episode --minutes=1

The scenarios:
  slow_learner    the queue fills;
  slow_rollouts   the learner waits;
  short_episodes  10,000 episodes of one turn;
  long_episode    one episode has 1,000 times as many turns as the others;
  slow_tool       a tool takes minutes in some episodes;
  stall           all tools stop for a while, again and again;
  mixed           slow tools, stalls, and tools that raise, hang, flood or return nonsense.

Every few seconds the command prints memory, threads, child processes, file descriptors and live JAX buffers. The thread
count leaves out the threads of environment calls that timed out, which end when their call does. The last line is one
JSON object. The exit code is 1 if one of these quantities grows, if an episode or the learner starves, or if throughput
does not recover. Linux only: the figures come from /proc.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import flags, logging

from experiments.support import chaos_run, command
from experiments.tasks.overload import SCENARIOS, Clock, Scenario, Times, make_domain
from sao_jax.io.console import Console
from sao_jax.learner import OptimizerConfig
from sao_jax.rollout import EpisodeRequest, TrajectoryQueue, schedules
from sao_jax.training import loop
from sao_jax.training.config import CheckpointConfig, CriticConfig, RunConfig, WarmStartConfig
from sao_jax.types import Trajectory

GROWTH: Mapping[str, tuple[float, float]] = {
  "rss_mb": (40.0, 0.06), "threads": (3.0, 0.1), "children": (1.0, 0.0), "fds": (3.0, 0.05),
  "live_arrays": (64.0, 0.05), "live_mb": (4.0, 0.05),
}  # fmt: skip
"""Allowed rise of each quantity over the judged part of the run: absolute, and as a share of its median. The limit on
arrays is wide because copies of the weights come and go with every publication."""
SETTLING = 0.3
"""The first share of the run is not judged for growth: programs are compiled, and pools and caches fill."""
FIRST_BATCHES = 4
"""The first batches are not judged: they wait for compilation."""
FEWEST_SAMPLES = 16
"""With fewer samples, growth cannot be told from noise."""


def make_config(scenario: Scenario, times: Times) -> RunConfig:
  """Returns the config of `experiments.support.chaos_run` with the asynchronous schedule, adapted to the scenario."""
  steps = 10**7 if scenario.episodes is None else -(-scenario.episodes // chaos_run.BATCH_SIZE)
  base = chaos_run.make_config("async", num_steps=steps)
  rows = 1 if scenario.max_len > 128 else base.learner.rows_per_microbatch
  return dataclasses.replace(
    base,
    max_staleness=10_000 if scenario.long_turns else base.max_staleness,  # so that the long episode is not dropped
    eval_episodes=0,
    warm_start=WarmStartConfig(num_steps=60, batch_size=32, optimizer=OptimizerConfig(learning_rate=2e-2)),
    critic=CriticConfig(),
    learner=dataclasses.replace(
      base.learner, row_length=scenario.max_len, rows_per_microbatch=rows, min_microbatches=rows
    ),
    engine=dataclasses.replace(
      base.engine, max_len=scenario.max_len, max_turns=max(4, scenario.long_turns),
      num_slots=32, env_workers=32, env_timeout_s=times.env_timeout_s,
    ),
    checkpoint=CheckpointConfig(every_steps=50, keep=2),
  )  # fmt: skip


def _nothing(*_: Any) -> None:
  """Ignores an event."""


class EpisodeLog:
  """Records when episodes start, end and are used, and when the learner receives batches. One per process.

  It wraps methods of the queue and of the schedule, as `experiments.support.chaos_run` does.
  """

  def __init__(self, learner_s: float):
    self._learner_s = learner_s
    self._lock = threading.Lock()
    self._started: dict[int, float] = {}
    self._ended: dict[int, float] = {}
    self.longest = {"episode_s": 0.0, "wait_for_learner_s": 0.0, "wait_for_batch_s": 0.0}
    self.batches: list[float] = []
    self.trained = 0
    self.most_turns = 0
    self.failed = 0
    self.most_waiting = 0

  def install(self) -> None:
    """Replaces the methods with the wrapped ones."""
    self._wrap(TrajectoryQueue, "start", before=self._note_start)
    self._wrap(TrajectoryQueue, "put", before=self._note_end, after=self._note_put)
    self._wrap(TrajectoryQueue, "fail", after=self._note_fail)
    original = schedules.AsyncSchedule.next_batch

    @functools.wraps(original)
    def next_batch(schedule: Any, version: int) -> list[Trajectory]:
      began = time.monotonic()
      batch = original(schedule, version)
      self._note_batch(batch, time.monotonic() - began)
      time.sleep(self._learner_s)
      return batch

    schedules.AsyncSchedule.next_batch = next_batch  # type: ignore[method-assign]

  @property
  def warm(self) -> bool:
    """Whether the learner has had its first batches, so that everything is compiled."""
    return len(self.batches) >= FIRST_BATCHES

  def unfinished(self) -> float:
    """Returns the seconds since the start of the oldest running episode."""
    with self._lock:
      return time.monotonic() - min(self._started.values(), default=time.monotonic())

  def _wrap(
    self, owner: Any, method: str, *, before: Callable[..., None] = _nothing, after: Callable[..., None] = _nothing
  ) -> None:
    original = getattr(owner, method)

    @functools.wraps(original)
    def wrapper(queue: Any, *args: Any) -> None:
      before(queue, *args)
      original(queue, *args)
      after(queue, *args)

    setattr(owner, method, wrapper)

  def _note_start(self, queue: TrajectoryQueue, request: EpisodeRequest) -> None:
    with self._lock:
      self._started[request.episode_id] = time.monotonic()

  def _note_end(self, queue: TrajectoryQueue, trajectory: Trajectory) -> None:
    with self._lock:  # before the put: the learner may take the trajectory immediately after it
      self._ended[trajectory.episode_id] = time.monotonic()

  def _note_put(self, queue: TrajectoryQueue, trajectory: Trajectory) -> None:
    self._end(trajectory.episode_id)
    self.most_waiting = max(self.most_waiting, queue.qsize())

  def _note_fail(self, queue: TrajectoryQueue, request: EpisodeRequest) -> None:
    self._end(request.episode_id)
    self.failed += 1

  def _end(self, episode_id: int) -> None:
    with self._lock:
      self._judge("episode_s", self._started.pop(episode_id))

  def _judge(self, name: str, since: float) -> None:
    if self.warm and since > self.batches[FIRST_BATCHES - 1]:
      self.longest[name] = max(self.longest[name], time.monotonic() - since)

  def _note_batch(self, batch: Sequence[Trajectory], waited: float) -> None:
    now = time.monotonic()
    with self._lock:
      for trajectory in batch:
        self._judge("wait_for_learner_s", self._ended.pop(trajectory.episode_id))
      newest = max(trajectory.episode_id for trajectory in batch)
      for episode in [e for e in self._ended if e < newest - 10_000]:
        del self._ended[episode]  # dropped as too stale
    self._judge("wait_for_batch_s", now - waited)
    self.trained += len(batch)
    self.most_turns = max(self.most_turns, *(trajectory.num_turns for trajectory in batch))
    self.batches.append(now)


def sample(episode_log: EpisodeLog, clock: Clock) -> dict[str, float]:
  """Returns the resources that this process holds now."""
  status = pathlib.Path("/proc/self/status").read_text()
  fields = dict(line.split(":", 1) for line in status.splitlines())
  arrays = jax.live_arrays()
  me = os.getpid()
  parents = [_parent(path) for path in pathlib.Path("/proc").glob("[0-9]*/stat")]
  return {
    "seconds": clock.seconds,
    "rss_mb": int(fields["VmRSS"].split()[0]) / 1024,
    "threads": int(fields["Threads"]) - clock.timed_out,  # the number of these depends on the throughput
    "children": sum(parent == me for parent in parents),
    "fds": len(os.listdir("/proc/self/fd")),
    "live_arrays": len(arrays),
    "live_mb": sum(array.nbytes for array in arrays if not array.is_deleted()) / 2**20,
    "trained": episode_log.trained,
    "oldest_episode_s": episode_log.unfinished(),
  }


def _parent(stat: pathlib.Path) -> int:
  try:
    return int(stat.read_text().rsplit(")", 1)[1].split()[1])
  except OSError:
    return -1  # the process ended during the read


def growth(samples: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
  """Returns the rise of each quantity over the judged part of the run: the median slope of all pairs (Theil-Sen).

  >>> rows = [{"seconds": t, **dict.fromkeys(GROWTH, 100.0), "fds": 10.0 + t} for t in range(20)]
  >>> {name: row["grows"] for name, row in growth(rows).items() if row["grows"]}
  {'fds': True}
  """
  judged = list(samples[int(len(samples) * SETTLING) :])
  times = [row["seconds"] for row in judged]
  result = {}
  for name, (absolute, share) in GROWTH.items():
    values = [row[name] for row in judged]
    slopes = [(values[j] - values[i]) / (times[j] - times[i]) for i in range(len(values)) for j in range(i)]
    median = statistics.median(values)
    rise = statistics.median(slopes) * (times[-1] - times[0]) if slopes else 0.0
    grows = rise > max(absolute, share * median)
    result[name] = {"median": round(median, 2), "rise": round(rise, 2), "most": round(max(values), 2), "grows": grows}
  return result


def recovery(batches: Sequence[float], began: float, times: Times) -> float | None:
  """Returns the batches per second between stalls relative to the first such stretch; None with fewer than two of them.

  Nothing is judged before `FIRST_BATCHES`. The first fifth of each stretch is left for the backlog of the stall.
  """
  rates = []
  for number in range(int((batches[-1] - began) / times.stall_every_s) + 1 if len(batches) > FIRST_BATCHES else 0):
    start = began + number * times.stall_every_s
    end = start + times.stall_every_s
    low = start + times.stall_s * (number > 0)
    low += 0.2 * (end - low)
    if batches[FIRST_BATCHES] <= low and end <= batches[-1]:
      rates.append(sum(low <= t < end for t in batches) / (end - low))
  return statistics.median(rates[1:]) / rates[0] if len(rates) > 1 and rates[0] else None


def soak(scenario: Scenario, times: Times, workdir: pathlib.Path, *, sample_s: float) -> dict[str, Any]:
  """Runs the scenario; returns the result, which the command prints last."""
  episode_log = EpisodeLog(scenario.learner_s)
  episode_log.install()
  config = make_config(scenario, times)
  clock = Clock()
  samples: list[dict[str, float]] = []
  over = threading.Event()

  def watch() -> None:
    while not over.wait(sample_s):
      row = sample(episode_log, clock)
      if episode_log.warm:
        samples.append(row)
      print("  ".join(f"{name} {value:.0f}" for name, value in row.items()), flush=True)
      if scenario.episodes is None and len(samples) * sample_s > 60 * times.minutes:
        os.kill(os.getpid(), signal.SIGTERM)  # the loop saves the run and ends it
        return

  watcher = threading.Thread(target=watch, name="soak-watch")
  watcher.start()
  try:
    domain = make_domain(scenario, times, clock)
    summary = loop.train(config, domain, workdir, console=Console(plain_every_s=60.0))
  finally:
    over.set()
    watcher.join()
  seconds = clock.seconds
  longest_s = 20.0 + 2 * (times.slow_tool_s if scenario.slow_share else 0.0)
  longest_s += 2 * times.stall_s * scenario.stalls + 2 * times.env_timeout_s * scenario.faults
  # The queue's capacity, and the episodes in flight when it filled: one in each slot, and one that had just left each.
  most_allowed = 2 * config.batch_size + 2 * config.engine.num_slots
  judged = episode_log.batches[FIRST_BATCHES:]
  step_s = statistics.median(b - a for a, b in itertools.pairwise(judged)) if len(judged) > 1 else 0.0
  allowed = {
    "episode_s": longest_s + (seconds if scenario.long_turns else 0.0),
    "wait_for_learner_s": longest_s + 2 * most_allowed / config.batch_size * step_s,
    "wait_for_batch_s": longest_s,
  }
  starved = {name: value for name, value in episode_log.longest.items() if value > allowed[name]}
  grown = growth(samples) if len(samples) >= FEWEST_SAMPLES else {}
  again = recovery(episode_log.batches, clock.began or 0.0, times) if scenario.stalls else None
  faults = [f"{name} grows" for name, row in grown.items() if row["grows"]]
  faults += [] if grown else [f"{len(samples)} samples are too few to judge growth; lower --sample_s"]
  faults += [f"{name} {value:.1f} > {allowed[name]:.1f}" for name, value in starved.items()]
  faults += [f"throughput after stalls is {again:.2f} of that before"] if again is not None and again < 0.6 else []
  faults += ["the run ended early"] if scenario.episodes is None and summary is not None else []
  faults += ["the long episode was not trained on"] if episode_log.most_turns < scenario.long_turns else []
  faults += ["the queue held more than its capacity"] if episode_log.most_waiting > most_allowed else []
  return {
    "seconds": round(seconds, 1), "samples": len(samples), "trajectories": episode_log.trained,
    "trajectories_per_s": round(episode_log.trained / seconds, 2), "failed_episodes": episode_log.failed,
    "most_turns": episode_log.most_turns,
    "longest": {name: round(value, 2) for name, value in episode_log.longest.items()},
    "most_waiting": episode_log.most_waiting,
    "recovered_to": None if again is None else round(again, 2), "growth": grown, "faults": faults,
  }  # fmt: skip


def define_flags() -> None:
  flags.DEFINE_enum("scenario", "mixed", list(SCENARIOS), "The kind of abnormal load.")
  flags.DEFINE_float(
    "minutes", 30.0, "The length of the run after compilation, in minutes. short_episodes ignores it.", lower_bound=0.01
  )
  flags.DEFINE_integer("episodes", None, "The episodes of short_episodes. Defaults to 10,000.", lower_bound=16)
  flags.DEFINE_integer("long_turns", None, "The turns of the long episode. Defaults to 1,000.", lower_bound=2)
  flags.DEFINE_float("slow_tool_s", 120.0, "The seconds that a slow tool takes.", lower_bound=0.0)
  flags.DEFINE_float("stall_every_s", 300.0, "The seconds between the starts of two stalls.", lower_bound=0.01)
  flags.DEFINE_float("stall_s", 45.0, "The length of a stall of all tools, in seconds.", lower_bound=0.0)
  flags.DEFINE_float(
    "env_timeout_s", 180.0, "The engine's env_timeout_s: an environment call that hangs longer fails.", lower_bound=0.01
  )
  flags.DEFINE_float("sample_s", 10.0, "The seconds between two lines.", lower_bound=0.05)


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  options = flags.FLAGS
  scenario = SCENARIOS[options.scenario]
  if options.episodes is not None and scenario.episodes is not None:
    scenario = dataclasses.replace(scenario, episodes=options.episodes)
  if options.long_turns is not None and scenario.long_turns:
    scenario = dataclasses.replace(scenario, long_turns=options.long_turns, max_len=2 * options.long_turns + 64)
  times = Times(**{field.name: options[field.name].value for field in dataclasses.fields(Times)})
  with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
    result = soak(scenario, times, pathlib.Path(scratch) / "run", sample_s=options.sample_s)
  for name, row in result["growth"].items():
    print(f"{name:12} median {row['median']:10.1f}  rise {row['rise']:8.2f}{'  GROWS' if row['grows'] else ''}")
  print(f"soak: {'; '.join(result['faults']) or 'nothing grows and nothing starves'}")
  print(json.dumps({"scenario": options.scenario, **result}))
  sys.exit(1 if result["faults"] else 0)


if __name__ == "__main__":
  define_flags()
  command.run(main)
