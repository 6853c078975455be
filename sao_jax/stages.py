"""The two stages before RL: a supervised warm start of the policy, and pretraining of the value model.

Each stage's result is a checkpoint in `<workdir>/stages/<stage>/`; where it is there, the stage is not run again.
"""

from __future__ import annotations

import concurrent.futures
import functools
import pathlib
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from sao_jax import config as config_lib
from sao_jax.components import Components
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
from sao_jax.progress import Interrupts
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.types import Params, Trajectory

_PARTIAL = "warm_start/partial"
PRETRAINING_SEED = 2**31 + 1
"""Sampling noise of the trajectories that the value model is pretrained on."""


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
  policy = parts.init_policy()
  with _stage_checkpointer(parts, workdir, "warm_start") as checkpointer:
    if (restored := checkpointer.restore(policy)) is not None:
      return restored.state
    _require_run(run, "warm_start", workdir)
    settings = parts.config.warm_start
    console.print(parameter_report(policy, title="policy"))
    seconds = 0.0
    if settings.num_steps:
      policy, seconds = _imitate(parts, policy, workdir, console, interrupts)
    checkpointer.save(settings.num_steps, policy, {"seconds": seconds})
  shutil.rmtree(_partial(workdir), ignore_errors=True)  # of a run that was stopped within the stage
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
    _stage_checkpointer(parts, workdir, _PARTIAL) as checkpointer,
    console.stage("warm start", settings.num_steps) as bar,
    concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="demonstrations") as ahead,
  ):
    if (restored := checkpointer.restore(state)) is not None:
      start, state = restored.step, restored.state
      rng.bit_generator.state = restored.host["rng"]
      began -= restored.host["seconds"]
      bar.advance(start)
    batches = _demonstrations(parts, rng)
    coming = ahead.submit(next, batches)
    before = None
    for i in range(start + 1, settings.num_steps + 1):
      batch, packed = pack_batch(learner, coming.result()[0])
      coming = ahead.submit(next, batches)
      state, report = step(state, batch, np.int32(packed.num_microbatches))
      # One step ahead of the device and no more: a signal must not find a long queue of steps before it.
      jax.block_until_ready(before)
      before = report["loss"]
      # The loss is fetched now and then only: fetching waits for the device.
      note = f"loss {float(report['loss']):.3f}" if i % settings.log_every == 0 else None
      bar.advance(note=note)
      if i < settings.num_steps and (interrupts.anywhere() or i % settings.save_every == 0):
        checkpointer.save(i, state, {"rng": coming.result()[1], "seconds": time.monotonic() - began})
        interrupts.check()
  if skipped := int(state.skipped):
    console.print(f"{skipped} of {settings.num_steps} updates of the warm start were skipped: not finite, or no token")
  return state.params, time.monotonic() - began


def _demonstrations(parts: Components, rng: np.random.Generator) -> Iterator[tuple[list[Trajectory], dict[str, Any]]]:
  """Batches of demonstrations without end, of tasks in random order, each with the generator's state before it."""
  domain, settings = parts.domain, parts.config.warm_start
  if domain.demonstrate is None:
    steps = settings.num_steps
    raise ValueError(f"warm_start.num_steps must be 0 for a domain without demonstrations; received {steps}.")
  demonstrate = domain.demonstrate
  while True:
    before = dict(rng.bit_generator.state)
    tasks = rng.integers(domain.num_train_tasks, size=settings.batch_size)
    yield [encode_demonstration(parts, demonstrate(int(t), rng), index=i) for i, t in enumerate(tasks)], before


def encode_demonstration(parts: Components, pieces: Sequence[tuple[str, bool]], *, index: int = 0) -> Trajectory:
  """A demonstration's pieces of (text, is_action) as a trajectory, each piece tokenised by itself, as in a rollout."""
  ids = [parts.domain.tokenizer.encode(text) for text, _ in pieces]
  mask = [is_action for piece, (_, is_action) in zip(ids, pieces, strict=True) for _ in piece]
  return demonstration_trajectory(np.asarray([i for piece in ids for i in piece]), np.asarray(mask), index=index)


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
  bottleneck). After a signal, which raises `Interrupted`, the stage starts anew.

  Returns:
    The value model's parameters; None for algorithms without one.
  """
  critic = parts.init_critic(policy)
  if critic is None:
    return None
  with _stage_checkpointer(parts, workdir, "value_pretraining") as checkpointer:
    if (restored := checkpointer.restore(critic)) is not None:
      return restored.state
    _require_run(run, "value_pretraining", workdir)
    began = time.monotonic()
    settings = parts.config.critic
    console.print(parameter_report(critic, parts.config.learner.frozen_critic, title="critic"))
    if settings.pretraining_trajectories:
      with interrupts.at_once():
        trajectories = _initial_trajectories(parts, policy, console)
      critic = _fit_values(parts, policy, critic, trajectories, console, interrupts)
    checkpointer.save(settings.pretraining_trajectories, critic, {"seconds": time.monotonic() - began})
  return critic


def _initial_trajectories(parts: Components, policy: Params, console: Console) -> list[Trajectory]:
  count = parts.config.critic.pretraining_trajectories
  weights = parts.placement.for_engine(policy)
  tasks = np.random.default_rng((parts.config.seed, 2)).integers(parts.domain.num_train_tasks, size=count)
  requests = [EpisodeRequest(task_index=int(task), episode_id=i, group_id=i) for i, task in enumerate(tasks)]
  done = []
  with console.stage("initial trajectories", count) as bar:
    for trajectory in parts.rollouts.generate(lambda _: (weights, 0), requests, seed=PRETRAINING_SEED):
      done.append(trajectory)
      bar.advance()
  return sorted(done, key=lambda x: x.episode_id)  # Completion order depends on the machine's speed; this does not.


def _fit_values(
  parts: Components,
  policy: Params,
  critic: Params,
  trajectories: list[Trajectory],
  console: Console,
  interrupts: Interrupts,
) -> Params:
  config = parts.config
  learner = config_lib.pretraining_learner(config)
  assert parts.value_apply is not None  # or there would be no critic to fit
  step = parts.placement.step(make_critic_step(learner, parts.value_apply, num_updates=1, jit=False))
  state: LearnerState = parts.placement.make(functools.partial(init_state, learner), policy, critic)
  rng = np.random.default_rng((config.seed, 3))
  size = min(config.batch_size, len(trajectories))
  batches = len(trajectories) // size
  with console.stage("value pretraining", config.critic.pretraining_epochs * batches) as bar:
    for _ in range(config.critic.pretraining_epochs):
      order = rng.permutation(len(trajectories))
      for i in range(batches):
        batch, packed = pack_batch(learner, [trajectories[j] for j in order[i * size : (i + 1) * size]])
        state, report = step(state, batch, np.int32(packed.num_microbatches))
        bar.advance(note=f"explained variance {float(report['explained_variance_before']):.2f}")
        interrupts.check()
  return state.critic


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


def _partial(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / "stages" / _PARTIAL


def _require_run(run: bool, stage: str, workdir: pathlib.Path) -> None:
  if not run:
    raise ValueError(f"stage {stage} has no result in {workdir} yet; run it first (--stage={stage}, or --stage=all).")
