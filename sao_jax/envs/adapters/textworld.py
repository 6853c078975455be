"""Text adventures made by Microsoft's TextWorld: a world, a quest, a reward where the quest is done."""

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
"""The game's interpreter, in C and in this process, hangs on a NUL and crashes on commands of great length."""
_FILE_COMMAND = re.compile(
  r"\b(?:save|restore|script|unscript|noscript|replay)\b|\b(?:transcrip|notranscr|recording)", re.IGNORECASE
)
"""By these it writes and reads files in the directory that this process runs in; it knows words by nine letters."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextWorldConfig:
  """Which games.

  Raises:
    ValueError: a field outside its range.
  """

  directory: str
  """Where the games are kept: made when first asked for (seconds each), and used again from there."""
  num_games: int = 100
  """Number of games; task indices beyond it start again from the first."""
  seed: int = 0
  """Seed of the first game; game i has seed + i. Use ranges that do not overlap for training and evaluation."""
  nb_rooms: int = 2
  nb_objects: int = 4
  quest_length: int = 3
  """What TextWorld is asked for; the shortest solution may take a command less."""
  list_commands: bool = False
  """Show the commands that are possible now under each text."""
  max_turns: int = 20
  move_timeout_s: float = 10.0
  """Seconds that a command may take; past it the episode is truncated."""
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
  """One game per episode; an action is one command. The reward is the score gained, so that a whole quest gives 1.

  Args:
    config: the games.
    lock: held while a game is made; shared by the environments of one process (see `textworld_factory`).
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
    # Not the first feedback, which holds a banner of some 20 lines.
    return self._text(f"{self._state.objective}\n\n{self._state.description.strip()}")

  def play(self, text: str) -> Reply:
    # One line, and never empty: what the interpreter reads is one command.
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
        (scratch / path.name).replace(path)  # After the other file: a game that exists is complete.
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
  """Makes environments that may run in different threads, and whose games run in a process that can be killed."""
  with require_extra("envs"):
    import textworld  # noqa: F401 (here, that its absence is not told by every episode)
  # The process may have been started in another directory.
  make = functools.partial(
    _make_game, dataclasses.replace(config, directory=str(pathlib.Path(config.directory).resolve()))
  )
  return lambda: HostedTextWorld(
    make, max_turns=config.max_turns, template=config.template, move_timeout_s=config.move_timeout_s
  )


def _make_game(config: TextWorldConfig) -> TextWorld:
  return TextWorld(config, lock=threading.Lock())
