"""Functions as tools: the schema from signature and docstring, checked arguments, and whose fault an exception is."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from sao_jax.envs.chat import ChatEnv, Question, Score
from sao_jax.envs.function_tools import FunctionTool
from sao_jax.tokenizers import ParsedAction, ToolCall


def look_up(table: str, rows: list[int], order: Literal["up", "down"] = "up", limit: int | None = None) -> Any:
  """Reads rows
  of a table.

  Args:
    table: its name,
      as listed.
    rows (list): their numbers.

  Returns:
    The rows: as text.
  """
  if table == "none":
    raise ValueError("no such table")
  if table == "broken":
    raise ConnectionError("the database is down")
  return {"table": table, "rows": rows, "order": order, "limit": limit}


def test_schema() -> None:
  function = FunctionTool(look_up).description["function"]
  assert function["name"] == "look_up" and function["description"] == "Reads rows of a table."
  assert function["parameters"] == {
    "type": "object",
    "properties": {
      "table": {"type": "string", "description": "its name, as listed."},
      "rows": {"type": "array", "items": {"type": "integer"}, "description": "their numbers."},
      "order": {"enum": ["up", "down"]},
      "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "required": ["table", "rows"],
  }


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"table": "a"}, "look_up takes table, rows, order, limit; received table"),
    ({"table": "a", "rows": [], "x": 1}, "received rows, table, x"),
    ({"table": 1, "rows": []}, "table must be .*string.*; received 1"),
    ({"table": "a", "rows": [True]}, "rows must be .*; received"),
    ({"table": "a", "rows": [], "order": "left"}, "order must be .*down"),
    ({"table": "a", "rows": [], "limit": 0.5}, "limit must be"),
    ({"table": "none", "rows": []}, "no such table"),
  ],
)
def test_bad_calls_are_for_the_model_to_read(arguments: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    FunctionTool(look_up)(arguments)


def test_results() -> None:
  assert FunctionTool(look_up)({"table": "a", "rows": [1]}) == (
    '{"table": "a", "rows": [1], "order": "up", "limit": null}'
  )


def bare(x: int) -> str:
  return str(x)


def untyped(x) -> str:  # type: ignore[no-untyped-def]
  """Has no type."""
  return str(x)


def odd(x: set[int]) -> str:
  """Has a type that JSON lacks."""
  return str(x)


@pytest.mark.parametrize(
  ("function", "message"), [(bare, "docstring"), (untyped, "'.*' has no annotation"), (odd, r"odd\(x\) must be")]
)
def test_functions_that_cannot_be_tools(function: Any, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    FunctionTool(function)


class Chat:
  """Actions are the name of a table, or text after a colon."""

  def prompt(self, messages: Any, tools: Any = ()) -> str:
    return str([tool["function"]["name"] for tool in tools])

  def between(self, messages: Any, *, ended_with: str, tools: Any = ()) -> str:
    return str([message["content"] for message in messages])

  def parse(self, action: str, tools: Any = ()) -> ParsedAction:
    if action.startswith(":"):
      return ParsedAction(content=action[1:])
    name = "other" if action == "other" else "look_up"
    return ParsedAction(content="", calls=(ToolCall(name=name, arguments={"table": action, "rows": []}),))


def test_in_an_episode() -> None:
  question = Question(messages=[], score=lambda said: Score(reward=0.3 * len(said), parts={"length": len(said)}))
  env = ChatEnv(Chat(), lambda task: question, None, max_turns=9, functions=[FunctionTool(look_up)])  # type: ignore[arg-type]
  assert env.reset(0) == "['look_up']"
  assert '"table": "a"' in env.step("a").observation
  assert env.step("none").observation == "['error: no such table']"
  assert env.step("other").observation == "['error: there is no tool other; there are look_up.']"
  with pytest.raises(ConnectionError):  # a broken tool: the engine fails the episode
    env.step("broken")
  step = env.step(":abcd")
  assert step.reward == pytest.approx(1.2) and step.done
  assert step.info == {"success": True, "turns": 5, "tool_calls": 3, "tool_errors": 2, "reward/length": 4}
