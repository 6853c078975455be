"""Tool calls in an action's text, in the format that the checkpoint was trained to write.

json_tags    <tool_call>{"name": NAME, "arguments": {...}}</tool_call>                    Qwen2.5, Qwen3
xml          <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>   Qwen3-Coder
key_values   <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>   GLM-4.5 and later
json         {"name": NAME, "parameters": {...}}, or <|python_tag|>CODE               Llama 3.1 and later

A call ends where the parser finds its end, not at the first tag that looks like it:

- JSON is parsed, so tags inside its strings are text.
- A VALUE is not escaped. It ends at the first closing tag before the next argument or before the closing tags of the
  call. If the same closing tags come again before the next call, the first ones were text.
- CODE goes to the end of the action, without a thought that begins on a line of its own and ends the action.

A tag outside a call makes the action malformed, since it is not an answer. So does JSON that looks like a call but
lacks its tags. A single tag between quotes or backticks is text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from sao_jax.tokenizers.call_reader import SIGN, CallReader, MalformedCall, Style
from sao_jax.tokenizers.call_reader import ToolCall as ToolCall

_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_PYTHON_TAG = "<|python_tag|>"
_END_OF_MESSAGE = "<|eom_id|>"
"""The token at the end of a Llama action that calls a tool."""
_THOUGHT_TAG = re.compile(r"""(?P<mention>(["'`])</?think>\2)|</?think>""")
_BLANKS = re.compile(r"\s*")
_FUNCTION_CALL = re.compile(r"\[?\s*([\w-]+)(?:\.call)?\(")
"""The beginning of code, or of a list of calls as Llama 4 may write them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedAction:
  """An action split into its text and its tool calls."""

  content: str
  """The text of the action, without calls, thought (see `content`) and stop tokens; stripped."""
  calls: tuple[ToolCall, ...] = ()
  error: str | None = None
  """Why a call is malformed, for the model to read. There are no calls then."""


def style_of(template: str) -> Style | None:
  """Returns the style of calls that a chat template teaches. None if its source shows no known style."""
  return next((style for sign, style in _SIGNS if sign in template), None)


_SIGNS: tuple[tuple[str, Style], ...] = (
  ("<arg_key>", "key_values"),
  ("<function=", "xml"),
  ("<tool_call>", "json_tags"),
  ('"parameters": ', "json"),
)


def parse(
  text: str, style: Style, *, tools: Sequence[Mapping[str, Any]] = (), stop_tokens: Sequence[str] = ()
) -> ParsedAction:
  """Parses an action. A malformed call gives an `error`, never an exception.

  Args:
    text: the action, with control tokens.
    style: form of its calls.
    tools: schemas of the tools. They give the names, and the arguments that are strings if the style does not tell.
      CODE goes to the first tool that takes `code`, or to `python` if no schemas are given.
    stop_tokens: tokens to remove at the end.
  """
  if style not in get_args(Style):
    raise ValueError(f"style must be one of {', '.join(get_args(Style))}; received {style!r}.")
  waits = _END_OF_MESSAGE in stop_tokens and text.endswith(_END_OF_MESSAGE)
  text = _without_stop_tokens(text, stop_tokens)
  schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
  scanner = _Scanner(text, CallReader(text, style, schemas))
  answer = _without_thought(text)
  try:
    scanner.scan()
    if style == "json" and not scanner.calls:
      _check_no_code(answer, waits, schemas)
  except MalformedCall as error:
    return ParsedAction(content=answer, error=f"malformed tool call: {error}")
  if not scanner.calls:
    return ParsedAction(content=answer)
  return ParsedAction(content="".join(scanner.said).strip(), calls=tuple(scanner.calls))


def content(text: str, stop_tokens: Sequence[str] = ()) -> str:
  """Returns the text of an action that has no calls, without its thought and final stop tokens; stripped.

  The thought goes from the first `<think>` to the next `</think>`. If `</think>` comes first, the thought starts at the
  beginning, since the prompt may open it. A single tag between quotes or backticks is text.

  >>> content("<think>2 and 2</think> 4<|end|>", ["<|end|>"])
  '4'
  """
  return _without_thought(_without_stop_tokens(text, stop_tokens))


def _without_stop_tokens(text: str, stop_tokens: Sequence[str]) -> str:
  for token in stop_tokens:
    text = text.removesuffix(token)
  return text.strip()


def _without_thought(text: str) -> str:
  tag = next((tag for tag in _THOUGHT_TAG.finditer(text) if not tag["mention"]), None)
  end = text.find(_END_OF_THOUGHT, tag.start()) if tag else -1
  if tag is None or end < 0:
    return text
  begin = tag.start() if tag[0] == _THOUGHT else 0
  return (text[:begin] + text[end + len(_END_OF_THOUGHT) :]).strip()


def _check_no_code(answer: str, waits: bool, schemas: Mapping[str, Any]) -> None:
  """Raises MalformedCall if an answer is code without its tag."""
  function = _FUNCTION_CALL.match(answer)
  if waits or (function and function[1] in schemas and answer.endswith((")", ")]"))):
    raise MalformedCall(f"{_PYTHON_TAG} is missing in front of code", len(answer))


class _Scanner:
  """Reads an action once from left to right, so the time is linear.

  Thoughts from `<think>` to `</think>` are skipped. A `</think>` without a `<think>` ends a thought that the prompt
  opened, and drops everything before it. But an action that begins with a call, or has no text after one, had no
  thought.

  Attributes:
    calls: the calls found so far.
    said: the text around them, in pieces.
  """

  def __init__(self, text: str, reader: CallReader):
    self.calls: list[ToolCall] = []
    self.said: list[str] = []
    self._text = text
    self._reader = reader
    self._last_end = text.rfind(_END_OF_THOUGHT)
    self._prompt_may_open = True

  def scan(self) -> None:
    """Fills `calls` and `said`.

    Raises:
      MalformedCall: a call cannot be parsed, or a tag is outside a call.
    """
    place = 0
    while sign := SIGN.search(self._text, place):
      begin = sign.start()
      self.said.append(self._text[place:begin])
      if sign["mention"]:
        place = sign.end()
        self.said.append(sign[0])
      elif sign[0] == _THOUGHT:
        place = self._skip_thought(begin)
      elif sign[0] == _END_OF_THOUGHT:
        place = self._end_thought(begin)
      else:
        place = self._take_call(sign)
    self.said.append(self._text[place:])

  def _skip_thought(self, begin: int) -> int:
    if begin > self._last_end:  # It never ends, so its text counts.
      return begin + len(_THOUGHT)
    self._prompt_may_open = False
    return self._text.index(_END_OF_THOUGHT, begin) + len(_END_OF_THOUGHT)

  def _end_thought(self, begin: int) -> int:
    end = begin + len(_END_OF_THOUGHT)
    if self._prompt_may_open and not (self.calls and self._nothing_after(end)):
      self.calls.clear()
      self.said.clear()
    self._prompt_may_open = False
    return end

  def _take_call(self, sign: re.Match[str]) -> int:
    begin = sign.start()
    try:
      call, place = self._reader.read(sign)
    except MalformedCall as error:
      end = self._text.find(_END_OF_THOUGHT, error.place)
      if begin == 0 or not self._prompt_may_open or end < 0 or self._nothing_after(end + len(_END_OF_THOUGHT)):
        raise
      return self._end_thought(end)
    if call is None:
      self.said.append(self._text[begin:place])
    else:
      self.calls.append(call)
      self._prompt_may_open = self._prompt_may_open and begin > 0
    return place

  def _nothing_after(self, place: int) -> bool:
    return _BLANKS.fullmatch(self._text, place) is not None
