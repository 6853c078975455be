"""The sweep over TextArena: a sample of games, games that cannot be made, and faults that it must detect."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("textarena", reason="needs the extra 'envs'")

from experiments import sweep_textarena
from experiments.support import textarena_players
from sao_jax.envs.adapters import textarena as textarena_env

ROOT = pathlib.Path(__file__).parents[2]
SOLVED = (
  "Bandit-v0", "Crosswords-v0", "FifteenPuzzle-v0", "FrozenLake-v0", "GuessTheNumber-v0", "LightsOut-v0",
  "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0-small", "PegJump-v0", "Secretary-v0", "Slitherlink-v0",
  "Sudoku-v0-easy", "ThreeCardMonte-v0", "TowerOfHanoi-v0",
)  # fmt: skip


@pytest.mark.parametrize("game", SOLVED)
def test_the_best_known_play_wins_and_bad_play_earns_less(game: str) -> None:
  outcome = sweep_textarena.check(game, seeds=2)
  assert outcome.faults == [] and outcome.rewards["best"] == 1.0
  assert {"random", "nonsense", "silent", "quits"} < outcome.rewards.keys() and outcome.seeds == 2


def test_play_for_luck_earns_more_than_bad_play() -> None:
  for game in ("2048-v0-3x3", "Blackjack-v0"):
    assert sweep_textarena.check(game, seeds=3).faults == []


@pytest.mark.parametrize(
  ("game", "fault"),
  [
    ("Set-v0", "worst play earns 20.000 at seed 0"),
    ("Set-v0", "worst play earns 20.000, the best known play"),
    ("FifteenPuzzle-v0", "best play earns 1 without success at seed 0"),
  ],
)
def test_games_as_they_are_have_faults(monkeypatch: pytest.MonkeyPatch, game: str, fault: str) -> None:
  monkeypatch.setattr(textarena_env, "repair", lambda env: None)
  monkeypatch.setattr(textarena_env, "corrected", lambda env, reward: reward)
  found = sweep_textarena.check(game, seeds=1).faults
  assert any(fault in line for line in found), found


@pytest.mark.parametrize(
  ("pay", "fault"),
  [
    (lambda reward: 1.0 - reward, "play earns 1.000, the best known play 0.000"),
    (lambda reward: 2.0 * reward, "best play earns 2.000 at seed 0"),
    (lambda reward: 1.0, "nonsense play succeeds at seed 0"),
    (lambda reward: 0.5, "silent play earns 0.500, the best known play 0.500"),
  ],
)
def test_faults_are_seen(monkeypatch: pytest.MonkeyPatch, pay: Callable[[float], float], fault: str) -> None:
  monkeypatch.setattr(textarena_env, "corrected", lambda env, reward: pay(reward))
  found = sweep_textarena.check("ThreeCardMonte-v0", seeds=1).faults
  assert any(fault in line for line in found), found


def test_a_game_without_a_player_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(sweep_textarena, "GAMES", {})
  assert sweep_textarena.check("Secretary-v0").faults == ["there is no player for SecretaryEnv"]


def test_the_search_finds_a_shortest_way_or_the_nearest_state() -> None:
  def neighbours(x: int) -> list[tuple[str, Any]]:
    return [("+", x + 1), ("-", x - 1), ("*", 2 * x)] if 0 < x < 50 else []

  assert len(textarena_players.search(3, neighbours, lambda x: 0 if x == 25 else 1)) == 4  # 6, 12, 24, 25
  assert textarena_players.search(3, neighbours, lambda x: abs(x - 49.5))[-1] in "+-*"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, "-m", "experiments.sweep_textarena", *arguments]
  return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_the_command_prints_a_table_and_a_summary() -> None:
  done = run("--games=ThreeCardMonte-v0,Secretary-v0", "--seeds=2")
  assert done.returncode == 0, done.stderr[-3_000:]
  lines = done.stdout.splitlines()
  assert lines[0].split() == ["game", *sweep_textarena.PLAYERS, "seeds"]
  assert lines[1].split()[:2] == ["ThreeCardMonte-v0", "1.000"] and lines[2].split()[-1] == "2"
  summary = json.loads(lines[-1])
  assert summary == {"games": 2, "refused": 0, "slow_to_start": [], "unsolved": [], "faults": []}


def test_the_command_says_why_a_game_is_refused() -> None:
  done = run("--games=Klondike-v0")
  assert done.returncode == 1
  assert "game 'Klondike-v0' cannot be made: SyntaxError" in done.stderr and "Traceback" not in done.stderr
