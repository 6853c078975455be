"""Evaluates a policy: pass@1 on held-out tasks, averaged over runs.

    python -m experiments.evaluate --workdir=runs/NAME --episodes=1000
    python -m experiments.evaluate --workdir=runs/NAME --step=50 --data=PROBLEMS.jsonl
    python -m experiments.evaluate --checkpoint=DIR --data=PROBLEMS.jsonl --out=results/mine
    python -m experiments.evaluate --checkpoint=DIR --benchmark=AIME2025 --data=aime2025.jsonl --out=results/aime
    python -m experiments.evaluate --checkpoint=MODEL.gguf --benchmark=reasoning_gym:chain_sum --max_len=256 --notool

The first command evaluates the newest checkpoint of a run on that run's own tasks; the second an earlier one, on a file
of your own problems. The others evaluate a Hugging Face directory or a GGUF file with its chat template, on your own
problems or on a benchmark (`experiments.support.benchmark_sets`). Their defaults are the paper's settings: temperature
1, top-p 1, up to 50 turns, 131,072 tokens, Python as a tool, 16 or 4 runs. math-verify grades the answers.

Every sample is written to `OUT/samples.jsonl` when it ends. The same command continues where it was stopped, with the
same samples as without the interruption. It refuses to continue if the checkpoint or the problems have changed.
Episodes of all runs are decoded together, `--num_slots` at a time. The interval is over problems; see
`evaluation.interval_over_problems`. A problem that occurs twice in a file counts twice, with a warning. An empty
reference answer is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from absl import app, flags, logging

from experiments.support import benchmark_sets, command, config_flags, recorded_config
from experiments.support.fingerprint import fingerprint
from experiments.tasks.factory import find_factory, make_domain
from sao_jax import models
from sao_jax.io import trajectories as trajectory_io
from sao_jax.io import workdir as workdir_lib
from sao_jax.io.jsonl import JsonlFile, cut_after_step
from sao_jax.learner.algorithms import learner_config
from sao_jax.rollout import EngineConfig, TooManyFailuresError
from sao_jax.rollout.failures import by_count
from sao_jax.training import config as config_lib
from sao_jax.training import evaluation, pretrained, run_state
from sao_jax.training.components import Components
from sao_jax.training.config import EnvConfig, RunConfig
from sao_jax.types import Params
from sao_jax.utils import process_exit


def define_flags() -> None:
  flags.DEFINE_string("workdir", None, "The folder of a run to evaluate.")
  flags.DEFINE_integer("episodes", None, "The number of held-out episodes. Defaults to eval_episodes.", lower_bound=1)
  flags.DEFINE_integer("step", None, "The learner step of the run's checkpoint. Defaults to the newest.", lower_bound=0)
  flags.DEFINE_string("samples", None, "With --workdir, appends every trajectory to this JSONL file.")
  flags.DEFINE_string("checkpoint", None, "The Hugging Face directory or GGUF file to evaluate.")
  flags.DEFINE_string("benchmark", None, f"One of {', '.join(benchmark_sets.BENCHMARKS)}, or reasoning_gym:TASK.")
  flags.DEFINE_string("data", None, "The JSONL or CSV file of the benchmark as published, or of your own problems.")
  flags.DEFINE_string("out", None, "The folder for samples and the result.")
  flags.DEFINE_integer("num_runs", None, "The number of runs. Defaults to the paper's.", lower_bound=1)
  flags.DEFINE_integer("num_tasks", 100, "The number of problems of a reasoning-gym task.", lower_bound=1)
  flags.DEFINE_string("settings", "{}", "The settings of a reasoning-gym task, as a Python dictionary.")
  flags.DEFINE_integer("max_turns", 50, "The maximum number of actions per episode.", lower_bound=1)
  flags.DEFINE_integer("max_len", 131_072, "The maximum number of tokens per episode.", lower_bound=2)
  flags.DEFINE_integer("max_action_tokens", None, "The maximum tokens per action. Unlimited by default.", lower_bound=1)
  flags.DEFINE_float("temperature", 1.0, "The sampling temperature.")
  flags.DEFINE_float("top_p", 1.0, "The probability mass of nucleus sampling.")
  flags.DEFINE_bool("tool", True, "Offers Python as a tool.")
  flags.DEFINE_integer("num_slots", 16, "The number of episodes decoded at a time.", lower_bound=1)
  flags.DEFINE_enum("dtype", None, models.config.DTYPES, "The dtype of computation. Defaults to the checkpoint's.")


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  options = flags.FLAGS
  check(options, [name for name in (*OF_RUNS, *OF_BENCHMARKS) if options[name].present])
  if options.workdir is not None:
    evaluate_run(pathlib.Path(options.workdir), options.episodes, options.samples, options.step, options.data)
  else:
    print(describe(evaluate_benchmark(options)))


OF_RUNS = ("episodes", "samples", "step")
"""Flags that apply only with --workdir."""
OF_BENCHMARKS = (
  "benchmark", "out", "num_runs", "num_tasks", "settings", "max_turns", "max_len", "max_action_tokens",
  "temperature", "top_p", "tool", "num_slots", "dtype",
)  # fmt: skip
"""Flags that apply only with --checkpoint; a run is evaluated on its own tasks with its own settings."""


def check(options: Any, given: Sequence[str]) -> None:
  """Checks that the given flags go together.

  Args:
    options: an object with the flags as attributes.
    given: names of the flags on the command line.

  Raises:
    UsageError: the flags do not go together.
  """
  if (options.workdir is None) == (options.checkpoint is None):
    raise app.UsageError("exactly one of --workdir and --checkpoint is required.")
  of, others = ("checkpoint", OF_BENCHMARKS) if options.checkpoint is None else ("workdir", OF_RUNS)
  if wrong := [name for name in given if name in others]:
    raise app.UsageError(f"--{wrong[0]} needs --{of}: a run is evaluated on its own tasks, with its own settings.")
  if options.checkpoint is None:
    return
  if (options.benchmark is None and options.data is None) or options.out is None:
    raise app.UsageError("--checkpoint needs --benchmark or --data, and --out.")
  benchmark_sets.default_runs(options.benchmark)
  if "settings" in given:
    parse_settings(options.settings)


def parse_settings(text: str) -> dict[str, Any]:
  """Parses the dictionary in `--settings`.

  Raises:
    UsageError: the text is not a dictionary.
  """
  settings = config_flags.parse_mapping(text)
  if settings is None:
    raise app.UsageError(f"--settings must be a Python dictionary such as {{'min_terms': 2}}; received {text!r}.")
  return settings


def evaluate_run(
  workdir: pathlib.Path, episodes: int | None, samples: str | None, step: int | None = None, data: str | None = None
) -> None:
  """Prints the success of a run's policy on held-out tasks.

  Args:
    workdir: the run's folder.
    episodes: number of episodes; None: the run's, or one for each problem of `data`.
    samples: file for the trajectories.
    step: of the checkpoint; None: the newest.
    data: file of problems in place of the run's held-out tasks.

  Raises:
    ValueError: the workdir holds no checkpoint, or `data` is given and the task of the run reads no file.
    CheckpointError: there is no intact checkpoint of this step.
    TooManyFailuresError: every episode failed.
  """
  config = recorded_config.read(workdir)
  if data is not None:
    config = with_problems(config, data)
  with Components(config, make_domain(config), learning=False) as parts:
    step, policy = restore_policy(parts, workdir, step)
    episodes = episodes or (config.eval_episodes if data is None else parts.domain.num_eval_tasks)
    weights = parts.for_engine(policy)
    result = evaluation.evaluate(
      parts.rollouts, parts.domain, weights, num_episodes=episodes, version=step
    )
    if result.failed == result.n:
      raise all_failed(result.n, parts)
  if samples is not None:
    trajectory_io.write(samples, result.trajectories, step=step)
  kinds = f": {by_count(result.failed_by_kind)}" if result.failed else ""
  print(
    f"checkpoint {step}: success {result.success_rate:.3f} (95 % interval {result.low:.3f} to {result.high:.3f}), "
    f"n = {result.n}, mean reward {result.reward_mean:.3g}, {result.turns_mean:.2f} turns, "
    f"{result.n - result.failed - result.solved} unsolved, {result.failed} failed episodes{kinds}"
  )


def with_problems(config: RunConfig, data: str) -> RunConfig:
  """Returns the config with another file of held-out problems.

  Raises:
    ValueError: the task has no option `held_out`.
    FactoryError: the task's function does not exist.
  """
  takes = {*config.env.options, *inspect.signature(find_factory(config)).parameters}
  if "held_out" not in takes:
    raise ValueError(f"--data needs a run whose task has the option held_out; received {config.env.factory!r}.")
  options = {**config.env.options, "held_out": data}
  return dataclasses.replace(config, env=dataclasses.replace(config.env, options=options))


def evaluate_benchmark(options: Any) -> evaluation.PassAtOne:
  """Runs the missing episodes of a benchmark and writes `OUT/result.json`.

  Args:
    options: an object with the flags as attributes.

  Raises:
    ValueError: the benchmark or the engine rejects a setting, or the folder holds another evaluation.
    TooManyFailuresError: every episode failed; nothing is written.
  """
  out = pathlib.Path(options.out)
  num_runs = options.num_runs or benchmark_sets.default_runs(options.benchmark)
  model, params = load(options.checkpoint, options.dtype)
  config = benchmark_config(options, model)
  # Before anything is written: the user can correct the problems and give the same command again.
  domain = make_domain(config)
  out.mkdir(parents=True, exist_ok=True)
  with contextlib.closing(domain), workdir_lib.WorkdirLock(out):
    inputs = {name: fingerprint(x) for name in ("checkpoint", "data") if (x := getattr(options, name)) is not None}
    record = {**config_lib.to_json(config), "inputs": inputs}
    missing = {"inputs", *config_lib.comparison(config)["may_be_missing"]}
    workdir_lib.write_or_check_config(out, record, may_differ=("engine.num_slots",), may_be_missing=missing)
    samples = out / "samples.jsonl"
    cut_after_step(samples, 0)  # a kill may have left half a line at the end
    known = trajectory_io.read(samples) if samples.exists() else []
    with Components(config, domain, learning=False) as parts:
      weights = parts.placement.for_engine(parts.placement.put(params))
      file = JsonlFile(samples)
      try:
        result = evaluation.evaluate_runs(
          parts.rollouts, parts.domain, weights, num_runs=num_runs, known=known,
          on_done=lambda trajectory: file.append(trajectory_io.to_json(trajectory)),
        )  # fmt: skip
      finally:
        file.close()
      if result.failed == num_runs * result.num_problems:
        (out / "config.json").unlink()  # without samples, other settings are fine the next time
        raise all_failed(result.failed, parts)
  row = {"benchmark": options.benchmark, "checkpoint": options.checkpoint, **dataclasses.asdict(result)}
  (out / "result.json").write_text(json.dumps(row, indent=2, allow_nan=False) + "\n", encoding="utf-8")
  return result


def load(checkpoint: str, dtype: str | None) -> tuple[models.ModelConfig, Params]:
  """Loads a checkpoint; returns its model config and parameters."""
  path = pathlib.Path(checkpoint)
  kind = {} if dtype is None else {"dtype": dtype, "param_dtype": dtype}
  return models.load_gguf(path, **kind) if path.suffix == ".gguf" else models.load_hf(path, **kind)


def benchmark_config(options: Any, model: models.ModelConfig) -> RunConfig:
  """Makes the config of the evaluation: a run without steps."""
  max_len = options.max_len
  return RunConfig(
    num_steps=0,
    schedule="sync",
    policy=model,
    learner=learner_config("sao", row_length=max_len, temperature=options.temperature),
    engine=EngineConfig(
      num_slots=options.num_slots,
      max_len=max_len,
      max_action_tokens=min(options.max_action_tokens or max_len, max_len),
      max_turns=options.max_turns,
      temperature=options.temperature,
      top_p=options.top_p,
      token_budget=512,
    ),
    env=EnvConfig(
      factory="experiments.support.benchmark_sets:make_domain",
      options={
        "benchmark": options.benchmark,
        "checkpoint": options.checkpoint,
        "data": options.data,
        "tool": options.tool,
        "max_turns": options.max_turns,
        "num_tasks": options.num_tasks,
        "settings": parse_settings(options.settings),
      },
    ),
  )


def describe(result: evaluation.PassAtOne) -> str:
  """Formats the result in one line."""
  return (
    f"pass@1 {result.mean:.3f} (95 % interval over problems {result.low:.3f} to {result.high:.3f}), mean of "
    f"{result.num_runs} runs of {result.num_problems} problems (lowest {min(result.by_run):.3f}, highest "
    f"{max(result.by_run):.3f}), {result.turns_mean:.2f} turns, {result.truncated} truncated, {result.failed} failed"
  )


def all_failed(count: int, parts: Components) -> TooManyFailuresError:
  """Makes the error for an evaluation without a successful episode, with the kinds of failures."""
  kinds = by_count(parts.rollouts.counters()["failed_by_kind"])
  return TooManyFailuresError(
    f"all {count} episodes failed, so nothing was measured: {kinds}; the first of each kind is logged above."
  )


def restore_policy(parts: Components, workdir: pathlib.Path, step: int | None = None) -> tuple[int, Params]:
  """Restores the policy of a checkpoint, by default the newest; returns its step and parameters.

  Raises:
    ValueError: the workdir holds no checkpoint.
    CheckpointError: there is no intact checkpoint of this step.
  """
  return pretrained.restore_policy(workdir, run_state.checkpoint_template(parts)["learner"].policy, step=step)


if __name__ == "__main__":
  define_flags()
  with process_exit.exit_after_main():
    command.run(main)
