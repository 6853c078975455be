"""Every ready-made task twice, in two processes of different hash seeds: the same index must give the same task.

    python -m experiments.sweep_tasks
    python -m experiments.sweep_tasks --only=textarena --indices=20

The second process asks for the indices in reverse, so that a task which depends on those made before it shows as well.
Compared are prompts of both splits, demonstrations, which hold the right answers, and what is replied to a few moves
where there are none. Prints the tasks that differ, and one JSON object on the last line. Exits 1 when there are any.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from experiments.support import command
from experiments.tasks.factory import import_named
from sao_jax.envs.base import Tag
from sao_jax.types import Domain, Split
from sao_jax.utils.extras import require_extra

HASH_SEEDS = ("1", "2")
_STANDARD = "experiments.tasks.standard"
_MOVES = ("[1]", "[up]", "[A B]", "[1 2 3 4]", "hit", "pickup", "[0 0 0]")
_LEVELS = (None, 0, 1, 99)
_MAX_TEXT_CHARS = 300
_COMPOSITE = {"datasets": [{"name": name, "weight": 1.0, "config": {}} for name in ("ransom_note", "puzzle24")]}
_SLOW = frozenset(("jugs:99",))
"""Sets and levels of which one problem takes minutes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A domain: the function that makes it, and its options."""

  name: str
  factory: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def reasoning_gym_cases(levels: Sequence[int | None]) -> list[Case]:
  """All sets at some levels of their curricula (None: the defaults)."""
  from reasoning_gym.factory import DATASETS, has_curriculum

  cases = []
  for task in sorted(DATASETS):
    for level in levels if has_curriculum(task) else (None,):
      name = task if level is None else f"{task}:{level}"
      options: dict[str, Any] = {"task": task, "level": level, "size": 200, "num_eval_tasks": 50}
      if task == "composite":
        options["settings"] = _COMPOSITE
      if name not in _SLOW:
        cases.append(Case(name=f"reasoning_gym:{name}", factory=f"{_STANDARD}:reasoning_gym", options=options))
  return cases


def textarena_cases() -> list[Case]:
  """All games; those of several players, or that cannot start here, refuse in both processes alike."""
  with require_extra("envs"):
    import textarena

  found = {re.sub("-(raw|train)$", "", name) for name in textarena.envs.registration.ENV_REGISTRY}
  return [
    Case(name=f"textarena:{game}", factory=f"{_STANDARD}:textarena", options={"game": game}) for game in sorted(found)
  ]


def other_cases(directory: str) -> list[Case]:
  """Gymnasium's environments, text adventures (kept in `directory`), repositories and this project's own tasks."""
  toy_text = ("FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v4", "CliffWalking-v1", "Blackjack-v1")
  return [
    *(Case(name=f"gymnasium:{x}", factory=f"{_STANDARD}:gymnasium", options={"env_id": x}) for x in toy_text),
    Case(
      name="textworld", factory=f"{_STANDARD}:textworld",
      options={"directory": directory, "num_games": 3, "num_eval_games": 2},
    ),
    Case(name="coding", factory=f"{_STANDARD}:coding", options={"num_problems": 6}),
    Case(name="tool_math", factory="experiments.tasks.tool_math:make_domain", options={"eval_size": 50}),
    Case(name="bisection", factory="experiments.tasks.bisection:make_domain"),
    Case(name="digits", factory="experiments.tasks.digits:make_domain"),
  ]  # fmt: skip


def texts(case: Case, indices: Sequence[int]) -> dict[str, str]:
  """What a domain says about some indices; errors are texts too."""
  found: dict[str, str] = {}
  try:
    module, _, function = case.factory.partition(":")
    domain: Domain = getattr(import_named(module), function)(**case.options)
    splits: tuple[Split, ...] = ("train", "eval") if domain.demonstrate is None else ("eval",)
    try:
      for split in splits:
        for index in indices:
          found[f"{split} {index}"] = _or_error(_play, domain, split, index)
      if domain.demonstrate is not None:  # of training tasks
        for index in indices:
          found[f"demonstration {index}"] = _or_error(_demonstration, domain, index)
    finally:
      domain.close()
  except Exception as error:  # noqa: BLE001 (compared and told)
    found["error"] = f"{type(error).__name__}: {error}"
  return found


def _or_error(function: Callable[..., str], *arguments: Any) -> str:
  """Some sets fail at some of their problems."""
  try:
    return function(*arguments)
  except Exception as error:  # noqa: BLE001 (compared and told)
    return f"{type(error).__name__}: {error}"


def _demonstration(domain: Domain, index: int) -> str:
  assert domain.demonstrate is not None
  return "".join(piece[0] for piece in domain.demonstrate(index, np.random.default_rng(index)))


def _play(domain: Domain, split: Split, index: int) -> str:
  env = domain.make_env(split)
  try:
    said = env.reset(index)
    if domain.demonstrate is None:
      for move in _MOVES:
        step = env.step(move + Tag.END)
        said += f"{step.observation} {step.reward} {step.info if step.done else ''}\n"
        if step.done:
          break
    return said
  finally:
    env.close()


def compare(cases: Sequence[Case], indices: Sequence[int]) -> tuple[dict[str, list[str]], dict[str, str]]:
  """Runs two processes: the differences by case, and the errors by case where both have the same one."""
  with tempfile.TemporaryDirectory() as other, concurrent.futures.ThreadPoolExecutor(2) as threads:
    runs = [
      threads.submit(_in_process, _moved(cases, other) if turn else list(cases), indices[:: -1 if turn else 1], seed)
      for turn, seed in enumerate(HASH_SEEDS)
    ]
    first, second = (run.result() for run in runs)
  differences: dict[str, list[str]] = {}
  errors: dict[str, str] = {}
  for case in cases:
    one, two = first[case.name], second[case.name]
    if wrong := [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]:
      differences[case.name] = [f"{key}: {_start(one, key)} / {_start(two, key)}" for key in wrong]
    elif "error" in one:
      errors[case.name] = one["error"]
  return differences, errors


def _start(found: Mapping[str, str], key: str) -> str:
  return repr(found.get(key, "")[:_MAX_TEXT_CHARS])


def _moved(cases: Sequence[Case], directory: str) -> list[Case]:
  """The same cases, but their files are made anew."""
  moved = {"directory": directory}
  return [
    dataclasses.replace(case, options={**case.options, **moved}) if "directory" in case.options else case
    for case in cases
  ]


def _in_process(cases: Sequence[Case], indices: Sequence[int], hash_seed: str) -> dict[str, dict[str, str]]:
  request = json.dumps([[dataclasses.asdict(case) for case in cases], list(indices)])
  code = "from experiments import sweep_tasks\nsweep_tasks.answer()"
  done = subprocess.run(
    [sys.executable, "-c", code], input=request, stdout=subprocess.PIPE, text=True, check=True,
    env={**os.environ, "PYTHONHASHSEED": hash_seed},
  )  # fmt: skip
  found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
  return found


def answer() -> None:
  """The work of one of the two processes: cases and indices in, their texts out."""
  cases, indices = json.load(sys.stdin)
  print(json.dumps({case["name"]: texts(Case(**case), indices) for case in cases}))


_ONLY = flags.DEFINE_list("only", None, "Beginnings of the names of tasks; all if not given.")
_INDICES = flags.DEFINE_integer("indices", 5, "Indices of each task and split.", lower_bound=1)


def main(argv: list[str]) -> int:
  del argv
  began = time.monotonic()
  with tempfile.TemporaryDirectory() as directory:
    cases = [*other_cases(directory), *textarena_cases(), *reasoning_gym_cases(_LEVELS)]
    cases = [case for case in cases if _ONLY.value is None or case.name.startswith(tuple(_ONLY.value))]
    if not cases:
      raise ValueError(f"--only must name tasks' beginnings, such as textarena; received {_ONLY.value}.")
    differences, errors = compare(cases, range(_INDICES.value))
  for name, found in differences.items():
    print(f"\n{name}", *found, sep="\n  ")
  took = round(time.monotonic() - began)
  print("\n" + json.dumps({"tasks": len(cases), "seconds": took, "refused": errors, "differ": sorted(differences)}))
  return 1 if differences else 0


if __name__ == "__main__":
  command.run(main)
