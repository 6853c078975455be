"""Questions for a chat model, with or without a Python tool, in the chat template of its checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from sao_jax.envs import base
from sao_jax.envs.function_tools import FunctionTool

PYTHON_TOOL: Final[Mapping[str, Any]] = {
  "type": "function",
  "function": {
    "name": "python",
    "description": "Runs Python code and returns what it prints. Variables stay from call to call.",
    "parameters": {
      "type": "object",
      "properties": {"code": {"type": "string", "description": "The code to run."}},
      "required": ["code"],
    },
  },
}


def python_tool(packages: Sequence[str] = ()) -> Mapping[str, Any]:
  """Returns the tool description for the model, with the packages that code may import."""
  if not packages:
    return PYTHON_TOOL
  function = PYTHON_TOOL["function"]
  description = f"{function['description']} Besides the standard library it can import {', '.join(packages)}."
  return {**PYTHON_TOOL, "function": {**function, "description": description}}


class Call(Protocol):
  """A tool call of an action."""

  @property
  def name(self) -> str: ...

  @property
  def arguments(self) -> Mapping[str, Any]: ...


class Parsed(Protocol):
  """A parsed action; see `tokenizers.ParsedAction`."""

  @property
  def content(self) -> str: ...

  @property
  def calls(self) -> Sequence[Call]: ...

  @property
  def error(self) -> str | None: ...


class ChatFormat(Protocol):
  """Writer of prompts and parser of actions, such as `tokenizers.Chat`."""

  def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str: ...

  def between(
    self, messages: Sequence[Mapping[str, Any]], *, ended_with: str, tools: Sequence[Mapping[str, Any]] = ()
  ) -> str: ...

  def parse(self, action: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """A reward with the numbers that it was computed from."""

  reward: float
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """Numbers to log, each as the metric `reward/NAME`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
  """One task."""

  messages: Sequence[Mapping[str, Any]]
  """The conversation up to the model's first action."""
  score: Callable[[str], float | Score]
  """Score of the final answer: the text of the last action without its thought. It is the reward."""


class ChatEnv(base.Environment):
  """An environment that asks one question per episode.

  Actions may call tools, and the observation is their output. The first action without a call is the answer and ends
  the episode. The observation after a malformed call says what is wrong with it. Without an answer after `max_turns`
  actions the episode is truncated with reward 0 (calls of the last turn are not run).

  Args:
    chat: chat format of the checkpoint.
    question: function `task_index -> Question`. The same index must give the same question.
    tool: runs Python, with one session per episode from the first call on. None offers no tool.
    max_turns: actions per episode, at least 1.
    success_threshold: score from which an episode counts as a success.
    packages: packages besides the standard library that the tool can import, for its description.
    functions: further tools.
  """

  def __init__(
    self,
    chat: ChatFormat,
    question: Callable[[int], Question],
    tool: base.Tool | None,
    *,
    max_turns: int,
    success_threshold: float = 1.0,
    packages: Sequence[str] = (),
    functions: Sequence[FunctionTool] = (),
  ):
    if max_turns < 1:
      raise ValueError(f"max_turns must be at least 1; received {max_turns!r}.")
    self._chat = chat
    self._make_question = question
    self._tool = tool
    self._functions = {function.name: function for function in functions}
    python = () if tool is None else (python_tool(packages),)
    self._tools = (*python, *(function.description for function in functions))
    self._max_turns = max_turns
    self._success_threshold = success_threshold
    self._stack = contextlib.ExitStack()
    self._session: base.ToolSession | None = None
    self._question: Question | None = None
    self._turns = self._calls = self._errors = self._results = 0

  def reset(self, task_index: int) -> str:
    self._end_episode()
    self._question = self._make_question(task_index)
    self._turns = self._calls = self._errors = self._results = 0
    return self._chat.prompt(self._question.messages, self._tools)

  def step(self, action: str) -> base.Step:
    if self._question is None:
      raise RuntimeError("step was called before reset, or after the end of the episode.")
    self._turns += 1
    parsed = self._chat.parse(action, self._tools)
    if not parsed.calls and parsed.error is None:
      score = self._question.score(parsed.content)
      return self._done(score if isinstance(score, Score) else Score(reward=float(score)), truncated=False)
    if self._turns >= self._max_turns:
      return self._done(Score(reward=0.0), truncated=True)
    if parsed.error is not None:
      self._errors += 1
      messages = [self._result(self._tools[0]["function"]["name"], parsed.error)]
    else:
      messages = [self._result(call.name, self._run(call)) for call in parsed.calls]
    return base.Step(observation=self._chat.between(messages, ended_with=action, tools=self._tools))

  def close(self) -> None:
    self._end_episode()

  def _result(self, name: str, text: str) -> dict[str, str]:
    self._results += 1
    # Mistral's templates accept only ids of nine letters and digits.
    return {"role": "tool", "name": name, "tool_call_id": f"call{self._results:05d}", "content": text}

  def _run(self, call: Call) -> str:
    if (function := self._functions.get(call.name)) is not None:
      self._calls += 1
      try:
        return function(call.arguments)
      except ValueError as error:
        self._errors += 1
        return f"error: {error}"
    if self._tool is None:
      self._errors += 1
      return f"error: there is no tool {call.name}; there are {', '.join(self._functions)}."
    code = call.arguments.get("code")
    if not isinstance(code, str) or len(call.arguments) != 1:
      self._errors += 1
      return f"error: python takes one argument, code, a string; received {sorted(call.arguments)}."
    if self._session is None:
      self._session = self._stack.enter_context(self._tool.session())
    self._calls += 1
    return self._session.run(code)

  def _done(self, score: Score, *, truncated: bool) -> base.Step:
    self._end_episode()
    info = {
      "success": not truncated and score.reward >= self._success_threshold, "turns": self._turns,
      "tool_calls": self._calls, "tool_errors": self._errors,
      **{f"reward/{name}": value for name, value in score.parts.items()},
    }  # fmt: skip
    return base.Step(reward=score.reward, done=True, truncated=truncated, info=info)

  def _end_episode(self) -> None:
    self._question = self._session = None
    self._stack.close()
