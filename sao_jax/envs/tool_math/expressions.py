"""Integer expressions as trees: what has to be computed for a problem, and which calls compute it."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

Expression: TypeAlias = "int | Operation | Negation"


@dataclasses.dataclass(frozen=True)
class Operation:
  """`left op right`; the operator is a key of `OPERATORS`."""

  op: str
  left: Expression
  right: Expression


@dataclasses.dataclass(frozen=True)
class Negation:
  """`-( value )`: a sign, not an operation; nobody calls a tool for it."""

  value: Expression


OPERATORS: Mapping[str, Callable[[int, int], int]] = {
  "+": lambda a, b: a + b,
  "-": lambda a, b: a - b,
  "*": lambda a, b: a * b,
  "//": lambda a, b: a // b,
  "gcd": math.gcd,
}
_AST_OPERATORS: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


def parse_expression(text: str) -> Expression:
  """Reads integers, + - * //, unary minus and parentheses.

  Raises:
    ValueError: anything else.
  """
  try:
    return _from_ast(ast.parse(text, mode="eval").body)
  except SyntaxError as error:
    raise ValueError(f"text must be an integer expression of + - * // and parentheses; received {text!r}.") from error


def _from_ast(node: ast.expr) -> Expression:
  if isinstance(node, ast.Constant) and type(node.value) is int:
    return node.value
  if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
    value = _from_ast(node.operand)
    return -value if isinstance(value, int) else Negation(value)
  if isinstance(node, ast.BinOp) and type(node.op) in _AST_OPERATORS:
    return Operation(_AST_OPERATORS[type(node.op)], _from_ast(node.left), _from_ast(node.right))
  raise ValueError(f"text must be an integer expression of + - * // and parentheses; received {ast.unparse(node)!r}.")


def operation_text(op: str, left: int, right: int) -> str:
  """One operation as it is written in a call."""
  return f"gcd({left}, {right})" if op == "gcd" else f"{left} {op} {right}"


def evaluate(expression: Expression) -> int:
  """The value, in Python integers."""
  if isinstance(expression, int):
    return expression
  if isinstance(expression, Negation):
    return -evaluate(expression.value)
  return OPERATORS[expression.op](evaluate(expression.left), evaluate(expression.right))


def num_operations(expression: Expression) -> int:
  """Operations (each a call for who computes one at a time); signs do not count."""
  if isinstance(expression, int):
    return 0
  if isinstance(expression, Negation):
    return num_operations(expression.value)
  return 1 + num_operations(expression.left) + num_operations(expression.right)


def reduce_stepwise(
  expression: Expression, *, exchange: Mapping[int, str] | None = None
) -> tuple[list[tuple[str, int]], int]:
  """Computes one operation at a time, the left operand's operations first.

  Args:
    expression: what to compute.
    exchange: operation number (from 0, in the order of computation) -> operator to use instead of the right one.

  Returns:
    The steps as (text of the operation, its result), and the final value. Later steps work with what earlier ones gave.
  """
  steps: list[tuple[str, int]] = []

  def visit(node: Expression) -> int:
    if isinstance(node, int):
      return node
    if isinstance(node, Negation):
      return -visit(node.value)
    left, right = visit(node.left), visit(node.right)
    op = (exchange or {}).get(len(steps), node.op)
    steps.append((operation_text(op, left, right), OPERATORS[op](left, right)))
    return steps[-1][1]

  value = visit(expression)
  return steps, value


def operators_in_order(expression: Expression) -> list[str]:
  """The operators in the order in which `reduce_stepwise` computes them."""
  if isinstance(expression, int):
    return []
  if isinstance(expression, Negation):
    return operators_in_order(expression.value)
  return [*operators_in_order(expression.left), *operators_in_order(expression.right), expression.op]


def left_to_right(text: str) -> Expression | None:
  """The tree that ignores precedence, or None where parentheses or words leave no such reading."""
  parts = text.split(" ")
  try:
    tree: Expression = int(parts[0])
    for op, number in zip(parts[1::2], parts[2::2], strict=True):
      if op not in OPERATORS or op == "gcd":
        return None
      tree = Operation(op, tree, int(number))
  except ValueError:
    return None
  return tree


def count_code_operations(code: str) -> int | None:
  """Operators and function calls in a program; None if it is not Python."""
  try:
    tree = ast.parse(code)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None
  return sum(isinstance(node, (ast.BinOp, ast.Call, ast.AugAssign)) for node in ast.walk(tree))
