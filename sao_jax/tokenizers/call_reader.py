"""A reader of single tool calls; see `tool_calls` for their forms and their ends."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

Style = Literal["json_tags", "xml", "key_values", "json"]

_END_OF_THOUGHT = "</think>"
_PYTHON_TAG = "<|python_tag|>"
SIGN = re.compile(
  r"""(?P<mention>(["'`])<[^<>\n"'`]{1,60}>\2)"""
  r"""|(?P<tag></?(?:think|tool_call|arg_key|arg_value)>|<(?:function|parameter)=|</(?:function|parameter)>"""
  r"""|<\|python_tag\|>)"""
  r"""|(?P<object>\{\s*")"""
  r"""|(?P<fragment>["']?\bname["']?\s*:\s*["'][^"'\\\n]*["']\s*,\s*["']?(?:arguments|parameters)["']?\s*:)"""
)
"""The next place to examine outside of calls. A fragment is the inside of a call's JSON without an object around it."""
_LIKE_A_CALL = re.compile(
  r"""\{\s*"(?:type"\s*:\s*"function"|(?:name|function|arguments|parameters)(?:"\s*(?::|\Z)|\Z))"""
)
"""The beginning of JSON that must be a call. Invalid JSON of this form is an error."""
_JSON_MARK = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\]]', re.DOTALL)
_BLANKS = re.compile(r"\s*")
_NAME: Mapping[str, re.Pattern[str]] = {
  "xml": re.compile(r"\s*<function=([^<>\s]+)\s*>\s*"),
  "key_values": re.compile(r"\s*([^<\s]+)\s*"),
}
_KEY: Mapping[str, re.Pattern[str]] = {
  "xml": re.compile(r"<parameter=([^<>]*)>"),
  "key_values": re.compile(r"<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
}
_CLOSED = r"((?:</tool_call>\s*)+|(?=<tool_call>|\Z))"
"""The group is empty if `</tool_call>` is missing. Some models write it twice."""
_END_OF_CALL: Mapping[str, re.Pattern[str]] = {
  "json_tags": re.compile(rf"\s*{_CLOSED}"),
  "xml": re.compile(rf"</function>\s*{_CLOSED}"),
  "key_values": re.compile(_CLOSED),
}
_END_OF_VALUE: Mapping[str, re.Pattern[str]] = {
  "xml": re.compile(rf"</parameter>\s*(?=<parameter=|{_END_OF_CALL['xml'].pattern})"),
  "key_values": re.compile(rf"</arg_value>\s*(?=<arg_key>|{_END_OF_CALL['key_values'].pattern})"),
}
_AFTER_CALL: Mapping[str, re.Pattern[str]] = {
  "xml": re.compile(r"</parameter>\s*(?:<parameter=|</function>\s*</tool_call>)|<(?:tool_call>|think>|function=)"),
  "key_values": re.compile(r"</arg_value>\s*(?:<arg_key>|</tool_call>)|<(?:tool_call|think|arg_key)>"),
}
"""The next end of a value, or the next call or thought."""
_UNQUOTED_END = re.compile(r"""</tool_call>(?!["'`])""")
_FUNCTION_CALL = re.compile(r"([\w-]+)(?:\.call)?\(\s*")
_KEYWORD = re.compile(r"(\w+)\s*=\s*")
_SEPARATOR = re.compile(r"\s*(?:,\s*|(?=\)))")
_ILL_FORMED = "its arguments are not well-formed"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
  """One call."""

  name: str
  arguments: Mapping[str, Any]


class MalformedCall(ValueError):
  """A call that cannot be parsed.

  Args:
    why: the reason, for the model to read.
    place: where parsing stopped. The text before it belongs to the call.
  """

  def __init__(self, why: str, place: int):
    super().__init__(why)
    self.place = place


class CallReader:
  """Reads calls of an action's text.

  Args:
    text: the action.
    style: form of its calls.
    schemas: schema of the parameters of each tool, by name.
  """

  def __init__(self, text: str, style: Style, schemas: Mapping[str, Any]):
    self._text = text
    self._style = style
    self._schemas = schemas
    self._known_json = 0
    """End of the last JSON object. Inside it, only text that begins like a call is examined again."""

  def read(self, sign: re.Match[str]) -> tuple[ToolCall | None, int]:
    """Reads the call at a match of `SIGN`.

    Returns:
      The call, or None if there is only text, and its end.

    Raises:
      MalformedCall: the call cannot be parsed.
    """
    if sign["object"]:
      return self._bare_object(sign.start())
    if sign["fragment"]:
      raise MalformedCall("not a JSON object", self._rest_of_call(sign.end()))
    if sign[0] == _PYTHON_TAG and self._style == "json":
      return self._python(sign.end())
    if sign[0] != "<tool_call>" or self._style == "json":
      json_why = f"write JSON without tags, or {_PYTHON_TAG} and code"
      why = json_why if self._style == "json" else "<tool_call> is missing"
      place = sign.end() if sign[0].startswith("</") else self._rest_of_call(sign.end())
      raise MalformedCall(f"{sign[0]} outside a call; {why}", place)
    if self._style == "json_tags":
      value, place = _decode(self._text, _skip_blanks(self._text, sign.end()))
      call = self._from_object(value, "arguments", place)
    else:
      call, place = self._from_tags(sign.end())
    end = _END_OF_CALL[self._style].match(self._text, place)
    if end is None:
      raise MalformedCall("not valid JSON (text follows it)", self._rest_of_call(place))
    if not end[1]:
      raise MalformedCall("</tool_call> is missing", place)
    return call, end.end()

  def _bare_object(self, begin: int) -> tuple[ToolCall | None, int]:
    """Reads JSON without tags."""
    must_be_call = _LIKE_A_CALL.match(self._text, begin) is not None
    if not must_be_call and begin < self._known_json:
      return None, begin + 1
    try:
      value, place = _decode(self._text, begin)
    except MalformedCall as error:
      if must_be_call:
        raise
      self._known_json = error.place
      return None, begin + 1
    if not self._is_like_a_call(value):
      self._known_json = place
      return None, place if must_be_call else begin + 1
    if self._style != "json":
      raise MalformedCall("<tool_call> is missing", place)
    return self._from_object(value, "parameters", place), place

  def _is_like_a_call(self, value: Mapping[str, Any]) -> bool:
    name = value.get("name", value.get("function"))
    if value.get("type") == "function" or (isinstance(name, str) and (name in self._schemas or not self._schemas)):
      return True
    if isinstance(name, dict) and isinstance(name.get("name"), str):  # as the OpenAI API writes a call
      return self._is_like_a_call(name)
    has_arguments = "arguments" in value or "parameters" in value
    named = name is not None or any(isinstance(x, str) and x in self._schemas for x in value.values())
    return named and has_arguments

  def _from_object(self, value: Any, key: str, place: int) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(key), dict):
      raise MalformedCall(f'it must be an object with "name" (a string) and "{key}" (an object)', place)
    return self._call(value["name"], value[key], place)

  def _call(self, name: str, arguments: Mapping[str, Any], place: int) -> ToolCall:
    if self._schemas and name not in self._schemas:
      raise MalformedCall(f"no tool {name!r:.100}; available: {', '.join(self._schemas)}", place)
    return ToolCall(name=name, arguments=arguments)

  def _python(self, begin: int) -> tuple[ToolCall, int]:
    """Reads the text after `<|python_tag|>`: a call in JSON, `NAME(KEY=JSON, ...)`, or code."""
    begin, end = _skip_blanks(self._text, begin), len(self._text)
    if _LIKE_A_CALL.match(self._text, begin):
      value, end = _decode(self._text, begin)
      return self._from_object(value, "parameters", end), end
    function = _FUNCTION_CALL.match(self._text, begin)
    if function and function[1] in (self._schemas or ("python",)):
      arguments, end = self._keywords(function.end())
      return self._call(function[1], arguments, end), end
    code = self._text[begin:]
    if code.endswith(_END_OF_THOUGHT):
      code = code.partition("\n<think>")[0].rstrip()
    if not code:
      raise MalformedCall(f"no code after {_PYTHON_TAG}", end)
    tools = [name for name, schema in self._schemas.items() if "code" in schema.get("properties", {})]
    if self._schemas and not tools:
      raise MalformedCall(f"no tool runs code; available: {', '.join(self._schemas)}", end)
    return ToolCall(name=tools[0] if tools else "python", arguments={"code": code}), end

  def _keywords(self, place: int) -> tuple[dict[str, Any], int]:
    """Reads arguments of the form `KEY=JSON, ...)`."""
    arguments: dict[str, Any] = {}
    while not self._text.startswith(")", place):
      keyword = _KEYWORD.match(self._text, place)
      if keyword is None:
        raise MalformedCall(_ILL_FORMED, len(self._text))
      try:
        arguments[keyword[1]], place = _decode(self._text, keyword.end())
      except MalformedCall as error:
        raise MalformedCall(f"{keyword[1]} is {error}; strings need double quotes", len(self._text)) from error
      separator = _SEPARATOR.match(self._text, place)
      if separator is None:
        raise MalformedCall(_ILL_FORMED, len(self._text))
      place = separator.end()
    return arguments, place + 1

  def _from_tags(self, place: int) -> tuple[ToolCall, int]:
    """Reads a call up to its closing tags."""
    named = _NAME[self._style].match(self._text, place)
    if named is None:
      raise MalformedCall("it has no function name", place)
    place = named.end()
    properties = self._schemas.get(named[1], {}).get("properties", {})
    arguments: dict[str, Any] = {}
    while not _END_OF_CALL[self._style].match(self._text, place):
      key = _KEY[self._style].match(self._text, place)
      if key is None:
        # A word after <tool_call> is a function name only if arguments follow it.
        is_call = self._style == "xml" or arguments or self._text.startswith("<arg_key>", place)
        raise MalformedCall(_ILL_FORMED, self._rest_of_call(place) if is_call else place)
      name = key[1].strip()
      if not name:
        raise MalformedCall("an argument has no name", self._rest_of_call(place))
      end = self._end_of_value(key.end())
      value = self._text[key.end() : end.start()]
      if self._style == "xml":
        value = value.removeprefix("\n").removesuffix("\n")
      arguments[name] = _value(value, properties.get(name, {}).get("type"))
      place = end.end()
    return self._call(named[1], arguments, place), place

  def _end_of_value(self, begin: int) -> re.Match[str]:
    for end in _END_OF_VALUE[self._style].finditer(self._text, begin):
      goes_on = self._text.startswith(("<parameter=", "<arg_key>"), end.end())
      after = None if goes_on else _AFTER_CALL[self._style].search(self._text, end.end())
      if after is None or not after[0].startswith("</"):
        return end
    raise MalformedCall(_ILL_FORMED, len(self._text))

  def _rest_of_call(self, place: int) -> int:
    """Returns the farthest end of a malformed call: the next unquoted `</tool_call>`, or the end of the text."""
    end = _UNQUOTED_END.search(self._text, place)
    return end.start() if end else len(self._text)


def _refuse(constant: str) -> NoReturn:
  raise ValueError(f"{constant} is not valid JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _decode(text: str, place: int) -> tuple[Any, int]:
  """Reads the JSON value at a place; returns it and its end."""
  end = _end_of_brackets(text, place)
  try:
    value, length = _DECODER.raw_decode(text[place:end])
  except RecursionError as error:
    raise MalformedCall("nested too deeply", end) from error
  except ValueError as error:
    raise MalformedCall(f"not valid JSON ({error})", end if text.startswith(("{", "["), place) else place) from error
  return value, place + length


def _end_of_brackets(text: str, place: int) -> int:
  """Returns the end of the bracket at a place, ignoring brackets in strings. Without one, the end of the text."""
  depth = 0
  for mark in _JSON_MARK.finditer(text, place) if text.startswith(("{", "["), place) else ():
    if not mark[0].startswith('"'):
      depth += 1 if mark[0] in "{[" else -1
      if depth == 0:
        return mark.end()
  return len(text)


def _skip_blanks(text: str, place: int) -> int:
  found = _BLANKS.match(text, place)
  assert found is not None
  return found.end()


def _value(text: str, kind: str | None) -> Any:
  """Returns the value of an argument: the text if its type is string or it is not JSON, else its JSON value."""
  if kind == "string":
    return text
  try:
    return json.loads(text, parse_constant=_refuse)
  except (ValueError, RecursionError):
    return text
