"""Plain Python functions as tools of a chat model, which reads their signature and docstring."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

_SIMPLE: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_ARGUMENT = re.compile(r"(?P<indent> +)(?P<name>\w+)(?: \([^)]*\))?: *(?P<text>.*)")


class FunctionTool:
  """A function that a model can call. All environments share it and call it from many threads.

  A `ValueError` of the function is told to the model, as `error: ...`. Any other exception fails the episode
  ("step_error"): then the tool is broken, and not the call.

  Args:
    function: a function with a docstring, whose first paragraph describes it and whose `Args:` section describes its
      parameters. Each parameter is annotated as str, int, float, bool, list, dict, Literal, a Union of them, or Any.

  Raises:
    ValueError: the docstring or an annotation is missing, a parameter is positional-only or variadic, or the schema has
      no form for its type.
  """

  def __init__(self, function: Callable[..., Any]):
    self.name = function.__name__
    text, described = _docstring(inspect.getdoc(function) or "")
    if not text:
      raise ValueError(f"the tool {self.name} must have a docstring, which the model reads; received none.")
    self._function = function
    self._types: dict[str, Any] = {}
    self._required: list[str] = []
    hints = typing.get_type_hints(function)
    properties = {}
    for name, parameter in inspect.signature(function).parameters.items():
      what = f"the tool {self.name} must have annotated parameters with names"
      if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise ValueError(f"{what}; received {parameter}.")
      if name not in hints:
        raise ValueError(f"{what}; its parameter {name!r} has no annotation.")
      self._types[name] = hints[name]
      properties[name] = _schema(f"{self.name}({name})", hints[name])
      if name in described:
        properties[name]["description"] = described[name]
      if parameter.default is parameter.empty:
        self._required.append(name)
    schema = {"type": "object", "properties": properties, "required": self._required}
    self.description: Mapping[str, Any] = {
      "type": "function",
      "function": {"name": self.name, "description": text, "parameters": schema},
    }

  def __call__(self, arguments: Mapping[str, Any]) -> str:
    """Calls the function and returns its result: a str as it is, anything else as JSON.

    Raises:
      ValueError: the arguments do not fit the signature, or the function refuses them; for the model to read.
    """
    unknown, missing = sorted(set(arguments) - set(self._types)), [x for x in self._required if x not in arguments]
    if unknown or missing:
      takes = ", ".join(self._types) or "no arguments"
      raise ValueError(f"{self.name} takes {takes}; received {', '.join(sorted(arguments)) or 'none'}.")
    for name, value in arguments.items():
      if not _fits(value, self._types[name]):
        wanted = json.dumps(_schema(name, self._types[name]))
        raise ValueError(f"{self.name}: {name} must be {wanted}; received {value!r:.200}.")
    result = self._function(**arguments)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _docstring(text: str) -> tuple[str, dict[str, str]]:
  """Splits a docstring into its first paragraph and the texts of its `Args:` section.

  >>> _docstring("Adds two\\nnumbers.\\n\\nArgs:\\n  a: the first\\n    of them.\\n  b: the other.\\n\\nReturns:")
  ('Adds two numbers.', {'a': 'the first of them.', 'b': 'the other.'})
  """
  first = " ".join(text.partition("\n\n")[0].split())
  _, found, rest = text.partition("\nArgs:\n")
  described: dict[str, str] = {}
  name, indent = "", 0
  for line in rest.splitlines() if found else []:
    if line and not line.startswith(" "):
      break  # the next section
    match = _ARGUMENT.fullmatch(line)
    if match and (not indent or len(match["indent"]) == indent):
      name, indent = match["name"], len(match["indent"])
      described[name] = match["text"]
    elif name:
      described[name] = f"{described[name]} {line.strip()}".strip()
  return first, described


def _schema(what: str, kind: Any) -> dict[str, Any]:
  """Returns the JSON schema of a type."""
  origin, inner = get_origin(kind) or kind, get_args(kind)
  if kind is Any:
    return {}
  if origin in _SIMPLE:
    return {"type": _SIMPLE[origin]}
  if origin in (list, Sequence) or kind is Sequence:
    return {"type": "array", "items": _schema(what, inner[0])} if inner else {"type": "array"}
  if origin in (dict, Mapping):
    return {"type": "object"}
  if origin is Literal:
    return {"enum": list(inner)}
  if origin in (Union, types.UnionType):
    return {"anyOf": [{"type": "null"} if x is type(None) else _schema(what, x) for x in inner]}
  allowed = "str, int, float, bool, list, dict, Literal or a Union"
  raise ValueError(f"{what} must be annotated as {allowed}; received {kind}.")


def _fits(value: Any, kind: Any) -> bool:
  """Whether a JSON value fits a type. An integer is a float, too; a bool is neither."""
  origin, inner = get_origin(kind) or kind, get_args(kind)
  if kind is Any:
    return True
  if origin in (int, float):
    return isinstance(value, (int, float) if origin is float else int) and not isinstance(value, bool)
  if origin in (list, Sequence):
    return isinstance(value, list) and (not inner or all(_fits(x, inner[0]) for x in value))
  if origin in (dict, Mapping):
    return isinstance(value, dict)
  if origin is Literal:
    return value in inner
  if origin in (Union, types.UnionType):
    return any(value is None if x is type(None) else _fits(value, x) for x in inner)
  return isinstance(value, origin)
