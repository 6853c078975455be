"""Trains an agent: `python -m experiments.train`.

`--config` selects another preset, and `--config.FIELD=VALUE` overrides one of its fields.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import app, flags, logging
from rich.table import Table

from experiments import plots
from experiments.support import command, config_flags
from experiments.tasks.factory import make_domain
from sao_jax.io import trajectories as trajectory_io
from sao_jax.io import workdir as workdir_lib
from sao_jax.io.console import Console
from sao_jax.parallel import distributed
from sao_jax.rollout.failures import by_count
from sao_jax.training import config as config_lib
from sao_jax.training.config import RunConfig
from sao_jax.training.signals import Interrupted, StopSignals
from sao_jax.training.trainer import Trainer
from sao_jax.utils import process_exit

DEFAULT_PRESET = str(pathlib.Path(__file__).parent / "presets" / "tool_math_cpu.py")

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The folder of the run. A run that is already there continues. Defaults to a dated folder in runs/."
)
_STAGE = flags.DEFINE_enum(
  "stage",
  "all",
  ["all", *config_lib.STAGES],
  "Runs only this stage, whose predecessors must be in the workdir. Defaults to all stages.",
)
_ALLOW_CHANGE = flags.DEFINE_list(
  "allow_change",
  [],
  "The fields that this run may change in a workdir that holds a run already, such as "
  f"learner.policy_optimizer.learning_rate. Allowed are {', '.join(sorted(config_lib.MAY_CHANGE))}.",
)


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)  # Orbax logs every file at INFO
  launch = distributed.initialize_from_environment()
  if launch is not None and _WORKDIR.value is None:
    raise app.UsageError("--workdir is required with several processes. All of them must be able to write to it.")
  config = config_flags.read(RunConfig)
  if _ALLOW_CHANGE.value:
    config = dataclasses.replace(config, may_change=tuple(_ALLOW_CHANGE.value))
  workdir = pathlib.Path(_WORKDIR.value or f"runs/{datetime.datetime.now():%Y-%m-%d_%H%M%S}")
  within = workdir.absolute()  # an environment may change the working directory
  stages = config_lib.STAGES if _STAGE.value == "all" else (_STAGE.value,)
  console = Console(quiet=not distributed.is_main_process())
  console.print(f"workdir {workdir}")
  try:
    with StopSignals() as signals, signals.interruptible():
      domain = make_domain(config)
    with Trainer(
      config, domain, within, console=console, make_domain=functools.partial(make_domain, config)
    ) as trainer:
      summary = trainer.train(run_stages=stages)
    if summary is not None and distributed.is_main_process():
      with workdir_lib.writing(within), StopSignals() as signals, signals.interruptible():
        report(within, summary, console, named=workdir)
    elif summary is None and "rl" in stages:
      console.print(f"continue    the same command, with --workdir={workdir}")
  except Interrupted:
    console.print(f"Stopped by a signal. To continue, run the same command with --workdir={workdir}.")


def report(workdir: pathlib.Path, summary: Mapping[str, Any], console: Console, *, named: pathlib.Path) -> None:
  """Reports a finished run: plots, a table, a few trajectories, and the next command.

  Args:
    workdir: absolute path of the run's folder.
    summary: the run's summary.
    console: where to report.
    named: the workdir as the user gave it.
  """
  plots.plot_run(workdir)
  samples = trajectory_io.read(workdir / "trajectories.jsonl")
  for trajectory in samples[:2] + samples[2:][-3:]:
    outcome = "solved" if trajectory.success else "not solved"
    console.print(f"[{outcome}, {trajectory.num_turns} turns] {trajectory.text}")
  if summary["n"]:
    console.print(success_table(summary))
  if summary["failed_episodes"]:
    kinds = by_count(summary["failed_by_kind"])
    console.print(f"failed      {summary['failed_episodes']} episodes of RL, which were not trained on: {kinds}")
  seconds = ", ".join(f"{stage} {value:.0f} s" for stage, value in summary["seconds_by_stage"].items())
  console.print(f"time        {summary['seconds_total']:.0f} s ({seconds})")
  console.print(f"plots       {named / 'plots'}")
  console.print(f"checkpoint  {named / 'checkpoints' / str(summary['num_steps'])}")
  console.print(f"evaluate    python -m experiments.evaluate --workdir={named}")
  console.print(f"export      python -m experiments.export --workdir={named} --out=DIR")


WHEN = ("before", "after")


def success_table(summary: Mapping[str, Any]) -> Table:
  """Makes the table of held-out success before and after RL from the summary of a run with evaluations.

  A failed episode is not an unsolved one, but counts in n. The mean reward, which failed episodes do not have, is shown
  where it differs from the success of the others.
  """
  table = Table(title="held-out success, pass@1")
  rewards = {when: summary[f"reward_{when}"] for when in WHEN}  # None in a run that version 0.3 began
  rewarded = any(_differs_from_success(summary, when) for when in WHEN)
  for column in ("", "success", "95 % interval", "n", "unsolved", "failed", *(["reward"] if rewarded else [])):
    table.add_column(column)
  for when in WHEN:
    low, high = summary[f"success_{when}_interval"]
    rate, n, failed = summary[f"success_{when}"], summary["n"], summary[f"eval_failed_{when}"]
    counts = ("?", "?") if failed is None else (str(n - failed - round(rate * n)), str(failed))
    reward = [] if not rewarded else ["?" if rewards[when] is None else f"{rewards[when]:.3g}"]
    table.add_row(f"{when} RL", f"{rate:.3f}", f"{low:.3f} to {high:.3f}", str(n), *counts, *reward)
  return table


def _differs_from_success(summary: Mapping[str, Any], when: str) -> bool:
  reward, n, failed = summary[f"reward_{when}"], summary["n"], summary[f"eval_failed_{when}"] or 0
  return reward is not None and failed < n and not math.isclose(reward, summary[f"success_{when}"] * n / (n - failed))


if __name__ == "__main__":
  with process_exit.exit_after_main():
    command.run(main, flags_parser=config_flags.parser(RunConfig, default=DEFAULT_PRESET))
