"""Cost of saving checkpoints for the learner: `python -m experiments.benchmarks.checkpointing`.

Runs learner steps of the main preset (its model and its batch of 128 trajectories, here demonstrations) in three modes
that take turns in one process: without saving, with a checkpoint in every step, and with one checkpoint in `--steps`
steps. Each checkpoint includes a full queue of finished trajectories. `stall_share` is the time for which `save` blocks
the learner, divided by the time of a step. The slowdowns also include the cost of the writing thread to the steps that
run at the same time; on a CPU they share cores. `slowdown_as_preset` is the slowdown by one save in
`checkpoint.every_steps` steps.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags, logging

from experiments.presets import tool_math_cpu
from experiments.support import command
from experiments.tasks import tool_math
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.rollout import TrajectoryQueue
from sao_jax.rollout.schedules import AsyncSchedule
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.training import config as config_lib
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig
from sao_jax.training.demonstrations import encode_demonstration
from sao_jax.training.health import HealthCheck
from sao_jax.training.metrics import StepMetrics
from sao_jax.training.run_state import RunState
from sao_jax.types import Domain, Trajectory


def demonstrations(parts: Components, count: int) -> list[Trajectory]:
  """Makes trajectories as long as the task's, with artificial log-probs."""
  rng = np.random.default_rng(0)
  demonstrate = parts.domain.demonstrate
  assert demonstrate is not None
  made = []
  for i in range(count):
    trajectory = encode_demonstration(parts, demonstrate(i, rng), index=i)
    logp = np.where(trajectory.action_mask, -0.1, np.nan).astype(np.float32)
    made.append(dataclasses.replace(trajectory, behavior_logp=logp))
  return made


class Bench:
  """A learner with everything that its checkpoint needs."""

  def __init__(self, config: RunConfig, domain: Domain, workdir: pathlib.Path):
    self.parts = Components(config, domain)
    self.batch = demonstrations(self.parts, config.batch_size)
    queue = TrajectoryQueue(
      batch_size=config.batch_size, group_size=1, max_staleness=config.max_staleness, capacity=2 * config.batch_size
    )
    waiting = demonstrations(self.parts, 2 * config.batch_size)
    counters = {**queue.counters, "running": []}
    queue.restore(counters, waiting)
    weights = WeightStore()
    schedule = AsyncSchedule(engine=self.parts.engine, requests=self.parts.requests, queue=queue, weights=weights)
    record = config_lib.to_json(config)
    self.checkpointer = Checkpointer(workdir, config=record, keep=2, keep_best=1)
    metrics = StepMetrics(self.parts)
    metrics.start()
    health = HealthCheck(self.parts, workdir)
    self.run = RunState(self.parts, schedule, weights, metrics, health, self.checkpointer)
    policy = self.parts.init_policy()
    self.state = self.parts.init_state(policy, self.parts.init_critic(policy))
    self.saved = 0

  def step(self) -> float:
    """Runs one learner step; returns its seconds."""
    began = time.perf_counter()
    self.state, report = self.parts.update(self.state, self.parts.pack(self.batch))
    jax.device_get(report)
    return time.perf_counter() - began

  def save(self) -> float:
    """Saves a checkpoint; returns the seconds for which the call blocks the learner."""
    self.saved += 1
    began = time.perf_counter()
    self.run.save(self.saved, self.state, metric=0.0)
    return time.perf_counter() - began

  def steps(self, count: int, *, save_every: int | None) -> tuple[float, list[float]]:
    """Runs `count` steps; returns their seconds and the seconds of each `save` among them."""
    began = time.perf_counter()
    stalls = []
    for i in range(count):
      self.step()
      if save_every is not None and i % save_every == 0:
        stalls.append(self.save())
    seconds = time.perf_counter() - began
    self.checkpointer.wait()
    return seconds, stalls


def measure(config: RunConfig, domain: Domain, workdir: pathlib.Path, *, steps: int, rounds: int) -> dict[str, Any]:
  """Measures the three modes in turns; returns the result that is printed last."""
  bench = Bench(config, domain, workdir)
  with bench.parts, bench.checkpointer:
    for _ in range(2):
      bench.step()
    bench.save()
    bench.checkpointer.wait()
    every = config.checkpoint.every_steps
    ways: dict[str, int | None] = {"plain": None, "every_step": 1, "sometimes": steps}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    stalls: list[float] = []
    for _ in range(rounds):
      for name, save_every in ways.items():
        took, stalled = bench.steps(steps, save_every=save_every)
        seconds[name].append(took / steps)
        stalls += stalled if name == "sometimes" else []
        print(f"{name:12} {1e3 * took / steps:8.1f} ms per step", flush=True)
    writing = []
    for _ in range(3):
      began = time.perf_counter()
      bench.save()
      bench.checkpointer.wait()
      writing.append(time.perf_counter() - began)
    size = sum(p.stat().st_size for p in bench.checkpointer.path(bench.saved).rglob("*") if p.is_file())
  step_s, stall_s = statistics.median(seconds["plain"]), statistics.median(stalls)
  every_step = statistics.median(a / b for a, b in zip(seconds["every_step"], seconds["plain"], strict=True)) - 1
  sometimes = statistics.median(a / b for a, b in zip(seconds["sometimes"], seconds["plain"], strict=True)) - 1
  return {
    "step_ms": round(1e3 * step_s, 2), "stall_ms": round(1e3 * stall_s, 2),
    "stall_ms_most": round(1e3 * max(stalls), 2), "stall_share": round(stall_s / step_s, 4),
    "write_ms": round(1e3 * statistics.median(writing), 1),
    "checkpoint_mb": round(size / 2**20, 2), "slowdown_every_step": round(every_step, 3),
    "slowdown_as_preset": round(sometimes * steps / every, 4), "steps": steps, "rounds": rounds,
  }  # fmt: skip


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  config = tool_math_cpu.make_config()
  with tempfile.TemporaryDirectory(prefix="checkpointing-") as workdir:
    domain = tool_math.make_domain(**config.env.options)
    result = measure(config, domain, pathlib.Path(workdir), steps=flags.FLAGS.steps, rounds=flags.FLAGS.rounds)
  print(f"a save blocks the learner for {result['stall_ms']} ms, {result['stall_share']:.1%} of a step")
  print(json.dumps(result))


if __name__ == "__main__":
  flags.DEFINE_integer("steps", 8, "The number of learner steps per round and mode.", lower_bound=2)
  flags.DEFINE_integer("rounds", 5, "The number of rounds. Figures are medians over rounds.", lower_bound=1)
  command.run(main)
