"""Runs one of the paper's comparisons: `python -m experiments.ablate --suite=main --seeds=5 --workdir=DIR`.

Every arm starts, seed by seed, from the same warm-started policy and differs in what the suite compares only; see
`experiments/ablations/suites.py`. Runs go through processes of their own, `--jobs` at a time; the same command goes on
where it stopped. In the workdir come `SUITE.csv` (a row per learner step and evaluation), `SUITE.md` (means with 95 %
bootstrap intervals over seeds, paired differences to SAO) and `SUITE.png`.

    --tune     first tries each arm at the same learning rates of the policy, on a seed of its own and a quarter of the
               steps, and goes on with the best (`tuned_SUITE.json`)
    --quick    every stage of every arm in minutes, at a size at which nothing is learned
    --base     the run that all arms share: another size is another base
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

from absl import app, flags

from experiments.ablations import results, run_arm, suites
from experiments.ablations.suites import Arm

DEFAULT_BASE = "experiments.presets.tool_math_cpu:make_config"
LEARNING_RATES = (1e-4, 3e-4, 1e-3)
TUNING_SEED = 10_000
TUNING_SHARE = 0.25


class Runner:
  """The processes of a suite.

  Args:
    suite: its name.
    base: `module:function` of the base run.
    workdir: where everything goes.
    quick: the small size.
    jobs: processes at a time.
  """

  def __init__(self, suite: str, *, base: str, workdir: pathlib.Path, quick: bool, jobs: int):
    self.suite = suite
    self.arms = suites.SUITES[suite].arms
    self._base_name = base
    self._base = run_arm.base_config(base, quick=quick)
    self._workdir = workdir
    self._quick = quick
    self._jobs = jobs

  def folder(self, arm: Arm, seed: int) -> pathlib.Path:
    """Where an arm's run of a seed lies."""
    return self._workdir / self.suite / arm.slug / f"seed{seed}"

  def make_starts(self, seeds: Sequence[int]) -> None:
    """The warm-started policies, which all suites in the workdir share."""
    if self._base.warm_start.num_steps:
      tasks = [(self._start(seed), ["--seed", str(seed)], "done") for seed in seeds]
      self._run_all(tasks)

  def run(self, seeds: Sequence[int], learning_rates: dict[str, float]) -> None:
    """All arms and seeds; a seed's arms follow one another, so that comparisons exist early."""
    tasks = []
    for seed in seeds:
      for arm in self.arms:
        tasks.append((self.folder(arm, seed), self._arm_flags(arm, seed, learning_rates.get(arm.slug)), "summary.json"))
    self._run_all(tasks)

  def tune(self) -> dict[str, float]:
    """The learning rate of each arm with the best training success at the end of a short run."""
    path = self._workdir / f"tuned_{self.suite}.json"
    if path.exists():
      return dict(json.loads(path.read_bytes()))
    self.make_starts([TUNING_SEED])
    steps = max(2, round(TUNING_SHARE * self._base.num_steps))
    tasks, folders = [], {}
    for arm in self.arms:
      for rate in LEARNING_RATES:
        folder = self._workdir / "tuning" / self.suite / arm.slug / f"{rate:g}"
        folders[arm.slug, rate] = folder
        tasks.append((folder, [*self._arm_flags(arm, TUNING_SEED, rate), f"--num_steps={steps}"], "summary.json"))
    self._run_all(tasks)
    found = {key: _end_success(folder) for key, folder in folders.items()}
    best = {arm.slug: max(LEARNING_RATES, key=lambda rate: found[arm.slug, rate]) for arm in self.arms}
    path.write_text(json.dumps(best, indent=2) + "\n", encoding="utf-8")
    return best

  def _start(self, seed: int) -> pathlib.Path:
    return self._workdir / "start" / f"seed{seed}"

  def _arm_flags(self, arm: Arm, seed: int, learning_rate: float | None) -> list[str]:
    chosen = [f"--suite={self.suite}", f"--arm={arm.slug}", f"--seed={seed}", f"--start={self._start(seed)}"]
    return chosen if learning_rate is None else [*chosen, f"--learning_rate={learning_rate:g}"]

  def _run_all(self, tasks: Sequence[tuple[pathlib.Path, list[str], str]]) -> None:
    """Runs what has not ended yet.

    Raises:
      RuntimeError: runs that failed, with the ends of their logs; the others have been run.
    """
    waiting = [task for task in tasks if not (task[0] / task[2]).exists()]
    with concurrent.futures.ThreadPoolExecutor(self._jobs) as pool:
      errors = [error for error in pool.map(lambda task: self._run_one(task[0], task[1]), waiting) if error]
    if errors:
      raise RuntimeError("\n".join(errors))

  def _run_one(self, folder: pathlib.Path, options: list[str]) -> str | None:
    """Runs one process; returns what went wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
      sys.executable, "-m", "experiments.ablations.run_arm", f"--base={self._base_name}", f"--folder={folder}",
      f"--quick={self._quick}", *options,
    ]  # fmt: skip
    # Two processes on two cores: each keeps to its own.
    flags_of_xla = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    log = folder / "log.txt"
    with open(log, "ab") as out:
      code = subprocess.run(
        command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "XLA_FLAGS": flags_of_xla}, check=False
      ).returncode
    print(f"{'done' if code == 0 else 'FAILED'}  {folder.relative_to(self._workdir)}", flush=True)
    if code == 0:
      return None
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
    return f"{folder} ended with code {code}:\n" + "\n".join(tail)


def _end_success(folder: pathlib.Path) -> float:
  found = json.loads((folder / "summary.json").read_bytes())["success_after"]
  return -1.0 if found is None else float(found)


def define_flags() -> None:
  flags.DEFINE_enum("suite", None, sorted(suites.SUITES), "The comparison.", required=True)
  flags.DEFINE_integer("seeds", 3, "Seeds 0, 1, ... of every arm.", lower_bound=1)
  flags.DEFINE_string("workdir", None, "Where runs and results go.", required=True)
  flags.DEFINE_string("base", DEFAULT_BASE, "module:function of the run that all arms share.")
  flags.DEFINE_bool("quick", False, "A size of minutes, at which nothing is learned.")
  flags.DEFINE_bool("tune", False, "Tune each arm's learning rate first.")
  flags.DEFINE_integer("jobs", os.cpu_count(), "Processes at a time.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
  options = flags.FLAGS
  workdir = pathlib.Path(options.workdir).absolute()
  runner = Runner(options.suite, base=options.base, workdir=workdir, quick=options.quick, jobs=options.jobs)
  seeds = range(options.seeds)
  try:
    rates = runner.tune() if options.tune else {}
    runner.make_starts(seeds)
    runner.run(seeds, rates)
  finally:  # what there is is worth a table, also after a failure
    suite = suites.SUITES[options.suite]
    rows = results.collect(options.suite, suite, runner.folder, seeds)
    if rows:
      command = shlex.join(["python", "-m", "experiments.ablate", *sys.argv[1:]])
      results.write_all(workdir, options.suite, suite, rows, command)
      print((workdir / f"{options.suite}.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
  define_flags()
  app.run(main)
