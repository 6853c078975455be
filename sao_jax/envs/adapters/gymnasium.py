"""Gymnasium environments with discrete actions, such as toy text (FrozenLake, Taxi, CliffWalking, Blackjack)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sao_jax.envs.adapters.text_game import Reply, Template, TextGame
from sao_jax.utils.extras import require_extra

_MOVES = ("left", "down", "right", "up")
_ACTIONS: Mapping[str, Sequence[str]] = {
  "FrozenLake": _MOVES,
  "CliffWalking": ("up", "right", "down", "left"),
  "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
  "Blackjack": ("stick", "hit"),
}
_ENDS_AT_THE_GOAL = ("CliffWalking", "Taxi")
"""Environments where each step costs reward. The best total may be negative, so reaching the end is the success."""
_PLACES = ("red", "green", "yellow", "blue")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GymnasiumConfig:
  """Settings of an environment.

  Raises:
    ValueError: `max_turns` is below 1.
  """

  env_id: str
  """Gymnasium's name: `"FrozenLake-v1"`, `"Taxi-v4"`, `"CliffWalking-v1"`, `"Blackjack-v1"`, ..."""
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Further arguments of `gymnasium.make`: `{"is_slippery": False}`."""
  actions: tuple[str, ...] = ()
  """Names of the actions by number. Empty for the names of the toy-text environments above."""
  success_total: float | None = None
  """Sum of rewards from which an episode counts as a success. With None, an episode succeeds in CliffWalking and Taxi
  when it reaches the goal, and elsewhere with a sum above 0."""
  describe: Callable[[Any, Any], str] | None = None
  """Function `(environment, observation) -> text`. None uses `describe_observation`."""
  max_turns: int = 50
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.max_turns < 1:
      raise ValueError(f"GymnasiumConfig.max_turns must be at least 1; received {self.max_turns!r}.")


class Gymnasium(TextGame):
  """A Gymnasium environment with named actions. Task i uses seed i.

  The observation after any other text lists the actions, and the text costs a turn. Rewards are those of the
  environment, step by step. `GymnasiumConfig.success_total` defines success.

  Raises:
    ValueError: the environment has no discrete actions, or the number of names is wrong.
  """

  def __init__(self, config: GymnasiumConfig):
    with require_extra("envs"):
      import gymnasium

    super().__init__(max_turns=config.max_turns, template=config.template)
    self.config = config
    text = "ansi" in gymnasium.spec(config.env_id).make(**config.settings).metadata.get("render_modes", ())
    self._env: Any = gymnasium.make(config.env_id, render_mode="ansi" if text else None, **config.settings)
    self._family = _family(self._env)
    self.actions = tuple(config.actions or _ACTIONS.get(self._family, ()))
    count = getattr(self._env.action_space, "n", None)
    if count is None or len(self.actions) != int(count):
      raise ValueError(
        f"actions must name each discrete action of {config.env_id}, whose action space is {self._env.action_space}; "
        f"received {self.actions}."
      )

  def start(self, task_index: int) -> str:
    observation, _ = self._env.reset(seed=task_index)
    return f"{self._describe(observation)}\nActions: {', '.join(self.actions)}."

  def play(self, text: str) -> Reply:
    name = text.strip().lower()
    if name not in self.actions:
      return Reply(text=f"error: the actions are {', '.join(self.actions)}.")
    observation, reward, terminated, truncated, _ = self._env.step(self.actions.index(name))
    return Reply(
      text=self._describe(observation),
      reward=float(reward),
      done=bool(terminated or truncated),
      truncated=bool(truncated and not terminated),
    )

  def succeeded(self, total: float, finished: bool) -> bool:
    if self.config.success_total is not None:
      return total >= self.config.success_total
    return finished if self._family in _ENDS_AT_THE_GOAL else total > 0

  def close(self) -> None:
    super().close()
    self._env.close()

  def _describe(self, observation: Any) -> str:
    return (self.config.describe or describe_observation)(self._env, observation)


def _family(env: Any) -> str:
  """Returns the toy-text environment, for any of its ids (FrozenLake8x8-v1, CliffWalkingSlippery-v1, ...), or ''."""
  name = type(env.unwrapped).__name__.lower()
  return next((family for family in _ACTIONS if name.startswith(family.lower())), "")


def describe_observation(env: Any, observation: Any) -> str:
  """Describes an observation: in words, as a map (the player is at `[F]`), as rendered, or as `str`."""
  family = _family(env)
  if family == "Blackjack":
    total, dealer, ace = observation
    return f"Your sum is {total}, the dealer shows {dealer}, you have {'a' if ace else 'no'} usable ace."
  if family == "Taxi":
    row, column, passenger, goal = env.unwrapped.decode(observation)
    where = "in the taxi" if passenger == 4 else f"at {_PLACES[passenger]}"
    grid = re.sub(r"\x1b\[[0-9;]*m", "", env.render()).strip()
    return f"{grid}\nTaxi at row {row}, column {column}. Passenger {where}. Destination: {_PLACES[goal]}."
  if env.render_mode != "ansi":
    return str(observation)
  grid = re.sub(r"\x1b\[41m(.)\x1b\[0m", r"[\1]", env.render())
  return re.sub(r"\x1b\[[0-9;]*m", "", grid).strip("\n")
