"""How much value pretraining is enough: explained variance on held-out trajectories against the number of updates.

    python -m experiments.pretraining_curve --workdir=runs/curve --trajectories=1024,4096 --updates=256

Takes a run's config as `experiments.train` does. The policy is warm-started, or starts from `policy_checkpoint`. Its
trajectories are generated once; the last `--held_out` of them measure, and each fit draws its batches from the first N
of the others, in shuffled passes. For each N, `WORKDIR/curve.csv` receives the explained variance before the first
update and after 1, 2, 4, ... updates, and the rows at the end of each line on the console show the same. The curve that
stops rising gives the amount: `critic.pretraining_trajectories` and `pretraining_epochs`.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Sequence

import jax
import matplotlib as mpl
import numpy as np
from absl import app, flags, logging
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import plots
from experiments.support import command, config_flags
from experiments.tasks.factory import make_domain
from sao_jax.io.console import Console
from sao_jax.learner import init_state, make_critic_evaluation, make_critic_step, pack_batch
from sao_jax.training import stages
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig, pretraining_learner
from sao_jax.training.initial_trajectories import initial_trajectories
from sao_jax.training.signals import StopSignals
from sao_jax.types import Params, Trajectory

DEFAULT_PRESET = str(pathlib.Path(__file__).parent / "presets" / "tool_math_cpu.py")
COLUMNS = ("trajectories", "updates", "epochs", "explained_variance", "held_out")


def define_flags() -> None:
  flags.DEFINE_list("trajectories", ["1024", "4096"], "The numbers of trajectories to fit values to.")
  flags.DEFINE_integer("held_out", 512, "The number of trajectories that measure.", lower_bound=2)
  flags.DEFINE_integer("updates", 256, "The number of updates of each fit.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  del argv
  options = flags.FLAGS
  logging.set_verbosity(logging.WARNING)
  if options.workdir is None:
    raise app.UsageError("--workdir is required: the folder of the curve.")
  counts = [int(text) for text in options.trajectories]
  config = config_flags.read(RunConfig)
  total = max(counts) + options.held_out
  config = dataclasses.replace(config, critic=dataclasses.replace(config.critic, pretraining_trajectories=total))
  workdir, console, signals = pathlib.Path(options.workdir).absolute(), Console(), StopSignals()
  with Components(config, make_domain(config)) as parts:
    policy = stages.warm_start(parts, workdir, console, signals)
    (workdir / "partial").mkdir(parents=True, exist_ok=True)
    made = initial_trajectories(parts, policy, workdir, console, signals)
    fitted, held_out = made[: -options.held_out], made[-options.held_out :]
    rows = [row for n in counts for row in curve(parts, policy, fitted[:n], held_out, options.updates, console)]
  write(workdir / "curve.csv", rows)
  plot(workdir / "curve.png", rows)


def curve(
  parts: Components,
  policy: Params,
  fitted: list[Trajectory],
  held_out: list[Trajectory],
  updates: int,
  console: Console,
) -> Iterator[dict[str, float]]:
  """Fits a fresh critic, and yields a row at 0, 1, 2, 4, ... updates and at the end."""
  learner, critic = pretraining_learner(parts.config), parts.init_critic(policy)
  assert critic is not None, "the algorithm needs a critic"
  step = parts.step(lambda _, value: make_critic_step(learner, value, num_updates=1, jit=False))
  measure = parts.step(lambda _, value: make_critic_evaluation(learner, value, jit=False))
  state = parts.placement.make(functools.partial(init_state, learner), policy, critic)
  size = min(parts.config.batch_size, len(fitted))
  rng, order = np.random.default_rng((parts.config.seed, 3)), np.zeros(0, int)
  points = {0, updates, *(2**i for i in range(updates.bit_length()))}
  for i in range(updates + 1):
    if i:
      order = order if order.size >= size else rng.permutation(len(fitted))
      batch, stats = pack_batch(learner, [fitted[j] for j in order[:size]])
      order = order[size:]
      state, _ = step(state, batch, np.int32(stats.num_microbatches))
    if i in points:
      batch, stats = pack_batch(learner, held_out)
      state, report = measure(state, batch, np.int32(stats.num_microbatches))
      found = float(jax.device_get(report["explained_variance"]))
      console.print(f"{len(fitted):6d} trajectories  {i:5d} updates  explained variance {found:.3f}")
      epochs = i * size / len(fitted)
      yield dict(zip(COLUMNS, (len(fitted), i, epochs, found, len(held_out)), strict=True))


def write(path: pathlib.Path, rows: Sequence[dict[str, float]]) -> None:
  with open(path, "w", newline="", encoding="utf-8") as file:
    writer = csv.DictWriter(file, COLUMNS)
    writer.writeheader()
    writer.writerows({key: f"{value:.6g}" for key, value in row.items()} for row in rows)


def plot(path: pathlib.Path, rows: Sequence[dict[str, float]]) -> None:
  """Plots one curve per number of trajectories."""
  with mpl.rc_context(plots.STYLE):
    figure = Figure(figsize=(7.0, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for n in dict.fromkeys(row["trajectories"] for row in rows):
      mine = [row for row in rows if row["trajectories"] == n]
      axis.plot(
        [row["updates"] for row in mine], [row["explained_variance"] for row in mine], "o-", label=f"{n:g} trajectories"
      )
    axis.set(title="Value pretraining: explained variance on held-out trajectories", xlabel="updates", xscale="symlog")
    plots.legend_beside(axis)
    figure.savefig(path)


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "The folder of the curve.")
  define_flags()
  command.run(main, flags_parser=config_flags.parser(RunConfig, default=DEFAULT_PRESET))
