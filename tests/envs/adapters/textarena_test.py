from __future__ import annotations

import itertools
import os
import random
import signal
import threading

import pytest

pytest.importorskip("textarena", reason="needs the extra 'envs'")

from sao_jax.envs.adapters.hosted_game import HostedGame
from sao_jax.envs.adapters.textarena import TextArena, TextArenaConfig, textarena_factory


def make(game: str) -> HostedGame:
  env = textarena_factory(TextArenaConfig(game=game))()
  assert isinstance(env, HostedGame)
  return env


def test_guessing_by_the_hints_wins() -> None:
  env = make("GuessTheNumber-v0")
  assert "between 1 and 20" in env.reset(3)
  low, high = 1, 20
  while True:
    guess = (low + high) // 2
    step = env.step(f"I say [{guess}]<|end|>")
    if step.done:
      break
    assert "I say" not in step.observation  # The player's own move is in the context already.
    low, high = (guess + 1, high) if "higher" in step.observation else (low, guess - 1)
  assert step.reward == 1.0 and step.info["success"] and "Congratulations" in step.info["reason"]


def test_mastermind_by_elimination_wins() -> None:
  env = make("Mastermind-v0")
  env.reset(1)
  codes = list(itertools.permutations(range(1, 7), 4))
  while True:
    guess = codes[0]
    step = env.step(f"[{' '.join(map(str, guess))}]<|end|>")
    if step.done:
      break
    black, white = (int(step.observation.split(f" {kind} peg")[0].split()[-1]) for kind in ("black", "white"))

    def feedback(code: tuple[int, ...], guess: tuple[int, ...] = guess) -> tuple[int, int]:
      same = sum(a == b for a, b in zip(code, guess, strict=True))
      return same, len(set(code) & set(guess)) - same

    codes = [code for code in codes[1:] if feedback(code) == (black, white)]
  assert step.reward == 1.0 and step.info["success"]


def test_an_invalid_move_is_told_and_two_end_the_game() -> None:
  env = make("FrozenLake-v0")
  prompt = env.reset(3)
  assert "Current Board" in prompt
  step = env.step("north<|end|>")
  assert not step.done and "invalid move" in step.observation
  step = env.step("north<|end|>")
  assert step.done and step.reward < 1.0 and not step.info["success"]


def test_a_move_that_a_game_stumbles_over_is_told_and_the_game_goes_on() -> None:
  env = textarena_factory(TextArenaConfig(game="GuessTheNumber-v0", max_turns=4))()
  env.reset(3)
  for _ in range(3):
    step = env.step(f"[{'9' * 5_000}]<|end|>")
    assert not step.done and step.reward == 0.0 and len(step.observation) < 400
    assert "error: the game cannot take this move" in step.observation
  last = env.step("[3]<|end|>")
  assert last.done and last.truncated and not last.info["success"]


@pytest.mark.parametrize(("game", "move"), [("Countdown-v0", "nonsense"), ("Cryptarithm-v0", "[]")])
def test_games_that_confuse_reward_and_reason_of_an_invalid_move(game: str, move: str) -> None:
  env = make(game)
  env.reset(3)
  assert not env.step(f"{move}<|end|>").done
  step = env.step(f"{move}<|end|>")
  assert step.done and 0.0 <= step.reward < 1.0 and not step.info["success"] and "action format" in step.info["reason"]


JUNK = (
  "",
  "nonsense",
  "[]",
  "[[",
  "[-1 -1 -1]",
  "\0",
  "é" * 50,
  "[" * 5_000,
  "[None]",
  "[1e99]",
  "[Up]",
  "[A B]",
  "[0 0 0]",
)
GAMES = (
  "2048-v0", "Bandit-v0", "Blackjack-v0", "Crosswords-v0", "FifteenPuzzle-v0", "FrozenLake-v0", "LightsOut-v0",
  "Mastermind-v0", "Minesweeper-v0", "PegJump-v0", "Secretary-v0", "Sokoban-v0", "Sudoku-v0",
  "TowerOfHanoi-v0",
)  # fmt: skip


@pytest.mark.parametrize("game", GAMES)
def test_junk_is_answered_in_every_game(game: str) -> None:
  env = textarena_factory(TextArenaConfig(game=game))()
  first = env.reset(5)
  for junk in JUNK:
    step = env.step(f"{junk}<|end|>")
    assert step.reward <= 0.5 and not step.info.get("success")
    if step.done:
      assert env.reset(5) == first
    else:
      assert step.observation.startswith("<|output|>")


def test_games_depend_on_their_seed_and_moves_only() -> None:
  def play(env: HostedGame) -> list[str]:
    texts = [env.reset(7)]
    for move in ("[Up]", "[Left]", "[Down]", "[Right]") * 2:
      texts.append(env.step(f"{move}<|end|>").observation)
    return texts

  random.seed(5)
  outside = random.random()
  random.seed(5)
  factory = textarena_factory(TextArenaConfig(game="2048-v0"))
  expected = play(factory())  # type: ignore[arg-type]
  assert random.random() == outside  # The games leave the global generator alone.
  results: list[list[str]] = []
  threads = [threading.Thread(target=lambda: results.append(play(factory()))) for _ in range(3)]  # type: ignore[arg-type]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(300)
  assert results == [expected] * 3


def test_a_game_that_is_drawn_when_it_is_made_is_that_of_its_seed() -> None:
  drawn = textarena_factory(TextArenaConfig(game="Countdown-v0", settings={"numbers": None, "target": None}))
  first, second = drawn(), drawn()
  outside = random.getstate()
  prompts = [env.reset(seed) for env, seed in ((first, 3), (second, 4), (second, 3), (first, 4))]
  assert prompts[0] == prompts[2] != prompts[1] == prompts[3]
  assert random.getstate() == outside


def test_a_move_is_not_said_back_by_games_that_log_it_wrongly() -> None:
  for game, move, reply in (
    ("Countdown-v0", "[0 1 +]", "Move history"), ("Cryptarithm-v0", "[S 9]", "Assigned: 1/8"),
    ("TowerOfHanoi-v0", "[A B]", "You moved disk 1 from A to B."),
  ):  # fmt: skip
    env = make(game)
    env.reset(0)
    step = env.step(f"{move}<|end|>")
    assert reply in step.observation and move not in step.observation and "<|output|>0" not in step.observation


def test_countdown_is_won_by_a_way_to_its_target() -> None:
  env = TextArena(
    TextArenaConfig(game="Countdown-v0", settings={"numbers": [2, 3, 5], "target": 25}), lock=threading.Lock()
  )
  assert "TARGET: 25" in env.reset(0)
  step = env.step("[0 1 +]<|end|>")  # The sum goes to the end: 5, 5.
  assert not step.done and "[0 1 +]" not in step.observation and "Available numbers" in step.observation
  step = env.step("[0 1 *]<|end|>")
  assert step.done and step.reward == 1.0 and step.info["success"]


@pytest.mark.timeout(600)
def test_a_move_that_a_game_never_ends_truncates_one_episode() -> None:
  config = TextArenaConfig(game="GuessTheNumber-v0", move_timeout_s=0.5)
  hasty, patient, other = textarena_factory(config)(), make("GuessTheNumber-v0"), make("GuessTheNumber-v0")
  hasty._workers.close()  # type: ignore[attr-defined]  # Other tests may have left several processes.
  for env in (patient, other):
    env.reset(3)
    env.step("[1]<|end|>")
  expected = other.step("[2]<|end|>")
  hasty.reset(3)
  (worker,) = hasty._workers._idle  # type: ignore[attr-defined]
  os.kill(worker.process.popen.pid, signal.SIGSTOP)
  step = hasty.step("[1]<|end|>")
  assert step.done and step.truncated and step.reward == 0.0 and "it took more than" in step.info["scorer_error"]
  assert patient.step("[2]<|end|>") == expected  # played again in a new process
  with pytest.raises(ValueError, match="move_timeout_s must be positive; received 0"):
    TextArenaConfig(game="GuessTheNumber-v0", move_timeout_s=0)


def test_other_games_are_refused() -> None:
  with pytest.raises(ValueError, match="game must be one of TextArena's; received 'Nonsense-v0'"):
    make("Nonsense-v0")
  for game in ("TicTacToe-v0", "MarketEntryGame-v0"):  # the second starts with one player, but its moves never end
    with pytest.raises(ValueError, match=f"game must be one for a single player; '{game}' is not"):
      make(game).reset(0)
