"""Tests every task of reasoning-gym through the adapter: its problems, its own answers, and hostile answers.

    python -m experiments.sweep_reasoning_gym
    python -m experiments.sweep_reasoning_gym --tasks=boxnet,rush_hour

Each task is tested at its default difficulty and at the first, second and last level of its curriculum. Problems must
be made in time and be the same when made again. The package's own answer must score 1. Nonsense and hostile answers
must score at most a half, in time, and no part of their text may be run, open a file or start a process. Prints a row
for each task and level with faults. Faults in `KNOWN` belong to the package. The last line is one JSON object. The exit
code is 1 if there are other faults.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
import types
from collections.abc import Iterator, Mapping
from typing import Any

from absl import flags

from experiments.support import command, sweeps
from sao_jax.envs.adapters import _reasoning_gym_worker
from sao_jax.envs.adapters.reasoning_gym import ReasoningGym, ReasoningGymConfig, check_task

_MARK = "sweep_mark_7391"
"""A marker in hostile answers: if the text of an answer is run, its code contains the marker."""
_SLOW_S = 1.0
_MAKING_LIMIT_S, _SCORING_LIMIT_S = 60.0, 20.0
LEVELS = (None, 0, 1, 99)
_NONSENSE = (
  "", "banana %$", "None", "nan", "inf", "-1e400", "{}", "[[]]", '{"a": [null]}', "\0", "é漢字", "0 " * 2_000,
)  # fmt: skip
_LARGE = (
  "9" * 5_000, "[" * 3_000, "(" * 3_000, '{"a":' * 3_000, "a," * 20_000, "1/0", "10**10**10",
  f"{'9' * 4_000}/{'7' * 4_000}",
)  # fmt: skip
_CODE = (
  f"__import__('os').system('echo {_MARK}')", f"open('/tmp/{_MARK}','w')", f"[x for x in '{_MARK}']", f"{_MARK}(1)",
  f"(lambda: '{_MARK}')()", f"{{'{_MARK}': open}}", f"f'{{{_MARK}}}'",
)  # fmt: skip
_COMPOSITE = {
  "datasets": [{"name": name, "weight": 1.0, "config": {}} for name in ("chain_sum", "puzzle24", "n_queens")]
}

KNOWN: Mapping[tuple[str, str], str] = {
  ("caesar_cipher", "making"): "its curriculum ends at rotations that it rejects",
  ("codeio", "problems are not"): "some of its programs draw their own random numbers",
  ("jugs", "making"): "the last level of its curriculum takes minutes a problem",
  ("jugs", "its own answer"): "some of its problems have no solution, so no answer scores",
  ("knight_swap", "making"): "its curriculum begins at boards that it rejects",
  ("modulo_grid", "making"): "its curriculum has a target of 0, which it rejects",
  ("quantum_lock", "'banana"): "it reads the letters A to C of any text, which are a solution here",
  ("rubiks_cube", "making"): "its curriculum ends at cubes that it rejects",
  ("survo", "making"): "its curriculum ends at boards that it rejects",
  ("time_intervals", "'0 0"): "it gives partial credit for answers that are close",
}
"""Faults of the package itself, by task and beginning of the report."""


@dataclasses.dataclass
class Outcome:
  """The findings at one level of one task."""

  task: str
  level: int | None
  faults: list[str] = dataclasses.field(default_factory=list)
  has_answer: bool = True
  make_s: float = 0.0
  """CPU seconds to make one problem."""
  score_s: float = 0.0
  """CPU seconds to score the slowest answer."""

  @property
  def unknown(self) -> list[str]:
    """The faults that are not in `KNOWN`."""
    known = [start for task, start in KNOWN if task == self.task]
    return [fault for fault in self.faults if not fault.startswith(tuple(known))]


class _Watch:
  """Detects by Python's audit events whether an answer's text is run, a file is written or a process is started."""

  def __init__(self) -> None:
    self.seen: list[str] = []
    self.on = False
    sys.addaudithook(self._hook)

  def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
    if not self.on:
      return
    if event == "exec" and _mentions(arguments[0]):
      self.seen.append("ran an answer's text")
    elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"):
      self.seen.append(event)
    elif event == "open" and isinstance(arguments[1], str) and arguments[1].strip("rbtU"):
      self.seen.append(f"open {arguments[0]!r} {arguments[1]!r}")

  @contextlib.contextmanager
  def watching(self) -> Iterator[list[str]]:
    self.seen, self.on = [], True
    try:
      yield self.seen
    finally:
      self.on = False


def _mentions(code: object) -> bool:
  if not isinstance(code, types.CodeType):
    return False
  return any(_MARK in str(x) for x in (*code.co_names, *code.co_varnames, *code.co_consts)) or any(
    _mentions(x) for x in code.co_consts
  )


class _InThisProcess:
  """Scores answers as the package's separate process does, but in this process, where audit events are seen."""

  def call(self, request: Any, *, timeout_s: float) -> Any:
    del timeout_s
    return _reasoning_gym_worker.answer(request)


_WATCH: list[_Watch] = []
"""The only instance, since an audit hook stays for the life of the process."""


def check(task: str, level: int | None, *, problems: int = 3) -> Outcome:
  """Checks one task at one level (None for its defaults). Must run on the main thread."""
  if not _WATCH:
    _WATCH.append(_Watch())
  outcome = Outcome(task=task, level=level)
  settings = _COMPOSITE if task == "composite" else {}
  config = ReasoningGymConfig(task=task, size=20, seed=7, level=level, settings=settings)
  began = time.process_time()
  try:
    with sweeps.time_limit(_MAKING_LIMIT_S):
      env, again = (ReasoningGym(config, workers=_InThisProcess()) for _ in range(2))
      prompts = [env.reset(i) for i in range(problems)]
      outcome.make_s = (time.process_time() - began) / problems
      if [again.reset(20 + i) for i in range(problems)] != prompts:
        outcome.faults.append("problems are not the same when made again")
  except Exception as error:  # noqa: BLE001 (an outcome)
    outcome.faults.append(f"making: {type(error).__name__}: {error}")
    return outcome
  for index, prompt in enumerate(prompts):
    if len(prompt) < 30 or "\0" in prompt:
      outcome.faults.append(f"prompt {prompt[:80]!r}")
    env.reset(index)
    _check_gold(env, outcome)
    for text in (*_NONSENSE, *_LARGE, *_CODE):
      reward = _score(env, f"<answer>{text}</answer>", outcome)
      if reward > 0.5:
        outcome.faults.append(f"{text[:40]!r} gets {reward}")
    if _score(env, f"the answer is {env.gold_answer}", outcome):
      outcome.faults.append("an answer without tags scores")
  return outcome


def _check_gold(env: ReasoningGym, outcome: Outcome) -> None:
  gold = env.gold_answer
  outcome.has_answer = gold is not None
  if gold is None:
    return
  reward = _score(env, f"so <answer>{gold}</answer>", outcome)
  if reward < 1.0:
    outcome.faults.append(f"its own answer {gold[:60]!r} scores {reward}")


def _score(env: ReasoningGym, text: str, outcome: Outcome) -> float:
  assert _WATCH
  began = time.process_time()
  try:
    with _WATCH[0].watching() as seen, sweeps.time_limit(_SCORING_LIMIT_S):
      reply = env.play(text)
  except Exception as error:  # noqa: BLE001 (an outcome)
    outcome.faults.append(f"scoring {text[:40]!r}: {type(error).__name__}: {str(error)[:200]}")
    return 0.0
  took = time.process_time() - began
  outcome.score_s = max(took, outcome.score_s)
  outcome.faults += [f"scoring {text[:60]!r}: {event}" for event in seen]
  if took > _SLOW_S:
    outcome.faults.append(f"scoring {text[:40]!r} took {took:.1f} s")
  if not (reply.done and 0.0 <= reply.reward <= 1.0):
    outcome.faults.append(f"scoring {text[:40]!r} gives {reply.reward}")
  return reply.reward


_TASKS = flags.DEFINE_list("tasks", None, "The tasks to check. Defaults to all.")
_VERBOSE = flags.DEFINE_bool("verbose", False, "Also prints a row for tasks without faults.")


def main(argv: list[str]) -> int:
  del argv
  from reasoning_gym.factory import DATASETS, has_curriculum

  for task in _TASKS.value or ():
    check_task(task)
  outcomes = []
  for task in _TASKS.value or sorted(DATASETS):
    for level in LEVELS if has_curriculum(task) else (None,):
      outcomes.append(outcome := check(task, level))
      if outcome.faults or _VERBOSE.value:
        print(f"\n{task}, level {level}: {outcome.make_s:.2f} s to make, {outcome.score_s:.2f} s to score", flush=True)
      for fault in outcome.faults:
        print(f"  {'new  ' if fault in outcome.unknown else 'known'} {fault}", flush=True)
  tasks = {outcome.task for outcome in outcomes}
  summary = {
    "tasks": len(tasks),
    "checks": len(outcomes),
    "without_answer": sorted({outcome.task for outcome in outcomes if not outcome.has_answer}),
    "slow_to_make": sorted({outcome.task for outcome in outcomes if outcome.make_s > _SLOW_S}),
    "known_faults": sorted({outcome.task for outcome in outcomes if outcome.faults and not outcome.unknown}),
    "new_faults": sorted({outcome.task for outcome in outcomes if outcome.unknown}),
  }
  return sweeps.conclude(summary, faults="new_faults")


if __name__ == "__main__":
  command.run(main)
