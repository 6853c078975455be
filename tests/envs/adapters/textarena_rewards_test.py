"""Rewards of TextArena games through the adapter, where their own rewards do not rank plays."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("textarena", reason="needs the extra 'envs'")

from sao_jax.envs.adapters.textarena import TextArena, TextArenaConfig
from sao_jax.envs.base import Step

SOLUTION = {"S": 9, "E": 5, "N": 6, "D": 7, "M": 1, "O": 0, "R": 8, "Y": 2}


def make(game: str, max_turns: int = 60, **settings: Any) -> tuple[TextArena, Any]:
  """Returns the environment at task 3, and its game."""
  env = TextArena(TextArenaConfig(game=game, max_turns=max_turns, settings=settings), lock=threading.Lock())
  env.reset(3)
  return env, env._env


def play(env: TextArena, *moves: str) -> Step:
  for move in moves:
    step = env.step(f"{move}<|end|>")
    if step.done:
      break
  return step


def give_up(env: TextArena) -> Step:
  step = play(env, "nonsense", "nonsense")
  assert step.done and not step.info["success"]
  return step


def test_a_better_button_of_the_bandit_pays_more() -> None:
  env, game = make("Bandit-v0")
  rewards = {}
  for button in game.buttons:
    env.reset(3)
    rewards[button] = play(env, *["[red]"] * 20, f"[{button}]").reward
  means = game.state.game_state["ground_truth"]
  ranked = sorted(game.buttons, key=means.__getitem__)
  assert sorted(rewards, key=rewards.__getitem__) == ranked
  assert rewards[ranked[-1]] == 1.0
  assert rewards[ranked[0]] == pytest.approx(1.0 - means[ranked[-1]] + means[ranked[0]])
  env.reset(3)
  assert give_up(env).reward == -1.0


def test_a_solved_fifteen_puzzle_is_won() -> None:
  env, game = make("FifteenPuzzle-v0")
  game.board[:] = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, None, 15]]
  step = play(env, "[left]")
  assert step.done and step.reward == 1.0 and step.info["success"]


def test_every_fifteen_puzzle_has_a_solution() -> None:
  env, game = make("FifteenPuzzle-v0")
  for seed in range(20):
    env.reset(seed)
    tiles = [tile or 16 for row in game.board for tile in row]
    assert sorted(tiles) == list(range(1, 17))
    gap, swaps = tiles.index(16), 0
    for place in range(16):  # parity of the permutation, by swapping each tile into place
      while tiles[place] != place + 1:
        other = tiles[place] - 1
        tiles[place], tiles[other] = tiles[other], tiles[place]
        swaps += 1
    assert (swaps + (3 - gap // 4) + (3 - gap % 4)) % 2 == 0  # every move swaps the gap with a neighbour


def test_one_card_three_times_is_no_set() -> None:
  env, game = make("Set-v0")
  step = play(env, "[1, 1, 1]", "[2, 2, 3]")
  assert step.done and step.reward == 0.0 and game.state.game_state["score"] == 0


def test_a_set_is_a_twentieth() -> None:
  env, game = make("Set-v0")
  game.state.game_state |= {"score": 7, "num_turns": 19, "board": game.deck[:12]}
  step = play(env, "[1, 2, 3]")  # the first three of the ordered deck differ only in shape
  assert step.done and step.reward == pytest.approx(0.4) and not step.info["success"]


def test_letters_assigned_at_random_earn_nothing() -> None:
  env, _ = make("Cryptarithm-v0")
  play(env, *[f"[{letter} {digit + 1}]" for digit, letter in enumerate("SENDMOR")])
  assert give_up(env).reward == 0.0
  env.reset(0)
  step = play(env, *[f"[{letter} {digit}]" for letter, digit in SOLUTION.items()])
  assert step.done and step.reward == 1.0 and step.info["success"]


def test_what_is_not_solved_pays_less_than_one() -> None:
  env, _ = make("Countdown-v0", numbers=[100, 3, 3], target=100)
  assert 0.9 < give_up(env).reward < 1.0
  env.reset(0)
  assert play(env, "[1 2 -]", "[0 1 -]").reward == 1.0
  env, game = make("Slitherlink-v0")
  game.clues = [[0] * 4 for _ in range(4)]
  assert 0.9 < give_up(env).reward < 1.0
  env, game = make("2048-v0-ultra-easy")
  game.state.game_state |= {"score": 500, "board": [[16, 2, 16, 2], [2, 16, 2, 16], [0, 0, 0, 0], [0, 0, 0, 0]]}
  assert 0.9 < give_up(env).reward < 1.0
  env.reset(0)
  game.state.game_state["board"] = [[16, 16, 0, 0], *([0] * 4 for _ in range(3))]
  assert play(env, "[left]").reward == 1.0


def test_giving_up_at_blackjack_pays_no_draws() -> None:
  env, game = make("Blackjack-v0")
  game.state.game_state["results_summary"] |= {"win": 1, "draw": 3}
  assert give_up(env).reward == pytest.approx(1 / 5)


def test_lights_that_begin_switched_off_can_be_played() -> None:
  env, game = make("LightsOut-v0")
  game._initial_on, game.state.game_state["grid"] = 0, [[False] * 5 for _ in range(5)]
  assert "error" not in play(env, "[2 2]").observation
  assert play(env, "[2 2]").reward == 1.0


def test_out_of_turns_a_game_pays_for_what_is_done() -> None:
  env, game = make("GuessTheNumber-v0", max_turns=1)
  for guess in range(1, 21):
    env.reset(3)
    distance = abs(guess - game.game_number)
    step = play(env, f"[{guess}]")
    assert step.done and step.truncated == bool(distance)
    assert step.reward == pytest.approx(1 - distance / 19) and step.info["success"] == (distance == 0)
  env, game = make("Set-v0", max_turns=1)
  game.state.game_state["score"] = 5
  assert play(env, "nonsense").reward == pytest.approx(0.25)
  env, game = make("Secretary-v0", max_turns=1)
  step = play(env, "[continue]")
  assert step.truncated and step.reward == 0.0


@pytest.mark.parametrize(
  ("game", "reason"),
  [
    ("Klondike-v0", "cannot be made: SyntaxError: invalid syntax"),
    ("UsedCar-v0-balanced", "cannot be made: ImportError: Could not import textarena.envs.UsedCar"),
    ("ScorableGames-v0", "cannot be started: FileNotFoundError: Game configuration directory not found"),
    ("Briscola-v0", "is not: Briscola supports 2, 3, or 4 players"),
  ],
)
def test_games_that_cannot_be_played_are_refused_with_the_reason(game: str, reason: str) -> None:
  with pytest.raises(ValueError, match=f"'{game}' {reason}"):
    make(game)


def test_settings_that_a_game_does_not_have_are_refused() -> None:
  with pytest.raises(ValueError, match=r"'Bandit-v0' cannot be made: TypeError: .* unexpected keyword .* 'lives'"):
    make("Bandit-v0", lives=3)
