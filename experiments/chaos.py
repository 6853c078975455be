"""Kills training runs at random moments, resumes them, and audits that nothing was lost.

    python -m experiments.chaos --seed=0 --kills=20

Some kills come at a random time after the start of the process, which includes imports, warm start and value
pretraining. Others come during checkpoint writes, weight publications, evaluations, and reads of checkpoints (the
beginning of a resume). The line before the last counts the operations that kills really interrupted.

With the `sync` and `lagged` schedules, a killed run must end with the same arrays (bit for bit), the same resume state
and the same metrics rows as an undisturbed run. With `async`, no trajectory may be trained on twice, every episode must
be accounted for, and the reported staleness must match the trajectories. If all of this holds, the last line says so
and the exit code is 0.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from experiments.support import chaos_run, command, compilation
from sao_jax.io import jsonl
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.io.metrics import read_metrics
from sao_jax.training import config as config_lib

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLACES = ("time", *chaos_run.WINDOWS)
SCHEDULES = ("sync", "lagged", "async")
TIMES = frozenset({"time_s", "rollout_tokens_per_s", "learner_busy_fraction", "engine_busy_fraction", "eval_seconds"})
"""Metrics that depend on wall time: the only ones in which a killed run may differ."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
  """The contents of a finished workdir that must not depend on kills."""

  rows: list[dict[str, Any]]
  evaluations: list[dict[str, Any]]
  arrays: dict[str, np.ndarray]
  host: dict[str, Any]
  ledger: dict[int, dict[str, Any]]
  """The last batch that each learner step was given. A kill can make a step start again with another batch."""


def launch(
  workdir: pathlib.Path, schedule: str, num_steps: int, cache: pathlib.Path, *more: str
) -> subprocess.Popen[bytes]:
  """Starts or resumes a run; its output is appended to a `.log` file beside the workdir."""
  chaos_run.windows_log(workdir).unlink(missing_ok=True)
  command = [
    sys.executable, "-m", "experiments.support.chaos_run", f"--workdir={workdir}", f"--schedule={schedule}",
    f"--num_steps={num_steps}", *more,
  ]  # fmt: skip
  environment = os.environ | {"JAX_PLATFORMS": "cpu", **compilation.shared_cache(cache)}
  with open(workdir.with_suffix(".log"), "ab") as log:
    return subprocess.Popen(
      command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
    )


def finish(workdir: pathlib.Path, schedule: str, num_steps: int, cache: pathlib.Path) -> float:
  """Runs or resumes a run to its end; returns the seconds that it took."""
  began = time.monotonic()
  if was_killed(launch(workdir, schedule, num_steps, cache), workdir):
    raise RuntimeError(f"a {schedule} run was killed by something other than this command.")
  return time.monotonic() - began


def was_killed(process: subprocess.Popen[bytes], workdir: pathlib.Path) -> bool:
  """Waits for the process; returns True after SIGKILL and False after exit code 0.

  Raises:
    RuntimeError: any other exit code; the message shows the end of the log.
  """
  code = process.wait()
  if code not in (0, -signal.SIGKILL):
    log = workdir.with_suffix(".log").read_text(errors="replace")
    raise RuntimeError(f"the run in {workdir} ended with exit code {code}:\n{log[-4000:]}")
  return code != 0


def kill_once(
  workdir: pathlib.Path,
  schedule: str,
  place: str,
  num_steps: int,
  seconds: float,
  cache: pathlib.Path,
  rng: random.Random,
) -> bool:
  """Starts or resumes a run and kills it; returns False if it finished before it could be killed."""
  if place == "time":
    process = launch(workdir, schedule, num_steps, cache)
    try:
      process.wait(rng.uniform(0.0, seconds))
    except subprocess.TimeoutExpired:
      process.kill()
    return was_killed(process, workdir)
  # The number of calls that nearly every process reaches. Restores include those of the earlier stages' results.
  most = {"publication": num_steps // 2, "checkpoint": num_steps // 4, "evaluation": 1, "restore": 3}[place]
  occurrence, seed = rng.randint(1, most), rng.randrange(2**31)
  more = (f"--place={place}", f"--occurrence={occurrence}", f"--seed={seed}")
  return was_killed(launch(workdir, schedule, num_steps, cache, *more), workdir)


def read_outcome(workdir: pathlib.Path, schedule: config_lib.Schedule, num_steps: int) -> Outcome:
  """Reads the outcome from a finished workdir."""
  config = config_lib.to_json(chaos_run.make_config(schedule, num_steps=num_steps))
  with Checkpointer(workdir, config=config, read_only=True) as checkpointer:
    arrays, host = checkpointer.arrays(num_steps), checkpointer.host_state(num_steps)
  rows, evaluations = read_metrics(workdir)
  ledger = {row["step"]: row for _, row in jsonl.read_rows(workdir / chaos_run.LEDGER)}
  return Outcome(rows=rows, evaluations=evaluations, arrays=arrays, host=host, ledger=ledger)


def audit_rows(outcome: Outcome, num_steps: int) -> list[str]:
  """Checks that every step has one row, that evaluations are complete, and that staleness matches the batches."""
  faults = []
  if [row["step"] for row in outcome.rows] != list(range(1, num_steps + 1)):
    faults.append(f"metrics rows of steps {[row['step'] for row in outcome.rows]}; expected 1 to {num_steps} once each")
  if [row["step"] for row in outcome.evaluations] != [0, num_steps]:
    faults.append(f"evaluations of steps {[row['step'] for row in outcome.evaluations]}; expected 0 and {num_steps}")
  for row in outcome.rows:
    staleness = outcome.ledger[row["step"]]["staleness"]
    if row["staleness_max"] != max(staleness) or abs(row["staleness_mean"] - np.mean(staleness)) > 1e-6:
      faults.append(f"step {row['step']}: staleness {row['staleness_mean']} does not match the batch's {staleness}")
  return faults


def audit_same(outcome: Outcome, reference: Outcome) -> list[str]:
  """Checks that everything but wall times equals the undisturbed run."""
  faults = []
  for name in sorted(outcome.arrays.keys() | reference.arrays.keys()):
    a, b = outcome.arrays.get(name), reference.arrays.get(name)
    if a is None or b is None or a.tobytes() != b.tobytes():
      faults.append(f"array {name} differs")
  for kind in ("rows", "evaluations"):
    for a, b in itertools.zip_longest(getattr(outcome, kind), getattr(reference, kind), fillvalue={}):
      if different := [key for key in sorted((a.keys() | b.keys()) - TIMES) if not _equal(a.get(key), b.get(key))]:
        faults.append(f"{kind}, step {b.get('step')}: {', '.join(different)} differ")
  for key in sorted((outcome.host.keys() | reference.host.keys()) - {"metrics"}):
    if outcome.host.get(key) != reference.host.get(key):
      faults.append(f"resume state {key!r} differs")
  if outcome.ledger != reference.ledger:
    faults.append("batches differ")
  return faults


def audit_episodes(outcome: Outcome, *, max_staleness: int) -> list[str]:
  """Checks that no episode was trained on twice, and that each was trained on, waits, will be run again, or failed."""
  faults = []
  trained = [episode for entry in outcome.ledger.values() for episode in entry["episodes"]]
  if twice := [episode for episode, count in collections.Counter(trained).items() if count > 1]:
    faults.append(f"episodes {sorted(twice)} were trained on twice")
  waiting = set(outcome.host["waiting"])
  requests, counts = outcome.host["schedule"]["requests"], outcome.host["schedule"]["queue"]
  known = set(trained) | waiting | set(requests["again"])
  if overlap := set(trained) & (waiting | set(requests["again"])):
    faults.append(f"episodes {sorted(overlap)} were trained on and would be trained on again")
  lost = requests["cursor"] - len(known)
  counted = counts["dropped_stale"] + counts["dropped_incomplete_group"] + counts["failed"]
  if lost != counted:
    faults.append(f"{lost} of {requests['cursor']} episodes are missing; {counted} are counted as dropped or failed")
  if (stale := max(max(entry["staleness"]) for entry in outcome.ledger.values())) > max_staleness:
    faults.append(f"staleness {stale} is above {max_staleness}")
  return faults


def kill_and_audit(
  schedule: config_lib.Schedule,
  places: Sequence[str],
  num_steps: int,
  scratch: pathlib.Path,
  rng: random.Random,
  inside: collections.Counter[str],
) -> list[str]:
  """Runs one schedule with one kill per entry of `places`; returns the faults found.

  Counts the operations that the kills interrupted in `inside`.
  """
  cache = scratch / "cache"
  reference_dir = scratch / f"{schedule}-reference"
  seconds = finish(reference_dir, schedule, num_steps, cache)
  reference = read_outcome(reference_dir, schedule, num_steps)
  faults = [f"reference: {fault}" for fault in _audit(schedule, reference, None, num_steps)]
  waiting = collections.deque(places)
  victim = 0
  inside.update(dict.fromkeys(chaos_run.WINDOWS, 0))
  while waiting:
    victim += 1
    workdir = scratch / f"{schedule}-{victim}"
    killed = []
    while waiting and kill_once(workdir, schedule, waiting[0], num_steps, seconds, cache, rng):
      killed.append(waiting.popleft())
      where = chaos_run.killed_inside(workdir)
      inside.update(where)
      print(f"  {schedule}: killed ({killed[-1]}), during: {', '.join(where) or 'no such operation'}", flush=True)
    finish(workdir, schedule, num_steps, cache)
    outcome = read_outcome(workdir, schedule, num_steps)
    found = _audit(schedule, outcome, reference, num_steps)
    print(f"  {schedule}: run {victim}, {len(killed)} kills: {'; '.join(found) or 'nothing lost'}", flush=True)
    faults += [f"run {victim} ({', '.join(killed)}): {fault}" for fault in found]
    shutil.rmtree(workdir)
  return [f"{schedule}: {fault}" for fault in faults]


def _audit(schedule: str, outcome: Outcome, reference: Outcome | None, num_steps: int) -> list[str]:
  faults = audit_rows(outcome, num_steps)
  if schedule == "async":
    return faults + audit_episodes(outcome, max_staleness=3)
  return faults + (audit_same(outcome, reference) if reference is not None else [])


def _equal(a: Any, b: Any) -> bool:
  return a == b or (isinstance(a, float) and isinstance(b, float) and np.isnan(a) and np.isnan(b))


def plan(kills: int, schedules: Sequence[str], rng: random.Random) -> Mapping[str, list[str]]:
  """Distributes kills evenly over schedules; within each, the kinds of kills take turns in random order."""
  shares: dict[str, list[str]] = {schedule: [] for schedule in schedules}
  places = list(PLACES)
  rng.shuffle(places)
  for number in range(kills):
    shares[schedules[number % len(schedules)]].append(places[number // len(schedules) % len(places)])
  return shares


def define_flags() -> None:
  flags.DEFINE_integer("seed", 0, "The seed of the times and places of kills.")
  flags.DEFINE_integer("kills", 20, "The total number of kills.", lower_bound=1)
  flags.DEFINE_integer("num_steps", 12, "The number of learner steps of each run.", lower_bound=4)
  flags.DEFINE_list("schedules", list(SCHEDULES), "The schedules to test.")


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.ERROR)
  jax.config.update("jax_platforms", "cpu")  # as in the runs: the audit needs no accelerator
  options = flags.FLAGS
  if not options.schedules or not set(options.schedules) <= set(SCHEDULES):
    raise app.UsageError(f"--schedules must be some of {', '.join(SCHEDULES)}; received {options.schedules}.")
  rng = random.Random(options.seed)
  shares = plan(options.kills, options.schedules, rng)
  faults: list[str] = []
  inside: collections.Counter[str] = collections.Counter()
  with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
    for schedule, places in shares.items():
      print(f"{schedule}: {len(places)} kills ({', '.join(places)})", flush=True)
      if places:
        faults += kill_and_audit(schedule, places, options.num_steps, pathlib.Path(scratch), rng, inside)
  if faults:
    print("\n".join(faults))
    sys.exit(f"chaos: {len(faults)} faults after {options.kills} kills (seed {options.seed})")
  counts = collections.Counter(place for places in shares.values() for place in places)
  print(json.dumps({"kills": options.kills, "aimed_at": counts, "fell_into": inside, "seed": options.seed}))
  print(f"chaos: {options.kills} kills over {', '.join(shares)}; every one resumed with nothing lost")


if __name__ == "__main__":
  define_flags()
  command.run(main)
