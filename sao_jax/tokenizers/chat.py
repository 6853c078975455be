"""The chat format of a checkpoint: its tokenizer, chat template and form of tool calls."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax.tokenizers import end_of_turn, tool_calls
from sao_jax.tokenizers.chat_template import ChatTemplate, Message
from sao_jax.tokenizers.gguf_tokenizer import load_gguf_tokenizer
from sao_jax.tokenizers.hf_tokenizer import HFTokenizer
from sao_jax.tokenizers.tool_calls import ParsedAction, Style


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat:
  """The chat format of a checkpoint; it implements `envs.chat.ChatFormat`."""

  tokenizer: HFTokenizer
  template: ChatTemplate
  style: Style | None = None
  """Form of tool calls. None if the template teaches none; an action is then all content."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Switches of the template for every rendering, such as `{"enable_thinking": False}`. The date is always 26 July 2024
  unless the template has a switch for it, as Llama's does (`date_string`)."""

  @classmethod
  def load(cls, checkpoint: str | pathlib.Path, **options: Any) -> Chat:
    """Reads a Hugging Face checkpoint directory or a GGUF file.

    Logs a warning if the template ends a turn with a token that is not a stop token of the checkpoint.

    Args:
      checkpoint: the directory, or a file whose name ends in `.gguf`.
      **options: see `Chat.options`.
    """
    path = pathlib.Path(checkpoint)
    if path.suffix == ".gguf":
      tokenizer, template = load_gguf_tokenizer(path)
    else:
      tokenizer = HFTokenizer.load(path)
      template = ChatTemplate.load(path, stop_tokens=tokenizer.stop_tokens, control_tokens=tokenizer.control_tokens)
    end_of_turn.report(path, tokenizer, template)
    return cls(tokenizer=tokenizer, template=template, style=tool_calls.style_of(template.source), options=options)

  def prompt(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the prompt of an episode.

    Raises:
      ValueError: tools are given, but the template teaches no tool calls.
    """
    if tools and self.style is None:
      raise ValueError("the checkpoint's chat template teaches no tool calls; pass no tools.")
    return self.template.render(messages, tools=list(tools) or None, **self.options)

  def between(self, messages: Sequence[Message], *, ended_with: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns the text between two actions; see `ChatTemplate.between`.

    Args:
      messages: tool results or user messages after the first action.
      ended_with: text of the first action.
      tools: the same tools as in `prompt`.
    """
    return self.template.between(messages, ended_with=ended_with, tools=list(tools) or None, **self.options)

  def parse(self, action: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAction:
    """Parses an action; see `tool_calls.parse`. Without tools, it finds no calls."""
    stop_tokens = self.tokenizer.stop_tokens
    if not tools or self.style is None:
      return ParsedAction(content=tool_calls.content(action, stop_tokens))
    return tool_calls.parse(action, self.style, tools=tools, stop_tokens=stop_tokens)
