"""SAO from end to end: the page to read first.

    task -> env.reset -> engine (continuous batching) -> env.step -> ... -> Trajectory -> queue (bounded, staleness)
         -> packed TokenBatch -> critic update x K -> values -> skip-observation GAE -> actor update -> publish ->
         engine

`train` runs the paper's recipe in order: supervised warm start, value pretraining on the initial policy's own
trajectories, then `reinforce`, whose body reads like the line above. A stage whose result is in the workdir is not
run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from sao_jax import config as config_lib
from sao_jax import evaluation, stages
from sao_jax.components import Components
from sao_jax.config import RunConfig, Stage
from sao_jax.io import trajectories as trajectory_io
from sao_jax.io import workdir as workdir_lib
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.io.console import Console
from sao_jax.io.metrics import MetricsWriter, read_metrics
from sao_jax.learner import LearnerState, init_state
from sao_jax.progress import Interrupts, Progress
from sao_jax.rollout.sources import BatchSource
from sao_jax.types import Domain, Params, Trajectory

SAMPLES_PER_CHECKPOINT = 4
"""Trajectories written to `trajectories.jsonl` with every checkpoint."""


def train(
  config: RunConfig,
  domain: Domain,
  workdir: str | pathlib.Path,
  *,
  run_stages: Sequence[Stage] = config_lib.STAGES,
  console: Console | None = None,
) -> dict[str, Any] | None:
  """Runs the recipe in a workdir, going on from what is there.

  Args:
    config: the run.
    domain: the task.
    workdir: the run's folder; made if missing. It must not hold a run of another config.
    run_stages: which stages to run; those before them must have been run in this workdir.
    console: where to report.

  Returns:
    The summary that is also written to `summary.json`; None if RL was not run to its end (stages left out, or a
    signal).

  Raises:
    ValueError: the workdir holds a different config, or an earlier stage's result is missing.
    RuntimeError: another run holds the workdir.
  """
  workdir = pathlib.Path(workdir)
  console = console or Console()
  with workdir_lib.WorkdirLock(workdir):
    workdir_lib.write_or_check_config(workdir, config_lib.to_json(config), may_differ=config_lib.MAY_DIFFER)
    with Components(config, domain) as parts:
      policy = stages.warm_start(parts, workdir, console, run="warm_start" in run_stages)
      critic = stages.value_pretraining(parts, policy, workdir, console, run="value_pretraining" in run_stages)
      if "rl" not in run_stages:
        return None
      return reinforce(parts, policy, critic, workdir, console)


def reinforce(
  parts: Components, policy: Params, critic: Params | None, workdir: pathlib.Path, console: Console
) -> dict[str, Any] | None:
  """Stage 3, SAO: one learner step per batch of finished trajectories, until `num_steps` or a signal.

  Returns:
    The summary; None after a signal.
  """
  config = parts.config
  source = parts.make_source()
  progress = Progress(parts)
  saving = dataclasses.asdict(config.checkpoint)
  saving.pop("every_steps")
  record = config_lib.to_json(config)
  with Checkpointer(workdir, config=record, may_differ=config_lib.MAY_DIFFER, **saving) as checkpointer:
    start, state = _restore(checkpointer, init_state(config.learner, policy, critic), source, progress, parts)
    with (
      MetricsWriter(workdir, restored_step=start) as metrics,
      contextlib.closing(trajectory_io.TrajectoryWriter(workdir, restored_step=start)) as samples,
    ):
      if not metrics.has_evaluation(0):
        _evaluate(parts, state, 0, metrics, console)
      # The engine serves one caller at a time: the evaluations stand outside the block in which the source drives it.
      with (
        contextlib.closing(source),
        Interrupts() as interrupts,
        console.stage(f"{config.algorithm}, {config.schedule}", config.num_steps) as bar,
      ):
        bar.advance(start)
        source.publish(state.policy, start)
        progress.start()
        for step in range(start + 1, config.num_steps + 1):
          trajectories = source.next_batch(version=step - 1)
          state, row = _learn(parts, state, step, trajectories, source, progress)
          metrics.write(step, row)
          bar.advance(note=progress.note(row))
          if step % config.checkpoint.every_steps == 0 or step == config.num_steps or interrupts.requested:
            samples.write(step, trajectories[:SAMPLES_PER_CHECKPOINT])
            _save(checkpointer, step, state, source, progress, parts, metric=row["success_rate"])
          if interrupts.requested:
            console.print(f"Stopped by a signal after step {step}; the same command goes on from here.")
            return None
      if not metrics.has_evaluation(config.num_steps):
        _evaluate(parts, state, config.num_steps, metrics, console)
  return _summarise(parts, workdir, progress, source)


def _learn(
  parts: Components,
  state: LearnerState,
  step: int,
  trajectories: list[Trajectory],
  source: BatchSource,
  progress: Progress,
) -> tuple[LearnerState, dict[str, float | int]]:
  """One learner step, from trajectories to published weights. Returns the new state and the metrics row."""
  progress.learner_begins()
  batch, packed = parts.pack(trajectories)  # packed rows
  state, report = parts.update(state, batch, np.int32(packed.num_microbatches))  # critic x K, values, GAE, policy
  source.publish(state.policy, step)  # taken up in flight
  return state, progress.row(step, trajectories, jax.device_get(report), source)


def _restore(
  checkpointer: Checkpointer, state: LearnerState, source: BatchSource, progress: Progress, parts: Components
) -> tuple[int, LearnerState]:
  """Goes on from the newest checkpoint: `(its step, its state)`; `(0, state)` where there is none."""
  restored = checkpointer.restore(_checkpoint_tree(state, [state.policy] * parts.config.lag))
  if restored is None:
    return 0, state
  host = restored.host
  waiting = [trajectory_io.from_json(row) for row in host["waiting"]]
  source.restore(host["source"], waiting, restored.state["old_weights"])
  progress.restore(host["progress"])
  if parts.baselines is not None:
    parts.baselines.restore(host["baselines"])
  return restored.step, restored.state["learner"]


def _save(
  checkpointer: Checkpointer,
  step: int,
  state: LearnerState,
  source: BatchSource,
  progress: Progress,
  parts: Components,
  *,
  metric: float,
) -> None:
  """Starts to save all that a resume needs; the arrays are copied before this returns."""
  source_state, waiting = source.state()
  host = {
    "source": source_state,
    "waiting": [trajectory_io.to_json(trajectory) for trajectory in waiting],
    "progress": progress.state(),
    "baselines": None if parts.baselines is None else parts.baselines.state(),
  }
  checkpointer.save(step, _checkpoint_tree(state, source.old_weights()), host, metric=metric)


def _checkpoint_tree(state: LearnerState, old_weights: list[Params]) -> dict[str, Any]:
  return {"learner": state, "old_weights": old_weights}


def checkpoint_template(parts: Components) -> dict[str, Any]:
  """Arrays shaped like a checkpoint of this run: what `Checkpointer.restore` wants."""
  policy = parts.init_policy()
  state = init_state(parts.config.learner, policy, parts.init_critic(policy))
  return _checkpoint_tree(state, [policy] * parts.config.lag)


def _evaluate(parts: Components, state: LearnerState, step: int, metrics: MetricsWriter, console: Console) -> None:
  """Success on held-out tasks, as a row of the metrics."""
  n = parts.config.eval_episodes
  if not n:
    return
  began = time.monotonic()
  with console.stage(f"evaluation after {step} steps", 1) as bar:
    result = evaluation.evaluate(parts.engine, parts.domain, state.policy, num_episodes=n, version=step)
    bar.advance(note=f"success {result.success_rate:.3f}")
  metrics.write_evaluation(
    step, success_rate=result.success_rate, n=n, eval_low=result.low, eval_high=result.high,
    eval_turns_mean=result.turns_mean, eval_seconds=time.monotonic() - began,
  )


def _summarise(parts: Components, workdir: pathlib.Path, progress: Progress, source: BatchSource) -> dict[str, Any]:
  """Writes and returns the run's summary."""
  _, evaluations = read_metrics(workdir)
  before, after = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
  seconds = {**stages.stage_seconds(parts, workdir), "rl": progress.seconds}
  seconds["evaluation"] = sum(row["eval_seconds"] for row in evaluations)
  summary = {
    "success_before": before.get("eval_success_rate"),
    "success_before_interval": [before.get("eval_low"), before.get("eval_high")],
    "success_after": after.get("eval_success_rate"),
    "success_after_interval": [after.get("eval_low"), after.get("eval_high")],
    "n": parts.config.eval_episodes,
    "seconds_total": sum(seconds.values()),
    "seconds_by_stage": seconds,
    "num_steps": parts.config.num_steps,
    "dropped_stale": source.counters()["dropped_stale"],
    "failed_episodes": progress.failed_episodes,
    "device": jax.devices()[0].device_kind,
  }
  workdir_lib.write_summary(workdir, summary)
  return summary
