"""The chat environment with fakes of the template and the interpreter."""

from __future__ import annotations

import contextlib

import pytest

from sao_jax.envs.chat import PYTHON_TOOL, ChatEnv, Question, python_tool
from sao_jax.tokenizers import ParsedAction, ToolCall, parse_tool_calls


class PlainChat:
  """A chat format with calls of the form `!code`, in plain text for tests to read."""

  def prompt(self, messages, tools=()):
    return f"{[m['content'] for m in messages]} {[t['function']['name'] for t in tools]}>"

  def between(self, messages, *, ended_with, tools=()):
    return f"{[(m['role'], m['content']) for m in messages]} after {ended_with}>"

  def parse(self, action, tools=()):
    if tools and action.startswith("!!"):
      return ParsedAction(content=action, error="malformed tool call: !!")
    if tools and action.startswith("!"):
      codes = action[1:].split("!")
      return ParsedAction(content="", calls=tuple(ToolCall(name="python", arguments={"code": c}) for c in codes))
    if tools and action == "odd":
      return ParsedAction(content="", calls=(ToolCall(name="python", arguments={"cod": 1}),))
    return ParsedAction(content=action)


class Recorder:
  """A tool that returns its input and counts its sessions."""

  def __init__(self):
    self.opened = self.closed = 0

  @contextlib.contextmanager
  def session(self):
    self.opened += 1
    seen = []

    class Session:
      def run(self, code):
        seen.append(code)
        return f"ran {','.join(seen)}"

    yield Session()
    self.closed += 1


def question(task_index):
  messages = [{"role": "user", "content": f"q{task_index}"}]
  return Question(messages=messages, score=lambda text: float(text == "right") / 2)


def make(tool=None, **options):
  return ChatEnv(PlainChat(), question, tool, **{"max_turns": 3} | options)


def test_calls_then_an_answer():
  tool = Recorder()
  env = make(tool)
  assert env.reset(7) == "['q7'] ['python']>"
  assert env.step("!1!2").observation == "[('tool', 'ran 1'), ('tool', 'ran 1,2')] after !1!2>"
  assert env.step("!3").observation == "[('tool', 'ran 1,2,3')] after !3>"
  step = env.step("right")
  assert step.done and step.reward == 0.5 and not step.truncated and step.observation == ""
  assert step.info == {"success": False, "turns": 3, "tool_calls": 3, "tool_errors": 0}
  assert (tool.opened, tool.closed) == (1, 1)


def test_results_carry_names_and_ids_and_every_rendering_the_tools():
  """Templates may require all fields. All accept ids of nine letters and digits."""
  seen = []

  class Chat(PlainChat):
    def between(self, messages, *, ended_with, tools=()):
      seen.append(([(m["name"], m["tool_call_id"]) for m in messages], tools))
      return super().between(messages, ended_with=ended_with, tools=tools)

  env = ChatEnv(Chat(), question, Recorder(), max_turns=9)
  for _ in range(2):  # ids restart with each episode
    env.reset(0)
    env.step("!1!2")
    env.step("!!")
    env.step("odd")
  ids = [[("python", "call00001"), ("python", "call00002")], [("python", "call00003")], [("python", "call00004")]]
  assert seen == [(found, (PYTHON_TOOL,)) for found in ids * 2]


def test_the_model_is_told_of_packages():
  assert python_tool() == PYTHON_TOOL
  told = python_tool(("numpy", "sympy"))["function"]
  assert told["description"].endswith(" Besides the standard library it can import numpy, sympy.")
  assert told["name"] == "python" and "numpy" not in PYTHON_TOOL["function"]["description"]


def test_threshold_decides_success():
  env = make(success_threshold=0.5)
  env.reset(0)
  assert env.step("right").info["success"]
  env.reset(0)
  assert not env.step("wrong").info["success"]


def test_malformed_calls_are_answered_and_counted():
  env = make(Recorder())
  env.reset(0)
  assert env.step("!!").observation == "[('tool', 'malformed tool call: !!')] after !!>"
  assert "python takes one argument, code, a string; received ['cod']" in env.step("odd").observation
  assert env.step("right").info["tool_errors"] == 2


class StyledChat(PlainChat):
  """A checkpoint's style of calls works."""

  def __init__(self, style):
    self.style = style

  def parse(self, action, tools=()):
    return parse_tool_calls(action, self.style, tools=tools, stop_tokens=["<|eom_id|>", "<end>"])


@pytest.mark.parametrize(
  ("style", "action"),
  [
    ("json_tags", '{"name": "python", "arguments": {"code": "1"}}\n</tool_call><end>'),
    ("json_tags", '<tool_call>{"name": "python", "arguments": {"code": "s.split(\'</think>\')"}}</tool_call><end>'),
    ("xml", "<function=python>\n<parameter=code>\n1\n</parameter>\n</function>\n</tool_call><end>"),
    ("key_values", "python\n<arg_key>code</arg_key>\n<arg_value>1</arg_value>\n</tool_call><end>"),
    ("json", '{"name": "python", "parameters": {"code": "s.split(\'</think>\')"}}<end>'),
    ("json", "<|python_tag|>print(1)<|eom_id|>"),
    ("json", "print(1)<|eom_id|>"),
  ],
)
def test_no_call_is_scored(style, action):
  scored = []
  asked = Question(messages=[], score=lambda text: scored.append(text) or 1.0)
  env = ChatEnv(StyledChat(style), lambda task_index: asked, Recorder(), max_turns=3)
  env.reset(0)
  assert not env.step(action).done and scored == []
  assert env.step("<think>hm</think>{1, 2, 3}<end>").done and scored == ["{1, 2, 3}"]


@pytest.mark.parametrize("last", ["!1", "!!"])
def test_out_of_turns(last):
  tool = Recorder()
  env = make(tool, max_turns=1)
  env.reset(0)
  step = env.step(last)
  assert step.done and step.truncated and step.reward == 0.0 and not step.info["success"]
  assert tool.opened == 0


def test_answer_in_the_last_turn_counts():
  env = make(max_turns=1)
  env.reset(0)
  step = env.step("right")
  assert step.done and not step.truncated and step.reward == 0.5


def test_without_a_tool_nothing_is_a_call():
  env = make()
  assert env.reset(0) == "['q0'] []>"
  assert env.step("!1").done


def test_sessions_end_with_their_episode():
  tool = Recorder()
  env = make(tool)
  env.reset(0)
  env.step("!1")
  env.reset(1)
  assert tool.closed == 1
  assert env.step("!2").observation == "[('tool', 'ran 2')] after !2>"
  env.close()
  assert tool.closed == 2


def test_misuse():
  env = make()
  with pytest.raises(RuntimeError, match="before reset"):
    env.step("x")
  with pytest.raises(ValueError, match="max_turns must be at least 1; received 0"):
    make(max_turns=0)


def test_schema_has_what_the_environment_reads():
  assert PYTHON_TOOL["function"]["name"] == "python"
  assert list(PYTHON_TOOL["function"]["parameters"]["properties"]) == ["code"]
