"""The preference-shift simulation of the paper's online learning: the preferred style changes twice.

    python -m experiments.online_styles --workdir=runs/styles --algorithm=sao
    python -m experiments.online_styles --workdir=runs/llm --judge_url=http://localhost:8000/v1 --judge_model=NAME

This command makes one run: SAO, or `--algorithm=global_running_mean` (window 128). By default the embedded judge grades
answers by rules. `--judge_url` uses any model behind an OpenAI-compatible endpoint instead; if it needs a key,
`--judge_key_variable=OPENAI_API_KEY` names the environment variable that holds it. To compare both arms over seeds,
with plots, use `python -m experiments.ablate --suite=online`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from absl import flags, logging

from experiments.ablations import suites
from experiments.online.questions import STYLES
from experiments.online.simulation import SimulationConfig, train
from experiments.presets import online_cpu
from experiments.support import command
from experiments.tasks.options import checked
from sao_jax.io.console import Console
from sao_jax.io.metrics import read_metrics
from sao_jax.training.signals import Interrupted


def define_flags() -> None:
  flags.DEFINE_string("workdir", None, "The folder of the run.", required=True)
  flags.DEFINE_enum("algorithm", "sao", ["sao", "global_running_mean"], "The training algorithm.")
  flags.DEFINE_integer("seed", 0, "The seed of the run.")
  flags.DEFINE_integer(
    "phase_steps", online_cpu.PHASE_STEPS, "The number of learner steps between changes of the style.", lower_bound=1
  )
  flags.DEFINE_integer("warm_start_steps", None, "The supervised updates. Defaults to the preset's.", lower_bound=1)
  flags.DEFINE_string("judge_url", None, "The OpenAI-compatible endpoint of a judge. Defaults to the embedded judge.")
  flags.DEFINE_string("judge_model", "", "The name of the judge's model at the endpoint.")
  flags.DEFINE_string("judge_key_variable", None, "The environment variable with the judge's key. Defaults to no key.")


def main(argv: Sequence[str]) -> None:
  del argv
  options = flags.FLAGS
  logging.set_verbosity(logging.WARNING)
  settings = {"phase_steps": options.phase_steps}
  if options.judge_url is not None:
    settings |= {"judge_url": options.judge_url, "judge_model": options.judge_model}
    settings |= {"judge_key_variable": options.judge_key_variable}
  base = online_cpu.make_config()
  steps = checked(SimulationConfig, settings).num_steps
  base = dataclasses.replace(base, num_steps=steps, env=dataclasses.replace(base.env, options=settings))
  if options.warm_start_steps is not None:
    base = dataclasses.replace(
      base, warm_start=dataclasses.replace(base.warm_start, num_steps=options.warm_start_steps)
    )
  if options.judge_url is not None:  # each answer is one request: keep many in flight
    base = dataclasses.replace(base, engine=dataclasses.replace(base.engine, env_workers=64, wait_for_env=True))
  arm = next(arm for arm in suites.SUITES["online"].arms if arm.algorithm == options.algorithm)
  workdir = pathlib.Path(options.workdir)
  console = Console()
  try:
    train(suites.arm_config(base, arm, seed=options.seed, start=None), workdir, console=console)
  except Interrupted:
    console.print("Stopped by a signal. The same command starts RL from the beginning.")
    return
  print("step  preferred   " + "  ".join(f"{style:>10}" for style in STYLES))
  for row in read_metrics(workdir)[1]:
    now = checked(SimulationConfig, settings).preferred_at(row["step"] + 1)
    print(f"{row['step']:4d}  {now:10}  " + "  ".join(f"{row[f'eval_accuracy_{style}']:10.3f}" for style in STYLES))


if __name__ == "__main__":
  define_flags()
  command.run(main)
