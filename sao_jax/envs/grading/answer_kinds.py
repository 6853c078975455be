r"""Kinds of answers. The reference has a kind, and an answer of another kind is wrong.

| kind     | reference                           | right answer                                                  |
|----------|-------------------------------------|---------------------------------------------------------------|
| words    | `\text{Evelyn}`, `x + c for any c`  | the same tokens; case and spacing of words are ignored        |
| quantity | `3 hours 20 minutes`                | the same numbers with the same units                          |
| rows     | `\begin{cases}`, `\begin{align}`    | the same rows, as a list                                      |
| list     | `1, 2`, `1 and 2`, `\pm 3`          | the same elements in any order; with dots, in the same order  |
| relation | `y = 2x + 3`, `x \le 2`             | an equivalent one; 5 for `x = 5`, the interval for `x \le 2`  |
| union    | `(-\infty, 1) \cup (2, 3)`          | the same parts in any order                                   |
| set      | `\{1, 2\}`                          | the same elements in any order                                |
| bracket  | `(3, \frac{\pi}{2})`, `[1, 2)`      | the same brackets with the same entries, in order             |
| matrix   | `\begin{pmatrix}`                   | the same entries                                              |
| ratio    | `3 : 4`                             | the same ratio                                                |
| based    | `4210_5`                            | the same digits with the same base                            |
| number   | `12`, `\frac{\pi}{2}`               | the same value; units may be missing, but must not differ     |
| expression | `2x + 1`                          | an equal expression in the same letters                       |
| other    | anything else                       | the same tokens                                               |

Answers of every kind may have a name: `x = 5`, `P(X = 3) = \frac{1}{8}`. A percent sign is a unit: 50% is right for the
references 50 and 50%, but 1/2 is wrong for 50%, and 50% is wrong for 1/2.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TypeAlias

from sao_jax.envs.grading import answer_values
from sao_jax.envs.grading.answer_intervals import (
  FLIPPED,
  as_intervals,
  elements,
  inequality,
  intervals,
  is_bracket,
  nodes_of_set,
)
from sao_jax.envs.grading.answer_parts import (
  MATRICES,
  RELATIONS,
  UNITS,
  Nodes,
  cells,
  has,
  is_group,
  is_name,
  is_op,
  measure,
  quantities,
  rows,
  same_unit,
  sides,
  split,
  starts_with_letter,
  words,
)
from sao_jax.envs.grading.answer_tokens import Group, Token, UnreadableError, literal, tokens

Test: TypeAlias = Callable[[Nodes], bool]
Comparison: TypeAlias = Callable[[Nodes, Nodes], bool]


@dataclasses.dataclass(frozen=True)
class Kind:
  """A kind of answer."""

  name: str
  fits: Test
  """Whether a reference is of this kind. The first kind that fits counts."""
  same: Comparison
  """Whether an answer is right for a reference of this kind."""


def kind_of(gold: Nodes) -> Kind:
  """Returns the kind of a reference."""
  return next(kind for kind in _kinds() if kind.fits(gold))


def same_tokens(gold: str, answer: str) -> bool:
  """Whether two answers are printed alike.

  Raises:
    UnreadableError: one of them cannot be read.
  """
  return literal(tokens(gold)) == literal(tokens(answer))


def same_answer(gold: str, answer: str) -> bool:
  """Whether an answer is right for a reference. Neither has a box around it.

  Raises:
    UnreadableError: one of them cannot be parsed.
  """
  wanted, found = tokens(gold), tokens(answer)
  if same(wanted, found):
    return True
  # 1,234 alone is one number, but it may be two elements of a list.
  several = kind_of(wanted).name in ("list", "set", "bracket", "union")
  return several and same(tokens(gold, thousands=False), tokens(answer, thousands=False))


def same(gold: Nodes, answer: Nodes) -> bool:
  """Whether an answer is right for a reference."""
  if literal(gold) == literal(answer):
    return True
  gold, answer = as_intervals(gold), as_intervals(answer)
  with contextlib.suppress(UnreadableError):  # It is of another kind.
    if kind_of(gold).same(gold, answer):
      return True
  wanted, found = _equations(gold), _equations(answer)
  return (wanted is None) != (found is None) and same(wanted or gold, found or answer)


def _equations(nodes: Nodes) -> Nodes | None:
  """Returns the list `x = 1, y = 2` for `(x, y) = (1, 2)`, and None for any other answer."""
  match nodes:
    case (Group("(", ")", names), Token("op", "="), Group("(", ")", values)):
      left, right = (split(x, lambda node: node.kind == "sep")[0] for x in (names, values))
      if 1 < len(left) == len(right) and all(left) and all(right) and all(map(is_name, left)):
        rows = ((Token("sep", ","), *x, Token("op", "="), *y) for x, y in zip(left, right, strict=True))
        return tuple(node for row in rows for node in row)[1:]
  return None


def _kinds() -> tuple[Kind, ...]:
  return (
    Kind("words", _is_words, _same_words),
    Kind("quantity", lambda gold: len(quantities(gold)) > 1, lambda a, b: quantities(a) == quantities(b)),
    Kind("rows", lambda gold: rows(gold) is not None, _same_rows),
    Kind("list", lambda gold: len(elements(gold)) > 1, _same_list),
    Kind("relation", lambda gold: has(gold, RELATIONS), _same_relation),
    Kind("union", lambda gold: has(gold, frozenset("∪")), _named(_same_union)),
    Kind("set", lambda gold: is_group(gold, (r"\{",)), _named(_same_set)),
    Kind("bracket", is_bracket, _named(_same_bracket)),
    Kind("matrix", lambda gold: is_group(gold, tuple(MATRICES)), _named(_same_matrix)),
    Kind("ratio", lambda gold: has(gold, frozenset(":")), _named(_same_ratio)),
    Kind("based", _is_based, _named(lambda a, b: _is_based(b) and literal(a) == literal(b))),
    Kind("number", lambda gold: _is_value(gold, number=True), _same_number),
    Kind("expression", lambda gold: _is_value(gold, number=False), _named(_same_measure)),
    Kind("other", lambda gold: True, _same_words),
  )


def _is_words(gold: Nodes) -> bool:
  """Whether there are words other than units and names."""
  if not words(gold) or len(quantities(gold)) > 1:
    return False
  if rows(gold) is not None or any(isinstance(x, Group) and x.open in MATRICES for x in gold):
    return False
  for part in split(gold, lambda node: node.kind == "sep" or is_op(node, RELATIONS))[0]:
    try:
      value, unit = measure(part)
    except UnreadableError:
      return True
    known = all(x in UNITS or not x.isalpha() for x in unit)
    if words(value) and not (is_name(part) and has(gold, frozenset("="))):
      return True
    if not known and answer_values.plain_value(value) is None and not words(value):
      return True
  return False


def _same_words(gold: Nodes, answer: Nodes) -> bool:
  return _folded(gold) == _folded(answer)


def _folded(nodes: Nodes) -> tuple[str, ...]:
  """Returns the tokens with words in lower case. A choice like (C) gives its letter."""
  if is_group(nodes, ("(",)) and isinstance(nodes[0], Group) and len(nodes[0].items) == 1:
    nodes = nodes[0].items
  return tuple(text.lower() if len(text) > 1 or words(nodes) else text for text in literal(nodes))


def _is_value(gold: Nodes, *, number: bool) -> bool:
  try:
    return answer_values.is_number(measure(gold)[0]) == number
  except UnreadableError:
    return False


def _same_measure(gold: Nodes, answer: Nodes) -> bool:
  """Whether values and units agree."""
  (wanted, unit), (found, other) = measure(gold), measure(answer)
  return same_unit(unit, other) and answer_values.same_value(wanted, found)


def _same_number(gold: Nodes, answer: Nodes) -> bool:
  """Whether all sides of an equation with a value have the right one. Rounded sides need only be close."""
  parts, signs = sides(answer)
  if "≡" in signs:
    return _same_residue(gold, parts, signs)
  if not set(signs) <= {"=", "≈"}:
    return False
  found = False
  exact: Nodes | None = None
  for sign, part in zip(("=", *signs), parts, strict=True):
    if sign == "≈" and exact is not None:
      if not _rounds(exact, part):
        return False
    elif _is_value(part, number=True):
      if not _same_measure(gold, part):
        return False
      exact = part
      found = found or not answer_values.is_choice(part)
    elif not (is_name(part) or (part is parts[0] and _is_term(part))):
      return False
  return found


def _is_term(part: Nodes) -> bool:
  """Whether a part is an expression with letters, whose value an equation may give: `m + n = 70`."""
  return starts_with_letter(part) and _is_value(part, number=False)


def _rounds(exact: Nodes, rounded: Nodes) -> bool:
  """Whether a decimal is a number rounded to its last place. One with as many places is a second answer instead."""
  exact, rounded = measure(exact)[0], measure(rounded)[0]
  value = answer_values.plain_value(rounded)
  if value is None or not answer_values.is_decimal(rounded):
    return False
  places = answer_values.num_places(rounded)
  if answer_values.is_decimal(exact) and answer_values.num_places(exact) == places:
    return False
  return answer_values.is_near(exact, rounded, places)


def _same_residue(gold: Nodes, parts: list[Nodes], signs: list[str]) -> bool:
  """Whether the right side of a congruence is the right residue. If both sides are numbers, it must also hold."""
  if len(parts) != 2:
    return False
  row = parts[1]
  if isinstance(row[-1], Group) and row[-1].open == "(":
    row = (*row[:-1], *row[-1].items)
  residue, mod = split(row, lambda node: is_op(node, frozenset(("mod",))))
  if len(mod) != 1:
    return False
  value, modulus = (answer_values.plain_value(_unwrapped(x)) for x in residue)
  if value is None or modulus is None or not 0 <= value < modulus or modulus.denominator != 1:
    return False
  left = parts[0]
  if _is_value(left, number=True):
    remainder = (Group("(", ")", left), Token("op", "mod"), Token("num", str(modulus), modulus))
    if not answer_values.same_value(residue[0], remainder):
      return False
  elif not (is_name(left) or _is_term(left)):
    return False
  return _same_measure(gold, residue[0])


def _unwrapped(nodes: Nodes) -> Nodes:
  return nodes[0].items if is_group(nodes, ("{", "(")) and isinstance(nodes[0], Group) else nodes


def _named(compare: Comparison) -> Comparison:
  """Extends a comparison to equations: all sides but names must be right, and the last one always counts."""

  def compare_sides(gold: Nodes, answer: Nodes) -> bool:
    parts, signs = sides(answer)
    if not set(signs) <= {"=", "∈"}:
      return _same_interval(gold, answer)
    rest = [as_intervals(part) for part in [part for part in parts[:-1] if not is_name(part)] + parts[-1:]]
    return all(compare(gold, part) for part in rest)

  return compare_sides


def _is_based(gold: Nodes) -> bool:
  match gold:
    case (Token("num"), Token("op", "_"), Group("{", _, (Token("num"),))):
      return True
  return False


def _same_ratio(gold: Nodes, answer: Nodes) -> bool:
  wanted, found = (split(x, lambda node: is_op(node, frozenset(":")))[0] for x in (gold, answer))
  if len(wanted) != len(found) or len(wanted) < 2:
    return False
  if all(map(same, wanted, found)):
    return True
  a, b = ([answer_values.plain_value(x) for x in parts] for parts in (wanted, found))
  if None in a or None in b or not all(a) or not all(b):
    return False
  return len({x / y for x, y in zip(a, b, strict=True) if x is not None and y is not None}) == 1


def _same_list(gold: Nodes, answer: Nodes) -> bool:
  if _same_interval(gold, answer):
    return True
  answer = _after_name(answer)
  found = nodes_of_set(answer)
  return _same_elements(elements(gold), elements(answer if found is None else found))


def _same_set(gold: Nodes, answer: Nodes) -> bool:
  wanted, found = nodes_of_set(gold), nodes_of_set(answer)
  assert wanted is not None
  found = answer if found is None and any(isinstance(x, Token) and x.kind == "sep" for x in answer) else found
  if found is None or not wanted or not found:
    return False
  return _same_elements(elements(wanted), elements(found))


def _after_name(nodes: Nodes) -> Nodes:
  """Returns the set after `x =` or `x ∈`, or all nodes if there is none."""
  parts, signs = sides(nodes) if has(nodes, RELATIONS) and nodes_of_set(nodes[-1:]) is not None else ([nodes], [])
  return parts[1] if len(parts) == 2 and signs[0] in ("=", "∈") and is_name(parts[0]) else nodes


def _same_elements(wanted: list[Nodes], found: list[Nodes]) -> bool:
  """Whether the elements are the same, in the same order if there are dots among them, else in any order."""
  if len(wanted) != len(found) or len(wanted) > 100:
    return False
  dots = Token("dots", "...")
  if any(dots in part for part in (*wanted, *found)):
    return all(a == b if dots in a or dots in b else same(a, b) for a, b in zip(wanted, found, strict=True))
  named = {literal(sides(part)[0][0]) for part in wanted if has(part, RELATIONS)}
  if len(named) > 1 and not all(has(part, RELATIONS) for part in found):
    return False  # It is unclear which value is x and which is y.
  if not named:
    names = {literal(part[: part.index(Token("op", "="))]) for part in found if Token("op", "=") in part}
    if len({name[:1] for name in names}) > 1:
      return False  # x = 1, y = 2 is not a list of values of x.
  rest = list(found)
  for part in wanted:
    equal = [x for x in rest if literal(x) == literal(part)]
    match = equal[0] if equal else next((x for x in rest if same(part, x)), None)
    if match is None:
      return False
    rest.remove(match)
  return True


def _same_bracket(gold: Nodes, answer: Nodes) -> bool:
  wanted = gold[0]
  found = answer[0]
  if len(answer) != 1 or not isinstance(wanted, Group) or not isinstance(found, Group):
    return False
  if _ends(wanted) != _ends(found):
    return False
  a, b = elements(wanted.items), elements(found.items)
  return len(a) == len(b) and all(map(same, a, b))


def _ends(group: Group) -> str:
  return (group.open + group.close).replace(r"\langle", "(").replace(r"\rangle", ")")


def _same_union(gold: Nodes, answer: Nodes) -> bool:
  wanted, found = (split(x, lambda node: is_op(node, frozenset("∪")))[0] for x in (gold, answer))
  return all(wanted) and all(found) and _same_elements(wanted, found)


def _same_matrix(gold: Nodes, answer: Nodes) -> bool:
  wanted, found = gold[0], answer[0]
  if not isinstance(wanted, Group) or not is_group(answer, tuple(MATRICES)) or not isinstance(found, Group):
    return False
  a, b = cells(wanted), cells(found)
  if [len(row) for row in a] != [len(row) for row in b] or (wanted.open == "cases") != (found.open == "cases"):
    return False
  return all(same(x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True))


def _same_rows(gold: Nodes, answer: Nodes) -> bool:
  wanted, found = rows(gold), rows(answer)
  return wanted is not None and same(wanted, answer if found is None else found)


def _same_relation(gold: Nodes, answer: Nodes) -> bool:
  parts, signs = sides(gold)
  if _same_interval(gold, answer):
    return True
  given, given_signs = sides(answer)
  if len(parts) == 2 and signs[0] in ("=", "∈") and _names_one(parts[0]):
    if not given_signs:
      return same(parts[1], answer)
    if given_signs[0] in ("=", "∈") and literal(given[0]) == literal(parts[0]):
      return same(parts[1], answer[len(given[0]) + 1 :])
  if given_signs != signs:
    given, given_signs = given[::-1], [FLIPPED.get(sign, "") for sign in reversed(given_signs)]
  if given_signs != signs or not set(signs) <= set(FLIPPED):
    return False
  pairs = zip(parts, parts[1:], given, given[1:], signs, strict=False)
  return all(answer_values.same_relation((a, b), (c, d), ordered=sign not in "!=") for a, b, c, d, sign in pairs)


def _names_one(nodes: Nodes) -> bool:
  """Whether nodes name one quantity, not a product of two."""
  count = sum(isinstance(node, Token) and node.kind in ("letter", "cmd") for node in nodes)
  segment = all(isinstance(node, Token) and node.kind == "letter" and node.text.isupper() for node in nodes)
  return is_name(nodes) and (count <= 1 or (segment and count == 2))  # AB is a length.


def _same_interval(gold: Nodes, answer: Nodes) -> bool:
  """Whether one is an inequality in one letter, and the other the interval or union of intervals of its solutions."""
  wanted, found = (inequality(x) or intervals(x) for x in (gold, answer))
  if not wanted or not found or (inequality(gold) is None) == (inequality(answer) is None):
    return False
  return _same_elements([(x,) for x in wanted], [(x,) for x in found])


