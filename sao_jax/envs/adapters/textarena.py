"""Single-player games of the TextArena package: Mastermind, GuessTheNumber, FrozenLake, Minesweeper, 2048, ..."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.max_turns < 1:
      raise ValueError(f"TextArenaConfig.max_turns must be at least 1; received {self.max_turns!r}.")


class TextArena(TextGame):
  """One game per episode, task number i being the game with seed i. The reward comes at the end of the game.

  Moves are written as the game's first text says, mostly in square brackets. What a game stumbles over (some raise at
  moves that they do not know) is answered by its error, and costs a turn. The games draw from Python's global random
  generator; each gets a state of its own here, swapped in for the time of a move, so that an episode depends on its
  seed and moves only. The environments of one process share `lock` for that (see `textarena_factory`).

  Raises:
    ValueError: an unknown game, or one for several players.
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
    self._make: Callable[[], Any] = lambda: textarena.make(name, **config.settings)
    self._env = self._with_own_random(self._make, seed=0)
    # Some games (RushHour) draw their problem as they are made, not as they are reset.
    self._draws_when_made = self._random_state != random.Random(0).getstate()

  def start(self, task_index: int) -> str:
    from textarena.state import SinglePlayerState

    if self._draws_when_made:
      self._env = self._with_own_random(self._make, seed=task_index)
    try:
      self._with_own_random(lambda: self._env.reset(num_players=1, seed=task_index), seed=task_index)
    except AssertionError as error:
      raise ValueError(f"game must be one for a single player; {self.config.game!r} is not: {error}.") from error
    if not isinstance(self._env.state, SinglePlayerState):
      # Some (MarketEntryGame) begin with one player all the same, and look for the next one for ever.
      kind = type(self._env.state).__name__
      raise ValueError(f"game must be one for a single player; {self.config.game!r} is not: its state is a {kind}.")
    return self._with_own_random(self._messages)

  def play(self, text: str) -> Reply:
    try:
      done, _ = self._with_own_random(lambda: self._env.step(text))
    except Exception as error:  # noqa: BLE001 (the player reads it; a move must not end an episode as a failed one)
      return Reply(text=f"error: the game cannot take this move: {str(error)[:_MAX_ERROR_CHARS]}")
    if not done:
      return Reply(text=self._with_own_random(self._messages))
    rewards, game_info = self._env.close()
    reward, reason = (rewards or {}).get(0, 0.0), game_info.get(0, {}).get("reason", "")
    if isinstance(reward, str):  # Countdown and Cryptarithm exchange the two at invalid moves: "Invalid Move: 0.5"
      reward, reason = reason.rpartition(" ")[2], reward
    info = {"success": float(reward) >= self.config.success_threshold, "reason": reason}
    return Reply(text=reason, reward=float(reward), done=True, info=info)

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


def textarena_factory(config: TextArenaConfig) -> EnvironmentFactory:
  """Makes environments that may run in different threads."""
  with require_extra("envs"):
    import textarena  # noqa: F401 (here, that its absence is not told by every episode)
  lock = threading.Lock()
  return lambda: TextArena(config, lock=lock)
