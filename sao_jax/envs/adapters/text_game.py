"""A base class for environments whose actions are free text, and the template of their turns."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from sao_jax.envs import base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
  """The template of the turns of an episode. Each part has one `{}` for its text.

  The default uses the tags of `base.Tag`. For a published model, write the template of that model (see `CHATML`).

  Raises:
    ValueError: a part does not have exactly one `{}`, or `end` is empty.
  """

  system: str = f"{base.Tag.SYSTEM}{{}}"
  user: str = f"{base.Tag.USER}{{}}{base.Tag.ASSISTANT}"
  """Turn of the user, up to the beginning of the next action."""
  observation: str = f"{base.Tag.OUTPUT}{{}}{base.Tag.ASSISTANT}"
  """Text between the `end` of an action and the beginning of the next."""
  end: str = base.Tag.END
  """End of an action."""
  reserved: tuple[str, ...] = ("<|",)
  """Beginnings of tags. In untrusted text a space breaks them up, so that it cannot fake a turn."""

  def __post_init__(self) -> None:
    for name in ("system", "user", "observation"):
      if getattr(self, name).count("{}") != 1:
        raise ValueError(f"Template.{name} must hold {{}} exactly once; received {getattr(self, name)!r}.")
    if not self.end:
      raise ValueError("Template.end must not be empty.")

  def prompt(self, text: str, *, system: str = "") -> str:
    """Returns the first text of an episode."""
    return (self._fill(self.system, system) if system else "") + self._fill(self.user, text)

  def reply(self, text: str) -> str:
    """Returns the text after an action."""
    return self._fill(self.observation, text)

  def _fill(self, part: str, text: str) -> str:
    for tag in self.reserved:
      text = text.replace(tag, f"{tag[:1]} {tag[1:]}")
    return part.replace("{}", text)


CHATML = Template(
  system="<|im_start|>system\n{}<|im_end|>\n",
  user="<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
  observation="\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
  end="<|im_end|>",
)
"""The template of Qwen, SmolLM2 and many others."""


class Reply(NamedTuple):
  """The reply of a game to one move."""

  text: str = ""
  reward: float = 0.0
  done: bool = False
  truncated: bool = False
  info: Mapping[str, Any] = {}


class TextGame(base.Environment, abc.ABC):
  """A base class for environments whose actions are free text up to the `end` of the template.

  It counts turns and writes the template. An episode that runs out of turns is truncated and keeps its rewards.
  `info["success"]` comes from the last reply of the game, or else from `succeeded`. An action that was cut off before
  its `end` is played as it is.
  """

  def __init__(self, *, max_turns: int, template: Template, system_prompt: str = ""):
    if max_turns < 1:
      raise ValueError(f"max_turns must be at least 1; received {max_turns!r}.")
    self.template = template
    self._max_turns = max_turns
    self._system_prompt = system_prompt
    self._turns = 0
    self._total = 0.0
    self._running = False

  @abc.abstractmethod
  def start(self, task_index: int) -> str:
    """Starts game number `task_index` and returns its first text."""

  @abc.abstractmethod
  def play(self, text: str) -> Reply:
    """Plays one move."""

  def succeeded(self, total: float, finished: bool) -> bool:
    """Whether an episode counts as a success. By default, its rewards must sum to more than 0.

    Args:
      total: sum of the rewards of the episode.
      finished: whether the game ended, rather than run out of turns.
    """
    return total > 0

  def reset(self, task_index: int) -> str:
    if isinstance(task_index, bool) or not isinstance(task_index, int) or task_index < 0:
      raise ValueError(f"task_index must be an int >= 0; received {task_index!r}.")
    self._turns, self._total, self._running = 0, 0.0, False
    prompt = self.template.prompt(self.start(task_index), system=self._system_prompt)
    self._running = True
    return prompt

  def step(self, action: str) -> base.Step:
    if not self._running:
      raise RuntimeError("step was called before reset, or after the end of the episode.")
    self._turns += 1
    reply = self.play(action.removesuffix(self.template.end).strip())
    self._total += reply.reward
    truncated = reply.truncated or (not reply.done and self._turns >= self._max_turns)
    done = reply.done or truncated
    if not done:
      return base.Step(observation=self.template.reply(reply.text), reward=float(reply.reward), info=dict(reply.info))
    self._running = False
    success = self.succeeded(self._total, finished=reply.done and not reply.truncated)
    info = {"success": success, "turns": self._turns, "last_text": reply.text, **reply.info}
    return base.Step(reward=float(reply.reward), done=True, truncated=truncated, info=info)

  def close(self) -> None:
    self._running = False
