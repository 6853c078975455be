"""The two stages before RL: a supervised warm start of the policy, and pretraining of the value model.

Each stage's result is a checkpoint in `<workdir>/stages/<stage>/`; where it is there, the stage is not run again.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import logging
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from sao_jax.io import trajectory_arrays
from sao_jax.io import workdir as workdir_lib
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.io.console import Console
from sao_jax.learner import (
  LearnerState,
  SftState,
  demonstration_trajectory,
  init_sft_state,
  init_state,
  make_critic_step,
  make_sft_step,
  pack_batch,
  parameter_report,
)
from sao_jax.parallel.distributed import is_main_process
from sao_jax.rollout.episodes import EpisodeFailure, EpisodeRequest, encode_text
from sao_jax.training import config as config_lib
from sao_jax.training.components import Components
from sao_jax.training.config import Stage
from sao_jax.training.health import RunStoppedError, UpdateGuard
from sao_jax.training.signals import Interrupted, Interrupts
from sao_jax.types import Params, Trajectory

PRETRAINING_SEED = 2**31 + 1
"""Sampling noise of the trajectories that the value model is pretrained on."""
_POLL_S = 0.5
_SFT_STEP = "the step of the warm start"
_VALUE_STEP = "the step of value pretraining"

_log = logging.getLogger(__name__)


def warm_start(
  parts: Components, workdir: pathlib.Path, console: Console, interrupts: Interrupts, *, run: bool = True
) -> Params:
  """Stage 1: the policy imitates demonstrations (cross-entropy on action tokens). Returns its parameters.

  Args:
    parts: the run's parts.
    workdir: where the result is kept.
    console: where to report.
    interrupts: a signal saves what there is and raises `Interrupted`.
    run: False raises ValueError if there is no result yet.
  """
  with interrupts.at_once():
    policy = parts.init_policy()
  with _stage_checkpointer(parts, workdir, "warm_start") as checkpointer:
    if (restored := checkpointer.restore(policy)) is not None:
      _remove_partial(workdir, "warm_start")
      return restored.state
    _require_run(run, "warm_start", workdir)
    settings = parts.config.warm_start
    console.print(parameter_report(policy, title="policy"))
    seconds = 0.0
    if settings.num_steps:
      policy, seconds = _imitate(parts, policy, workdir, console, interrupts)
    checkpointer.save(settings.num_steps, policy, {"seconds": seconds})
  _remove_partial(workdir, "warm_start")
  return policy


def _imitate(
  parts: Components, policy: Params, workdir: pathlib.Path, console: Console, interrupts: Interrupts
) -> tuple[Params, float]:
  """The supervised updates, going on from what an earlier run saved of them. Returns the policy, and the seconds."""
  settings, learner = parts.config.warm_start, parts.config.learner
  imitate = make_sft_step(
    settings.optimizer, parts.policy_apply, logprob_chunk_size=learner.logprob_chunk_size, jit=False
  )
  step = parts.placement.step(imitate)
  state: SftState = parts.placement.make(functools.partial(init_sft_state, settings.optimizer), policy)
  rng = np.random.default_rng((parts.config.seed, 1))
  start, began = 0, time.monotonic()
  with (
    _stage_checkpointer(parts, workdir, "warm_start/partial") as checkpointer,
    console.stage("warm start", settings.num_steps) as bar,
  ):
    if (restored := checkpointer.restore(state)) is not None:
      start, state = restored.step, restored.state
      rng.bit_generator.state = restored.host["rng"]
      began -= restored.host["seconds"]
      bar.advance(start)
    skips = _Skips(parts.config.max_skipped_in_a_row, start, int(state.skipped))
    before, drawn = None, dict(rng.bit_generator.state)

    def save(i: int) -> None:
      checkpointer.save(i, state, {"rng": drawn, "seconds": time.monotonic() - began})

    with contextlib.closing(_Ahead(_demonstrations(parts, rng))) as ahead:
      for i in range(start + 1, settings.num_steps + 1):
        if (made := ahead.next(interrupts)) is None:  # a signal, while a demonstration takes its time
          if i > start + 1:
            save(i - 1)
          raise Interrupted
        demonstrations, drawn = made
        batch, packed = pack_batch(learner, demonstrations)
        first = i == start + 1  # it compiles, and nothing is lost
        with interrupts.at_once() if first else contextlib.nullcontext(), console.compiling(_SFT_STEP, first=first):
          state, report = step(state, batch, np.int32(packed.num_microbatches))
          # One step ahead of the device and no more: a signal must not find a long queue of steps before it.
          jax.block_until_ready(report["loss"] if first else before)
        before = report["loss"]
        # The loss is fetched now and then only: fetching waits for the device.
        note = f"loss {float(report['loss']):.3f}" if i % settings.log_every == 0 else None
        bar.advance(note=note)
        if i % settings.log_every == 0 or i == settings.num_steps:
          skips.look(i, int(report["skipped"]))
        if skips.too_many or (i < settings.num_steps and (interrupts.anywhere() or i % settings.save_every == 0)):
          save(i)
          skips.check()
          interrupts.check()
  if skipped := int(state.skipped):
    console.print(f"{skipped} of {settings.num_steps} updates of the warm start were skipped: not finite, or no token")
  return state.params, time.monotonic() - began


class _Skips:
  """Stops a warm start that skips every update; it looks now and then, since a look waits for the device.

  `UpdateGuard` answers for the other stages and differs in what it knows: it has each step's report and batch, so that
  one skipped step counts, and its batch is kept and diagnosed. Here a count since the last look is all there is (steps
  run one ahead of the host), so that only looks between which everything was skipped count, and demonstrations, which
  the task can make again, are not kept.

  Args:
    limit: `RunConfig.max_skipped_in_a_row`.
    step: updates done.
    skipped: those of them that were skipped.
  """

  def __init__(self, limit: int, step: int, skipped: int):
    self._limit = limit
    self._seen = step, skipped
    self._in_a_row = 0

  def look(self, step: int, skipped: int) -> None:
    """Takes note of how many were skipped until `step`."""
    new, all_new = skipped - self._seen[1], step - self._seen[0]
    self._in_a_row = self._in_a_row + new if new == all_new else 0
    self._seen = step, skipped

  @property
  def too_many(self) -> bool:
    """Whether `check` will raise."""
    return bool(self._limit) and self._in_a_row >= self._limit

  def check(self) -> None:
    """Raises `RunStoppedError` after too many skipped updates in a row."""
    if self.too_many:
      raise RunStoppedError(
        f"The last {self._in_a_row} updates of the warm start were skipped: loss or gradient were not finite, or no "
        f"token of the demonstrations is an action (max_skipped_in_a_row = {self._limit})."
      )


Demonstrations: TypeAlias = tuple[list[Trajectory], dict[str, Any]]
"""A batch, and the state of the generator of random numbers after it."""


class _Ahead:
  """Makes the next batch on a thread while the learner is at the last one."""

  def __init__(self, batches: Iterator[Demonstrations]):
    self._batches = batches
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="demonstrations")
    self._coming = self._pool.submit(next, batches)

  def next(self, interrupts: Interrupts) -> Demonstrations | None:
    """The next batch; None if a signal comes first (to a lone process)."""
    while not self._coming.done():
      concurrent.futures.wait([self._coming], _POLL_S)
      if interrupts.requested and jax.process_count() == 1:
        return None
    made = self._coming.result()
    self._coming = self._pool.submit(next, self._batches)
    return made

  def close(self) -> None:
    """Does not wait for what is being made."""
    self._pool.shutdown(wait=False, cancel_futures=True)


def _demonstrations(parts: Components, rng: np.random.Generator) -> Iterator[Demonstrations]:
  """Batches without end, of tasks in random order."""
  domain, settings = parts.domain, parts.config.warm_start
  if domain.demonstrate is None:
    steps = settings.num_steps
    raise ValueError(f"warm_start.num_steps must be 0 for a domain without demonstrations; received {steps}.")
  demonstrate = domain.demonstrate
  while True:
    tasks = rng.integers(domain.num_train_tasks, size=settings.batch_size)
    batch = [encode_demonstration(parts, demonstrate(int(t), rng), index=i) for i, t in enumerate(tasks)]
    yield batch, dict(rng.bit_generator.state)


def encode_demonstration(parts: Components, pieces: Sequence[tuple[str, bool]], *, index: int = 0) -> Trajectory:
  """A demonstration's pieces of (text, is_action) as a trajectory, each piece tokenised by itself, as in a rollout."""
  try:
    ids = [encode_text(parts.domain.tokenizer, text) for text, _ in pieces]
  except EpisodeFailure as error:
    raise ValueError(f"demonstration {index} of a batch: {error}") from error
  mask = [is_action for piece, (_, is_action) in zip(ids, pieces, strict=True) for _ in piece]
  return demonstration_trajectory(np.concatenate(ids), np.asarray(mask), index=index)


def value_pretraining(
  parts: Components,
  policy: Params,
  workdir: pathlib.Path,
  console: Console,
  interrupts: Interrupts,
  *,
  run: bool = True,
) -> Params | None:
  """Stage 2: the value model is fitted to trajectories of the initial policy (METHOD 3.2; a cold critic is a
  bottleneck). After a signal, which raises `Interrupted`, the stage goes on where it was.

  Returns:
    The value model's parameters; None for algorithms without one.
  """
  with interrupts.at_once():
    critic = parts.init_critic(policy)
  if critic is None:
    return None
  with _stage_checkpointer(parts, workdir, "value_pretraining") as checkpointer:
    if (restored := checkpointer.restore(critic)) is not None:
      _remove_partial(workdir, "value_pretraining")
      return restored.state
    _require_run(run, "value_pretraining", workdir)
    settings = parts.config.critic
    console.print(parameter_report(critic, parts.config.learner.frozen_critic, title="critic"))
    seconds = 0.0
    if settings.pretraining_trajectories:
      critic, seconds = _fit_values(parts, policy, critic, workdir, console, interrupts)
    checkpointer.save(settings.pretraining_trajectories, critic, {"seconds": seconds})
  _remove_partial(workdir, "value_pretraining")
  return critic


def _initial_trajectories(
  parts: Components, policy: Params, workdir: pathlib.Path, console: Console, interrupts: Interrupts
) -> list[Trajectory]:
  """Trajectories of the initial policy, in the order of their numbers; those of a run that was stopped are kept."""
  config = parts.config
  count = config.critic.pretraining_trajectories
  path = workdir / "stages" / "value_pretraining" / "partial" / "initial_trajectories.safetensors"
  unfinished = path.with_name(f"unfinished_{path.name}")
  found = parts.placement.exchange([path.exists(), unfinished.exists()])[0]
  done = _read_if_whole(path if found[0] else unfinished) if any(found) else []
  if found[0] and done:
    return done

  def keep() -> None:
    # Elsewhere they are all made again: beside other neighbours the rest might differ in its last bits.
    if done and config.schedule == "async":
      trajectory_arrays.save(unfinished, trajectory_arrays.to_arrays(list(done)))

  with interrupts.at_once(rescue=keep):
    weights = parts.placement.for_engine(policy)
  tasks = np.random.default_rng((config.seed, 2)).integers(parts.domain.num_train_tasks, size=count)
  known = {x.episode_id for x in done}
  requests = [
    EpisodeRequest(task_index=int(task), episode_id=i, group_id=i) for i, task in enumerate(tasks) if i not in known
  ]
  try:
    with console.stage("initial trajectories", count) as bar, interrupts.at_once(rescue=keep):
      bar.advance(len(done))
      for trajectory in parts.rollouts.generate(lambda _: (weights, 0), requests, seed=PRETRAINING_SEED):
        done.append(trajectory)
        bar.advance()
  except Interrupted:
    keep()
    raise
  done.sort(key=lambda x: x.episode_id)  # Completion order depends on the machine's speed; this does not.
  if is_main_process():
    trajectory_arrays.save(path, trajectory_arrays.to_arrays(done))
  return done


def _read_if_whole(path: pathlib.Path) -> list[Trajectory]:
  try:
    return trajectory_arrays.read(path)
  except ValueError as error:
    _log.warning("Damaged, and made again: %s", error)
    return []


def _fit_values(
  parts: Components,
  policy: Params,
  critic: Params,
  workdir: pathlib.Path,
  console: Console,
  interrupts: Interrupts,
) -> tuple[Params, float]:
  """The critic's updates, going on from what an earlier run saved of them. Returns the critic, and the seconds."""
  config = parts.config
  learner = config_lib.pretraining_learner(config)
  assert parts.value_apply is not None  # or there would be no critic to fit
  step = parts.placement.step(make_critic_step(learner, parts.value_apply, num_updates=1, jit=False))
  guard = UpdateGuard(parts, workdir / "stages" / "value_pretraining")
  start, began = 0, time.monotonic()
  with _stage_checkpointer(parts, workdir, "value_pretraining/partial") as checkpointer:
    trajectories = _initial_trajectories(parts, policy, workdir, console, interrupts)
    if not trajectories:
      count = config.critic.pretraining_trajectories
      raise RunStoppedError(
        f"None of {count} episodes for value pretraining gave a trajectory: see the warnings above."
      )
    rng = np.random.default_rng((config.seed, 3))
    orders = [rng.permutation(len(trajectories)) for _ in range(config.critic.pretraining_epochs)]
    size = min(config.batch_size, len(trajectories))
    batches = len(trajectories) // size
    with interrupts.at_once():
      state: LearnerState = parts.placement.make(functools.partial(init_state, learner), policy, critic)
    if (restored := checkpointer.restore(_without_policy(state))) is not None:
      start = restored.step
      state = restored.state._replace(policy=state.policy, policy_opt=state.policy_opt)
      began -= restored.host["seconds"]
      guard.restore(restored.host["guard"])
    with console.stage("value pretraining", len(orders) * batches) as bar:
      bar.advance(start)
      for i in range(start + 1, len(orders) * batches + 1):
        epoch, place = divmod(i - 1, batches)
        chosen = orders[epoch][place * size : (place + 1) * size]
        batch, packed = pack_batch(learner, [trajectories[j] for j in chosen])
        first = i == start + 1  # it compiles, and nothing is lost
        with interrupts.at_once() if first else contextlib.nullcontext(), console.compiling(_VALUE_STEP, first=first):
          state, report = step(state, batch, np.int32(packed.num_microbatches))
          report = jax.device_get(report)
        bar.advance(note=f"explained variance {report['explained_variance_before']:.2f}")
        guard.look(i, state, [trajectories[j] for j in chosen], report)
        if interrupts.anywhere() or guard.stops or i % config.warm_start.save_every == 0:
          host = {"seconds": time.monotonic() - began, "guard": guard.state()}
          checkpointer.save(i, _without_policy(state), host)
          guard.check()
          interrupts.check()
  return state.critic, time.monotonic() - began


def _without_policy(state: LearnerState) -> LearnerState:
  """What of a state value pretraining changes."""
  return state._replace(policy=None, policy_opt=None)


def stage_seconds(parts: Components, workdir: pathlib.Path) -> dict[str, float]:
  """Seconds that each finished stage took."""
  seconds = {}
  for stage in ("warm_start", "value_pretraining"):
    with _stage_checkpointer(parts, workdir, stage, read_only=True) as checkpointer:
      for step in checkpointer.steps()[-1:]:
        seconds[stage] = float(checkpointer.host_state(step)["seconds"])
  return seconds


def _stage_checkpointer(
  parts: Components, workdir: pathlib.Path, stage: str, *, read_only: bool = False
) -> Checkpointer:
  config: dict[str, Any] = config_lib.to_json(parts.config)
  return Checkpointer(
    workdir / "stages" / stage, config=config, keep=1, keep_best=0, read_only=read_only,
    **config_lib.comparison(parts.config),
  )  # fmt: skip


def _remove_partial(workdir: pathlib.Path, stage: Stage) -> None:
  """What a run that was stopped within the stage went on from: the stage has its result now."""
  if is_main_process():
    workdir_lib.delete(workdir / "stages" / stage / "partial")


def _require_run(run: bool, stage: str, workdir: pathlib.Path) -> None:
  if not run:
    raise ValueError(f"The stage {stage!r} has no result in {workdir} yet. Run it first.")
