"""The protocols of environments and tools, and the markup of episodes.

Your own task is a class with the three methods of `Environment`: `reset(task_index) -> prompt`, `step(action) -> Step`
and `close()`. Their texts are appended to the context unchanged, so they must include the tags of the template (see
`Tag`).
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from typing import Final, Protocol

from sao_jax.types import Environment, EnvironmentFactory, Step

__all__ = [
  "Environment", "EnvironmentFactory", "Step", "Tag", "Tool", "ToolSession", "answer", "call", "observation",
  "parse_action", "user_prompt",
]  # fmt: skip


class Tag:
  """The tags of the template. Each is one token of `MathTokenizer`.

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
  """Returns the prompt with the question `text`, up to the beginning of the first action."""
  return f"{Tag.USER}{text}{Tag.ASSISTANT}"


def call(code: str) -> str:
  """Returns the action that runs `code`."""
  return f"{Tag.PYTHON}{code}{Tag.END}"


def answer(text: str) -> str:
  """Returns the action with the answer `text`."""
  return f"{Tag.ANSWER}{text}{Tag.END}"


def observation(text: str) -> str:
  """Returns the observation that shows `text`. Tags in `text` are broken up, so that it cannot fake a turn."""
  return f"{Tag.OUTPUT}{text.replace('<|', '< |')}{Tag.ASSISTANT}"


def parse_action(action: str) -> tuple[str, str]:
  """Splits an action into its kind (`"python"`, `"answer"` or `"malformed"`) and its body (all of it if malformed).

  A well-formed action is one tag, a body that is not blank and has no tags, and `<|end|>`.
  """
  match = _ACTION.fullmatch(action)
  if match is None or not match["body"].strip() or "<|" in match["body"]:
    return "malformed", action
  return ("python" if match["python"] else "answer"), match["body"]


class ToolSession(Protocol):
  """One episode's use of a tool."""

  def run(self, code: str) -> str:
    """Runs `code` and returns its output, with the repr of a trailing expression. Errors are returned as text."""
    ...


class Tool(Protocol):
  """A tool that runs code. All environments share it and call it from many threads."""

  def session(self) -> AbstractContextManager[ToolSession]: ...
