"""Tool calls in an action's text, in the format that the checkpoint was trained to write.

json_tags    <tool_call>{"name": NAME, "arguments": {...}}</tool_call>                    Qwen2.5, Qwen3
xml          <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>   Qwen3-Coder
key_values   <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>   GLM-4.5 and later
json         {"name": NAME, "parameters": {...}}, all of the action                   Llama 3.1 and later
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

Style = Literal["json_tags", "xml", "key_values", "json"]

_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)\s*>(.*)</function>\s*", re.DOTALL)
_NAME = re.compile(r"\s*([^<\s]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
_TAGS: Mapping[str, tuple[tuple[str, str], ...]] = {
  "xml": (("<parameter=", ">"), ("", "</parameter>")),
  "key_values": (("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
}
"""What stands around the name of an argument and around its value."""
_END_OF_THOUGHT = "</think>"
_PYTHON_TAG = "<|python_tag|>"
"""Llama may write it in front of a call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
  """One call."""

  name: str
  arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsedAction:
  """An action taken apart."""

  content: str
  """What the action says besides: without its calls, its thought (up to the first `</think>`) and stop tokens;
  stripped."""
  calls: tuple[ToolCall, ...] = ()
  error: str | None = None
  """Why what looks like a call is none; for the model to read. Then there are no calls."""


def style_of(template: str) -> Style | None:
  """The style that a chat template teaches, read off its source; None if it shows no calls of a known style."""
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
  """Takes an action apart; a malformed call gives an `error`, never an exception.

  Args:
    text: the action, control tokens included.
    style: how it writes calls.
    tools: the schemas on offer: they say which arguments are strings, where the style does not, and which names exist.
    stop_tokens: cut off at the end.
  """
  if style not in get_args(Style):
    raise ValueError(f"style must be one of {', '.join(get_args(Style))}; received {style!r}.")
  text = content(text, stop_tokens)
  schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
  try:
    calls = tuple(_calls(text, style, schemas))
    for call in calls:
      if schemas and call.name not in schemas:
        raise ValueError(f"there is no tool {call.name!r}; there are {', '.join(schemas)}")
  except ValueError as error:
    return ParsedAction(content=text, error=f"malformed tool call: {error}")
  if calls:
    text = "" if style == "json" else _TAGGED.sub("", text).strip()
  return ParsedAction(content=text, calls=calls)


def content(text: str, stop_tokens: Sequence[str] = ()) -> str:
  """What an action says: without the stop tokens at its end and its thought (up to the first `</think>`); stripped.

  >>> content("<think>2 and 2</think> 4<|end|>", ["<|end|>"])
  '4'
  """
  for token in stop_tokens:
    text = text.removesuffix(token)
  thought, end, said = text.partition(_END_OF_THOUGHT)
  return (said if end else thought).strip()


def _calls(text: str, style: Style, schemas: Mapping[str, Any]) -> Iterator[ToolCall]:
  if style == "json":
    text = text.removeprefix(_PYTHON_TAG).lstrip()
    if text.startswith("{"):
      yield _from_json(text, "parameters")
    return
  for body, end in _TAGGED.findall(text):
    if not end:
      raise ValueError("</tool_call> is missing")
    if style == "json_tags":
      yield _from_json(body, "arguments")
    else:
      yield _from_tags(body, style, schemas)


def _from_json(text: str, key: str) -> ToolCall:
  try:
    call = json.loads(text)
  except json.JSONDecodeError as error:
    raise ValueError(f"not valid JSON ({error})") from error
  except RecursionError as error:
    raise ValueError("nested too deeply") from error
  if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get(key), dict):
    raise ValueError(f'it must be an object with "name" (a string) and "{key}" (an object)')
  return ToolCall(name=call["name"], arguments=call[key])


def _from_tags(body: str, style: Style, schemas: Mapping[str, Any]) -> ToolCall:
  found = (_FUNCTION if style == "xml" else _NAME).fullmatch(body)
  if found is None:
    raise ValueError("no function's name in it")
  name, rest = found.groups()
  properties = schemas.get(name, {}).get("properties", {})
  arguments = {key: _value(value, properties.get(key, {}).get("type")) for key, value in _pairs(rest, style)}
  return ToolCall(name=name, arguments=arguments)


def _pairs(text: str, style: Style) -> Iterator[tuple[str, str]]:
  """Names and values of arguments.

  Every character is read once. A pattern for a pair would search to the end again from each opening tag, or from each
  blank: minutes, where a model repeats one for a whole action.
  """
  place = 0
  while _skip_blanks(text, place) < len(text):
    parts = []
    for opening, closing in _TAGS[style]:
      if opening:  # else the value begins here, blanks and all
        place = _skip_blanks(text, place)
      begin = place + len(opening)
      end = text.find(closing, begin)
      if not text.startswith(opening, place) or end < 0:
        raise ValueError("its arguments are not well-formed")
      parts.append(text[begin:end])
      place = end + len(closing)
    name, value = parts
    if not name.strip():
      raise ValueError("an argument has no name")
    yield name.strip(), value.removeprefix("\n").removesuffix("\n") if style == "xml" else value


def _skip_blanks(text: str, place: int) -> int:
  while place < len(text) and text[place].isspace():
    place += 1
  return place


def _value(text: str, kind: str | None) -> Any:
  """The value of an argument: as it is where the schema says string, else JSON where it is JSON."""
  if kind == "string":
    return text
  try:
    return json.loads(text)
  except (json.JSONDecodeError, RecursionError):
    return text
