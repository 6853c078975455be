"""Conversations as demonstrations: the text of a chat in its checkpoint's format, split into actions and the rest."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.tokenizers.chat import Chat
from sao_jax.tokenizers.chat_template import Message


def pieces(
  chat: Chat, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> list[tuple[str, bool]]:
  """Returns a conversation as pieces of (text, is action), the same texts as in an episode with these messages.

  Actions are the assistant's messages with the token that ends them. The prompt and the texts between actions are those
  of `Chat.prompt` and `Chat.between`.

  Args:
    chat: the checkpoint's format.
    messages: in the form of the OpenAI API, with `tool_calls` and tool results. The last one is the assistant's, and no
      two of the assistant's follow each other.
    tools: schemas of the tools that the prompt shows.

  Raises:
    ValueError: the messages have another form, or the template writes an action so that it cannot be cut out, or so
      that its calls are not read back as they were given.
  """
  check(messages)
  places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
  found = [(chat.prompt(messages[: places[0]], tools), False)]
  for place, following in itertools.zip_longest(places, places[1:]):
    action = _action(chat, messages, place, tools)
    found.append((action, True))
    if following is not None:
      found.append((chat.between(messages[place + 1 : following], ended_with=action, tools=tools), False))
  return found


def check(messages: Sequence[Message]) -> None:
  """Raises ValueError unless the messages have the form that `pieces` takes."""
  if not isinstance(messages, list | tuple) or not all(isinstance(x, Mapping) for x in messages):
    raise ValueError(f"messages must be a list of objects; received {messages!r:.80}.")
  roles = [message.get("role") for message in messages]
  known = ("system", "user", "assistant", "tool")
  if unknown := [role for role in roles if role not in known]:
    raise ValueError(f"the role of a message must be one of {', '.join(known)}; received {unknown[0]!r:.80}.")
  if len(roles) < 2 or roles[0] == "assistant" or roles[-1] != "assistant":
    raise ValueError(f"messages must begin with a prompt and end with the assistant's; received the roles {roles}.")
  if any(pair == ("assistant", "assistant") for pair in itertools.pairwise(roles)):
    raise ValueError(f"between two messages of the assistant there must be another; received the roles {roles}.")
  for message in messages:
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
      raise ValueError(f"a message without tool_calls must have a text as its content; received {message!r:.80}.")


def _action(chat: Chat, messages: Sequence[Message], place: int, tools: Sequence[Mapping[str, Any]]) -> str:
  """The template's text of one of the assistant's messages, through the first stop token after it."""
  options = {"tools": list(tools) or None, **chat.options}
  before = chat.template.render(messages[:place], **options)
  user = {"role": "user", "content": "."}
  # Some templates end a turn only by the token that begins the next one.
  for following in ([], messages[place + 1 : place + 2] or [user]):
    text = chat.template.render([*messages[: place + 1], *following], add_generation_prompt=False, **options)
    if not text.startswith(before):
      raise ValueError("the chat template must leave the text before an action as it is when the action follows.")
    rest = text[len(before) :]
    ends = [rest.index(token) + len(token) for token in chat.tokenizer.stop_tokens if token in rest]
    if ends:
      action = rest[: min(ends)]
      _check_calls(chat, action, messages[place], tools)
      return action
  raise ValueError("the chat template must end the assistant's turn with a stop token of the checkpoint.")


def _check_calls(chat: Chat, action: str, message: Message, tools: Sequence[Mapping[str, Any]]) -> None:
  given = [call["function"] for call in message.get("tool_calls") or ()]
  wanted = [(call["name"], _object(call["arguments"])) for call in given]
  parsed = chat.parse(action, tools)
  read = [(call.name, dict(call.arguments)) for call in parsed.calls]
  if parsed.error is not None or (wanted and read != wanted):
    raise ValueError(
      f"tool calls must be read back from the action as they were given: {wanted!r:.120} became {read!r:.120} "
      f"({parsed.error or 'no error'}) in {action!r:.160}."
    )


def _object(arguments: Any) -> Any:
  return json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
