"""Predicts the throughput, utilisation and staleness of a cluster by schedule, and the best split of its chips.

    python -m experiments.simulate_cluster                             # the paper's setting; see PAPER
    python -m experiments.simulate_cluster --trajectories=runs/x/trajectories.jsonl --slots=32 --token_s=0.004
    python -m experiments.simulate_cluster --decode_report=REPORT --chips=128 --min_trainer_chips=16

The third takes the step times of engine and learner from a `compile_report` and a chip's stated rates
(`simulator.step_times`). They are computed, not measured.

Prints a row per schedule, the best split of `--chips`, and one JSON object on the last line. `--plots=DIR` also draws
the speed-up against the number of engines, and utilisation and staleness. The paper gives limits (128k tokens and 300
turns) but no distributions, so the lengths, latencies and speeds of its setting are assumptions. Rely on the trends,
not on exact figures.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from absl import flags
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from experiments import plots
from experiments.presets.model_configs import MODELS
from experiments.simulator.simulator import ClusterConfig, Result, simulate
from experiments.simulator.step_times import CHIPS, StepTimes, read_report, step_times
from experiments.simulator.workload import Distributions, LogNormal, Recorded, Workload
from experiments.support import command

PAPER_WORKLOAD = Distributions(
  turns=LogNormal(median=60, sigma=0.7),
  tokens=LogNormal(median=220, sigma=0.9),
  tool_s=LogNormal(median=1.5, sigma=1.4),
  max_turns=300,
  max_tokens=131_072,
)
"""A coding agent (assumed): about 25k action tokens in 75 turns; tools take 4 s on average, with a long tail."""

PAPER = ClusterConfig(
  num_engines=16, slots=16, token_s=0.02, turn_s=0.15, batch_size=128, group_size=8, train_s=20.0, train_token_s=2.5e-5,
  transfer_s=4.0, max_staleness=8,
)  # fmt: skip
"""16 engines of 16 slots at 50 tokens/s per slot, and a trainer of about 100 s per step (assumed)."""

VARIANTS: Mapping[str, Mapping[str, Any]] = {
  "sync": {"schedule": "sync"},
  "group_async": {"schedule": "group_async", "in_flight": False},
  "group_async_in_flight": {"schedule": "group_async"},
  "async": {"schedule": "async", "in_flight": False},
  "async_in_flight": {"schedule": "async"},
}
"""The schedules to compare, as changes to a cluster."""

COLORS: Mapping[str, str] = {
  "sync": plots.GREY,
  "group_async": "#e8b98a",
  "group_async_in_flight": plots.ORANGE,
  "async": "#9dbfe4",
  "async_in_flight": plots.BLUE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
  """A division of chips between trainer and engines."""

  trainer_chips: int
  num_engines: int
  result: Result


def compare(config: ClusterConfig, workload: Workload, *, num_steps: int = 40, seed: int = 0) -> dict[str, Result]:
  """Simulates each of `VARIANTS` on the same workload."""
  return {
    name: simulate(dataclasses.replace(config, **change), workload, num_steps=num_steps, seed=seed)
    for name, change in VARIANTS.items()
  }


def best_split(
  config: ClusterConfig,
  workload: Workload,
  *,
  chips: int,
  chips_per_engine: int,
  reference_trainer_chips: int,
  min_trainer_chips: int = 1,
  num_steps: int = 20,
  seed: int = 0,
) -> list[Split]:
  """Simulates the splits of a fixed number of chips; returns them, best first.

  Args:
    config: the cluster. Its `train_s` and `train_token_s` hold for `reference_trainer_chips`; a trainer of n chips is
      assumed to take `reference_trainer_chips / n` times as long.
    workload: the episodes.
    chips: total number of chips.
    chips_per_engine: number of chips of one engine.
    reference_trainer_chips: see `config`.
    min_trainer_chips: the least number of chips that hold the trainer's state.
    num_steps: trainer steps per simulation.
    seed: seed of the episodes.
  """
  least = chips_per_engine + min_trainer_chips
  if chips < least:
    raise ValueError(f"chips must be at least chips_per_engine + {min_trainer_chips} = {least}; received {chips}.")
  most = (chips - min_trainer_chips) // chips_per_engine
  splits = []
  for num_engines in sorted({max(1, round(most * k / 16)) for k in range(1, 17)}):
    trainer_chips = chips - num_engines * chips_per_engine
    slower = reference_trainer_chips / trainer_chips
    candidate = dataclasses.replace(
      config, num_engines=num_engines, train_s=config.train_s * slower, train_token_s=config.train_token_s * slower
    )
    result = simulate(candidate, workload, num_steps=num_steps, seed=seed)
    splits.append(Split(trainer_chips=trainer_chips, num_engines=num_engines, result=result))
  return sorted(splits, key=lambda split: -split.result.trajectories_per_s)


def sweep_engines(
  config: ClusterConfig, workload: Workload, counts: Sequence[int], *, num_steps: int = 20, seed: int = 0
) -> dict[str, list[float]]:
  """Returns the trajectories per second of every variant by number of engines."""
  rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
  for count in counts:
    for name, result in compare(
      dataclasses.replace(config, num_engines=count), workload, num_steps=num_steps, seed=seed
    ).items():
      rates[name].append(result.trajectories_per_s)
  return rates


def plot_sweep(path: pathlib.Path, counts: Sequence[int], rates: Mapping[str, Sequence[float]]) -> None:
  """Plots the throughput and the speed-up over sync against the number of engines."""
  with mpl.rc_context(plots.STYLE):
    figure = Figure(figsize=(10.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name, values in rates.items():
      left.plot(counts, values, color=COLORS[name], linewidth=1.8, label=name.replace("_", " "))
      if name != "sync":
        speedups = [value / base for value, base in zip(values, rates["sync"], strict=True)]
        right.plot(counts, speedups, color=COLORS[name], linewidth=1.8)
    left.set_xscale("log", base=2)
    left.set_yscale("log")
    left.set(title="Throughput", xlabel="engines", ylabel="trajectories per second")
    right.set_xscale("log", base=2)
    right.set(title="Speed-up over sync with as many engines", xlabel="engines", ylabel="speed-up")
    right.set_ylim(bottom=0.0)
    plots.legend_beside(right, of=left)
    figure.savefig(path)


def plot_comparison(path: pathlib.Path, results: Mapping[str, Result]) -> None:
  """Plots the utilisation of engines and trainer, and the staleness."""
  with mpl.rc_context(plots.STYLE):
    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    places = range(len(results))
    left.barh([p - 0.19 for p in places], [r.slot_utilisation for r in results.values()], 0.36, color=plots.BLUE)
    left.barh([p + 0.19 for p in places], [r.trainer_utilisation for r in results.values()], 0.36, color=plots.ORANGE)
    left.set_yticks(list(places), [name.replace("_", " ") for name in results])
    left.invert_yaxis()
    left.set(title="Utilisation", xlabel="share of time: slots decoding (blue), trainer (orange)", xlim=(0, 1))
    for name, result in results.items():
      total = sum(result.staleness.values())
      shares = [count / total for count in result.staleness.values()]
      label = name.replace("_", " ")
      right.plot(list(result.staleness), shares, color=COLORS[name], marker="o", markersize=3, label=label)
    right.set(title="Staleness", xlabel="policy versions", ylabel="share of trajectories", ylim=(0, 1))
    plots.legend_beside(right)
    figure.savefig(path)


def print_table(results: Mapping[str, Result]) -> None:
  """Prints a row per schedule."""
  base = results["sync"].trajectories_per_s
  widths = {"traj/s": 9, "speed-up": 10, "tokens/s": 11, "slots": 8, "trainer": 9, "staleness": 11, "dropped": 9}
  print(f"{'schedule':24}" + "".join(f"{head:>{width}}" for head, width in widths.items()))
  for name, r in results.items():
    print(
      f"{name:24}{r.trajectories_per_s:9.3f}{r.trajectories_per_s / base:9.2f}x{r.tokens_per_s:11.0f}"
      f"{r.slot_utilisation:8.1%}{r.trainer_utilisation:9.1%}{r.staleness_mean:11.2f}{r.dropped:9d}"
    )


def define_flags() -> None:
  flags.DEFINE_string("trajectories", None, "A trajectories.jsonl to take episode lengths from.")
  flags.DEFINE_float("tool_s", PAPER_WORKLOAD.tool_s.median, "The median tool latency, in seconds.")
  flags.DEFINE_float("tool_sigma", PAPER_WORKLOAD.tool_s.sigma, "The sigma of the log-normal tool latency.")
  flags.DEFINE_integer("chips", 256, "The number of chips to split between trainer and engines.", lower_bound=2)
  flags.DEFINE_integer("chips_per_engine", 8, "The number of chips of one engine.", lower_bound=1)
  flags.DEFINE_integer("trainer_chips", 64, "The chips for which --train_s and --train_token_s hold.", lower_bound=1)
  flags.DEFINE_integer("min_trainer_chips", 1, "The least chips that hold the trainer's state.", lower_bound=1)
  flags.DEFINE_string(
    "decode_report", None,
    "A file with the output of compile_report for an engine's decode step. Replaces --token_s, --turn_s, --transfer_s, "
    "--train_s, --train_token_s and --slots by computed values, and compares the schedules on the best split.",
  )  # fmt: skip
  flags.DEFINE_enum("model", "qwen3_30b_a3b", sorted(MODELS), "The model of --decode_report.")
  flags.DEFINE_enum("chip", "v5p", sorted(CHIPS), "The chip of --decode_report.")
  flags.DEFINE_integer("context", 60_000, "The tokens of a trajectory, for --decode_report.", lower_bound=1)
  flags.DEFINE_string("plots", None, "The folder for plots. Defaults to no plots.")
  flags.DEFINE_integer("steps", 40, "The number of trainer steps measured per simulation.", lower_bound=1)
  flags.DEFINE_integer("seed", 0, "The seed of the episodes.", lower_bound=0)
  for name, default in _cluster_numbers(PAPER).items():
    define = flags.DEFINE_float if isinstance(default, float) else flags.DEFINE_integer
    define(name, default, f"The cluster's {name}; see ClusterConfig.")


def computed(config: ClusterConfig, workload: Workload) -> tuple[ClusterConfig, StepTimes]:
  """Returns the cluster with computed step times, and these; `train_token_s` is that of --trainer_chips chips."""
  options = flags.FLAGS
  model = dataclasses.replace(MODELS[options.model](), dtype="bfloat16")
  report = read_report(options.decode_report)
  rng = np.random.default_rng(0)
  episodes = [workload.draw(rng) for _ in range(2_000)]
  actions = float(np.mean([episode.tokens for episode in episodes]))
  turns = float(np.mean([episode.turns for episode in episodes]))
  if actions >= options.context:
    raise ValueError(f"--context must be above an episode's {actions:.0f} action tokens; received {options.context}.")
  times = step_times(
    report, model, CHIPS[options.chip], chips_per_engine=options.chips_per_engine, context=options.context,
    observation=(options.context - actions) / turns,
  )  # fmt: skip
  per_action = options.context / actions
  return dataclasses.replace(
    config, slots=report["slots"], token_s=times.token_s, turn_s=times.turn_s, transfer_s=times.transfer_s, train_s=0.0,
    train_token_s=times.train_chip_s * per_action / options.trainer_chips,
  ), times  # fmt: skip


def print_computed(times: StepTimes, config: ClusterConfig, splits: Sequence[Split], context: int) -> None:
  """Prints computed step times, and what each split of the chips gives."""
  options = flags.FLAGS
  print(
    f"computed, not measured ({options.model} on {options.chip}, contexts of {context:,} tokens):\n"
    f"  decode step {times.token_s * 1e3:.1f} ms, or {config.slots / times.token_s:,.0f} tokens/s from an engine of "
    f"{options.chips_per_engine} chips with {config.slots} sequences\n"
    f"  prefill of a turn {times.turn_s * 1e3:.1f} ms, weights to an engine {times.transfer_s * 1e3:.0f} ms, learner "
    f"{times.train_chip_s * 1e3:.3f} ms per token on one chip"
  )
  print(f"{'engines':>9}{'trainer chips':>15}{'traj/hour':>11}{'slots':>8}{'trainer':>9}{'staleness':>11}{'step s':>8}")
  for split in sorted(splits, key=lambda split: split.num_engines):
    r = split.result
    print(
      f"{split.num_engines:9d}{split.trainer_chips:15d}{3600 * r.trajectories_per_s:11.0f}{r.slot_utilisation:8.1%}"
      f"{r.trainer_utilisation:9.1%}{r.staleness_mean:11.2f}{1 / r.steps_per_s:8.0f}"
    )


def _cluster_numbers(config: ClusterConfig) -> dict[str, float | int]:
  return {key: value for key, value in dataclasses.asdict(config).items() if key not in ("schedule", "in_flight")}


def main(argv: Sequence[str]) -> None:
  del argv
  options = flags.FLAGS
  tool_s = LogNormal(median=options.tool_s, sigma=options.tool_sigma)
  workload: Workload = dataclasses.replace(PAPER_WORKLOAD, tool_s=tool_s)
  if options.trajectories is not None:
    workload = Recorded.read(options.trajectories, tool_s=tool_s)
  config = dataclasses.replace(PAPER, **{name: options[name].value for name in _cluster_numbers(PAPER)})
  folder = None if options.plots is None else pathlib.Path(options.plots)
  if folder is not None:  # before the simulations, in case the folder cannot be made
    folder.mkdir(parents=True, exist_ok=True)
  times = None
  if options.decode_report is not None:
    config, times = computed(config, workload)
  splits = best_split(
    config, workload, chips=options.chips, chips_per_engine=options.chips_per_engine,
    reference_trainer_chips=options.trainer_chips, min_trainer_chips=options.min_trainer_chips,
    num_steps=options.steps, seed=options.seed,
  )  # fmt: skip
  if times is not None:
    print_computed(times, config, splits, options.context)
    slower = options.trainer_chips / splits[0].trainer_chips
    config = dataclasses.replace(
      config, num_engines=splits[0].num_engines, train_token_s=config.train_token_s * slower
    )  # fmt: skip
  results = compare(config, workload, num_steps=options.steps, seed=options.seed)
  print_table(results)
  best = splits[0]
  print(
    f"best split of {options.chips} chips (async, in flight): {best.num_engines} engines of {options.chips_per_engine} "
    f"and {best.trainer_chips} for the trainer: {best.result.trajectories_per_s:.3f} trajectories/s"
  )
  if folder is not None:
    counts = [2**k for k in range(13)]
    rates = sweep_engines(config, workload, counts, seed=options.seed)
    plot_sweep(folder / "cluster_speedup.png", counts, rates)
    plot_comparison(folder / "cluster_utilisation.png", results)
  summary = {
    "trajectories_per_s": {name: result.trajectories_per_s for name, result in results.items()},
    "slot_utilisation": {name: result.slot_utilisation for name, result in results.items()},
    "trainer_utilisation": {name: result.trainer_utilisation for name, result in results.items()},
    "staleness_mean": {name: result.staleness_mean for name, result in results.items()},
    "best_split": {
      "num_engines": best.num_engines,
      "trainer_chips": best.trainer_chips,
      "trajectories_per_hour": 3600 * best.result.trajectories_per_s,
      "slot_utilisation": best.result.slot_utilisation,
      "trainer_utilisation": best.result.trainer_utilisation,
      "staleness_mean": best.result.staleness_mean,
    },
    **({} if times is None else {"computed_step_times": times._asdict()}),
  }
  print(json.dumps(summary))


if __name__ == "__main__":
  define_flags()
  command.run(main)
