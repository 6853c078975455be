"""Parts of an answer: sides of an equation, elements of a list, names before a value and units after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from fractions import Fraction
from typing import TypeAlias

from sao_jax.envs.grading.answer_tokens import BIG_OPERATORS, Group, Node, Token, UnreadableError, literal

Nodes: TypeAlias = tuple[Node, ...]

RELATIONS: Set[str] = frozenset(("=", "<", ">", "<=", ">=", "!=", "≈", "≡", "∈"))
MATRICES: Set[str] = frozenset(("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array", "cases"))
_ROWS: Set[str] = frozenset(("cases", "align", "aligned", "gather", "gathered", "split", "eqnarray", "array"))
_NAMING: Set[str] = frozenset(
  (r"\angle", r"\triangle", r"\overline", r"\partial", r"\nabla", r"\#", r"\hat", r"\vec", r"\bar", r"\tilde", r"\circ")
)
"""Commands without a value that may be part of a name: `\\angle ABC = 30`."""
_DECIDING = """not no never either neither but if else than maybe perhaps is are was for when where wrong except zero
one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million billion trillion dozen half
squared cubed factorial odd even prime"""
"""Words that are neither units nor names. They change the meaning of an answer."""
UNITS: Mapping[str, str] = {
  "mm": "millimeter millimeters", "cm": "centimeter centimeters centimetre centimetres",
  "m": "meter meters metre metres",
  "km": "kilometer kilometers kilometre kilometres", "in": "inch inches", "ft": "foot feet", "yd": "yard yards",
  "mi": "mile miles", "s": "sec second seconds", "min": "minute minutes", "h": "hr hrs hour hours", "day": "days",
  "week": "weeks", "month": "months", "year": "years", "g": "gram grams", "kg": "kilogram kilograms",
  "lb": "lbs pound pounds", "oz": "ounce ounces", "l": "liter liters litre litres", "ml": "milliliter milliliters",
  "unit": "units", "mph": "", "kph": "", "dollar": "dollars", "cent": "cents", "percent": "", "degree": "degrees deg",
  "radian": "radians rad", "am": "", "pm": "", "hz": "", "n": "newton newtons", "j": "joule joules", "w": "watt watts",
}  # fmt: skip


def is_op(node: Node, names: Set[str]) -> bool:
  return isinstance(node, Token) and node.kind == "op" and node.text in names


def has(nodes: Nodes, operators: Set[str]) -> bool:
  return any(is_op(node, operators) for node in nodes)


def is_group(nodes: Nodes, opening: tuple[str, ...]) -> bool:
  return len(nodes) == 1 and isinstance(nodes[0], Group) and nodes[0].open in opening


def split(nodes: Nodes, separates: Callable[[Token], bool]) -> tuple[list[Nodes], list[str]]:
  """Returns the parts between separators, and the separators."""
  parts: list[Nodes] = [()]
  between: list[str] = []
  for node in nodes:
    if isinstance(node, Token) and separates(node):
      parts.append(())
      between.append(node.text)
    else:
      parts[-1] += (node,)
  return parts, between


def all_nodes(nodes: Nodes) -> list[Node]:
  return [x for node in nodes for x in (node, *(all_nodes(node.items) if isinstance(node, Group) else ()))]


def sides(nodes: Nodes) -> tuple[list[Nodes], list[str]]:
  parts, signs = split(nodes, lambda node: is_op(node, RELATIONS))
  if not all(parts):
    raise UnreadableError("a relation sign must be between two sides.")
  return parts, signs


def is_name(nodes: Nodes) -> bool:
  """Whether nodes can only name a quantity: `x_1`, `P(X = 3)`, `\\min_{x = 3} f(x)`, `(a, b)`, `\\text{Area}`."""
  has_letter = any(char.isalpha() for text in literal(nodes) for char in text)
  if not has_letter or any(node.text in _DECIDING.split() for node in words(nodes)):
    return False
  for i, node in enumerate(nodes):
    if isinstance(node, Group):
      continue
    named = node.kind in ("letter", "word", "func") or node.text in _NAMING or is_op(node, frozenset("^_|'"))
    named = named or node.text in BIG_OPERATORS
    if not named and not (node.text == r"\frac" and all(map(_has_letter, nodes[i + 1 : i + 3]))):
      return False
  first = nodes[0]
  if isinstance(first, Group):  # A tuple of names, or an area [ABC].
    inside = [node for node in all_nodes(first.items) if isinstance(node, Token)]
    return all(node.kind in ("letter", "sep", "word") or node.text == "_" for node in inside)
  return True


def starts_with_letter(nodes: Nodes) -> bool:
  """Whether nodes begin with a letter. A leading number may be separate from the rest: `71 \\quad x = 70`."""
  nodes = nodes[1:] if is_op(nodes[0], frozenset("+-")) else nodes
  if isinstance(nodes[0], Token) and nodes[0].kind == "cmd":
    return len(nodes) > 1 and isinstance(nodes[1], Group) and _has_letter(nodes[1])
  return _has_letter(nodes[0])


def _has_letter(node: Node) -> bool:
  return any(isinstance(x, Token) and x.kind in ("letter", "func", "word") for x in all_nodes((node,)))


def words(nodes: Nodes) -> list[Token]:
  return [node for node in all_nodes(nodes) if isinstance(node, Token) and node.kind == "word"]


def unit(word: str) -> str:
  return next((name for name, others in UNITS.items() if word == name or word in others.split()), "")


def measure(nodes: Nodes) -> tuple[Nodes, tuple[str, ...]]:
  """Splits a value and its unit, if any: `\\$5`, `15^\\circ`, `2 \\text{ cm}^2`, `5 \\text{ apples}`."""
  found: list[str] = []
  rest = nodes[1:] if nodes[:1] == (Token("op", "-"),) else nodes
  sign = nodes[: len(nodes) - len(rest)]
  if len(rest) > 1 and isinstance(rest[0], Token) and rest[0].kind == "unit" and rest[0].text != "percent":
    return (*sign, *rest[1:]), (rest[0].text,)
  end = len(nodes)
  while end > 1:
    node, before = nodes[end - 1], nodes[end - 2]
    is_angle = isinstance(node, Token) and node.text == "degree" and isinstance(before, Token)
    if is_angle and any(isinstance(x, Token) and x.kind == "func" for x in nodes[:end]):
      break  # of a sine, not its unit
    if isinstance(node, Token) and node.kind in ("word", "unit"):
      found.insert(0, unit(node.text) or node.text)
      end -= 1
    elif isinstance(node, Group) and end > 2 and is_op(before, frozenset("^")) and ends_unit(nodes[end - 3]):
      found.insert(0, "^" + "".join(literal(node.items)))
      end -= 2
    elif found and is_op(node, frozenset("/*")) and ends_unit(before):
      found.insert(0, "/" if isinstance(node, Token) and node.text == "/" else "")
      end -= 1
    elif isinstance(node, Token) and node.text == "." and ends_unit(before):  # of "sq."
      end -= 1
    else:
      break
  said = [node.text for node in words(nodes[end:])]
  if len(said) > 4 or any(word in _DECIDING.split() for word in said):
    raise UnreadableError("a unit must have at most four words, without words that change the meaning.")
  for i, word in enumerate(found[:-1]):  # square feet
    if word in ("square", "sq", "cubic", "cu") and not found[i + 1].startswith(("/", "^")):
      found[i : i + 2] = [found[i + 1], "^2" if word.startswith("s") else "^3"]
  return nodes[:end], tuple(found)


def ends_unit(node: Node) -> bool:
  return isinstance(node, Token) and node.kind == "word"


def same_unit(gold: tuple[str, ...], answer: tuple[str, ...]) -> bool:
  """Whether units agree. They agree if one is missing or not in the table of units."""
  both_known = all(part in UNITS or not part.isalpha() for part in (*gold, *answer))
  return not gold or not answer or not both_known or gold == answer or "unit" in (*gold, *answer)


def quantities(nodes: Nodes) -> list[tuple[Fraction, str]]:
  """Returns the numbers and units of `3 hours and 20 minutes`; empty for anything else."""
  row = [node for node in nodes if not (isinstance(node, Token) and node.kind == "sep")]
  found: list[tuple[Fraction, str]] = []
  for number, word in zip(row[::2], row[1::2], strict=False):
    if not (isinstance(number, Token) and number.value is not None and isinstance(word, Token)):
      return []
    if not unit(word.text):
      return []
    found.append((number.value, unit(word.text)))
  different = len({name for _, name in found}) == len(found)
  return found if len(row) % 2 == 0 and different else []


def cells(group: Group) -> list[list[Nodes]]:
  """Returns the cells of a matrix, by rows."""
  found = split(group.items, lambda node: is_op(node, frozenset(("newline",))))[0]
  found = found if found[-1] else found[:-1]
  return [split(row, lambda node: is_op(node, frozenset("&")))[0] for row in found]


def rows(nodes: Nodes) -> Nodes | None:
  """Returns rows of equations as one list; None for anything else."""
  if not is_group(nodes, tuple(_ROWS)) or not isinstance(nodes[0], Group):
    return None
  lines = [tuple(node for cell in row for node in cell) for row in cells(nodes[0])]
  if nodes[0].open in ("cases", "array") and has(nodes[0].items, frozenset("&")):
    return None
  lines = [row[:-1] if row[-1:] == (Token("sep", ","),) else row for row in lines]
  joined = tuple(node for row in lines for node in (Token("sep", ","), *row))
  return joined[1:]
