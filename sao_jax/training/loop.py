"""SAO from end to end: the page to read first.

    task -> env.reset -> engine (continuous batching) -> env.step -> ... -> Trajectory -> queue (bounded, staleness)
         -> packed TokenBatch -> critic update x K -> values -> skip-observation GAE -> policy update
         -> weights published as version + 1 -> engine

`rl_loop` is that line. `train` runs the paper's recipe around it: a supervised warm start, value pretraining on the
initial policy's own trajectories, then `rl_loop`. A stage whose result is in the workdir is not run again.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from sao_jax.io import workdir as workdir_lib
from sao_jax.io.console import Console
from sao_jax.io.loggers import MetricsLogger
from sao_jax.learner import LearnerState
from sao_jax.parallel.distributed import is_main_process
from sao_jax.training import config as config_lib
from sao_jax.training import stages
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig, Stage
from sao_jax.training.data_checks import check_prompts
from sao_jax.training.rl_run import RLRun
from sao_jax.training.signals import Interrupted, StopSignals
from sao_jax.types import Domain

STOPPED = "Stopped by a signal. The same run in the same workdir continues from here."


def rl_loop(run: RLRun, state: LearnerState) -> LearnerState:
  """The RL loop: one learner step per batch of finished trajectories.

  With `algorithm="sao"` it is single-rollout asynchronous optimization (arXiv 2607.07508).

  `parts.update` is one compiled program, `learner.update.make_update_step`: K critic updates (Section 3.2), values
  with the updated critic, skip-observation GAE (Eqs. 4 and 5), and a policy update with DIS (Eqs. 1 to 3).

  Args:
    run: signals, checkpoints, health checks and metrics. They attach through its context managers and leave the method
      alone.
    state: of the learner, donated.

  Returns:
    The learner's state after `num_steps` learner steps.

  Raises:
    Interrupted: a signal came. RunStoppedError, TooManyFailuresError: see `train`. The run is saved.
  """
  parts, schedule, weights = run.parts, run.schedule, run.weights
  with run.generating(state):  # publishes the first weights
    for step in run.steps():
      with run.collecting(step, state):
        trajectories = schedule.next_batch(version=step - 1)  # none older than max_staleness versions
      with run.updating(step, state):
        batch = parts.pack(trajectories)  # rows of tokens, with the λ of each trajectory
        state, metrics = parts.update(state, batch)  # critic x K -> values -> GAE -> policy
        weights.publish(state.policy, version=step)  # the engine takes them up in the middle of its trajectories
        metrics = jax.device_get(metrics)
      run.record(step, state, trajectories, metrics)
  return state


def train(
  config: RunConfig,
  domain: Domain,
  workdir: str | pathlib.Path,
  *,
  run_stages: Sequence[Stage] = config_lib.STAGES,
  console: Console | None = None,
  make_domain: Callable[[], Domain] | None = None,
  loggers: Sequence[MetricsLogger] = (),
) -> dict[str, Any] | None:
  """Runs the recipe in a workdir, and continues from what is there.

  Args:
    config: the run.
    domain: the task.
    workdir: the run's folder; made if missing. It must not hold a run of another config.
    run_stages: which stages to run; those before them must have been run in this workdir.
    console: where to report.
    make_domain: makes the task again, in the processes of the engines of `config.cluster`; must be picklable.
    loggers: further places for the metrics of RL, such as `io.loggers.CallbackLogger`. They are told after the step's
      checkpoint, if one is due, in the main process only. The caller closes them.

  Returns:
    The summary that is also written to `summary.json`. None if RL was not run to its end: it was not among
    `run_stages`, or a signal came.

  Raises:
    ValueError: the workdir holds a different config, a file of the domain has changed since, an earlier stage's result
      is missing, or `num_steps` is below the step of the newest checkpoint.
    WorkdirError, CheckpointError: the workdir cannot be written to, or another run holds it.
    RunStoppedError, TooManyFailuresError: the run cannot continue by itself; it is saved up to there.
  """
  workdir = pathlib.Path(workdir).absolute()  # an environment may change the working directory
  console = console or Console(quiet=not is_main_process())
  with StopSignals() as signals:
    try:
      with opened(config, domain, workdir, console, signals, make_domain) as parts:
        return recipe(parts, workdir, console, signals, run_stages, loggers)[1]
    except Interrupted:
      console.print(STOPPED)
      return None


@contextlib.contextmanager
def opened(
  config: RunConfig,
  domain: Domain,
  workdir: pathlib.Path,
  console: Console,
  signals: StopSignals,
  make_domain: Callable[[], Domain] | None,
) -> Iterator[Components]:
  """Locks and checks the workdir, and makes the components of the run; closes them and the domain at the end."""
  _check_tasks(config, domain)
  with workdir_lib.writing(workdir), contextlib.ExitStack() as stack:
    if is_main_process():
      stack.enter_context(workdir_lib.WorkdirLock(workdir))
      record_config(config, workdir, console)
      workdir_lib.write_or_check_files(workdir, domain.files)
    with signals.interruptible():
      parts = Components(config, domain, make_domain=make_domain)
    with parts:
      with signals.interruptible():
        check_prompts(config, domain)
      yield parts


def recipe(
  parts: Components,
  workdir: pathlib.Path,
  console: Console,
  signals: StopSignals,
  run_stages: Sequence[Stage] = config_lib.STAGES,
  loggers: Sequence[MetricsLogger] = (),
) -> tuple[LearnerState | None, dict[str, Any] | None]:
  """Runs the stages; returns the learner's state and the summary, or `(None, None)` if RL is not among them."""
  signals.share(parts.placement)
  policy = stages.warm_start(parts, workdir, console, signals, run="warm_start" in run_stages)
  if set(run_stages) == {"warm_start"}:
    return None, None
  critic = stages.value_pretraining(parts, policy, workdir, console, signals, run="value_pretraining" in run_stages)
  if "rl" not in run_stages:
    return None, None
  with RLRun(parts, workdir, console, signals, loggers) as run:
    state = run.restore_or_init(policy, critic)
    del policy, critic  # the learner's state owns copies
    run.evaluate(state, step=0)
    state = rl_loop(run, state)
    run.evaluate(state, step=parts.config.num_steps)
    return state, run.summary(stages.stage_facts(parts, workdir))


def record_config(config: RunConfig, workdir: pathlib.Path, console: Console) -> None:
  """Writes `config.json`, or checks the one that is there and reports what `may_change` let change."""
  record, compared = config_lib.to_json(config), config_lib.comparison(config)
  for line in workdir_lib.write_or_check_config(workdir, record, **compared, reported=config.may_change):
    console.print(f"changed     {line}")


def _check_tasks(config: RunConfig, domain: Domain) -> None:
  for name, needed in (("num_train_tasks", True), ("num_eval_tasks", config.eval_episodes > 0)):
    if needed and getattr(domain, name) < 1:
      raise ValueError(f"Domain.{name} must be >= 1; received {getattr(domain, name)}.")
