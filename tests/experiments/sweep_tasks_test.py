"""The same index gives the same task in processes with different hash seeds, and the sweep detects differences."""

from __future__ import annotations

import json
import pathlib

import pytest

pytest.importorskip("textarena", reason="needs the extra 'envs'")
pytest.importorskip("textworld", reason="needs the extra 'envs'")

from experiments import sweep_tasks
from experiments.sweep_tasks import Case
from tests.experiments.chat_checkpoint import write_tokenizer

pytestmark = pytest.mark.timeout(900)

GAMES = (
  "2048-v0", "Bandit-v0", "Blackjack-v0", "Countdown-v0", "Crosswords-v0", "Cryptarithm-v0", "FifteenPuzzle-v0",
  "FrozenLake-v0-random", "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0",
  "PegJump-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sudoku-v0-very-easy", "ThreeCardMonte-v0",
  "TowerOfHanoi-v0",
)  # fmt: skip


def test_every_set_of_reasoning_gym() -> None:
  cases = sweep_tasks.reasoning_gym_cases((None,))
  assert len(cases) == 106
  assert sweep_tasks.compare(cases, range(2)) == ({}, {})


def test_games_repositories_and_own_tasks(tmp_path: pathlib.Path) -> None:
  cases = [case for case in sweep_tasks.textarena_cases() if case.name.removeprefix("textarena:") in GAMES]
  assert len(cases) == len(GAMES)
  cases += sweep_tasks.other_cases(str(tmp_path))
  assert sweep_tasks.compare(cases, range(2)) == ({}, {})


def test_tasks_for_checkpoints(tmp_path: pathlib.Path) -> None:
  (tmp_path / "checkpoint").mkdir()
  write_tokenizer(tmp_path / "checkpoint")
  problems = tmp_path / "problems.jsonl"
  problems.write_text("".join(json.dumps({"problem": f"{i} + 1?", "answer": i + 1}) + "\n" for i in range(3)))
  checkpoint, file = str(tmp_path / "checkpoint"), str(problems)
  chat = "experiments.tasks.chat"
  cases = [
    Case(name="ransom", factory=f"{chat}:reasoning_gym", options={"checkpoint": checkpoint, "task": "ransom_note"}),
    Case(
      name="math", factory=f"{chat}:math",
      options={"checkpoint": checkpoint, "train": file, "held_out": file, "tool": False},
    ),
  ]  # fmt: skip
  assert sweep_tasks.compare(cases, range(3)) == ({}, {})


FAULTY = '''
import dataclasses
from experiments.tasks import digits
from sao_jax.envs.base import Step
class Env:
  made = 0
  def __init__(self, kind):
    self.kind = kind
  def reset(self, index):
    Env.made += 1
    kinds = {"set": str(list({"a", "b", "c", "d", "e", "f"})), "order": str(Env.made), "none": ""}
    return f"task {index} {kinds[self.kind]}"
  def step(self, action):
    return Step(done=True)
  def close(self):
    pass
def make_domain(kind):
  if kind == "error":
    raise ValueError("no such game")
  return dataclasses.replace(digits.make_domain(), make_env=lambda split: Env(kind), demonstrate=None)
'''


def test_faults_are_seen(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / "faulty_tasks.py").write_text(FAULTY)
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  monkeypatch.chdir(pathlib.Path(__file__).parents[2])
  cases = [
    Case(name=kind, factory="faulty_tasks:make_domain", options={"kind": kind})
    for kind in ("set", "order", "none", "error")
  ]
  differences, errors = sweep_tasks.compare(cases, range(3))
  assert sorted(differences) == ["order", "set"] and errors == {"error": "ValueError: no such game"}
  assert any(line.startswith("train 0: ") and "task 0" in line for line in differences["set"])
