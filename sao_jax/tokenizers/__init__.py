"""Tokenizers, chat templates and tool calls."""

from __future__ import annotations

from sao_jax.tokenizers.chat import Chat
from sao_jax.tokenizers.chat_template import ChatTemplate
from sao_jax.tokenizers.gguf_tokenizer import load_gguf_tokenizer
from sao_jax.tokenizers.hf_tokenizer import HFTokenizer
from sao_jax.tokenizers.math_tokenizer import MathTokenizer
from sao_jax.tokenizers.tool_calls import ParsedAction, ToolCall
from sao_jax.tokenizers.tool_calls import parse as parse_tool_calls
from sao_jax.tokenizers.tool_calls import style_of as tool_call_style

__all__ = [
  "Chat", "ChatTemplate", "HFTokenizer", "MathTokenizer", "ParsedAction", "ToolCall", "load_gguf_tokenizer",
  "parse_tool_calls", "tool_call_style",
]  # fmt: skip
