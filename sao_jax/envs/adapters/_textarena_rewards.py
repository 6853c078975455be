"""Corrections of TextArena games in which bad play earns as much as good play, or more.

The experiment `sweep_textarena` shows for every game that the best known play earns more than bad play.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

_UNSOLVED = 0.999
"""Largest reward of an unsolved game."""
_SET_TURNS = 20
_PROGRESS = ("_get_percentage_completion", "_progress", "_calculate_progress")
"""Methods that return the progress of a game."""

_Correction: TypeAlias = Callable[[Any, float], float]


def repair(env: Any) -> None:
  """Replaces faulty methods of a new game."""
  change = _REPAIRS.get(type(env).__name__)
  if change is not None:
    change(env)


def corrected(env: Any, reward: float) -> float:
  """Returns the corrected reward of an episode.

  - Bandit pays the regret of a wrong button, so the worst button pays most. Corrected: one minus the regret.
  - Blackjack counts a draw as half a win, but only if the game ends by an invalid move. Corrected: share of hands won.
  - Cryptarithm pays for assigned letters, right or wrong. Corrected: 1 if solved, else 0.
  - 2048, Countdown and Slitherlink pay up to 1 for unsolved games. Corrected: less than 1.
  - Set pays the number of sets found in 20 turns. Corrected: their share.
  """
  correction = _CORRECTIONS.get(type(env).__name__)
  return reward if correction is None else correction(env, reward)


def partial(env: Any) -> float:
  """Returns the reward of an unfinished episode: the game's reward for its progress, or 0 if it measures none."""
  if type(env).__name__ == "SetEnv":
    return corrected(env, float(env.state.game_state["score"]))
  progress = next((getattr(env, name) for name in _PROGRESS if hasattr(env, name)), None)
  return 0.0 if progress is None else corrected(env, float(progress()))


def _bandit(env: Any, reward: float) -> float:
  del env
  return reward if reward < 0 or reward == 1.0 else 1.0 - reward  # Below 0 is an invalid move.


def _blackjack(env: Any, reward: float) -> float:
  del reward
  state = env.state.game_state
  return float(state["results_summary"]["win"] / state["num_hands"])


def _cryptarithm(env: Any, reward: float) -> float:
  del reward
  return float(len(env.mapping) == len(env.letters) and env._equation_holds())


def _set(env: Any, reward: float) -> float:
  del env
  return reward / _SET_TURNS


def _countdown(env: Any, reward: float) -> float:
  return _below_one(reward, solved=bool(env.move_history) and env.numbers[-1] == env.target)


def _game_2048(env: Any, reward: float) -> float:
  return _below_one(reward, solved=env._max_tile() >= env.target_tile)


def _slitherlink(env: Any, reward: float) -> float:
  return _below_one(reward, solved=env._is_solved())


def _below_one(reward: float, *, solved: bool) -> float:
  return reward if solved else min(reward, _UNSOLVED)


_CORRECTIONS: Mapping[str, _Correction] = {
  "BanditEnv": _bandit,
  "BlackjackEnv": _blackjack,
  "CountdownEnv": _countdown,
  "CryptarithmEnv": _cryptarithm,
  "Game2048Env": _game_2048,
  "SetEnv": _set,
  "SlitherlinkEnv": _slitherlink,
}


def _fifteen_puzzle(env: Any) -> None:
  """Half of the boards have no solution, and solving a board raises an error."""
  generate, is_solved = env._generate_board, env._is_solved

  def solvable_board() -> Any:
    tiles = [tile for row in generate() for tile in row]
    numbers = [tile for tile in tiles if tile is not None]
    inversions = sum(a > b for a, b in itertools.combinations(numbers, 2))
    if (inversions + 3 - tiles.index(None) // 4) % 2:
      first, second = (i for i, tile in enumerate(tiles) if tile in (1, 2))
      tiles[first], tiles[second] = tiles[second], tiles[first]
    return [tiles[i : i + 4] for i in range(0, 16, 4)]

  def end_if_solved() -> bool:
    if is_solved():
      env.state.set_outcome(reward=1.0, reason="Congratulations! You have solved the 15-Puzzle.")
    return False  # True would call a method that its state lacks.

  env._generate_board, env._is_solved = solvable_board, end_if_solved


def _lights_out(env: Any) -> None:
  """The progress is undefined if all lights are off at the start."""
  share = env._get_percentage_completion
  env._get_percentage_completion = lambda: share() if env._initial_on else 0.0


def _set_of_three(env: Any) -> None:
  """The same card named three times counts as a Set."""
  parse = env._parse_action

  def parse_different(action: str) -> Any:
    cards = parse(action)
    return cards if cards is not None and len(set(cards)) == 3 else None

  env._parse_action = parse_different


_REPAIRS: Mapping[str, Callable[[Any], None]] = {
  "FifteenPuzzleEnv": _fifteen_puzzle,
  "LightsOutEnv": _lights_out,
  "SetEnv": _set_of_three,
}
