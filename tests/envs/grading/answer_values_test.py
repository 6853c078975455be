from __future__ import annotations

import pytest

pytest.importorskip("latex2sympy2_extended", reason="needs the extra 'envs'")

from sao_jax.envs.grading.answer_tokens import UnreadableError, tokens
from sao_jax.envs.grading.answer_values import same_value, to_latex

pytestmark = pytest.mark.timeout(600)  # The first expression imports SymPy: a minute on a busy machine.


@pytest.mark.parametrize(
  ("text", "latex"),
  [
    ("2.5x", r"\frac{5}{2}x "),
    (r"2\frac{1}{2}", r"\frac{5}{2}"),
    ("n(n+1)", r"n \cdot (n +1)"),
    ("I + i", r"\varkappa +(I) "),
    (r"\sqrt[3]{-8}", r"(-\sqrt[3]{8})"),
    ("x_12", "x_{12} "),
    (r"\sin 2x \cos x", r"\sin (2x )\cdot \cos (x )"),
  ],
)
def test_written_with_one_meaning(text: str, latex: str) -> None:
  assert to_latex(tokens(text)) == latex


@pytest.mark.parametrize(
  "text",
  ["71 70", "71(2) 70", "|71|70", "5!!", "x 3", "2 +", "* 2",
   "f(x)", r"\frac{dy}{dx}", "1, 2", "x = 1", "2 cm", "|x", "x'"],
)  # fmt: skip
def test_what_is_no_expression(text: str) -> None:
  with pytest.raises(UnreadableError):
    to_latex(tokens(text))


@pytest.mark.parametrize(
  ("gold", "answer", "equal"),
  [
    ("1/2", "0.5", True),
    ("2^{1000}", "2^{1000} + 1", False),
    (r"\sqrt2^{1001}", r"\sqrt2^{1001} + 1", False),
    ("e^{-200}", "e^{-201}", False),
    ("0.0000001", "0.0000002", False),
    (r"\frac13", "0.333333", True),
    (r"\frac13", "0.33333", False),
    (r"\frac13", "0.333334", False),
    (r"\sqrt{3 + 2\sqrt2}", r"1 + \sqrt2", True),
    ("A + b", "a + B", False),
    (r"\sqrt{x^2}", "x", False),
    (r"\binom{2n}{n}", r"\frac{(2n)!}{(n!)^2}", True),
    ("8i^2", "-8", True),
    (r"\prod_{i=1}^{5} i", "120", True),
    (r"\int_0^1 2x\,dx", "1", True),
    ("d + x", "x + d", True),
    (r"\sin 2x", r"2 \sin x \cos x", True),
    (r"\sin(x \cos x)", r"\sin x \cos x", False),
    (r"2 \sin x", r"\sin x \cdot 2", True),
    (r"\sin 2x", r"\sin x \cdot 2", False),
    (r"\ln 2 \ln 3", r"\ln 3 \cdot \ln 2", True),
    (r"\log_2 3", r"\ln 3/\ln 2", True),
    (r"\frac{1}{2}", r"\sin 30^\circ", True),
    (r"\cos(60^\circ)", "0.5", True),
    (r"e^x \sin x", r"\sin x e^x", True),
  ],
)
def test_same_value(gold: str, answer: str, equal: bool) -> None:
  assert same_value(tokens(gold), tokens(answer)) == equal
