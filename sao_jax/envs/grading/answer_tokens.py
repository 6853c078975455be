"""Tokens of a mathematical answer in LaTeX, Unicode or plain text.

Answers that look the same in print have the same tokens. Spacing, sizes and fonts give no tokens, and synonyms give the
same one. No printed character is dropped: one without a known meaning is a token of kind "other". The meaning of tokens
is up to `answer_kinds`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Set
from fractions import Fraction
from typing import TypeAlias

MAX_CHARS = 2000
_MAX_DEPTH = 40


class UnreadableError(ValueError):
  """An answer cannot be parsed as a whole."""


@dataclasses.dataclass(frozen=True)
class Token:
  """A number, letter, word, operator or command."""

  kind: str
  """num, letter, word, unit, func, cmd (a known command), op, sep (of a list), dots or other."""
  text: str
  value: Fraction | None = None
  """The exact value of a number."""


@dataclasses.dataclass(frozen=True)
class Group:
  """A pair of brackets or an environment, with the tokens inside."""

  open: str
  close: str
  items: tuple[Node, ...]


Node: TypeAlias = Token | Group

_UNICODE: Mapping[str, str] = {
  "−": "-", "–": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "∕": "/", "π": r"\pi ",
  "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ",
  "≡": r"\equiv ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "±": r"\pm ", "∓": r"\mp ",
  "°": r"\degree ", "√": r"\root ", "∛": r"\root[3] ", "∜": r"\root[4] ", "…": r"\dots ", "⋯": r"\dots ",
  "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
  "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℂ": r"\mathbb{C}",
  "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta ",
  "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ", "ω": r"\omega ",
  "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
  "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ", "∠": r"\angle ", "△": r"\triangle ", "∖": r"\setminus ",
  "→": r"\to ", "，": ",", "；": ";", "、": ",", "’": "'", "′": "'",
}  # fmt: skip
_RAISED: Mapping[str, str] = {
  "⁰": "0", "¹": "1", "²": "2", "³": "3", "⁴": "4", "⁵": "5", "⁶": "6", "⁷": "7", "⁸": "8", "⁹": "9",
  "⁺": "+", "⁻": "-", "ⁿ": "n",
}  # fmt: skip
_LOWERED: Mapping[str, str] = {
  "₀": "0", "₁": "1", "₂": "2", "₃": "3", "₄": "4", "₅": "5", "₆": "6", "₇": "7", "₈": "8", "₉": "9",
  "₊": "+", "₋": "-", "ₙ": "n",
}  # fmt: skip

_SPACING: Set[str] = frozenset((
  r"\,", r"\;", r"\:", r"\!", r"\>", r"\/", r"\quad", r"\qquad", r"\enspace", r"\thinspace", r"\displaystyle",
  r"\textstyle", r"\scriptstyle", r"\limits", r"\nolimits", r"\big", r"\Big", r"\bigg", r"\Bigg", r"\bigl", r"\bigr",
  r"\Bigl", r"\Bigr", r"\biggl", r"\biggr", r"\Biggl", r"\Biggr", r"\boxed", r"\fbox", r"\rm", r"\bf", r"\it",
  r"\tiny", r"\small", r"\normalsize", r"\large", r"\Large", r"\LARGE", r"\huge", r"\Huge",
  r"\medspace", r"\thickspace", r"\negthinspace", r"\(", r"\)", r"\[", r"\]",
))  # fmt: skip
_FONTS: Set[str] = frozenset((
  r"\text", r"\textbf", r"\textit", r"\textrm", r"\textsf", r"\texttt", r"\textnormal", r"\textup", r"\mathrm",
  r"\mathbf", r"\mathit", r"\mathsf", r"\mathtt", r"\mathnormal", r"\boldsymbol", r"\bm", r"\mbox", r"\hbox",
  r"\operatorname", r"\emph",
))  # fmt: skip
_ALPHABETS: Set[str] = frozenset((r"\mathbb", r"\mathcal", r"\mathfrak", r"\mathscr"))
_SYNONYMS: Mapping[str, tuple[str, str]] = {
  r"\leq": ("op", "<="), r"\le": ("op", "<="), r"\leqslant": ("op", "<="), r"\geq": ("op", ">="), r"\ge": ("op", ">="),
  r"\geqslant": ("op", ">="), r"\ne": ("op", "!="), r"\neq": ("op", "!="), r"\lt": ("op", "<"), r"\gt": ("op", ">"),
  r"\approx": ("op", "≈"), r"\equiv": ("op", "≡"), r"\in": ("op", "∈"), r"\cdot": ("op", "*"), r"\times": ("op", "*"),
  r"\ast": ("op", "*"), r"\div": ("op", "/"), r"\cup": ("op", "∪"), r"\cap": ("op", "∩"), r"\pm": ("op", "±"),
  r"\mp": ("op", "∓"), r"\mid": ("op", "|"), r"\vert": ("op", "|"), r"\lvert": ("op", "|"), r"\rvert": ("op", "|"),
  r"\colon": ("op", ":"), r"\setminus": ("op", "∖"), r"\backslash": ("op", "∖"), r"\prime": ("op", "'"),
  r"\mod": ("op", "mod"), r"\bmod": ("op", "mod"), r"\to": ("op", "→"), r"\rightarrow": ("op", "→"),
  r"\\": ("op", "newline"), r"\cr": ("op", "newline"), r"\dots": ("dots", "..."), r"\ldots": ("dots", "..."),
  r"\cdots": ("dots", "..."), r"\dotsc": ("dots", "..."), r"\dotsb": ("dots", "..."), r"\%": ("unit", "percent"),
  r"\degree": ("unit", "degree"), r"\$": ("unit", "dollar"), r"\dfrac": ("cmd", r"\frac"), r"\tfrac": ("cmd", r"\frac"),
  r"\cfrac": ("cmd", r"\frac"), r"\dbinom": ("cmd", r"\binom"), r"\tbinom": ("cmd", r"\binom"),
  r"\varnothing": ("cmd", r"\emptyset"), r"\imath": ("letter", "i"), r"\epsilon": ("letter", r"\varepsilon"),
  r"\phi": ("letter", r"\varphi"), r"\arccot": ("other", r"\arccot"),
}  # fmt: skip
LETTERS: Set[str] = frozenset((
  r"\alpha", r"\beta", r"\delta", r"\varepsilon", r"\zeta", r"\eta", r"\theta", r"\vartheta", r"\kappa", r"\lambda",
  r"\mu", r"\nu", r"\xi", r"\rho", r"\sigma", r"\tau", r"\varphi", r"\chi", r"\psi", r"\omega", r"\Delta", r"\Theta",
  r"\Lambda", r"\Xi", r"\Sigma", r"\Phi", r"\Psi", r"\Omega",
))  # fmt: skip
FUNCTIONS: Set[str] = frozenset((
  r"\sin", r"\cos", r"\tan", r"\cot", r"\sec", r"\csc", r"\arcsin", r"\arccos", r"\arctan", r"\sinh", r"\cosh",
  r"\tanh", r"\ln", r"\log", r"\exp", r"\max", r"\min", r"\gcd", r"\lcm",
))  # fmt: skip
BIG_OPERATORS: Set[str] = frozenset((r"\sum", r"\prod", r"\int", r"\lim"))
_COMMANDS: Set[str] = frozenset((r"\frac", r"\sqrt", r"\binom", r"\pi", r"\infty", r"\emptyset")) | BIG_OPERATORS
_PLAIN_NAMES: Mapping[str, str] = {
  **{name[1:]: name for name in FUNCTIONS | {r"\pi", r"\theta", r"\alpha", r"\beta"}},
  "sqrt": r"\root", "infinity": r"\infty", "oo": r"\infty", "inf": r"\infty",
}  # fmt: skip
_SHORT_WORDS: Set[str] = frozenset((
  "no", "or", "if", "is", "it", "in", "to", "an", "at", "be", "by", "of", "on", "we", "as", "so", "do", "up", "us",
  "cm", "mm", "km", "kg", "ft", "mi", "lb", "oz", "hr", "min", "am", "pm", "yes", "odd", "even", "true", "false",
  "none", "dne", "all", "any", "not", "both",
))  # fmt: skip
_OPENING: Mapping[str, str] = {
  "(": ") ]", "[": "] )", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil", r"\langle": r"\rangle",
}  # fmt: skip
_BRACKETS: Mapping[str, str] = {
  r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lbrack": "[", r"\rbrack": "]", r"\lparen": "(", r"\rparen": ")",
}  # fmt: skip

_SCIENTIFIC = re.compile(r"([0-9]+(?:\.[0-9]+)?)e([+-][0-9]{2,3})(?![A-Za-z0-9.])")
_THOUSANDS = re.compile(r"[0-9]{1,3}(?:(?:,|\{,\}|\\,|\{\\,\}|,\\,|,?\\!\s*)[0-9]{3})+(?![0-9])")
_DIGITS = re.compile(r"[0-9]+")
_FRACTION = re.compile(r"\.([0-9]+)?(?:\\(?:overline|bar|dot)\s*\{?([0-9]+)\}?)?")
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)", re.DOTALL)
_ENVIRONMENT = re.compile(r"\s*\{([A-Za-z]+)\*?\}(?:\s*\{[lcr| ]*\})?")
_DEGREE = re.compile(r"\^\s*(?:\{\s*\\(?:circ|degree)\s*\}|\\(?:circ|degree)(?![A-Za-z]))")
_RUN = re.compile(r"[A-Za-z]+")
_INTEGER = re.compile(r"-?[0-9]+")
_OPERATOR = re.compile(r"<=|>=|!=|->|[-+*/^_!=<>|:'&]")
_FULL_STOP = re.compile(r"(?<![.\\])\.\s*((?:[$}]|\\[)\]])*)\s*$")


def tokens(text: str, *, thousands: bool = True) -> tuple[Node, ...]:
  """Returns the tokens of an answer, with brackets as `Group`s. Drops a full stop at the end.

  Args:
    text: the answer, without the box around it.
    thousands: whether `1,000` is one number.

  Raises:
    UnreadableError: the answer is empty or too long, or its brackets or environments do not match.
  """
  if len(text) > MAX_CHARS:
    raise UnreadableError(f"an answer must have at most {MAX_CHARS} characters; received {len(text)}.")
  for sign, plain in (("^", _RAISED), ("_", _LOWERED)):
    text = re.sub(f"[{''.join(plain)}]+", lambda m: sign + "{" + "".join(plain[x] for x in m[0]) + "}", text)  # noqa: B023
  text = "".join(_UNICODE.get(char, char) for char in text).replace("**", "^")
  if r"\right." in text:  # An unclosed brace before cases.
    text = text.replace(r"\left\{", "", 1)
  found = _Scanner(_FULL_STOP.sub(r"\1", text), thousands).items()
  if not any(_says_something(node) for node in found):
    raise UnreadableError(f"an answer must have a number, a letter or a word; received {text[:60]!r}.")
  return found


def _says_something(node: Node) -> bool:
  if isinstance(node, Group):
    return node.open == r"\{" or any(map(_says_something, node.items))
  return node.kind not in ("op", "sep", "unit") and any(char.isalnum() for char in node.text)


def literal(nodes: tuple[Node, ...]) -> tuple[str, ...]:
  """Returns the texts of the tokens. Adjacent letters and words are joined."""
  texts: list[str] = []
  glued = False
  for kind, text in _flat(nodes):
    word = kind in ("letter", "word") and text.isalpha()
    if word and glued:
      texts[-1] += text
    else:
      texts.append(text)
    glued = word
  return tuple(texts)


def _flat(nodes: tuple[Node, ...]) -> list[tuple[str, str]]:
  found: list[tuple[str, str]] = []
  for node in nodes:
    if isinstance(node, Token):
      found.append((node.kind, node.text))
    elif node.open == "{" and len(node.items) == 1:
      found += _flat(node.items)
    else:
      found += [("op", node.open), *_flat(node.items), ("op", node.close)]
  return found


class _Scanner:
  """Scanner of a text from left to right."""

  def __init__(self, text: str, thousands: bool):
    self._text = text
    self._thousands = thousands
    self._at = 0
    self._depth = 0
    self._is_money = len(re.findall(r"(?<!\\)\$", text)) == 1

  def items(self, closing: str = "", words: bool = False) -> tuple[Node, ...]:
    """Reads up to one of the closing brackets, which is not consumed, or to the end of the text if none is given."""
    self._depth += 1
    if self._depth > _MAX_DEPTH:
      raise UnreadableError(f"brackets must be nested at most {_MAX_DEPTH} deep.")
    found: list[Node] = []
    while True:
      self._skip_space()
      if any(self._starts(x) for x in closing.split()):
        break
      if self._at >= len(self._text):
        if closing:
          raise UnreadableError(f"a bracket or environment is not closed: {closing} is missing.")
        break
      found += self._next(words)
    self._depth -= 1
    return tuple(found)

  def _starts(self, what: str) -> bool:
    end = self._at + len(what)
    cut = what[-1].isalpha() and self._text[end : end + 1].isalpha()
    return self._text.startswith(what, self._at) and not cut

  def _skip_space(self) -> None:
    while self._at < len(self._text) and (self._text[self._at].isspace() or self._text[self._at] == "~"):
      self._at += 1

  def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
    match = pattern.match(self._text, self._at)
    if match is not None:
      self._at = match.end()
    return match

  def _next(self, words: bool) -> list[Node]:
    """Reads the next item of the text: no token for spacing, else one or more."""
    number = self._number()
    if number is not None:
      return [number]
    if self._take(_DEGREE):
      return [Token("unit", "degree")]
    if match := self._take(_RUN):
      return self._run(match[0], words)
    if match := self._take(_COMMAND):
      return self._command(match[0], words)
    if match := self._take(_OPERATOR):
      return self._operator(match[0])
    if self._text.startswith("...", self._at):
      self._at += 3
      return [Token("dots", "...")]
    char = self._text[self._at]
    self._at += 1
    if char == "{":  # Not an argument, so it is not printed.
      return list(self._bracket(char, words)[0].items)
    if char in _OPENING:
      return list(self._bracket(char, words))
    if char in ")]}":
      raise UnreadableError(f"unexpected closing bracket: {char}.")
    if char == "$" and not self._is_money:
      return []
    if char in "$€£%":
      return [Token("unit", {"$": "dollar", "%": "percent"}.get(char, char))]
    return [Token("sep" if char in ",;" else "other", char)]

  def _number(self) -> Token | None:
    """Reads a number, if there is one. Its value is exact, even for a repeating decimal."""
    if match := self._take(_SCIENTIFIC):
      return Token("num", match[0], Fraction(match[1]) * Fraction(10) ** int(match[2]))
    whole = (self._take(_THOUSANDS) if self._thousands else None) or self._take(_DIGITS)
    digits = "".join(_DIGITS.findall(whole[0])) if whole else ""
    match = _FRACTION.match(self._text, self._at)
    if match is None or not (match[1] or match[2]):
      return Token("num", digits, Fraction(digits)) if digits else None
    self._at = match.end()
    fixed, period = match[1] or "", match[2] or ""
    value = Fraction(f"{digits or 0}.{fixed or 0}")
    if period:
      value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
    return Token("num", str(value) if period else f"{digits or 0}.{fixed}", value)

  def _run(self, run: str, words: bool) -> list[Node]:
    """Returns the tokens of a run of letters: a name, a word or a product of letters."""
    lower = run.lower()
    if lower in ("and", "or"):
      return [Token("sep", lower)]
    if lower == "mod":
      return [Token("op", "mod")]
    if lower in ("percent", "percentage", "pct"):
      return [Token("unit", "percent")]
    if words and run in "mgshlL":
      return [Token("word", run)]
    if not words and run in _PLAIN_NAMES:
      return self._command(_PLAIN_NAMES[run], words)
    if len(run) > 1 and (words or self._is_word(run)):
      return [Token("word", lower)]
    return [Token("letter", letter) for letter in run]

  def _is_word(self, run: str) -> bool:
    """Whether a run of letters in a formula is a word ("even", "cm") or a product ("xyz", "mgh", "ABC")."""
    lower = run.lower()
    if lower in _SHORT_WORDS:
      return True
    before, after = self._text[: self._at - len(run)], self._text[self._at : self._at + 1]
    touches = before[-1:] in tuple("0123456789^_}") or after in tuple("^_")
    if len(run) < 3 or run.isupper() or touches or lower in "abcdefghijklmnopqrstuvwxyz":
      return False
    return any(vowel in lower for vowel in "aeiou")

  def _command(self, name: str, words: bool) -> list[Node]:
    if name in (r"\left", r"\right"):
      self._skip_space()
      self._at += self._text.startswith(".", self._at)
      return []
    if name in _SPACING or name[1:].isspace():
      return []
    if name == r"\begin":
      return [self._environment()]
    if name in _FONTS:
      return list(self._argument(words=name != r"\operatorname").items)
    if name in _ALPHABETS:
      return [Token("letter", f"{name}{{{''.join(literal(self._argument(words=True).items))}}}")]
    name = _BRACKETS.get(name, name)
    if name in _OPENING:
      return list(self._bracket(name, words))
    if name in (r"\}", r"\rfloor", r"\rceil", r"\rangle", r"\end"):
      raise UnreadableError(f"unexpected closing bracket: {name}.")
    if name in (r"\pmod", r"\pod"):
      return [Token("op", "mod"), self._argument()]
    if name in (r"\sqrt", r"\root"):
      return self._root(braced=name == r"\sqrt")
    known = {"letter": LETTERS, "func": FUNCTIONS, "cmd": _COMMANDS}
    default = next((kind for kind, names in known.items() if name in names), "other"), name
    kind, text = _SYNONYMS.get(name, default)
    arguments = 2 if text in (r"\frac", r"\binom") else 0
    return [Token(kind, text), *(self._argument() for _ in range(arguments))]

  def _operator(self, sign: str) -> list[Node]:
    if sign not in "^_":
      return [Token("op", "→" if sign == "->" else sign)]
    self._skip_space()
    integer = self._take(_INTEGER)  # Models write 2^10 for 2^{10}.
    if integer is None:
      return [Token("op", sign), self._argument(parentheses=True)]
    minus = [Token("op", "-")] if integer[0][0] == "-" else []
    digits = integer[0].lstrip("-")
    return [Token("op", sign), Group("{", "}", (*minus, Token("num", digits, Fraction(digits))))]

  def _argument(self, *, words: bool = False, parentheses: bool = False) -> Group:
    """Reads an argument of a command: a pair of braces, or one digit, letter or command."""
    self._skip_space()
    char = self._text[self._at : self._at + 1]
    if char == "{" or (char == "(" and parentheses):
      self._at += 1
      (group,) = self._bracket(char, words)
      return Group("{", "}", group.items)
    if char.isascii() and char.isalnum():
      self._at += 1
      token = Token("num", char, Fraction(char)) if char.isdigit() else Token("letter", char)
      return Group("{", "}", (token,))
    match = self._take(_COMMAND)
    if match is None or match[0] in (r"\left", r"\right"):
      raise UnreadableError(f"a command or sign lacks its argument before {self._text[self._at : self._at + 20]!r}.")
    return Group("{", "}", tuple(self._command(match[0], words)))

  def _root(self, *, braced: bool) -> list[Node]:
    r"""Reads a root and its degree, if given. Without braces, √13 has one meaning but \sqrt13 has two."""
    self._skip_space()
    degree: list[Node] = []
    if self._text.startswith("[", self._at):
      self._at += 1
      degree = [Group("[", "]", self._bracket("[", words=False)[0].items)]
      self._skip_space()
    digits = self._take(_DIGITS)
    if digits is None:
      return [Token("cmd", r"\sqrt"), *degree, self._argument(parentheses=True)]
    if braced and len(digits[0]) > 1:
      raise UnreadableError(f"\\sqrt{digits[0]} is ambiguous without braces.")
    return [Token("cmd", r"\sqrt"), *degree, Group("{", "}", (Token("num", digits[0], Fraction(digits[0])),))]

  def _bracket(self, opening: str, words: bool) -> list[Group]:
    thousands = self._thousands
    self._thousands = thousands and opening == "{"  # (1,234) is a pair.
    items = self.items(_OPENING[opening], words)
    self._thousands = thousands
    close = next(x for x in _OPENING[opening].split() if self._starts(x))
    self._at += len(close)
    if opening in "([" and len(items) == 1 and isinstance(items[0], Group) and items[0].open in ("array", "matrix"):
      return [Group("pmatrix", "end", items[0].items)]
    return [Group(opening, close, items)]

  def _environment(self) -> Group:
    name = self._take(_ENVIRONMENT)
    if name is None:
      raise UnreadableError(r"\begin must be followed by a name in braces.")
    items = self.items(r"\end")
    self._at += len(r"\end")
    if (end := self._take(_ENVIRONMENT)) is None or end[1] != name[1]:
      raise UnreadableError(f"\\begin{{{name[1]}}} is not closed by its own \\end.")
    return Group(name[1], "end", items)
