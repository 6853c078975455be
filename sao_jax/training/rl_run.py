"""Everything that surrounds the RL loop: signals, checkpoints, health checks, metrics, evaluations, the console."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import jax

from sao_jax.io import workdir as workdir_lib
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.io.console import Console, Stage
from sao_jax.io.loggers import MetricsLogger, WandbLogger
from sao_jax.io.metrics import read_metrics
from sao_jax.learner import LearnerState
from sao_jax.parallel.distributed import is_main_process
from sao_jax.rollout.failures import by_count
from sao_jax.training import config as config_lib
from sao_jax.training import evaluation
from sao_jax.training.components import Components
from sao_jax.training.data_checks import DataChecks
from sao_jax.training.health import HealthCheck, RunStoppedError
from sao_jax.training.metrics import RunLog, StepMetrics, environment_numbers
from sao_jax.training.run_state import RunState
from sao_jax.training.signals import Interrupted, StopSignals
from sao_jax.types import Params, Trajectory

SAMPLES_PER_CHECKPOINT = 4
"""Trajectories written to `trajectories.jsonl` with every checkpoint, unless `logging.trajectories` is "all"."""


class RLRun:
  """One RL run in a workdir, as the loop sees it. A context manager.

  The loop (`loop.rl_loop`) states the method. This object resumes it, ends it after a signal, saves it, checks it,
  and reports on it.

  Args:
    parts: the run's parts.
    workdir: the run's folder.
    console: where to report.
    signals: ask the run to save and end.
    loggers: further places for the metrics, told in the main process, and after the step's checkpoint, if one is due.
      Their exceptions end the run. The caller closes them.
  """

  def __init__(
    self,
    parts: Components,
    workdir: pathlib.Path,
    console: Console,
    signals: StopSignals,
    loggers: Sequence[MetricsLogger] = (),
  ):
    self._loggers = tuple(loggers)
    self._checks = DataChecks(getattr(parts.domain.tokenizer, "control_ids", ()))
    self.parts = parts
    self.config = parts.config
    self.schedule, self.weights = parts.make_schedule(on_wait=signals.check_local)
    self._workdir, self._console, self._signals = workdir, console, signals
    settings = dataclasses.asdict(self.config.checkpoint)
    settings.pop("every_steps")
    record, compared = config_lib.to_json(self.config), config_lib.comparison(self.config)
    self._checkpointer = Checkpointer(workdir, config=record, **compared, **settings)
    self._metrics, self._health = StepMetrics(parts), HealthCheck(parts, workdir)
    self._state = RunState(parts, self.schedule, self.weights, self._metrics, self._health, self._checkpointer)
    self._stack = contextlib.ExitStack()
    self._start = 0
    self._log: RunLog
    self._bar: Stage

  def restore_or_init(self, policy: Params, critic: Params | None) -> LearnerState:
    """The learner's state in the newest checkpoint; a fresh one of these parameters where there is no checkpoint.

    Raises:
      ValueError: the newest checkpoint is beyond `num_steps`.
    """
    with self._signals.abortable():
      self._start, state = self._state.restore() or (0, self.parts.init_state(policy, critic))
    if self._start > self.config.num_steps:
      raise ValueError(
        f"num_steps must be at least {self._start}, the step of the newest checkpoint in {self._workdir}; received "
        f"{self.config.num_steps}."
      )
    settings, boards = self.config.logging, list[WandbLogger]()
    if settings.wandb_project is not None and is_main_process():
      config = config_lib.to_json(self.config)
      wandb = WandbLogger(self._workdir, project=settings.wandb_project, mode=settings.wandb_mode, config=config)
      boards.append(self._stack.enter_context(contextlib.closing(wandb)))
    placement = self.parts.placement
    log = RunLog(self._workdir, restored_step=self._start, placement=placement, loggers=boards)
    self._log = self._stack.enter_context(contextlib.closing(log))
    return state

  def steps(self) -> range:
    """The learner steps to do: those after the newest checkpoint."""
    return range(self._start + 1, self.config.num_steps + 1)

  @contextlib.contextmanager
  def generating(self, state: LearnerState) -> Iterator[None]:
    """Publishes the weights, and lets the schedule generate inside the block.

    The engine serves one caller at a time. Run evaluations outside the block.

    Raises:
      TooManyFailuresError: more than `EngineConfig.max_failed_share` of the episodes failed, however few there were.
    """
    title = f"{self.config.algorithm}, {self.config.schedule}"
    with contextlib.closing(self.schedule), self._console.stage(title, self.config.num_steps) as self._bar:
      self._bar.advance(self._start)
      self.weights.publish(state.policy, self._start)
      self._metrics.start()
      self._evaluate_between(self._start, state)  # A signal may have ended the run before it was done.
      yield
      self._metrics.stop()
    self._checkpointer.wait()  # what is evaluated is saved, whatever becomes of the evaluation
    self._metrics.check_failures(self.config.engine.max_failed_share)

  @contextlib.contextmanager
  def collecting(self, step: int, state: LearnerState) -> Iterator[None]:
    """For the wait for a batch: a signal ends it, and whatever ends it, the learner's state is saved."""
    save = functools.partial(self._state.save_and_wait, step - 1, state)
    try:
      self._signals.check()
      with self._signals.interruptible(self.schedule.runs_on_caller, emergency_checkpoint=save):
        yield
    except BaseException as error:  # a signal, too many failed episodes, an engine that broke
      # Several processes save together, and only of a signal do all of them know.
      if jax.process_count() == 1 or isinstance(error, Interrupted):
        self._state.save(step - 1, state)
      raise

  @contextlib.contextmanager
  def updating(self, step: int, state: LearnerState) -> Iterator[None]:
    """For the learner step: a signal during a long compilation saves the state before it and ends the run."""
    self._metrics.batch_received()
    # The first step always compiles; the state before it is in the last checkpoint, or in the results of the stages. A
    # later step compiles if its batch has a size that none had before.
    first = step == self._start + 1
    save = None if first else self._state.emergency_checkpoint(step - 1, state)
    abortable = self._signals.abortable() if save is None else self._signals.abortable(save)
    with abortable, self._console.compiling("the learner step", first=first):
      yield

  def record(
    self, step: int, state: LearnerState, trajectories: list[Trajectory], metrics: dict[str, Any]
  ) -> None:
    """Writes the metrics of a learner step, evaluates and saves a checkpoint when due, and checks the run's health.

    Raises:
      RunStoppedError: too many updates in a row were skipped; the run is saved.
    """
    found = self._health.record(step, state, trajectories, metrics) | self._checks.record(trajectories)
    row = self._metrics.row(step, trajectories, {**metrics, **found}, self.schedule)
    self._log.step(step, row)
    self._bar.advance(note=self._metrics.note(row))
    saved = step % self.config.checkpoint.every_steps == 0 or step == self.config.num_steps
    if self.config.logging.trajectories == "all":
      self._log.samples(step, trajectories)
    elif saved:
      self._log.samples(step, trajectories[:SAMPLES_PER_CHECKPOINT])
    if saved:
      self._state.save(step, state, metric=row["success_rate"])
    try:
      self._health.check()
    except RunStoppedError:
      self._state.save(step, state)
      raise
    self._tell_loggers(step, row, trajectories)
    self._evaluate_between(step, state)

  def evaluate(self, state: LearnerState, step: int) -> None:
    """Writes the success on held-out tasks after `step` learner steps, unless it is written already.

    Before RL and after it, with the idle engine. `eval_every_steps` asks for more in between.
    """
    n = self.config.eval_episodes
    if not n or self._log.evaluated(step):
      return
    began = time.monotonic()
    with self._console.stage(f"evaluation after {step} steps", 1) as bar, self._signals.interruptible():
      weights = self.parts.for_engine(state.policy)
      result = evaluation.evaluate(self.parts.rollouts, self.parts.domain, weights, num_episodes=n, version=step)
      failed = f"  failed {by_count(result.failed_by_kind)}" if result.failed else ""
      bar.advance(note=f"success {result.success_rate:.3f}{failed}")
    evaluation.check_failures(result, self.config.engine.max_failed_share)
    self._write_evaluation(step, result, time.monotonic() - began)

  def _evaluate_between(self, step: int, state: LearnerState) -> None:
    """Writes the success on held-out tasks during RL, with the weights published after `step`, when that is due.

    The learner waits. An asynchronous engine keeps running, and training episodes that have started go on.
    """
    n, every = self.config.eval_episodes, self.config.eval_every_steps
    due = n and every and step % every == 0 and 0 < step < self.config.num_steps
    if not due or self._log.evaluated(step):
      return
    began = time.monotonic()
    requests = evaluation.held_out_requests(self.parts.domain, n)
    with self.collecting(step + 1, state):
      done = self.schedule.evaluate(requests, seed=evaluation.EVALUATION_SEED)
    seconds = time.monotonic() - began
    failures = self._metrics.evaluated(seconds, n - len(done))
    result = evaluation.result_of(done, self.parts.domain, n, failures)
    self._write_evaluation(step, result, seconds)
    interval = f"(95 % interval {result.low:.3f} to {result.high:.3f})"
    self._console.print(f"held-out success after {step} steps: {result.success_rate:.3f} {interval}")

  def _write_evaluation(self, step: int, result: evaluation.Evaluation, seconds: float) -> None:
    more = {
      "eval_low": result.low,
      "eval_high": result.high,
      "eval_turns_mean": result.turns_mean,
      "eval_reward_mean": result.reward_mean,
      "eval_failed": result.failed,
      **{f"eval_failed/{kind}": count for kind, count in result.failed_by_kind.items()},
      **{f"eval_{name}": value for name, value in environment_numbers(result.trajectories).items()},
      "eval_seconds": seconds,
    }
    self._log.evaluation(step, success_rate=result.success_rate, n=result.n, **more)
    row = {"eval_success_rate": result.success_rate, "eval_n": result.n, **more}
    self._tell_loggers(step, row, result.trajectories)

  def _tell_loggers(self, step: int, row: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
    if is_main_process():
      for logger in self._loggers:
        logger.write(step, row, trajectories)

  def summary(self, stage_facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The run's summary, which the main process also writes to `summary.json`.

    Args:
      stage_facts: `stages.stage_facts`.
    """
    placement = self.parts.placement
    dropped, failed = self.schedule.counters()["dropped_stale"], self._metrics.failures()
    if not is_main_process():
      received: dict[str, Any] = placement.exchange(None)[0]
      return received
    _, evaluations = read_metrics(self._workdir)
    before, after = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    evaluating = sum(row["eval_seconds"] for row in evaluations)
    seconds: dict[str, float] = {stage: facts["seconds"] for stage, facts in stage_facts.items()}
    seconds |= {"rl": self._metrics.seconds, "evaluation": evaluating}
    summary = {
      "success_before": before.get("eval_success_rate"),
      "success_before_interval": [before.get("eval_low"), before.get("eval_high")],
      "success_after": after.get("eval_success_rate"),
      "success_after_interval": [after.get("eval_low"), after.get("eval_high")],
      "reward_before": before.get("eval_reward_mean"),
      "reward_after": after.get("eval_reward_mean"),
      "eval_failed_before": before.get("eval_failed"),
      "eval_failed_after": after.get("eval_failed"),
      "n": self.config.eval_episodes,
      "pretraining_explained_variance": stage_facts.get("value_pretraining", {}).get("explained_variance"),
      "seconds_total": sum(seconds.values()),
      "seconds_by_stage": seconds,
      "num_steps": self.config.num_steps,
      "dropped_stale": dropped,
      **failed,
      "device": jax.devices()[0].device_kind,
    }
    workdir_lib.write_summary(self._workdir, summary)
    placement.exchange(summary)
    return summary

  def __enter__(self) -> RLRun:
    self._stack.enter_context(self._checkpointer)
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self._stack.close()
