"""Evaluates a run's policy on held-out tasks: `python -m experiments.evaluate --workdir=runs/NAME --episodes=1000`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from absl import app, flags, logging

from experiments import config_flags
from experiments.domains.factory import make_domain
from sao_jax import config as config_lib
from sao_jax import evaluation, exits, loop
from sao_jax.components import Components
from sao_jax.config import RunConfig
from sao_jax.io import trajectories as trajectory_io
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.types import Params


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
  logging.set_verbosity(logging.WARNING)
  workdir = pathlib.Path(flags.FLAGS.workdir)
  config = config_flags.from_config_dict(RunConfig, json.loads((workdir / "config.json").read_bytes()))
  with Components(config, make_domain(config)) as parts:
    step, policy = restore_policy(parts, workdir)
    weights = parts.placement.for_engine(policy)
    result = evaluation.evaluate(
      parts.rollouts, parts.domain, weights, num_episodes=flags.FLAGS.episodes or config.eval_episodes, version=step
    )
  if flags.FLAGS.samples is not None:
    trajectory_io.write(flags.FLAGS.samples, result.trajectories, step=step)
  print(
    f"checkpoint {step}: success {result.success_rate:.3f} (95 % interval {result.low:.3f} to {result.high:.3f}), "
    f"n = {result.n}, {result.turns_mean:.2f} turns, {result.failed} failed episodes"
  )


def restore_policy(parts: Components, workdir: pathlib.Path) -> tuple[int, Params]:
  """The policy of the newest checkpoint, and its step.

  Raises:
    ValueError: the workdir holds no checkpoint.
  """
  json_config = config_lib.to_json(parts.config)
  with Checkpointer(workdir, config=json_config, may_differ=config_lib.MAY_DIFFER, read_only=True) as checkpointer:
    restored = checkpointer.restore(loop.checkpoint_template(parts))
  if restored is None:
    raise ValueError(f"{workdir} holds no checkpoint.")
  return restored.step, restored.state["learner"].policy


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
  flags.DEFINE_integer("episodes", None, "Held-out episodes; default: the run's eval_episodes.", lower_bound=1)
  flags.DEFINE_string("samples", None, "Append every evaluated trajectory to this JSONL file.")
  with exits.whatever_is_left():
    app.run(main)
