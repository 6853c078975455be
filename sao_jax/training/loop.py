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
import functools
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sao_jax.io import trajectory_arrays
from sao_jax.io import workdir as workdir_lib
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.io.console import Console
from sao_jax.io.metrics import read_metrics
from sao_jax.learner import LearnerState
from sao_jax.parallel.distributed import is_main_process
from sao_jax.rollout.schedules import BatchSource
from sao_jax.training import config as config_lib
from sao_jax.training import evaluation, stages
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig, Stage
from sao_jax.training.health import RunStoppedError, UpdateGuard
from sao_jax.training.metrics import Progress, Records
from sao_jax.training.signals import Interrupted, Interrupts, NotNow
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
  make_domain: Callable[[], Domain] | None = None,
) -> dict[str, Any] | None:
  """Runs the recipe in a workdir, going on from what is there.

  Args:
    config: the run.
    domain: the task.
    workdir: the run's folder; made if missing. It must not hold a run of another config.
    run_stages: which stages to run; those before them must have been run in this workdir.
    console: where to report.
    make_domain: makes the task anew, in the processes of the engines of `config.cluster`; can be pickled.

  Returns:
    The summary that is also written to `summary.json`; None if RL was not run to its end (stages left out, or a
    signal).

  Raises:
    ValueError: the workdir holds a different config, an earlier stage's result is missing, or `num_steps` is below the
      step that the run has come to.
    WorkdirError, CheckpointError: the workdir cannot be written to, or another run holds it.
    RunStoppedError, TooManyFailuresError: the run cannot go on by itself; it is saved up to there.
  """
  workdir = pathlib.Path(workdir).absolute()  # an environment may change the working directory
  console = console or Console(quiet=not is_main_process())
  for name, needed in (("num_train_tasks", True), ("num_eval_tasks", config.eval_episodes > 0)):
    if needed and getattr(domain, name) < 1:
      raise ValueError(f"Domain.{name} must be >= 1; received {getattr(domain, name)}.")
  with workdir_lib.writing(workdir), contextlib.ExitStack() as stack, Interrupts() as interrupts:
    if is_main_process():
      stack.enter_context(workdir_lib.WorkdirLock(workdir))
      workdir_lib.write_or_check_config(workdir, config_lib.to_json(config), **config_lib.comparison(config))
    try:
      with interrupts.at_once():
        parts = Components(config, domain, make_domain=make_domain)
      with parts:
        interrupts.share(parts.placement)
        where = (workdir, console, interrupts)
        policy = stages.warm_start(parts, *where, run="warm_start" in run_stages)
        if set(run_stages) == {"warm_start"}:
          return None
        critic = stages.value_pretraining(parts, policy, *where, run="value_pretraining" in run_stages)
        return reinforce(parts, policy, critic, *where) if "rl" in run_stages else None
    except Interrupted:
      console.print("Stopped by a signal; the same run in the same workdir goes on from here.")
      return None


def reinforce(
  parts: Components, policy: Params, critic: Params | None, workdir: pathlib.Path, console: Console,
  interrupts: Interrupts,
) -> dict[str, Any]:  # fmt: skip
  """Stage 3, SAO: one learner step per batch of finished trajectories, until `num_steps`. Returns the summary.

  Raises:
    Interrupted: a signal came; RunStoppedError, TooManyFailuresError: see `train`. All is saved.
  """
  config = parts.config
  source, progress, guard = parts.make_source(), Progress(parts), UpdateGuard(parts, workdir)
  saving = dataclasses.asdict(config.checkpoint)
  saving.pop("every_steps")
  record, compared = config_lib.to_json(config), config_lib.comparison(config)
  with Checkpointer(workdir, config=record, **compared, **saving) as checkpointer:
    run = Run(parts, source, progress, guard, checkpointer)
    with interrupts.may_be_given_up():
      start, state = run.restore() or (0, parts.init_state(policy, critic))
    if start > config.num_steps:
      raise ValueError(
        f"num_steps must be at least {start}, the step of the newest checkpoint in {workdir}; received "
        f"{config.num_steps}."
      )
    with contextlib.closing(Records(workdir, restored_step=start, placement=parts.placement)) as records:
      evaluate = functools.partial(_evaluate, parts, records=records, console=console, interrupts=interrupts)
      evaluate(state, 0)
      # The engine serves one caller at a time: the evaluations stand outside the block in which the source drives it.
      with (
        contextlib.closing(source),
        console.stage(f"{config.algorithm}, {config.schedule}", config.num_steps) as bar,
      ):
        bar.advance(start)
        source.publish(state.policy, start)
        progress.start()
        for step in range(start + 1, config.num_steps + 1):
          try:
            interrupts.check()
            saves = functools.partial(run.save_and_wait, step - 1, state)
            with interrupts.at_once(source.runs_on_caller, rescue=saves):
              trajectories = source.next_batch(step - 1, interrupts.check_alone)
          except BaseException as error:  # a signal, too many failed episodes, an engine that broke
            # Several processes save together, and only of a signal do all of them know.
            if jax.process_count() == 1 or isinstance(error, Interrupted):
              run.save(step - 1, state)
            raise
          # The first step is compiled; what was there before it is in the last checkpoint, or in the stages' results.
          # So is a later one whose batch is of another size than those before it.
          rescue = run.rescue(step - 1, state) if step > start + 1 else None
          given_up = interrupts.may_be_given_up() if rescue is None else interrupts.may_be_given_up(rescue)
          with given_up, console.compiling("the learner step", first=step == start + 1):
            state, row = _learn(parts, state, step, trajectories, source, progress, guard)
          records.step(step, row)
          bar.advance(note=progress.note(row))
          if step % config.checkpoint.every_steps == 0 or step == config.num_steps:
            records.samples(step, trajectories[:SAMPLES_PER_CHECKPOINT])
            run.save(step, state, metric=row["success_rate"])
          try:
            guard.check()
          except RunStoppedError:
            run.save(step, state)
            raise
      checkpointer.wait()  # what is evaluated is there, whatever becomes of the evaluation
      evaluate(state, config.num_steps)
  return _summarise(parts, workdir, progress, source)


def _learn(
  parts: Components,
  state: LearnerState,
  step: int,
  trajectories: list[Trajectory],
  source: BatchSource,
  progress: Progress,
  guard: UpdateGuard,
) -> tuple[LearnerState, dict[str, float | int]]:
  """One learner step, from trajectories to published weights. Returns the new state and the metrics row."""
  progress.learner_begins()
  batch, packed = parts.pack(trajectories)  # packed rows
  state, report = parts.update(state, batch, np.int32(packed.num_microbatches))  # critic x K, values, GAE, policy
  source.publish(state.policy, step)  # taken up in flight
  report = jax.device_get(report)
  seen = guard.look(step, state, trajectories, report)  # skipped updates, a critic that diverges
  return state, progress.row(step, trajectories, {**report, **seen}, source)


@dataclasses.dataclass(frozen=True)
class Run:
  """What has a state that a resume needs, beside the learner's, and where it is saved."""

  parts: Components
  source: BatchSource
  progress: Progress
  guard: UpdateGuard
  checkpointer: Checkpointer

  def restore(self) -> tuple[int, LearnerState] | None:
    """Goes on from the newest checkpoint: `(its step, its state)`; None where there is none."""
    restored = self.checkpointer.restore(checkpoint_template(self.parts))
    if restored is None:
      return None
    host, waiting = restored.host, trajectory_arrays.from_arrays(restored.host_arrays)
    saved_by, now = host["processes"], jax.process_count()
    if self.parts.config.schedule == "async" and saved_by != now:
      raise ValueError(f"an asynchronous run goes on with as many processes as saved it, {saved_by}; received {now}.")
    self.source.restore(host["source"], waiting, restored.state["old_weights"])
    self.progress.restore(host["progress"])
    self.guard.restore(host["guard"])
    if self.parts.baselines is not None:
      self.parts.baselines.restore(host["baselines"])
    return restored.step, restored.state["learner"]

  def save(
    self, step: int, state: LearnerState, *, metric: float | None = None, baselines: dict[str, Any] | None = None
  ) -> None:
    """Starts to save all that a resume needs; the arrays are copied before this returns. Nothing to do if it is there.

    Args:
      step: learner steps done.
      state: after them.
      metric: decides which checkpoints are best; None: of no account.
      baselines: their state then; None: what it is now.
    """
    self.checkpointer.wait()
    if step in self.checkpointer.steps():
      return
    source_state, waiting = self.source.state()
    host = {
      "processes": jax.process_count(),
      "source": source_state,
      "waiting": [trajectory.episode_id for trajectory in waiting],
      "progress": self.progress.state(),
      "guard": self.guard.state(),
      "baselines": self._baselines() if baselines is None else baselines,
    }
    tree = _checkpoint_tree(state, self.source.old_weights())
    host_arrays = trajectory_arrays.to_arrays(waiting)
    # Several processes write their shards together, with barriers that are programs on the devices.
    with self.parts.placement.dispatching() if jax.process_count() > 1 else contextlib.nullcontext():
      self.checkpointer.save(step, tree, host, host_arrays=host_arrays, metric=metric)

  def save_and_wait(self, step: int, state: LearnerState) -> None:
    """As `save`; returns when all is written."""
    self.save(step, state)
    self.checkpointer.wait()

  def _baselines(self) -> dict[str, Any] | None:
    return None if self.parts.baselines is None else self.parts.baselines.state()

  def rescue(self, step: int, state: LearnerState) -> Callable[[], None]:
    """What saves while another thread is in the next learner step, from now on (before its batch is packed).

    That is possible until the step is on the device: `state` is donated to it then, and `NotNow` raised. What is saved
    is consistent, since all of `state` is copied last.
    """
    baselines = self._baselines()

    def save() -> None:
      if _any_deleted(state):
        raise NotNow
      try:
        self.save(step, state, baselines=baselines)
      except RuntimeError as error:
        if _any_deleted(state):
          raise NotNow from error
        raise
      self.checkpointer.wait()

    return save


def _any_deleted(tree: Any) -> bool:
  return any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))


def _checkpoint_tree(state: LearnerState, old_weights: list[Params]) -> dict[str, Any]:
  return {"learner": state, "old_weights": old_weights}


def checkpoint_template(parts: Components) -> dict[str, Any]:
  """Shapes and places of what a checkpoint of this run holds: what `Checkpointer.restore` wants."""
  state = parts.state_shapes()
  return _checkpoint_tree(state, [state.policy] * parts.config.lag)


def _evaluate(
  parts: Components, state: LearnerState, step: int, *, records: Records, console: Console, interrupts: Interrupts
) -> None:
  """Success on held-out tasks, as a row of the metrics, unless it is there already."""
  n = parts.config.eval_episodes
  if not n or records.evaluated(step):
    return
  began = time.monotonic()
  with console.stage(f"evaluation after {step} steps", 1) as bar, interrupts.at_once():
    weights = parts.placement.for_engine(state.policy)
    result = evaluation.evaluate(parts.rollouts, parts.domain, weights, num_episodes=n, version=step)
    bar.advance(note=f"success {result.success_rate:.3f}")
  records.evaluation(
    step,
    success_rate=result.success_rate,
    n=n,
    eval_low=result.low,
    eval_high=result.high,
    eval_turns_mean=result.turns_mean,
    eval_seconds=time.monotonic() - began,
  )


def _summarise(parts: Components, workdir: pathlib.Path, progress: Progress, source: BatchSource) -> dict[str, Any]:
  """The run's summary, which the main process writes."""
  dropped, failed = source.counters()["dropped_stale"], progress.failures()
  seconds = {**stages.stage_seconds(parts, workdir), "rl": progress.seconds}
  if not is_main_process():
    told: dict[str, Any] = parts.placement.exchange(None)[0]
    return told
  _, evaluations = read_metrics(workdir)
  before, after = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
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
    "dropped_stale": dropped,
    **failed,
    "device": jax.devices()[0].device_kind,
  }
  workdir_lib.write_summary(workdir, summary)
  parts.placement.exchange(summary)
  return summary
