"""Demonstrations of chat tasks for the warm start, from a JSONL file of conversations.

Each line holds an object with `messages` in the form of the OpenAI API:

    {"messages": [{"role": "user", "content": "What is 6 * 7?"},
                  {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function",
                    "function": {"name": "python", "arguments": {"code": "print(6 * 7)"}}}]},
                  {"role": "tool", "tool_call_id": "call00001", "name": "python", "content": "42"},
                  {"role": "assistant", "content": "The answer is \\\\boxed{42}."}]}

on one line. The prompt shows the tools of the task. Calls may also stand in the `content`, as the checkpoint writes
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.tasks import problem_file
from experiments.tasks.demonstrations import Pieces
from sao_jax.tokenizers import Chat, chat_demonstrations

Demonstrate = Callable[[int, np.random.Generator], Pieces]


def load(chat: Chat, path: str, tools: Sequence[Mapping[str, Any]] = ()) -> Demonstrate:
  """Returns a function for `Domain.demonstrate` that draws a conversation of the file, whatever the task.

  Args:
    chat: the checkpoint's format.
    path: the JSONL file.
    tools: schemas of the task's tools.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file is empty, or a line does not hold such a conversation. What only the template can tell is
      raised when the conversation is drawn.
  """
  conversations: list[tuple[int, Any]] = []
  for number, row in problem_file.rows(path):
    try:
      messages = row["messages"]
      chat_demonstrations.check(messages)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      expected = "a JSON object with messages of a conversation"
      raise ValueError(f"{path}, line {number} must be {expected}: {error}") from error
    conversations.append((number, messages))
  if not conversations:
    raise ValueError(f"{path} holds no conversation.")

  @functools.cache
  def pieces(index: int) -> Pieces:
    number, messages = conversations[index]
    try:
      return chat_demonstrations.pieces(chat, messages, tools)
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(f"{path}, line {number}: {error}") from error

  return lambda task_index, rng: pieces(int(rng.integers(len(conversations))))
