"""Single-player games of the TextArena package: Mastermind, GuessTheNumber, FrozenLake, Minesweeper, 2048, ..."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sao_jax.envs.adapters._textarena_rewards import corrected, partial, repair
from sao_jax.envs.adapters.hosted_game import HostedGame
from sao_jax.envs.adapters.text_game import Reply, Template, TextGame
from sao_jax.envs.base import EnvironmentFactory
from sao_jax.utils.extras import require_extra

_T = TypeVar("_T")
_MAX_ERROR_CHARS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextArenaConfig:
  """Settings of a game.

  Raises:
    ValueError: a field is outside its range.
  """

  game: str
  """TextArena's name: `"Mastermind-v0"`."""
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Further arguments of `textarena.make`: `{"max_turns": 12}`."""
  success_threshold: float = 1.0
  """Reward from which an episode counts as a success. Games that can be solved in part give less for a part."""
  max_turns: int = 30
  move_timeout_s: float = 10.0
  """Seconds per move; a slower move truncates the episode."""
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.move_timeout_s <= 0:
      raise ValueError(f"TextArenaConfig.move_timeout_s must be positive; received {self.move_timeout_s!r}.")
    if self.max_turns < 1:
      raise ValueError(f"TextArenaConfig.max_turns must be at least 1; received {self.max_turns!r}.")


class TextArena(TextGame):
  """An environment with one game per episode. Task i is the game with seed i.

  The reward comes at the end. It is that of the game, at most 1, corrected where bad play would earn as much as good
  play (see `_textarena_rewards`). An episode that runs out of turns earns the game's reward for partial progress.

  The first text of a game explains its moves, mostly in square brackets. If a move raises an exception in the game, the
  observation is the error, and the move costs a turn. The games draw from Python's global random generator. Each game
  has its own state here, which is swapped in for each move, so an episode depends only on its seed and moves. The
  environments of a process share `lock` for this (see `textarena_factory`).

  Raises:
    ValueError: the game is unknown, cannot be made, or is for several players.
  """

  def __init__(self, config: TextArenaConfig, *, lock: threading.Lock):
    with require_extra("envs"):
      import textarena

    super().__init__(max_turns=config.max_turns, template=config.template)
    self.config = config
    self._lock = lock
    self._random_state: Any = None
    name = config.game.removesuffix("-raw") + "-raw"  # Raw: only new messages, not the whole history.
    if name not in textarena.envs.registration.ENV_REGISTRY:
      raise ValueError(f"game must be one of TextArena's; received {config.game!r}.")
    self._make: Callable[[], Any] = lambda: _make(config, name)
    self._env = self._with_own_random(self._make, seed=0)
    # Some games (RushHour) draw their problem when they are made, not when they are reset.
    self._draws_when_made = self._random_state != random.Random(0).getstate()

  def start(self, task_index: int) -> str:
    from textarena.state import SinglePlayerState

    if self._draws_when_made:
      self._env = self._with_own_random(self._make, seed=task_index)
    try:
      self._with_own_random(lambda: self._env.reset(num_players=1, seed=task_index), seed=task_index)
    except (AssertionError, ValueError) as error:
      raise ValueError(f"game must be one for a single player; {self.config.game!r} is not: {error}.") from error
    except Exception as error:
      raise ValueError(f"game {self.config.game!r} cannot be started: {_first_line(error)}") from error
    if not isinstance(self._env.state, SinglePlayerState):
      # Some (MarketEntryGame) accept one player at the start, but then search for the next one for ever.
      kind = type(self._env.state).__name__
      raise ValueError(f"game must be one for a single player; {self.config.game!r} is not: its state is a {kind}.")
    return self._with_own_random(self._messages)

  def play(self, text: str) -> Reply:
    try:
      done, _ = self._with_own_random(lambda: self._env.step(text))
      said = "" if done else self._with_own_random(self._messages)
    except Exception as error:  # noqa: BLE001 (the player reads it; a move must not fail the episode)
      done, said = False, f"error: the game cannot take this move: {str(error)[:_MAX_ERROR_CHARS]}"
    if not done:
      truncated = self._turns >= self._max_turns
      return self._end(partial(self._env), said, truncated=True) if truncated else Reply(text=said)
    rewards, game_info = self._env.close()
    reward, reason = (rewards or {}).get(0, 0.0), game_info.get(0, {}).get("reason", "")
    if isinstance(reward, str):  # Countdown and Cryptarithm swap the two after an invalid move: "Invalid Move: 0.5"
      reward, reason = reason.rpartition(" ")[2], reward
    return self._end(corrected(self._env, float(reward)), reason, truncated=False)

  def _end(self, reward: float, text: str, *, truncated: bool) -> Reply:
    info = {"success": not truncated and reward >= self.config.success_threshold, "reason": text}
    return Reply(text=text, reward=reward, done=True, truncated=truncated, info=info)

  def _messages(self) -> str:
    """Returns the new messages of the game, without the player's moves, which are in the context already."""
    from textarena import ObservationType

    player, messages = self._env.get_observation()
    own = (player, ObservationType.PLAYER_ACTION)
    # Some games confuse arguments: they add moves without the player (TowerOfHanoi) or as numbers (Countdown).
    return "\n".join(
      text for speaker, text, kind in messages if speaker not in own and kind not in own and isinstance(text, str)
    )

  def _with_own_random(self, call: Callable[[], _T], *, seed: int | None = None) -> _T:
    with self._lock:
      outside = random.getstate()
      try:
        if seed is not None:
          random.seed(seed)
        else:
          random.setstate(self._random_state)
        return call()
      finally:
        self._random_state = random.getstate()
        random.setstate(outside)


def _make(config: TextArenaConfig, name: str) -> Any:
  import textarena

  try:
    env = textarena.make(name, **config.settings)
  except Exception as error:  # Some games lack files, a download or a key, or have syntax errors.
    raise ValueError(f"game {config.game!r} cannot be made: {_first_line(error)}") from error
  repair(env)
  return env


def _first_line(error: Exception) -> str:
  """Returns the kind of an error and the first line of its message that holds words."""
  lines = (line.strip() for line in str(error).splitlines() if re.search("[a-z]", line))
  return f"{type(error).__name__}: {next(lines, '')}"


def textarena_factory(config: TextArenaConfig) -> EnvironmentFactory:
  """Returns a factory of thread-safe environments whose games run in a process that can be killed."""
  with require_extra("envs"):
    import textarena  # noqa: F401 (a missing package is an error here, not in every episode)
  make = functools.partial(_make_game, config)
  return lambda: HostedGame(
    make, max_turns=config.max_turns, template=config.template, move_timeout_s=config.move_timeout_s
  )


def _make_game(config: TextArenaConfig) -> TextArena:
  return TextArena(config, lock=threading.Lock())
