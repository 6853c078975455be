"""A checkpoint's conversation: its tokenizer, its template and its form of tool calls, read together."""

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
  """How an environment talks to a checkpoint; what `envs.chat` asks for."""

  tokenizer: HFTokenizer
  template: ChatTemplate
  style: Style | None = None
  """How actions call tools; None: the template teaches no calls, and an action is all content."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Switches of the template, for every rendering: `{"enable_thinking": False}`. For templates that tell the date it is
  always 26 July 2024; those that read it as a switch (Llama's `date_string`) can be told another."""

  @classmethod
  def load(cls, checkpoint: str | pathlib.Path, **options: Any) -> Chat:
    """Reads a checkpoint directory of Hugging Face, or a GGUF file.

    A warning tells of a template that ends a turn with another token than the checkpoint's stop tokens.

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
    """The first text of an episode.

    Raises:
      ValueError: tools are on offer, but the template teaches no calls.
    """
    if tools and self.style is None:
      raise ValueError("the checkpoint's chat template teaches no tool calls; offer it no tools.")
    return self.template.render(messages, tools=list(tools) or None, **self.options)

  def between(self, messages: Sequence[Message], *, ended_with: str, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text from an action's end up to the next action, `messages` in between; see `ChatTemplate.between`.

    Args:
      messages: tool results, or the user's words.
      ended_with: text of the action.
      tools: those of the episode's `prompt`.
    """
    return self.template.between(messages, ended_with=ended_with, tools=list(tools) or None, **self.options)

  def parse(self, action: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedAction:
    """Takes an action apart; see `tool_calls.parse`. Without tools nothing is a call."""
    stop_tokens = self.tokenizer.stop_tokens
    if not tools or self.style is None:
      return ParsedAction(content=tool_calls.content(action, stop_tokens))
    return tool_calls.parse(action, self.style, tools=tools, stop_tokens=stop_tokens)
