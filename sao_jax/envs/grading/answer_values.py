"""Values of single expressions.

Tokens are converted to unambiguous LaTeX for the parser of math-verify. By itself, that parser adds adjacent numbers,
reads 3.1 as a binary fraction and takes I for the imaginary unit. Here adjacent numbers are an error, decimals are
fractions, and I is a letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from fractions import Fraction
from typing import Any, TypeAlias

from sao_jax.envs.grading.answer_tokens import BIG_OPERATORS, Group, Node, Token, UnreadableError, literal

Nodes: TypeAlias = tuple[Node, ...]

_DIGITS, _MAX_DIGITS = 30, 1000
_ROUNDED_DIGITS = 6
"""Number of significant digits from which a decimal may stand for the number that it rounds."""
_POINTS = (1.6180339, -0.7320508, 3.3166247, -2.4494897)
_TOLERANCE = 1e-20
_SEVERAL_ARGUMENTS: Set[str] = frozenset((r"\max", r"\min", r"\gcd", r"\lcm"))
_FUNCTION_LETTERS: Set[str] = frozenset("fghFGHPQ")
"""Letters that name a function before a parenthesis. Their values are unknown."""
_RENAMED: Mapping[str, str] = {"i": "(I)", "I": r"\varkappa ", "d": r"\varpi "}
_BRACKETS: Mapping[str, tuple[str, str]] = {
  "(": ("(", ")"), "[": ("(", ")"), r"\lfloor": (r"\lfloor ", r"\rfloor "), r"\lceil": (r"\lceil ", r"\rceil "),
}  # fmt: skip
_SIGNS: Mapping[str, str] = {"+": "+", "-": "-", "*": r"\cdot ", "/": "/", "mod": r"\mod "}


def plain_value(nodes: Nodes) -> Fraction | None:
  """Returns the value of an integer, a decimal or a fraction of them, with an optional sign; None for anything else."""
  value: Fraction | None = None
  match _unsigned(nodes):
    case (Token("num", _, number),):
      value = number
    case (
      (Token("cmd", r"\frac"), Group("{", _, (Token("num", _, top),)), Group("{", _, (Token("num", _, bottom),)))
      | (Token("num", _, top), Token("op", "/"), Token("num", _, bottom))
    ) if bottom:  # fmt: skip
      value = (top or Fraction(0)) / bottom
  negative = nodes[:1] == (Token("op", "-"),)
  return None if value is None else -value if negative else value


def same_value(gold: Nodes, answer: Nodes) -> bool:
  """Whether two expressions have the same value.

  Rational numbers are compared exactly, other numbers to 30 digits, and expressions with letters at a few points. A
  decimal of at least six significant digits also equals a number that rounds to it and is not written as a decimal.

  Raises:
    UnreadableError: one of them is not an expression.
  """
  if literal(gold) == literal(answer):
    return True
  left, right = plain_value(gold), plain_value(answer)
  if left is not None and left == right:
    return True
  decimal = next((x for x, y in ((gold, answer), (answer, gold)) if _rounds(x) and not is_decimal(y)), None)
  if left is not None and right is not None and decimal is None:
    return False
  a, b = expression(gold), expression(answer)
  if _equal(a, b):
    return True
  if decimal is None or a.free_symbols or b.free_symbols:
    return False
  return _near(a, b, Fraction(1, 2 * 10 ** num_places(decimal)))


def is_number(nodes: Nodes) -> bool:
  """Whether nodes are an expression without letters and with a finite value.

  Raises:
    UnreadableError: they are not an expression.
  """
  return plain_value(nodes) is not None or bool(getattr(expression(nodes), "is_number", False))


def expression(nodes: Nodes) -> Any:
  """Returns an arithmetic expression as a SymPy expression.

  Raises:
    UnreadableError: the nodes are not an arithmetic expression.
  """
  import sympy
  from latex2sympy2_extended import latex2sympy2

  value = plain_value(nodes)
  if value is not None:
    return sympy.Rational(value.numerator, value.denominator)
  read = latex2sympy2.latex2sympy(
    to_latex(_with_indices(nodes)), is_real=True, convert_degrees=False, normalization_config=None,
    conversion_config=latex2sympy2.ConversionConfig(lowercase_symbols=False),
  )  # fmt: skip
  if not isinstance(read, sympy.Expr):
    raise UnreadableError(f"it must be an expression; received {type(read).__name__}.")
  return read.doit()


def _with_indices(nodes: Nodes) -> Nodes:
  """Renames the index i of a sum or product, which is not the imaginary unit."""
  texts = literal(nodes)
  counts = any(texts[k] in (r"\sum", r"\prod") and "i" in texts[k + 1 : k + 4] for k in range(len(texts)))
  return _renamed(nodes, "i", r"\varsigma") if counts else nodes


def _renamed(nodes: Nodes, old: str, new: str) -> Nodes:
  return tuple(
    Group(node.open, node.close, _renamed(node.items, old, new)) if isinstance(node, Group)
    else Token("letter", new) if node == Token("letter", old) else node
    for node in nodes
  )  # fmt: skip


def _kind(node: Node) -> str:
  return node.kind if isinstance(node, Token) else "group"


def _unsigned(nodes: Nodes) -> Nodes:
  return nodes[1:] if len(nodes) > 1 and nodes[0] in (Token("op", "-"), Token("op", "+")) else nodes


def is_decimal(nodes: Nodes) -> bool:
  """Whether nodes are an integer or a decimal, with an optional sign."""
  row = _unsigned(nodes)
  return len(row) == 1 and isinstance(row[0], Token) and row[0].kind == "num"


def num_places(decimal: Nodes) -> int:
  """Returns the number of decimal places."""
  return len(literal(decimal)[-1].partition(".")[2])


def is_near(a: Nodes, b: Nodes, places: int) -> bool:
  """Whether two numbers differ by at most one unit of decimal place `places`.

  Raises:
    UnreadableError: one of them is not an expression.
  """
  return _near(expression(a), expression(b), Fraction(1, 10**places))


def _rounds(nodes: Nodes) -> bool:
  """Whether nodes are a decimal with enough digits to stand for the number that it rounds."""
  digits = literal(nodes)[-1]
  return is_decimal(nodes) and "." in digits and len(digits.replace(".", "").lstrip("0")) >= _ROUNDED_DIGITS


def _equal(a: Any, b: Any) -> bool:
  if a == b:
    return True
  if a.is_Rational and b.is_Rational:
    return False
  letters = sorted(a.free_symbols | b.free_symbols, key=str)
  if not letters:
    return _is_zero(a - b)
  compared = 0
  for point in _points(letters):
    left, right = (_parts(x.evalf(_DIGITS, subs=point)) for x in (a, b))
    if left is None or right is None:
      continue
    scale = max(1, *map(abs, left), *map(abs, right))
    if any(abs(x - y) > scale * _TOLERANCE for x, y in zip(left, right, strict=True)):
      return False
    compared += 1
  return compared >= 2


def _parts(value: Any) -> tuple[Any, Any] | None:
  """Returns the real and imaginary part of a value; None if it has no numeric value."""
  parts = value.as_real_imag() if value.is_number else ()
  return parts if parts and all(x.is_Float or x.is_Rational for x in parts) else None


def _is_zero(difference: Any) -> bool:
  """Whether a constant is zero in all digits that SymPy can compute."""
  if difference.is_Rational:
    return bool(difference == 0)
  parts = _parts(difference.evalf(_DIGITS, maxn=_MAX_DIGITS))
  # If a sum cancels, SymPy finds no correct digit, and the precision is 1.
  return parts is not None and all(x == 0 or getattr(x, "_prec", 0) == 1 for x in parts)


def _near(a: Any, b: Any, tolerance: Fraction) -> bool:
  import sympy

  distance = abs(a - b).evalf(_DIGITS)
  return bool(distance.is_number and distance <= sympy.Rational(tolerance.numerator, tolerance.denominator))


def same_relation(gold: tuple[Nodes, Nodes], answer: tuple[Nodes, Nodes], *, ordered: bool) -> bool:
  """Whether two equations, or two inequalities with the same sign, are multiples of each other.

  Args:
    gold: the two sides of one.
    answer: the two sides of the other.
    ordered: whether the factor must be positive, as for inequalities.

  Raises:
    UnreadableError: a side is not an expression.
  """
  a, b = (expression(left) - expression(right) for left, right in (gold, answer))
  letters = sorted(a.free_symbols | b.free_symbols, key=str)
  if not letters or a.free_symbols != b.free_symbols:
    return False
  ratios = [_parts((a / b).evalf(_DIGITS, subs=point)) for point in _points(letters)]
  factors = [real for real, imaginary in filter(None, ratios) if abs(imaginary) < _TOLERANCE]
  if len(factors) < 2 or len(factors) < len([x for x in ratios if x is not None]):
    return False
  first = factors[0]
  constant = all(abs(x - first) <= abs(first) * _TOLERANCE for x in factors)
  return bool(constant and first != 0 and (first > 0 or not ordered))


def _points(letters: list[Any]) -> list[dict[Any, float]]:
  """Returns the values of the letters at which expressions are compared."""
  return [{x: _POINTS[(i + j) % len(_POINTS)] + j / 7 for j, x in enumerate(letters)} for i in range(len(_POINTS))]


def to_latex(nodes: Nodes) -> str:
  """Converts an arithmetic expression to unambiguous LaTeX.

  Raises:
    UnreadableError: the nodes are not an arithmetic expression, or two numbers are adjacent.
  """
  return _Writer(nodes).write()


class _Writer:
  """Writer of a row of tokens. `_factor` is whether the last one ends a factor."""

  def __init__(self, nodes: Nodes):
    self._nodes = nodes
    self._at = 0
    self._out: list[str] = []
    self._factor = False
    self._bars = 0

  def write(self) -> str:
    if not self._nodes:
      raise UnreadableError("an expression must not be empty.")
    while self._at < len(self._nodes):
      node = self._nodes[self._at]
      self._at += 1
      if isinstance(node, Group):
        self._bracket(node)
      else:
        write = {
          "num": self._number, "letter": self._letter, "cmd": self._command, "func": self._function, "op": self._sign,
        }.get(node.kind)  # fmt: skip
        if write is None:
          raise UnreadableError(f"{node.text!r} cannot be in an expression.")
        write(node)
    if not self._factor or self._bars:
      raise UnreadableError("an expression must not end in an operator or an open bar.")
    return "".join(self._out)

  def _put(self, *texts: str, times: bool = False) -> None:
    self._out += [r"\cdot "] if times and self._factor else []
    self._out += texts
    self._factor = True

  def _next_is(self, text: str) -> bool:
    node = self._nodes[self._at] if self._at < len(self._nodes) else None
    return isinstance(node, Token) and node.kind == "op" and node.text == text

  def _argument(self, opening: str = "{") -> Group:
    node = self._nodes[self._at] if self._at < len(self._nodes) else None
    if not isinstance(node, Group) or node.open != opening:
      raise UnreadableError(f"an argument in {opening} is missing.")
    self._at += 1
    return node

  def _number(self, token: Token) -> None:
    if self._factor:
      raise UnreadableError(f"the number {token.text} must not follow a factor.")
    value = token.value or Fraction(0)
    match self._nodes[self._at : self._at + 3]:
      case (
        Token("cmd", r"\frac"), Group(_, _, (Token("num", _, top),)), Group(_, _, (Token("num", _, bottom),)),
      ) if top and bottom and top < bottom and all(x.denominator == 1 for x in (value, top, bottom)):  # fmt: skip
        value += top / bottom  # A mixed number.
        self._at += 3
    self._put(str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}")

  def _letter(self, token: Token) -> None:
    text = _RENAMED.get(token.text, token.text)
    if self._next_is("_"):
      self._at += 1
      index = "".join(literal(self._argument().items))
      if not index.replace("+", "").replace("-", "").replace(",", "").isalnum():
        raise UnreadableError(f"an index must hold letters and numbers; received {index!r}.")
      text = f"{token.text}_{{{index.replace(',', '')}}}"
    following = self._nodes[self._at] if self._at < len(self._nodes) else None
    if token.text in _FUNCTION_LETTERS and isinstance(following, Group) and following.open == "(":
      raise UnreadableError(f"the value of {token.text}(...) is unknown.")
    if text.startswith(r"\math"):
      raise UnreadableError(f"{text} has no value.")
    self._put(text if text.endswith(" ") else text + " ")

  def _bracket(self, group: Group) -> None:
    if group.open not in _BRACKETS or (group.open, group.close) in (("(", "]"), ("[", ")")):
      raise UnreadableError(f"{group.open} cannot be in an expression.")
    left, right = _BRACKETS[group.open]
    self._put(left, to_latex(group.items), right, times=True)

  def _command(self, token: Token) -> None:
    name = token.text
    if name in (r"\pi", r"\infty"):
      self._put(name + " ")
    elif name in (r"\frac", r"\binom"):
      top, bottom = self._argument(), self._argument()
      if top.items[:1] == bottom.items[:1] == (Token("letter", "d"),):
        raise UnreadableError("the value of a derivative is unknown.")
      self._put(f"{name}{{{to_latex(top.items)}}}{{{to_latex(bottom.items)}}}", times=name == r"\frac")
    elif name == r"\sqrt":
      self._root()
    elif name in BIG_OPERATORS:
      self._big_operator(name)
    else:
      raise UnreadableError(f"{name} cannot be in an expression.")

  def _root(self) -> None:
    following = self._nodes[self._at] if self._at < len(self._nodes) else None
    degree = self._argument("[").items if isinstance(following, Group) and following.open == "[" else ()
    radicand = self._argument().items
    order = plain_value(degree) if degree else None
    sign = ""
    negative = radicand[:1] == (Token("op", "-"),) and plain_value(radicand) is not None
    if order is not None and order % 2 == 1 and negative:  # The real root: the third root of -8 is -2.
      sign, radicand = "-", radicand[1:]
    index = f"[{to_latex(degree)}]" if degree else ""
    self._put(rf"({sign}\sqrt{index}{{{to_latex(radicand)}}})", times=True)

  def _scripts(self) -> dict[str, Nodes]:
    found: dict[str, Nodes] = {}
    while self._next_is("_") or self._next_is("^"):
      sign = self._nodes[self._at]
      self._at += 1
      assert isinstance(sign, Token)
      if sign.text in found:
        raise UnreadableError(f"{sign.text} occurs twice.")
      found[sign.text] = self._argument().items
    return found

  def _big_operator(self, name: str) -> None:
    if self._factor:
      self._out.append(r"\cdot ")
    scripts = self._scripts()
    lower, upper = scripts.get("_", ()), scripts.get("^", ())
    if name == r"\int":
      rest = self._nodes[self._at :]
      match rest[-2:]:
        case (Token("letter", "d"), Token("letter", variable)) if len(rest) > 2 and bool(lower) == bool(upper):
          limits = f"_{{{to_latex(lower)}}}^{{{to_latex(upper)}}}" if lower else ""
          self._at = len(self._nodes)
          self._put(rf"\int{limits} ({to_latex(rest[:-2])}) d{variable} ")
          return
      raise UnreadableError(r"\int needs an integrand and its variable.")
    sign = "→" if name == r"\lim" else "="
    if len(lower) < 3 or _kind(lower[0]) != "letter" or lower[1] != Token("op", sign):
      raise UnreadableError(f"{name} needs a variable and its start.")
    if bool(upper) == (name == r"\lim"):
      raise UnreadableError(f"{name} must have an upper bound; a limit must not.")
    variable, arrow = to_latex(lower[:1]), r"\to " if sign == "→" else "="
    self._out.append(f"{name}_{{{variable}{arrow}{to_latex(lower[2:])}}}")
    self._out.append(f"^{{{to_latex(upper)}}} " if upper else " ")
    self._factor = False

  def _function(self, token: Token) -> None:
    name = token.text
    if name in _SEVERAL_ARGUMENTS:
      arguments = _split(self._argument("(").items)
      self._put(name, "(", ",".join(to_latex(x) for x in arguments), ")", times=True)
      return
    scripts = self._scripts()
    if "_" in scripts and name != r"\log":
      raise UnreadableError(f"{name} must not have an index.")
    self._out.append(r"\cdot " if self._factor else "")
    self._out.append(name + "".join(f"{sign}{{{to_latex(items)}}}" for sign, items in scripts.items()) + " ")
    self._factor = False
    argument = _argument_of_function(self._nodes[self._at :])
    if argument:
      self._at += len(argument)
      self._put("(", to_latex(_in_radians(argument)), ")")

  def _sign(self, token: Token) -> None:
    if token.text == "|":
      closes = self._factor and self._bars > 0
      self._put("|", times=not closes)
      self._bars += -1 if closes else 1
      self._factor = closes
    elif token.text == "^" and self._factor:
      self._put(f"^{{{to_latex(self._argument().items)}}}")
    elif token.text == "!" and self._factor and not self._next_is("!"):  # n!! is not the factorial of n!.
      self._put("!")
    elif token.text in "+-" or (token.text in _SIGNS and self._factor):
      self._out.append(_SIGNS[token.text])
      self._factor = False
    else:
      raise UnreadableError(f"{token.text} cannot be in an expression.")


def _argument_of_function(nodes: Nodes) -> Nodes:
  r"""Returns the argument of a function without parentheses: `2x` in `\sin 2x \cos x` and in `\sin 2x \cdot y`."""
  if nodes and isinstance(nodes[0], Group):
    return _in_radians(nodes[:1])[: int(_in_radians(nodes[:1]) != nodes[:1])]
  end = 0
  while end < len(nodes):
    node, following = nodes[end], nodes[end + 1] if end + 1 < len(nodes) else None
    if isinstance(node, Token):
      sign = node.kind == "op" and (node.text in "^_!|/" or (not end and node.text in "+-"))
      known = node.kind in ("num", "letter") or node.text == "degree"
      if not (sign or known or (node.kind == "cmd" and node.text not in BIG_OPERATORS)):
        break
      power = isinstance(following, Token) and following.text == "^"
      if end and ((node.text == "e" and power) or (node.text == "/" and following and _kind(following) == "func")):
        break
    end += 1
  return nodes[:end]


def _in_radians(nodes: Nodes) -> Nodes:
  found: list[Node] = []
  for node in nodes:
    if node == Token("unit", "degree"):
      turn = (Token("cmd", r"\pi"), Token("op", "/"), Token("num", "180", Fraction(180)))
      found += [Token("op", "*"), Group("(", ")", turn)]
    else:
      found.append(Group(node.open, node.close, _in_radians(node.items)) if isinstance(node, Group) else node)
  return tuple(found)


def _split(nodes: Nodes) -> list[Nodes]:
  """Splits arguments at commas."""
  found: list[Nodes] = [()]
  for node in nodes:
    if node == Token("sep", ","):
      found.append(())
    else:
      found[-1] += (node,)
  return found


def is_choice(nodes: Nodes) -> bool:
  """Whether nodes show several numbers without saying which is meant: `\\max(71, 70)`, `70 \\bmod 71`."""
  return any(isinstance(node, Token) and (node.text in _SEVERAL_ARGUMENTS or node.text == "mod") for node in nodes)
