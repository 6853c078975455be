"""An environment for coding agents: a small repository with a failing test, edited by text commands.

The files are text on the host. Only tests run code, each time in a new sandbox session. Each action is one command:

    list
    read PATH [FIRST LAST]
    search TEXT
    edit PATH            (followed by a line `<<<<`, the old lines, `====`, the new lines, `>>>>`)
    test                 (runs the visible test)
    submit               (runs the hidden tests and ends the episode; the reward is 1 if they pass)
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

from sao_jax.envs.base import Step, observation, user_prompt
from sao_jax.envs.coding.judge import passes_hidden_tests, run_test
from sao_jax.envs.coding.tasks import CodingTask
from sao_jax.envs.sandbox import PythonTool

_HELP = "Commands: list | read PATH [FIRST LAST] | search TEXT | edit PATH with <<<< old ==== new >>>> | test | submit"

_MAX_DIGITS = 9
"""Most digits of a line number. Python cannot convert a number of thousands of digits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodingConfig:
  """Limits of an episode."""

  max_turns: int = 30
  max_observation_chars: int = 4000
  max_file_chars: int = 100_000
  """Longest file. Edits that would make a file longer are refused."""

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f"CodingConfig.{field.name} must be an integer >= 1; received {value!r}.")


class Coding:
  """An environment with one repository per episode."""

  def __init__(self, config: CodingConfig, tool: PythonTool, tasks: Sequence[CodingTask]):
    if not tasks:
      raise ValueError("Coding needs at least one task; received none.")
    self._config = config
    self._tool = tool
    self._tasks = tasks
    self._task = tasks[0]
    self._files: dict[str, str] = {}
    self._turns = 0

  def reset(self, task_index: int) -> str:
    self._task = self._tasks[task_index % len(self._tasks)]
    self._files = dict(self._task.files)
    self._turns = 0
    return user_prompt(f"{self._task.statement} Make the tests pass.\n{_HELP}\n{self._list('')}")

  def step(self, action: str) -> Step:
    self._turns += 1
    text = re.sub(r"<\|[a-z_]+\|>", "", action).strip()
    command, _, rest = text.partition("\n")
    name, _, argument = command.strip().partition(" ")
    if name == "submit":
      task = self._task
      passed = passes_hidden_tests(self._tool, self._files, task.entry_point, task.hidden_test)
      return Step(reward=float(passed), done=True, info={"success": passed, "bug": self._task.bug})
    commands: dict[str, Callable[[str], str]] = {
      "list": self._list,
      "read": self._read,
      "search": self._search,
      "test": self._test,
    }
    if name == "edit":
      answer = self._edit(argument.strip(), rest)
    elif name in commands:
      answer = commands[name](argument.strip())
    else:
      answer = f"unknown command {name[:50]!r}. {_HELP}\n"
    if len(answer) > self._config.max_observation_chars:
      answer = answer[: self._config.max_observation_chars] + "\n[... cut ...]\n"
    over = self._turns >= self._config.max_turns
    return Step(observation=observation(answer), done=over, truncated=over, info={"success": False} if over else {})

  def close(self) -> None:
    """Does nothing; there is nothing to release."""

  def _list(self, argument: str) -> str:
    names = sorted(name for name in self._files if name.startswith(argument))
    return "".join(f"{name} ({self._files[name].count(chr(10))} lines)\n" for name in names) or "no such files\n"

  def _read(self, argument: str) -> str:
    path, *bounds = argument.split()[:3] or [""]
    if path not in self._files:
      return f"no file {path!r}\n"
    if not all(bound.isdecimal() and len(bound) <= _MAX_DIGITS for bound in bounds):
      return "read PATH [FIRST LAST]: lines are numbers from 1\n"
    lines = self._files[path].splitlines()
    first, last = (int(bounds[0]) if bounds else 1), (int(bounds[1]) if len(bounds) > 1 else len(lines))
    return "".join(f"{number}: {line}\n" for number, line in enumerate(lines, 1) if first <= number <= last)

  def _search(self, argument: str) -> str:
    if not argument:
      return "search needs a text\n"
    found = [
      f"{path}:{number}: {line}\n"
      for path, text in sorted(self._files.items())
      for number, line in enumerate(text.splitlines(), 1)
      if argument in line
    ]
    return "".join(found) or "not found\n"

  def _edit(self, path: str, body: str) -> str:
    lines = body.strip().split("\n")
    if path not in self._files:
      return f"no file {path!r}\n"
    if lines[0] != "<<<<" or lines[-1] != ">>>>" or lines.count("====") != 1:
      return "edit PATH, then a line <<<<, the old lines, one line ====, the new lines, a line >>>>\n"
    middle = lines.index("====")
    old, new = "\n".join(lines[1:middle]), "\n".join(lines[middle + 1 : -1])
    count = self._files[path].count(old) if old else 0
    if count != 1:
      return f"the old lines must be in {path} exactly once; found {count} times\n"
    text = self._files[path].replace(old, new)
    if len(text) > self._config.max_file_chars:
      return f"the file would be longer than {self._config.max_file_chars} characters\n"
    self._files[path] = text
    return f"edited {path}\n"

  def _test(self, argument: str) -> str:
    del argument
    passed, text = run_test(self._tool, self._files, self._task.test)
    return f"{text}{'passed' if passed else 'FAILED'}\n"
