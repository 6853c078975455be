"""The two stages before RL: a supervised warm start of the policy, and pretraining of the value model.

Each stage's result is a checkpoint in `<workdir>/stages/<stage>/`; where it exists, the stage is not run again. A stage
that a signal stops continues from `<workdir>/stages/<stage>/partial/`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from sao_jax.io import workdir as workdir_lib
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.io.console import Console
from sao_jax.learner import (
  LearnerState,
  SftState,
  init_sft_state,
  init_state,
  make_critic_evaluation,
  make_critic_step,
  make_sft_step,
  pack_batch,
  parameter_report,
)
from sao_jax.parallel.distributed import is_main_process
from sao_jax.training import config as config_lib
from sao_jax.training.components import Components
from sao_jax.training.config import Stage
from sao_jax.training.demonstrations import DemonstrationBatches
from sao_jax.training.health import HealthCheck, SkippedUpdates
from sao_jax.training.initial_trajectories import initial_trajectories
from sao_jax.training.signals import StopSignals
from sao_jax.types import Params, Trajectory

LOW_EXPLAINED_VARIANCE = 0.1
"""Value pretraining that ends below this is reported by a warning: its advantages are little better than those of one
baseline for all states."""

_log = logging.getLogger(__name__)


class StageRun:
  """One stage of a run: its folder, its checkpoints, and its progress on the console.

  Args:
    name: of the stage, which is also its folder's name.
    parts: the run's parts.
    workdir: the run's folder.
    console: where to report.
    signals: ask the run to save and end.
  """

  def __init__(
    self, name: Stage, parts: Components, workdir: pathlib.Path, console: Console, signals: StopSignals
  ):
    self.name, self.parts, self.console, self.signals = name, parts, console, signals
    self.folder = workdir / "stages" / name
    self._workdir = workdir

  def result(
    self, initial: Params, fit: Callable[[], tuple[Params, dict[str, Any]]], *, run: bool, size: int
  ) -> tuple[Params, dict[str, Any]]:
    """The stage's result and facts about it: from its checkpoint, or else from `fit`, whose result is saved.

    Args:
      initial: the parameters before the stage.
      fit: returns the parameters after the stage, and JSON values, among them the `seconds` that it took.
      run: False raises ValueError if there is no result yet.
      size: the number that the checkpoint carries.
    """
    with stage_checkpointer(self.parts, self._workdir, self.name) as checkpointer:
      restored = checkpointer.restore(initial)
      if restored is None:
        if not run:
          raise ValueError(f"The stage {self.name!r} has no result in {self._workdir} yet. Run it first.")
        params, facts = fit()
        checkpointer.save(size, params, facts)
    if is_main_process():
      workdir_lib.delete(self.folder / "partial")
    return (params, facts) if restored is None else (restored.state, dict(restored.host))

  def partial_checkpointer(self) -> Checkpointer:
    """Checkpoints within the stage, from which a stopped run continues."""
    return stage_checkpointer(self.parts, self._workdir, f"{self.name}/partial")

  @contextlib.contextmanager
  def updating(self, what: str, *, first: bool) -> Iterator[None]:
    """For one update. The `first` one compiles; a signal then ends the stage, since nothing would be lost."""
    with (
      self.signals.interruptible() if first else contextlib.nullcontext(),
      self.console.compiling(what, first=first),
    ):
      yield


def warm_start(
  parts: Components, workdir: pathlib.Path, console: Console, signals: StopSignals, *, run: bool = True
) -> Params:
  """Trains the policy on demonstrations by cross-entropy on action tokens (stage 1). Returns its parameters.

  Args:
    parts: the run's parts.
    workdir: where the result is kept.
    console: where to report.
    signals: a signal saves the stage and raises `Interrupted`.
    run: False raises ValueError if there is no result yet, unless the config has no warm start.
  """
  stage = StageRun("warm_start", parts, workdir, console, signals)
  with signals.interruptible():
    policy = parts.init_policy()

  def fit() -> tuple[Params, dict[str, Any]]:
    console.print(parameter_report(policy, title="adapters" if parts.config.lora.enabled else "policy"))
    params, seconds = _imitate(stage, policy) if num_steps else (policy, 0.0)
    return params, {"seconds": seconds}

  num_steps = parts.config.warm_start.num_steps
  return stage.result(policy, fit, run=run or not num_steps, size=num_steps)[0]


def _imitate(stage: StageRun, policy: Params) -> tuple[Params, float]:
  """The supervised updates, from where an earlier run stopped. Returns the policy, and the seconds."""
  parts, settings = stage.parts, stage.parts.config.warm_start
  chunk = parts.learner.logprob_chunk_size
  step = parts.step(
    lambda policy, _: make_sft_step(settings.optimizer, policy, logprob_chunk_size=chunk, jit=False)
  )
  state: SftState = parts.placement.make(functools.partial(init_sft_state, settings.optimizer), policy)
  start, began = 0, time.monotonic()
  with (
    stage.partial_checkpointer() as checkpointer,
    stage.console.stage("warm start", settings.num_steps) as bar,
    contextlib.closing(DemonstrationBatches(parts)) as demonstrations,
  ):
    if (restored := checkpointer.restore(state)) is not None:
      start, state = restored.step, restored.state
      demonstrations.restore(restored.host["rng"])
      began -= restored.host["seconds"]
      bar.advance(start)
    skipped = SkippedUpdates(parts.config.max_skipped_in_a_row, start, int(state.skipped))

    def save(i: int) -> None:
      checkpointer.save(i, state, {"rng": demonstrations.state(), "seconds": time.monotonic() - began})

    before = None
    for i in range(start + 1, settings.num_steps + 1):
      first = i == start + 1
      trajectories = demonstrations.next(stage.signals, on_signal=None if first else functools.partial(save, i - 1))
      batch, stats = pack_batch(parts.config.learner, trajectories)
      with stage.updating("the step of the warm start", first=first):
        state, report = step(state, batch, np.int32(stats.num_microbatches))
        # One step ahead of the device and no more: a signal must not find a long queue of steps before it.
        jax.block_until_ready(report["loss"] if first else before)
      before = report["loss"]
      due = i % settings.log_every == 0  # reading the loss waits for the device, so it is read now and then
      bar.advance(note=f"loss {float(report['loss']):.3f}" if due else None)
      if due or i == settings.num_steps:
        skipped.record(i, int(report["skipped"]))
      if skipped.must_stop or (
        i < settings.num_steps and (stage.signals.requested_anywhere() or i % settings.save_every == 0)
      ):
        save(i)
        skipped.check()
        stage.signals.check()
  if total := int(state.skipped):
    stage.console.print(
      f"{total} of {settings.num_steps} updates of the warm start were skipped: not finite, or no token"
    )
  return state.params, time.monotonic() - began


def value_pretraining(
  parts: Components,
  policy: Params,
  workdir: pathlib.Path,
  console: Console,
  signals: StopSignals,
  *,
  run: bool = True,
) -> Params | None:
  """Stage 2: the value model is fitted to trajectories of the initial policy (Section 3.2: a cold critic is a
  bottleneck). Reports the explained variance that it reaches on trajectories that were held out.

  Args:
    parts: the run's parts.
    policy: the initial policy.
    workdir: where the result is kept.
    console: where to report.
    signals: a signal saves the stage and raises `Interrupted`.
    run: False raises ValueError if there is no result yet.

  Returns:
    The value model's parameters; None for algorithms without one.
  """
  stage = StageRun("value_pretraining", parts, workdir, console, signals)
  with signals.interruptible():
    critic = parts.init_critic(policy)
  if critic is None:
    return None

  config = parts.config
  count = config.critic.pretraining_trajectories

  def fit() -> tuple[Params, dict[str, Any]]:
    if count:
      console.print(parameter_report(critic, config_lib.pretraining_learner(config).frozen_critic, title="pretraining"))
    console.print(parameter_report(critic, parts.learner.frozen_critic, title="critic in RL"))
    return _fit_values(stage, policy, critic) if count else (critic, {"seconds": 0.0})

  params, facts = stage.result(critic, fit, run=run, size=count)
  _report_values(console, facts)
  return params


def _report_values(console: Console, facts: dict[str, Any]) -> None:
  """Prints the explained variance that value pretraining reached, and warns if it is low."""
  held_out, found = facts.get("held_out_trajectories", 0), facts.get("explained_variance")
  if not held_out:  # no value pretraining, too few trajectories, or the checkpoint of an older release
    return
  where = f"{held_out} held-out trajectories after {facts['updates']} updates"
  if found is None:
    _log.warning("Value pretraining: the returns of %s do not vary, so that values cannot explain them.", where)
    return
  console.print(f"value pretraining: explained variance {found:.2f} on {where}")
  if found < LOW_EXPLAINED_VARIANCE and is_main_process():
    _log.warning(
      "Value pretraining reached an explained variance of %.2f on %s. Below %.1f, advantages are little better than "
      "with one baseline for all states. More critic.pretraining_trajectories or pretraining_epochs may help, unless "
      "the tokens say little about the outcome.",
      found, where, LOW_EXPLAINED_VARIANCE,
    )  # fmt: skip


def hold_out(trajectories: list[Trajectory], batch_size: int) -> tuple[list[Trajectory], list[Trajectory]]:
  """Splits trajectories into those to fit values to and the last ones: one in eight, at most a batch."""
  kept = len(trajectories) - min(batch_size, len(trajectories) // 8)
  return trajectories[:kept], trajectories[kept:]


def _fit_values(stage: StageRun, policy: Params, critic: Params) -> tuple[Params, dict[str, Any]]:
  """The critic's updates, from where an earlier run stopped. Returns the critic, and facts about the stage."""
  parts, config = stage.parts, stage.parts.config
  learner = config_lib.pretraining_learner(config)
  step = parts.step(lambda _, value: make_critic_step(learner, value, num_updates=1, jit=False))
  health = HealthCheck(parts, stage.folder)
  start, began = 0, time.monotonic()
  with stage.partial_checkpointer() as checkpointer:
    made = initial_trajectories(parts, policy, stage.folder, stage.console, stage.signals)
    trajectories, held_out = hold_out(made, config.batch_size)
    rng = np.random.default_rng((config.seed, 3))
    orders = [rng.permutation(len(trajectories)) for _ in range(config.critic.pretraining_epochs)]
    size = min(config.batch_size, len(trajectories))
    batches = [order[i : i + size] for order in orders for i in range(0, len(trajectories) - size + 1, size)]
    with stage.signals.interruptible():
      state: LearnerState = parts.placement.make(functools.partial(init_state, learner), policy, critic)
    if (restored := checkpointer.restore(_without_policy(state))) is not None:
      start = restored.step
      state = restored.state._replace(policy=state.policy, policy_opt=state.policy_opt)
      began -= restored.host["seconds"]
      health.restore(restored.host["guard"])
    with stage.console.stage("value pretraining", len(batches)) as bar:
      bar.advance(start)
      for i in range(start + 1, len(batches) + 1):
        chosen = [trajectories[j] for j in batches[i - 1]]
        batch, stats = pack_batch(learner, chosen)
        with stage.updating("the step of value pretraining", first=i == start + 1):
          state, report = step(state, batch, np.int32(stats.num_microbatches))
          report = jax.device_get(report)
        bar.advance(note=f"explained variance {report['explained_variance_before']:.2f}")
        health.record(i, state, chosen, report)
        if stage.signals.requested_anywhere() or health.must_stop or i % config.warm_start.save_every == 0:
          host = {"seconds": time.monotonic() - began, "guard": health.state()}
          checkpointer.save(i, _without_policy(state), host)
          health.check()
          stage.signals.check()
    state, found = _explained_variance(stage, state, held_out)
  return state.critic, {
    "seconds": time.monotonic() - began, "updates": len(batches), "held_out_trajectories": len(held_out),
    "explained_variance": found,
  }  # fmt: skip


def _explained_variance(
  stage: StageRun, state: LearnerState, held_out: list[Trajectory]
) -> tuple[LearnerState, float | None]:
  """Explained variance on held-out trajectories; None if there are none, or their returns do not vary."""
  if not held_out:
    return state, None
  parts, learner = stage.parts, config_lib.pretraining_learner(stage.parts.config)
  measure = parts.step(lambda _, value: make_critic_evaluation(learner, value, jit=False))
  batch, stats = pack_batch(learner, held_out)
  with stage.signals.interruptible():
    state, report = measure(state, batch, np.int32(stats.num_microbatches))
    found = float(jax.device_get(report["explained_variance"]))
  return state, found if math.isfinite(found) else None


def _without_policy(state: LearnerState) -> LearnerState:
  """The part of a learner state that value pretraining changes."""
  return state._replace(policy=None, policy_opt=None)


def stage_facts(parts: Components, workdir: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Facts about each finished stage: the `seconds` that it took, and what value pretraining reached."""
  facts = {}
  for stage in ("warm_start", "value_pretraining"):
    with stage_checkpointer(parts, workdir, stage, read_only=True) as checkpointer:
      for step in checkpointer.steps()[-1:]:
        facts[stage] = dict(checkpointer.host_state(step))
  return facts


def stage_checkpointer(
  parts: Components, workdir: pathlib.Path, stage: str, *, read_only: bool = False
) -> Checkpointer:
  """The checkpoints of a stage, of which the newest is kept."""
  config: dict[str, Any] = config_lib.to_json(parts.config)
  return Checkpointer(
    workdir / "stages" / stage, config=config, keep=1, keep_best=0, read_only=read_only,
    **config_lib.comparison(parts.config),
  )  # fmt: skip
