"""Text games for a chat model, with the texts of the game as user turns."""

from __future__ import annotations

import dataclasses

from sao_jax.envs import base
from sao_jax.envs.chat import ChatFormat


class ChatGame(base.Environment):
  """Another environment in the chat template of a checkpoint. A command is the text of an action without its thought.

  Args:
    chat: chat format of the checkpoint.
    env: the game, in the markup of `envs.base`: `user_prompt` at its reset, `observation` after a command.
    system: text of a system turn; None for no such turn.
  """

  def __init__(self, chat: ChatFormat, env: base.Environment, *, system: str | None = None):
    self._chat = chat
    self._env = env
    self._system = system

  def reset(self, task_index: int) -> str:
    text = _inner(self._env.reset(task_index), base.Tag.USER)
    first = [] if self._system is None else [{"role": "system", "content": self._system}]
    return self._chat.prompt([*first, {"role": "user", "content": text}])

  def step(self, action: str) -> base.Step:
    step = self._env.step(self._chat.parse(action).content + base.Tag.END)
    if step.done:
      return dataclasses.replace(step, observation="")
    text = _inner(step.observation, base.Tag.OUTPUT)
    return dataclasses.replace(
      step, observation=self._chat.between([{"role": "user", "content": text}], ended_with=action)
    )

  def close(self) -> None:
    self._env.close()


def _inner(text: str, opening: str) -> str:
  """Returns the text between the opening tag and the assistant's tag."""
  if not (text.startswith(opening) and text.endswith(base.Tag.ASSISTANT)):
    raise ValueError(f"the game's text must be between {opening} and {base.Tag.ASSISTANT}; received {text[:80]!r}.")
  return text.removeprefix(opening).removesuffix(base.Tag.ASSISTANT)
