from __future__ import annotations

from fractions import Fraction

import pytest

from sao_jax.envs.grading.answer_tokens import Token, UnreadableError, literal, tokens


@pytest.mark.parametrize(
  ("text", "texts"),
  [
    (r"\dfrac12x", ("\\frac", "1", "2", "x")),
    (r"\left( -\infty,\, 2 \right]", ("(", "-", "\\infty", ",", "2", "]")),
    (r"11,\! 111,\! 100", ("11111100",)),
    (r"\$32{,}348", ("dollar", "32348")),
    ("(1,234)", ("(", "1", ",", "234", ")")),
    ("2√13", ("2", "\\sqrt", "13")),
    ("x²", ("x", "^", "2")),
    ("2^10", ("2", "^", "10")),
    ("2^{n-1}", ("2", "^", "{", "n", "-", "1", "}")),
    (r"\mathrm{e}", ("e",)),
    ("{71}{70}", ("71", "70")),
    ("xyz", ("xyz",)),
    (r"\text{no solutions}.", ("nosolutions",)),
    ("5.", ("5",)),
    (r"1, 2, \ldots", ("1", ",", "2", ",", "...")),
    (r"p \equiv 1 \pmod 4", ("p", "≡", "1", "mod", "4")),
  ],
)
def test_texts(text: str, texts: tuple[str, ...]) -> None:
  assert literal(tokens(text)) == texts


@pytest.mark.parametrize(
  ("text", "value"),
  [
    ("0.1", Fraction(1, 10)),
    (r"0.1\overline{6}", Fraction(1, 6)),
    (r"0.\dot{3}", Fraction(1, 3)),
    ("1e-07", Fraction(1, 10**7)),
    ("1e+21", Fraction(10**21)),
    ("1,000,000", Fraction(10**6)),
    (".5", Fraction(1, 2)),
  ],
)
def test_numbers_are_exact(text: str, value: Fraction) -> None:
  (token,) = tokens(text)
  assert isinstance(token, Token) and token.kind == "num" and token.value == value


@pytest.mark.parametrize(
  "text",
  ["", " ", "?", "$", r"\frac{1}{", "a}", "(1", "1)", r"\{1", r"\frac{1}", r"\begin{matrix} 1", r"x^", r"\sqrt13",
   "9" * 3000, "(" * 50 + "1" + ")" * 50, r"\begin{cases} 1 \end{matrix}"],
)  # fmt: skip
def test_what_is_not_whole_is_unreadable(text: str) -> None:
  with pytest.raises(UnreadableError):
    tokens(text)
