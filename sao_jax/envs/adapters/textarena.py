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
  """Which game.

  Raises:
    ValueError: `max_turns` below 1.
  """

  game: str
  """TextArena's name: `"Mastermind-v0"`."""
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Further arguments of `textarena.make`: `{"max_turns": 12}`."""
  success_threshold: float = 1.0
  """Reward from which an episode counts as a success; games that can be solved in part give less."""
  max_turns: int = 30
  move_timeout_s: float = 10.0
  """Seconds that a move may take; past it the episode is truncated."""
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.move_timeout_s <= 0:
      raise ValueError(f"TextArenaConfig.move_timeout_s must be positive; received {self.move_timeout_s!r}.")
    if self.max_turns < 1:
      raise ValueError(f"TextArenaConfig.max_turns must be at least 1; received {self.max_turns!r}.")


class TextArena(TextGame):
  """One game per episode, task number i being the game with seed i. The reward comes at the end of the game.

  It is the game's own, at most 1, corrected where bad play earns as much as good play (see `_textarena_rewards`). Out
  of turns, an episode earns what the game pays for the part of it that is done.

  Moves are written as the game's first text says, mostly in square brackets. What a game stumbles over (some raise at
  moves that they do not know) is answered by its error, and costs a turn. The games draw from Python's global random
  generator; each gets a state of its own here, swapped in for the time of a move, so that an episode depends on its
  seed and moves only. The environments of one process share `lock` for that (see `textarena_factory`).

  Raises:
    ValueError: an unknown game, one that cannot be made, or one for several players.
  """

  def __init__(self, config: TextArenaConfig, *, lock: threading.Lock):
    with require_extra("envs"):
      import textarena

    super().__init__(max_turns=config.max_turns, template=config.template)
    self.config = config
    self._lock = lock
    self._random_state: Any = None
    name = config.game.removesuffix("-raw") + "-raw"  # Without wrappers: new messages only, not the whole history.
    if name not in textarena.envs.registration.ENV_REGISTRY:
      raise ValueError(f"game must be one of TextArena's; received {config.game!r}.")
    self._make: Callable[[], Any] = lambda: _make(config, name)
    self._env = self._with_own_random(self._make, seed=0)
    # Some games (RushHour) draw their problem as they are made, not as they are reset.
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
      # Some (MarketEntryGame) begin with one player all the same, and look for the next one for ever.
      kind = type(self._env.state).__name__
      raise ValueError(f"game must be one for a single player; {self.config.game!r} is not: its state is a {kind}.")
    return self._with_own_random(self._messages)

  def play(self, text: str) -> Reply:
    try:
      done, _ = self._with_own_random(lambda: self._env.step(text))
      said = "" if done else self._with_own_random(self._messages)
    except Exception as error:  # noqa: BLE001 (the player reads it; a move must not end an episode as a failed one)
      done, said = False, f"error: the game cannot take this move: {str(error)[:_MAX_ERROR_CHARS]}"
    if not done:
      truncated = self._turns >= self._max_turns
      return self._end(partial(self._env), said, truncated=True) if truncated else Reply(text=said)
    rewards, game_info = self._env.close()
    reward, reason = (rewards or {}).get(0, 0.0), game_info.get(0, {}).get("reason", "")
    if isinstance(reward, str):  # Countdown and Cryptarithm exchange the two at invalid moves: "Invalid Move: 0.5"
      reward, reason = reason.rpartition(" ")[2], reward
    return self._end(corrected(self._env, float(reward)), reason, truncated=False)

  def _end(self, reward: float, text: str, *, truncated: bool) -> Reply:
    info = {"success": not truncated and reward >= self.config.success_threshold, "reason": text}
    return Reply(text=text, reward=reward, done=True, truncated=truncated, info=info)

  def _messages(self) -> str:
    """What the game has said since it was last asked; the player's own moves are left out: they are in the context."""
    from textarena import ObservationType

    player, messages = self._env.get_observation()
    own = (player, ObservationType.PLAYER_ACTION)
    # Some games confuse arguments: moves without their player (TowerOfHanoi), or as numbers (Countdown, Cryptarithm).
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
  except Exception as error:  # some games lack files, a download or a key, or are no Python that can be read
    raise ValueError(f"game {config.game!r} cannot be made: {_first_line(error)}") from error
  repair(env)
  return env


def _first_line(error: Exception) -> str:
  """The kind of an error and the first line of its message that says something."""
  lines = (line.strip() for line in str(error).splitlines() if re.search("[a-z]", line))
  return f"{type(error).__name__}: {next(lines, '')}"


def textarena_factory(config: TextArenaConfig) -> EnvironmentFactory:
  """Makes environments that may run in different threads, and whose games run in a process that can be killed."""
  with require_extra("envs"):
    import textarena  # noqa: F401 (here, that its absence is not told by every episode)
  make = functools.partial(_make_game, config)
  return lambda: HostedGame(
    make, max_turns=config.max_turns, template=config.template, move_timeout_s=config.move_timeout_s
  )


def _make_game(config: TextArenaConfig) -> TextArena:
  return TextArena(config, lock=threading.Lock())
