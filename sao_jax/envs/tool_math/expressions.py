"""Integer expressions as trees, and the calls that compute them."""

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
  """`-( value )`: a sign, which does not count as an operation."""

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
  """Parses an expression of integers, + - * //, unary minus and parentheses.

  Raises:
    ValueError: the text is no such expression.
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
  """Returns the text of one operation in a call."""
  return f"gcd({left}, {right})" if op == "gcd" else f"{left} {op} {right}"


def evaluate(expression: Expression) -> int:
  """Computes the value of an expression."""
  if isinstance(expression, int):
    return expression
  if isinstance(expression, Negation):
    return -evaluate(expression.value)
  return OPERATORS[expression.op](evaluate(expression.left), evaluate(expression.right))


def num_operations(expression: Expression) -> int:
  """Counts the operations of an expression. Signs do not count."""
  if isinstance(expression, int):
    return 0
  if isinstance(expression, Negation):
    return num_operations(expression.value)
  return 1 + num_operations(expression.left) + num_operations(expression.right)


def reduce_stepwise(
  expression: Expression, *, exchange: Mapping[int, str] | None = None
) -> tuple[list[tuple[str, int]], int]:
  """Computes an expression one operation at a time, the left operand first.

  Args:
    expression: the expression.
    exchange: wrong operators to use, by number of the operation (from 0, in the order of computation).

  Returns:
    The steps as (text of the operation, its result), and the final value. Later steps use the results of earlier ones.
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
  """Lists the operators in the order in which `reduce_stepwise` computes them."""
  if isinstance(expression, int):
    return []
  if isinstance(expression, Negation):
    return operators_in_order(expression.value)
  return [*operators_in_order(expression.left), *operators_in_order(expression.right), expression.op]


def left_to_right(text: str) -> Expression | None:
  """Returns the tree that ignores precedence, or None if the text has parentheses or words."""
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
  """Counts the operators and function calls of a program; None if it is not Python."""
  try:
    tree = ast.parse(code)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None
  return sum(isinstance(node, (ast.BinOp, ast.Call, ast.AugAssign)) for node in ast.walk(tree))
