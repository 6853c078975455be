"""One run of `experiments.ablate` in its own process: the start of a seed, or an arm from that start."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags, logging

from experiments.ablations import suites
from experiments.online import simulation
from experiments.support import command
from experiments.tasks.factory import FactoryError, import_named, make_domain
from sao_jax import models
from sao_jax.io.console import Console
from sao_jax.training import loop, stages
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig
from sao_jax.training.signals import StopSignals


def base_config(factory: str, *, quick: bool) -> RunConfig:
  """Calls `module:function`, which makes the run that all arms share.

  Raises:
    ValueError: there is no such function, or it does not return a RunConfig.
  """
  module, _, function = factory.partition(":")
  if not module or not function:
    raise ValueError(f"base must be module:function of a run; received {factory!r}.")
  try:
    found = import_named(module)
  except FactoryError as error:
    raise ValueError(f"base must be module:function of a run; received {factory!r}: {error}.") from error
  if not callable(make := getattr(found, function, None)):
    raise ValueError(f"base must be module:function of a run; received {factory!r}: {module} has no such function.")
  base = make()
  if not isinstance(base, RunConfig):
    raise ValueError(f"base {factory!r} must return a RunConfig; received {type(base).__name__}.")
  return suites.quick(base) if quick else base


def make_start(base: RunConfig, seed: int, folder: pathlib.Path) -> None:
  """Warm-starts the policy of a seed and saves it as a checkpoint. The file `done`, written last, marks success."""
  config = dataclasses.replace(base, seed=seed, num_steps=0, eval_episodes=0)
  loop.train(config, make_domain(config), folder / "run", run_stages=("warm_start",), console=Console())
  with Components(config, make_domain(config)) as parts:
    policy = stages.warm_start(parts, folder / "run", Console(), StopSignals(), run=False)
  models.save_hf(folder / "policy", config.policy, jax.device_get(policy))
  (folder / "done").touch()


def define_flags() -> None:
  flags.DEFINE_string("base", None, "module:function of the run that all arms share.", required=True)
  flags.DEFINE_string("folder", None, "The folder of this run.", required=True)
  flags.DEFINE_integer("seed", 0, "The seed of this run.")
  flags.DEFINE_bool("quick", False, "Uses the small size of experiments.ablate.")
  flags.DEFINE_string("suite", None, "The suite of the arm. Without it, this run makes the start of the seed.")
  flags.DEFINE_string("arm", None, "The arm, by the name of its folder.")
  flags.DEFINE_string("start", None, "The folder of the seed's start.")
  flags.DEFINE_bool("tuning", False, "Runs the arm at the base's lag and length.")
  flags.DEFINE_float("learning_rate", None, "The policy's learning rate. Defaults to the base's.")
  flags.DEFINE_integer("num_steps", None, "The number of learner steps. Defaults to the base's.")


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  options = flags.FLAGS
  folder = pathlib.Path(options.folder)
  base = base_config(options.base, quick=options.quick)
  if options.num_steps is not None:
    base = dataclasses.replace(base, num_steps=options.num_steps)
  if options.suite is None:
    make_start(base, options.seed, folder)
    return
  arm = suites.find(options.suite, options.arm)
  arm = arm.family if options.tuning else arm
  start = str(pathlib.Path(options.start) / "policy") if base.warm_start.num_steps else None
  config = suites.arm_config(base, arm, seed=options.seed, start=start, learning_rate=options.learning_rate)
  if suites.load(options.suite).simulation:
    summary: Any = simulation.train(config, folder, console=Console())
  else:
    summary = loop.train(config, make_domain(config), folder, console=Console())
  print(json.dumps(summary))


if __name__ == "__main__":
  define_flags()
  command.run(main)
