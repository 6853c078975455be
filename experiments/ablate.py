"""Runs one of the paper's comparisons: `python -m experiments.ablate --suite=main --seeds=5 --workdir=DIR`.

For each seed, all arms start from the same warm-started policy and differ only in what the suite compares; see
`experiments/ablations/suites.py`. Each run has its own process, and `--jobs` of them run at a time. The same command
continues where it stopped. An arm that belongs to several suites is run once per workdir. `WORKDIR/SUITE` receives
`SUITE.csv` (a row per learner step and evaluation), `SUITE.md` (means with 95 % bootstrap intervals over seeds and
paired differences to SAO) and `SUITE.png`.

    --tune     First tunes the policy's learning rate of each arm. All arms try the same rates, on a separate seed and
               for a share of the steps; the best rate is used and kept in `tuned.json`. An arm at several lags is
               tuned once, at the base's lag. Later commands in the workdir use the tuned rates without this flag;
               arms that were not tuned use the base's rate.
    --quick    Runs every stage of every arm in minutes, at a size at which nothing is learned.
    --base     Names the run that all arms share. Use it to change the size of the comparison.
    --report   Runs nothing. Rebuilds the tables and plots of all suites in the workdir from their CSV files, and the
               tables of RESULTS.md if that file is in the working directory: --report --workdir=experiments/results
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

from experiments.ablations import report, results, run_arm, suites, tuning
from experiments.ablations.suites import Arm
from experiments.support import command, compilation
from sao_jax.io import workdir as workdir_lib
from sao_jax.training import config as config_lib
from sao_jax.training.health import RunStoppedError

LEARNING_RATES = (0.25, 0.5, 1.0, 2.0)
"""The rates that are tried, as multiples of the base's learning rate."""
TUNING_SEED = 10_000


class Runner:
  """Runs the processes of a suite.

  Args:
    suite: name of the suite.
    base: `module:function` of the base run; None uses the suite's.
    workdir: folder of all runs. Suites that use the same workdir share starts, learning rates and runs.
    quick: whether to use the small size.
    jobs: number of processes at a time.

  Raises:
    ValueError: the workdir holds runs of another base.
  """

  def __init__(self, suite: str, *, base: str | None, workdir: pathlib.Path, quick: bool, jobs: int):
    self.name = suites.folder_of(suite)
    self.suite = suites.load(suite)
    self._suite_flag = suite
    self._base_name = base or self.suite.base
    self._base = run_arm.base_config(self._base_name, quick=quick)
    # Suites with their own task share nothing with the others.
    self._workdir = workdir / self.name if self.suite.simulation else workdir
    self._results = workdir / self.name
    self._quick = quick
    self._jobs = jobs
    tuned = self._workdir / "tuned.json"
    self._rates: dict[str, float] = json.loads(tuned.read_bytes()) if tuned.exists() else {}
    (self._workdir / "base").mkdir(parents=True, exist_ok=True)
    record, missing = config_lib.to_json(self._base), config_lib.comparison(self._base)["may_be_missing"]
    workdir_lib.write_or_check_config(self._workdir / "base", record, may_be_missing=missing)

  def folder(self, arm: Arm, seed: int) -> pathlib.Path:
    """Returns the folder of an arm's run: one per settings and seed, whichever suite asks for it."""
    return self._workdir / "runs" / f"{arm.slug}_lr{self.learning_rate(arm):g}" / f"seed{seed}"

  def learning_rate(self, arm: Arm) -> float:
    """Returns the tuned learning rate of an arm, or the base's, times the arm's factor."""
    return arm.rate_factor * self._rates.get(arm.family.slug, self._base.learner.policy_optimizer.learning_rate)

  def print_rates(self) -> None:
    """Prints which learning rates are used, if an earlier command tuned some."""
    if self._rates:
      untuned = [arm.name for arm in self.suite.arms if arm.family.slug not in self._rates]
      others = f"; the base's for {', '.join(untuned)}" if untuned else ""
      print(f"learning rates: from {self._workdir / 'tuned.json'}{others}", flush=True)

  def make_starts(self, seeds: Sequence[int]) -> None:
    """Trains the warm-started policy of each seed."""
    if self._base.warm_start.num_steps:
      tasks = [(self._start(seed), ["--seed", str(seed)], "done") for seed in seeds]
      self._run_all(tasks)

  def run(self, seeds: Sequence[int]) -> None:
    """Runs all arms and seeds. All arms of a seed run before the next seed, so that comparisons exist early."""
    tasks = []
    for seed in seeds:
      for arm in self.suite.arms:
        tasks.append((self.folder(arm, seed), self._arm_flags(arm, seed, self.learning_rate(arm)), "summary.json"))
    self._run_all(tasks)

  def tune(self) -> None:
    """Chooses the learning rate of each arm: the one with the most training success at the end of a short run."""
    path = self._workdir / "tuned.json"
    missing = {arm.family.slug: arm for arm in self.suite.arms if arm.family.slug not in self._rates}
    if not missing:
      return
    self.make_starts([TUNING_SEED])
    steps = self._base.num_steps
    if self.suite.tuning_share < 1.0:
      steps = max(2, round(self.suite.tuning_share * steps))
    rates = [factor * self._base.learner.policy_optimizer.learning_rate for factor in LEARNING_RATES]
    tasks, folders = [], {}
    for slug, arm in missing.items():
      for rate in rates:
        folder = self._workdir / "tuning" / slug / f"{rate:g}"
        folders[slug, rate] = folder
        options = [*self._arm_flags(arm, TUNING_SEED, rate), f"--num_steps={steps}", "--tuning"]
        tasks.append((folder, options, "summary.json"))
    self._run_all(tasks)
    found = {key: tuning.end_success(folder, self.suite.tuning_end) for key, folder in folders.items()}
    for slug in missing:
      self._rates[slug] = max(rates, key=lambda rate: found[slug, rate])
    path.write_text(json.dumps(self._rates, indent=2) + "\n", encoding="utf-8")

  def write_results(self, seeds: Sequence[int], command: str) -> None:
    """Writes the CSV file, the table and the plots of the runs that have finished."""
    rows = results.collect(self.name, self.suite, self.folder, self.learning_rate, seeds)
    if rows:
      outcomes = tuning.collect(self.suite, self._workdir / "tuning")
      results.write_all(self._results, self.name, self.suite, rows, outcomes, command)
      print((self._results / f"{self.name}.md").read_text(encoding="utf-8"))

  def _start(self, seed: int) -> pathlib.Path:
    return self._workdir / "start" / f"seed{seed}"

  def _arm_flags(self, arm: Arm, seed: int, learning_rate: float) -> list[str]:
    return [
      f"--suite={self._suite_flag}", f"--arm={arm.slug}", f"--seed={seed}", f"--start={self._start(seed)}",
      f"--learning_rate={learning_rate!r}",
    ]  # fmt: skip

  def _run_all(self, tasks: Sequence[tuple[pathlib.Path, list[str], str]]) -> None:
    """Runs the tasks that have not finished yet.

    Raises:
      RunStoppedError: some runs failed; the message shows the ends of their logs. The others have finished.
    """
    waiting = [task for task in tasks if not (task[0] / task[2]).exists()]
    with concurrent.futures.ThreadPoolExecutor(self._jobs) as pool:
      errors = [error for error in pool.map(lambda task: self._run_one(*task), waiting) if error]
    if errors:
      raise RunStoppedError("\n".join(errors))

  def _run_one(self, folder: pathlib.Path, options: list[str], last: str) -> str | None:
    """Runs one process, which writes the file `last` when it finishes; returns an error message or None."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [
      sys.executable, "-m", "experiments.ablations.run_arm", f"--base={self._base_name}", f"--folder={folder}",
      f"--quick={self._quick}", *options,
    ]  # fmt: skip
    environment = {
      **os.environ,
      # With one process per core, each process uses a single thread.
      "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip(),
      # Arms share most of their compiled programs, and seeds share all of them.
      **compilation.shared_cache(self._workdir / "compiled"),
    }
    log = folder / "log.txt"
    with open(log, "ab") as out:
      code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    # A run that was stopped by a signal also exits with code 0; its log says that it can be continued.
    ended = code == 0 and (folder / last).exists()
    print(f"{'done' if ended else 'FAILED'}  {folder.relative_to(self._workdir)}", flush=True)
    if ended:
      return None
    tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:]
    return f"{folder} ended with code {code} and without {last}:\n" + "\n".join(tail)


def usable_cores() -> int:
  """Returns the number of cores that this process may use, which can be fewer than the machine has."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def define_flags() -> None:
  flags.DEFINE_string(
    "suite", None, f"The comparison: one of {', '.join(sorted(suites.SUITES))}, or MODULE:NAME of your own. Required "
    "without --report.",
  )  # fmt: skip
  flags.DEFINE_integer("seeds", 3, "The number of seeds of every arm. Seeds are 0, 1, ....", lower_bound=1)
  flags.DEFINE_string("workdir", None, "The folder for runs and results.", required=True)
  flags.DEFINE_string("base", None, "module:function of the run that all arms share. Defaults to the suite's.")
  flags.DEFINE_bool("quick", False, "Uses a size that takes minutes, at which nothing is learned.")
  flags.DEFINE_bool("tune", False, "Tunes the learning rate of each arm first.")
  flags.DEFINE_bool("report", False, "Rebuilds the tables and plots from the workdir's CSV files and runs nothing.")
  flags.DEFINE_integer(
    "jobs", usable_cores(), "The number of processes at a time. Defaults to the available cores.", lower_bound=1
  )


def main(argv: Sequence[str]) -> None:
  del argv
  options = flags.FLAGS
  workdir = pathlib.Path(options.workdir).absolute()
  if options.report:
    own = {} if options.suite is None else {suites.folder_of(options.suite): suites.load(options.suite)}
    print("rebuilt:", ", ".join(report.rebuild(workdir, own)))
    if (document := pathlib.Path("RESULTS.md")).exists():
      document.write_text(report.fill(document.read_text(encoding="utf-8"), workdir), encoding="utf-8")
    return
  if options.suite is None:
    raise app.UsageError("--suite is required without --report.")
  runner = Runner(options.suite, base=options.base, workdir=workdir, quick=options.quick, jobs=options.jobs)
  seeds = range(options.seeds)
  try:
    if options.tune:
      runner.tune()
    runner.print_rates()
    runner.make_starts(seeds)
    runner.run(seeds)
  finally:  # after a failure, too: the finished runs are worth a table
    runner.write_results(seeds, shlex.join(["python", "-m", "experiments.ablate", *sys.argv[1:]]))


if __name__ == "__main__":
  define_flags()
  command.run(main)
