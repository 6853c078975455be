"""One run of `experiments.chaos` in its own process: a tiny training job that keeps a ledger and may kill itself.

The ledger, `ledger.jsonl` in the workdir, records the episodes of each learner step and their staleness. The file
`.windows` beside the workdir records when this process began and ended each weight publication, checkpoint write,
evaluation and restore. It shows which of them a kill interrupted.
"""

from __future__ import annotations

import functools
import os
import pathlib
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags, logging

from experiments.support import command
from experiments.tasks import digits
from sao_jax.io import jsonl
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.io.console import Console
from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.models import ModelConfig
from sao_jax.rollout import EngineConfig, schedules, weight_sync
from sao_jax.training import evaluation, loop
from sao_jax.training.config import CheckpointConfig, CriticConfig, EnvConfig, RunConfig, Schedule, WarmStartConfig
from sao_jax.types import Trajectory

LEDGER = "ledger.jsonl"
WINDOWS: Mapping[str, Sequence[tuple[Any, str]]] = {
  "publication": ((weight_sync.WeightStore, "publish"), (weight_sync.WeightHistory, "publish")),
  "checkpoint": ((Checkpointer, "_write"),),
  "evaluation": ((evaluation, "evaluate"),),
  "restore": ((Checkpointer, "restore"),),
}
"""The operations that a kill may interrupt, with the functions that perform them."""
BATCH_SIZE = 16


def make_config(schedule: Schedule, *, num_steps: int) -> RunConfig:
  """Makes a job of seconds that runs every stage. In `async`, tools take 5 ms so that rollouts and learner overlap."""
  in_background = schedule == "async"
  return RunConfig(
    schedule=schedule,
    lag=2 if schedule == "lagged" else 0,
    lag_switch_chunks=1 if schedule == "lagged" else None,
    max_staleness=3,
    num_steps=num_steps,
    batch_size=BATCH_SIZE,
    eval_episodes=16,
    policy=ModelConfig(
      model_type="qwen3_moe", vocab_size=len(digits.VOCABULARY), hidden_size=16, num_layers=2, num_heads=2,
      num_kv_heads=1, head_dim=8, intermediate_size=32, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16,
      init_std=0.25,
    ),
    warm_start=WarmStartConfig(num_steps=20, batch_size=32, optimizer=OptimizerConfig(learning_rate=1e-2)),
    critic=CriticConfig(pretraining_trajectories=32, pretraining_epochs=1),
    learner=learner_config(
      "sao", eps_low=0.3, eps_high=5.0, row_length=32, rows_per_microbatch=4, min_microbatches=4,
      policy_optimizer=OptimizerConfig(learning_rate=1e-3),
      critic_optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    ),
    engine=EngineConfig(
      num_slots=8, max_len=32, max_action_tokens=6, max_turns=4, chunk_steps=4, token_budget=32,
      env_workers=4 if in_background else 0, env_timeout_s=30.0 if in_background else None,
    ),
    env=EnvConfig(factory="experiments.tasks.digits:make_domain", options={"sleep_s": 0.005 * in_background}),
    checkpoint=CheckpointConfig(every_steps=2, keep=2, keep_best=1),
  )  # fmt: skip


def keep_ledger(workdir: pathlib.Path) -> None:
  """Records every batch that a schedule gives the learner."""
  ledger = jsonl.JsonlFile(workdir / LEDGER)

  def recorded(next_batch: Callable[..., list[Trajectory]]) -> Callable[..., list[Trajectory]]:
    @functools.wraps(next_batch)
    def wrapper(schedule: Any, version: int) -> list[Trajectory]:
      batch = next_batch(schedule, version)
      episodes = [trajectory.episode_id for trajectory in batch]
      staleness = [version - trajectory.oldest_version for trajectory in batch]
      ledger.append({"step": version + 1, "episodes": episodes, "staleness": staleness})
      return batch

    return wrapper

  for kind in (schedules.LaggedSchedule, schedules.AsyncSchedule):
    kind.next_batch = recorded(kind.next_batch)  # type: ignore[method-assign]


def windows_log(workdir: pathlib.Path) -> pathlib.Path:
  """Returns the path of the file of `watch_windows`."""
  return workdir.with_suffix(".windows")


def watch_windows(workdir: pathlib.Path, place: str | None, occurrence: int, rng: random.Random) -> None:
  """Logs the beginning (+) and end (-) of every call of `WINDOWS`, and arranges for SIGKILL during one of them.

  Args:
    workdir: the run's folder.
    place: a key of `WINDOWS`, or None for no kill.
    occurrence: number of the call in this process, from 1. The kill comes within the duration of the previous call.
    rng: decides the moment.
  """
  log = os.open(windows_log(workdir), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)

  def watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    calls, took = 0, 0.002

    @functools.wraps(original)
    def wrapper(*args: Any, **options: Any) -> Any:
      nonlocal calls, took
      calls += 1
      os.write(log, f"+{name}\n".encode())
      began = time.monotonic()
      if name == place and calls == occurrence:
        threading.Timer(rng.uniform(0.0, took), os.kill, (os.getpid(), signal.SIGKILL)).start()
      try:
        return original(*args, **options)
      finally:
        took = time.monotonic() - began
        os.write(log, f"-{name}\n".encode())

    return wrapper

  for name, functions in WINDOWS.items():
    for owner, method in functions:
      setattr(owner, method, watched(name, getattr(owner, method)))


def killed_inside(workdir: pathlib.Path) -> list[str]:
  """Returns the operations that the last process of a workdir had begun and not ended when it died."""
  if not windows_log(workdir).exists():
    return []
  lines = windows_log(workdir).read_text().split()
  return [name for name in WINDOWS if lines.count(f"+{name}") > lines.count(f"-{name}")]


def define_flags() -> None:
  flags.DEFINE_string("workdir", None, "The run's folder.", required=True)
  flags.DEFINE_enum("schedule", "sync", ["sync", "lagged", "async"], "The schedule of the run.")
  flags.DEFINE_integer("num_steps", 12, "The number of learner steps.")
  flags.DEFINE_enum("place", None, list(WINDOWS), "The operation during which to die. Defaults to no kill.")
  flags.DEFINE_integer("occurrence", 1, "The number of the call of that operation in this process, from 1.")
  flags.DEFINE_integer("seed", 0, "The seed of the moment within the call.")


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  options = flags.FLAGS
  workdir = pathlib.Path(options.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  keep_ledger(workdir)
  watch_windows(workdir, options.place, options.occurrence, random.Random(options.seed))
  config = make_config(options.schedule, num_steps=options.num_steps)
  loop.train(config, digits.make_domain(**config.env.options), workdir, console=Console())


if __name__ == "__main__":
  define_flags()
  command.run(main)
