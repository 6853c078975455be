"""What an environment is, what a tool is, and the markup that both sides of an episode are written in.

A task of your own is a class with the three methods of `Environment`: `reset(task_index) -> prompt`,
`step(action) -> Step`, `close()`. Every text they return is appended to the context as it is, so it carries the
template's tags (see `Tag`).
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Final, Protocol

from sao_jax.types import Environment as Environment
from sao_jax.types import EnvironmentFactory as EnvironmentFactory
from sao_jax.types import Step as Step


class Tag:
  """The tags of the template; each is one token of the tokenizers here.

  An episode reads `<|user|>question<|assistant|>` + action + observation + action + ... with actions
  `<|python|>code<|end|>` and `<|answer|>text<|end|>`, and observations `<|output|>text<|assistant|>`.
  """

  SYSTEM: Final = "<|system|>"
  USER: Final = "<|user|>"
  ASSISTANT: Final = "<|assistant|>"
  PYTHON: Final = "<|python|>"
  OUTPUT: Final = "<|output|>"
  ANSWER: Final = "<|answer|>"
  END: Final = "<|end|>"


_ACTION = re.compile(
  rf"(?:(?P<python>{re.escape(Tag.PYTHON)})|{re.escape(Tag.ANSWER)})(?P<body>.*){re.escape(Tag.END)}", re.DOTALL
)


def user_prompt(text: str) -> str:
  """The prompt that asks `text`, ending where the model's first action begins."""
  return f"{Tag.USER}{text}{Tag.ASSISTANT}"


def call(code: str) -> str:
  """The action that runs `code`."""
  return f"{Tag.PYTHON}{code}{Tag.END}"


def answer(text: str) -> str:
  """The action that answers `text`."""
  return f"{Tag.ANSWER}{text}{Tag.END}"


def observation(text: str) -> str:
  """What follows an action answered by `text`; tags in `text` are broken up, so that it cannot fake a turn."""
  return f"{Tag.OUTPUT}{text.replace('<|', '< |')}{Tag.ASSISTANT}"


def parse_action(action: str) -> tuple[str, str]:
  """Splits an action into its kind, `"python"`, `"answer"` or `"malformed"`, and its body (all of it if malformed).

  Well-formed is exactly one tag, a body that is not blank and holds no tag, and `<|end|>`.
  """
  match = _ACTION.fullmatch(action)
  if match is None or not match["body"].strip() or "<|" in match["body"]:
    return "malformed", action
  return ("python" if match["python"] else "answer"), match["body"]


class ToolSession(Protocol):
  """One episode's use of a tool."""

  def run(self, code: str) -> str:
    """Runs `code` and returns what it prints, a trailing expression's repr included; its errors come back as text."""
    ...


class Tool(Protocol):
  """Something that runs code; shared by all environments, called from many threads."""

  def session(self) -> AbstractContextManager[ToolSession]: ...
