"""Lists, sets and intervals among the nodes of an answer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from sao_jax.envs.grading import answer_values
from sao_jax.envs.grading.answer_parts import RELATIONS, Nodes, all_nodes, is_group, is_name, is_op, sides, split
from sao_jax.envs.grading.answer_tokens import Group, Token, UnreadableError, literal

FLIPPED: Mapping[str, str] = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def elements(nodes: Nodes) -> list[Nodes]:
  """Returns the elements of a list. An element with ± counts as two."""
  parts, separators = split(nodes, lambda node: node.kind == "sep")
  if len(parts) > 2 and separators[-1] in ("and", "or") and not parts[-2]:
    parts = [*parts[:-2], parts[-1]]  # "1, 2, and 3"
  if not all(parts):
    raise UnreadableError("a separator must be between two elements.")
  return [x for part in parts for x in _signs(part)]


def _signs(part: Nodes) -> list[Nodes]:
  if not any(is_op(node, frozenset("±∓")) for node in all_nodes(part)):
    return [part]
  return [_replaced(part, {"±": "+", "∓": "-"}), _replaced(part, {"±": "-", "∓": "+"})]


def _replaced(nodes: Nodes, signs: Mapping[str, str]) -> Nodes:
  return tuple(
    Group(node.open, node.close, _replaced(node.items, signs)) if isinstance(node, Group)
    else Token("op", signs[node.text]) if is_op(node, frozenset(signs)) else node
    for node in nodes
  )  # fmt: skip


def nodes_of_set(nodes: Nodes) -> Nodes | None:
  """Returns what stands between the braces of a set; None for anything else."""
  return nodes[0].items if is_group(nodes, (r"\{",)) and isinstance(nodes[0], Group) else None


def is_bracket(gold: Nodes) -> bool:
  if not is_group(gold, ("(", "[", r"\langle")) or not isinstance(gold[0], Group):
    return False
  return any(isinstance(node, Token) and node.kind == "sep" for node in gold[0].items)


def as_intervals(nodes: Nodes) -> Nodes:
  """Writes the real numbers, perhaps without a finite set, as an interval or a union of intervals."""
  if nodes[:1] != (Token("letter", r"\mathbb{R}"),):
    return nodes
  rest: list[Nodes] = []
  if len(nodes) == 3 and is_op(nodes[1], frozenset("∖")) and nodes_of_set(nodes[2:]):
    rest = elements(nodes_of_set(nodes[2:]) or ())
  values = [answer_values.plain_value(x) for x in rest]
  if None in values or (len(nodes) > 1 and not rest):
    return nodes
  infinity: Nodes = (Token("cmd", r"\infty"),)
  ends = [(Token("op", "-"), *infinity), *(x for _, x in sorted(zip(values, rest, strict=True))), infinity]
  groups = [Group("(", ")", (*a, Token("sep", ","), *b)) for a, b in itertools.pairwise(ends)]
  return tuple(node for group in groups for node in (Token("op", "∪"), group))[1:]


def intervals(nodes: Nodes) -> list[Group] | None:
  """Returns the intervals of a union, or of `x \\in` a union; None for anything else."""
  parts, signs = sides(nodes)
  if signs == ["∈"] and is_name(parts[0]):
    nodes = parts[1]
  found = [part[0] for part in split(nodes, lambda node: is_op(node, frozenset("∪")))[0] if is_bracket(part)]
  groups = [node for node in found if isinstance(node, Group) and len(elements(node.items)) == 2]
  whole = len(groups) == 1 + sum(is_op(node, frozenset("∪")) for node in nodes)
  return groups if whole else None


def inequality(nodes: Nodes) -> list[Group] | None:
  """Returns the intervals of `1 < x \\le 2`, or of several inequalities joined by "or"."""
  parts, separators = split(nodes, lambda node: node.kind == "sep")
  if not set(separators) <= {"or"}:
    return None
  found = [_one_interval(part) for part in parts]
  letters = {letter for letter, _ in filter(None, found)}
  return [interval for _, interval in filter(None, found)] if None not in found and len(letters) == 1 else None


def _one_interval(nodes: Nodes) -> tuple[str, Group] | None:
  parts, signs = split(nodes, lambda node: is_op(node, RELATIONS))
  if signs and set(signs) <= {">", ">="}:
    parts, signs = parts[::-1], [FLIPPED[sign] for sign in reversed(signs)]
  if not signs or not set(signs) <= {"<", "<="} or not all(parts):
    return None
  infinity: Nodes = (Token("cmd", r"\infty"),)
  names = [isinstance(part[0], Token) and part[0].kind == "letter" and len(part) == 1 for part in parts]
  match names:
    case [True, False]:  # x < b
      parts, signs = [(Token("op", "-"), *infinity), *parts], ["<", *signs]
    case [False, True]:  # a < x
      parts, signs = [*parts, infinity], [*signs, "<"]
    case [False, True, False]:
      pass
    case _:
      return None
  opening, closing = "(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"
  return literal(parts[1])[0], Group(opening, closing, (*parts[0], Token("sep", ","), *parts[2]))
