"""Text adventures of Microsoft's TextWorld: a world, a quest, and a reward for the quest."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import shutil
import threading
from typing import Any

from sao_jax.envs.adapters.hosted_game import HostedGame
from sao_jax.envs.adapters.text_game import Reply, Template, TextGame
from sao_jax.envs.base import EnvironmentFactory
from sao_jax.utils.extras import require_extra

_MAX_COMMAND_CHARS = 100
"""Longest command. The game's interpreter, written in C, crashes on very long ones and hangs on a NUL."""
_FILE_COMMAND = re.compile(
  r"\b(?:save|restore|script|unscript|noscript|replay)\b|\b(?:transcrip|notranscr|recording)", re.IGNORECASE
)
"""Commands that read or write files in the working directory. The interpreter compares nine letters of a word."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextWorldConfig:
  """Settings of the games.

  Raises:
    ValueError: a field is outside its range.
  """

  directory: str
  """Folder of the games. Each is made when first used, which takes seconds, and kept there."""
  num_games: int = 100
  """Number of games. Larger task indices start again from the first."""
  seed: int = 0
  """Seed of the first game; game i has seed + i. Use ranges that do not overlap for training and evaluation."""
  nb_rooms: int = 2
  nb_objects: int = 4
  quest_length: int = 3
  """Length passed to TextWorld. The shortest solution may take one command less."""
  list_commands: bool = False
  """Whether to list the possible commands below each text."""
  max_turns: int = 20
  move_timeout_s: float = 10.0
  """Seconds per command; a slower one truncates the episode."""
  template: Template = Template()

  def __post_init__(self) -> None:
    if self.move_timeout_s <= 0:
      raise ValueError(f"TextWorldConfig.move_timeout_s must be positive; received {self.move_timeout_s!r}.")
    for name in ("num_games", "nb_rooms", "nb_objects", "quest_length", "max_turns"):
      if getattr(self, name) < 1:
        raise ValueError(f"TextWorldConfig.{name} must be at least 1; received {getattr(self, name)!r}.")
    if self.seed < 0:
      raise ValueError(f"TextWorldConfig.seed must be at least 0; received {self.seed!r}.")


class TextWorld(TextGame):
  """An environment with one game per episode, where an action is one command. A whole quest earns a reward of 1.

  Args:
    config: the games.
    lock: held while a game is made, and shared by the environments of one process (see `textworld_factory`).
  """

  def __init__(self, config: TextWorldConfig, *, lock: threading.Lock):
    super().__init__(max_turns=config.max_turns, template=config.template)
    self.config = config
    self._lock = lock
    self._env: Any = None
    self._state: Any = None
    self._score = 0.0

  def start(self, task_index: int) -> str:
    with require_extra("envs"):
      import textworld

    self._close_game()
    path = self._make_game(self.config.seed + task_index % self.config.num_games)
    wanted = ("objective", "description", "admissible_commands", "policy_commands", "won", "lost", "max_score")
    infos = textworld.EnvInfos(**dict.fromkeys(wanted, True))
    self._env = textworld.start(str(path), infos)
    self._state = self._env.reset()
    self._score = 0.0
    # The first feedback holds a banner of about 20 lines, so it is not shown.
    return self._text(f"{self._state.objective}\n\n{self._state.description.strip()}")

  def play(self, text: str) -> Reply:
    # The interpreter must read exactly one command: one line, never empty.
    line = text.split("\n")[0]
    if len(line) > _MAX_COMMAND_CHARS or not (line.isascii() and line.isprintable()):
      return Reply(text=f"error: a command is at most {_MAX_COMMAND_CHARS} printable ASCII characters.")
    if _FILE_COMMAND.search(line):
      return Reply(text="error: there are no saved games and no transcripts here.")
    self._state, score, done = self._env.step(line or "look")
    reward, self._score = (score - self._score) / (self._state.max_score or 1), score
    info = {"success": bool(self._state.won)} if done else {}
    return Reply(text=self._text(self._state.feedback.strip()), reward=reward, done=done, info=info)

  def walkthrough(self) -> list[str]:
    """Commands that win from the present state: for demonstrations and tests."""
    return list(self._state.policy_commands or [])

  def commands(self) -> list[str]:
    """Commands that are possible in the present state."""
    return list(self._state.admissible_commands)

  def close(self) -> None:
    super().close()
    self._close_game()

  def _text(self, text: str) -> str:
    if not self.config.list_commands:
      return text
    return f"{text}\nCommands: {', '.join(self._state.admissible_commands)}."

  def _close_game(self) -> None:
    if self._env is not None:
      self._env.close()
    self._env = self._state = None

  def _make_game(self, seed: int) -> pathlib.Path:
    import textworld

    config = self.config
    name = f"rooms{config.nb_rooms}-objects{config.nb_objects}-quest{config.quest_length}-seed{seed}"
    path = pathlib.Path(config.directory).resolve() / f"{name}.z8"
    with self._lock:
      if not path.exists():
        options = textworld.GameOptions()
        options.nb_rooms, options.nb_objects = config.nb_rooms, config.nb_objects
        options.quest_length = config.quest_length
        options.seeds = seed
        scratch = path.parent / f"{name}.making"
        options.path = str(scratch / path.name)
        options.force_recompile = True
        textworld.make(options)
        (scratch / f"{name}.json").replace(path.with_suffix(".json"))
        (scratch / path.name).replace(path)  # After the other file, so an existing game is complete.
        shutil.rmtree(scratch)
    return path


class HostedTextWorld(HostedGame):
  """A `TextWorld` in a process that can be killed."""

  def walkthrough(self) -> list[str]:
    """Commands that win from the present state: for demonstrations and tests."""
    return list(self.ask("walkthrough"))

  def commands(self) -> list[str]:
    """Commands that are possible in the present state."""
    return list(self.ask("commands"))


def textworld_factory(config: TextWorldConfig) -> EnvironmentFactory:
  """Returns a factory of thread-safe environments whose games run in a process that can be killed."""
  with require_extra("envs"):
    import textworld  # noqa: F401 (a missing package is an error here, not in every episode)
  # The process of the games may have another working directory.
  make = functools.partial(
    _make_game, dataclasses.replace(config, directory=str(pathlib.Path(config.directory).resolve()))
  )
  return lambda: HostedTextWorld(
    make, max_turns=config.max_turns, template=config.template, move_timeout_s=config.move_timeout_s
  )


def _make_game(config: TextWorldConfig) -> TextWorld:
  return TextWorld(config, lock=threading.Lock())
