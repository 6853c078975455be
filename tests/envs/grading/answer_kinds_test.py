from __future__ import annotations

import pytest

pytest.importorskip("latex2sympy2_extended", reason="needs the extra 'envs'")

from sao_jax.envs.grading import answer_kinds
from sao_jax.envs.grading.answer_tokens import UnreadableError, tokens

pytestmark = pytest.mark.timeout(600)  # The first expression imports SymPy: a minute on a busy machine.


def same(gold: str, answer: str) -> bool:
  try:
    return answer_kinds.same_answer(gold, answer)
  except UnreadableError:
    return False


@pytest.mark.parametrize(
  ("gold", "kind"),
  [
    (r"\text{Evelyn}", "words"), ("all primes p", "words"), ("3 hours 20 minutes", "quantity"),
    (r"\begin{cases} x = 1 \\ y = 2 \end{cases}", "rows"), ("1, 2", "list"), (r"1 \text{ and } 2", "list"),
    (r"\pm 3", "list"), ("y = 2x + 3", "relation"), (r"(-\infty, 1) \cup (2, 3)", "union"), (r"\{1, 2\}", "set"),
    ("(3, 4)", "bracket"), ("[1, 2)", "bracket"), (r"\begin{pmatrix} 1 \end{pmatrix}", "matrix"), ("3 : 4", "ratio"),
    ("4210_5", "based"), (r"\frac{\pi}{2}", "number"), (r"2 \text{ cm}", "number"), ("2x + 1", "expression"),
    (r"\triangle ABC", "other"), ("f(2)", "other"),
  ],
)  # fmt: skip
def test_the_reference_decides_the_kind(gold: str, kind: str) -> None:
  assert answer_kinds.kind_of(tokens(gold)).name == kind


@pytest.mark.parametrize(
  ("gold", "answer"),
  [
    ("12", "x = 12"), (r"\frac{1}{8}", r"P(X = 3) = \frac{1}{8}"),
    (r"\frac{3}{8}", r"P(X \in \{1, 2\}) = \frac{3}{8}"), ("12", "f(x=2) = 12"), ("55", r"\sum_{k=1}^{10} k = 55"),
    ("120", r"\prod_{i=1}^{5} i = 120"), ("1", r"\lim_{x \to 0} \frac{\sin x}{x} = 1"),
    ("7", r"\left. \frac{dy}{dx} \right|_{x=1} = 7"), ("7", r"\min_{x = 3} f(x) = 7"),
    ("12", r"2^{10} \equiv 12 \pmod{1012}"), ("12", r"2^{10} \bmod 1012 = 12"), ("12", r"x \equiv 12 \pmod{1012}"),
    ("70", "x = y = 70"), ("70", r"35 \cdot 2 = 70"), ("70", r"70 \text{ cm}^2"), ("70", r"70 \approx 70.1"),
    ("70", "|-70|"), ("0.71", r"0.71 \approx 0.7"), (r"\frac{\pi}{2}", r"\frac{\pi}{2} \approx 1.57"),
    ("3", "m+n = 3"), ("10", r"\binom{5}{2} = 10"), ("6", r"\gcd(12, 18) = 6"), ("5", r"\mathbb{E}[X | Y = 2] = 5"),
    ("5", r"\max_{x \in [0,1]} f(x) = 5"), ("4", r"|\{x : x \equiv 1 \pmod 4\}| = 4"),
    ("30", r"\angle ABC = 30^\circ"), ("30", r"\angle ABC = 30"), ("24", "[ABC] = 24"),
    ("2", r"\int_0^2 f(x)\,dx = 2"), ("2", "f'(x)|_{x=1} = 2"), ("10", r"\text{Area} = 10"),
    ("10", r"\text{Area of } ABC = 10"), ("10", "S_{10} = 10"), ("10", "a_{n+1} = 10"), ("10", r"\overline{AB} = 10"),
    ("10", "AB = 10"), ("3", r"\log_{2} 8 = 3"), ("4", r"n(A \cup B) = 4"), ("4", r"\#\{n : n \le 4\} = 4"),
    ("3", "x^2 + y^2 = 3"), ("8", r"\sum_{n=1}^{\infty} a_n = 8"), ("2", r"\sum_{n=0}^{\infty} \frac{1}{2^n} = 2"),
    (r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{bmatrix}-1&0\\0&-1\end{bmatrix}"),
    (r"\begin{pmatrix} 1/2 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{pmatrix}0.5&0\\0&-1\end{pmatrix}"),
    (r"\begin{cases} x = 1 \\ y = 2 \end{cases}", "y=2, x=1"),
    (r"\begin{cases} x^2 & x > 0 \\ 0 & \text{otherwise} \end{cases}",
     r"\begin{cases} x^2 & \text{ } x>0 \\ 0 & \text{otherwise}\end{cases}"),
    ("xyz", "xzy"), ("2abc", "2bac"), (r"\frac{abc}{2}", "abc/2"), (r"\triangle ABC", r"\triangle ABC"),
    ("sqrt(2)", r"\sqrt{2}"), ("pi/4", r"\frac{\pi}{4}"), ("2*pi", r"2\pi"), ("ln(2)", r"\ln 2"), ("+3", "3"),
    ("1e-07", "10^{-7}"), ("1e+21", "10^{21}"), ("Yes", r"\text{Yes}"), ("Yes", "yes"), ("even", r"\text{even}"),
    ("Monday", r"\text{Monday}"), ("no solutions", r"\text{no solutions}"), (r"\text{Evelyn}", "Evelyn"),
    (r"\text{Evelyn}", r"\textbf{Evelyn}."), (r"(3, \frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)"),
    (r"\left( -\infty, 2 \right]", r"(-\infty, 2]"), (r"\left( -\infty, 2 \right]", r"x \le 2"),
    (r"x \in [-2,7]", "[-2,7]"), (r"x \in [-2,7]", r"-2 \le x \le 7"), ("[-2,7]", r"x \in [-2,7]"),
    (r"11\sqrt2", r"11\sqrt{2}"), ("p - q", "p-q"), ("6 - 5i", "6-5i"), (r"\$32{,}348", "32348"),
    (r"\$32,\!348", r"\$32,348"), (r"10\%", r"10\%"), (r"10\%", "10"), ("3R^2", "3 R^{2}"),
    (r"C_{20} \cdot 2^{3}", r"C_{20} \cdot 8"), ("y = 2x+3", "y=2x+3"), ("y = 2x+3", "y - 2x = 3"),
    ("y = 2x+3", "2x+3"), ("2x+3", "y = 2x+3"), (r"\{1,2\}", r"\{2,1\}"), (r"\{1,2\}", "1, 2"),
    ("2^{n-1}", r"\frac{2^n}{2}"), (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"),
    ("f(x)=x+c for any real c", r"f(x) = x + c \text{ for any real } c"),
    ("all primes p ≡ 1 mod 4", r"\text{all primes } p \equiv 1 \pmod 4"), ("No", r"\text{No}"),
    ("(2,1), (1,2)", "(1,2), (2,1)"), (r"\infty", r"\infty"), ("4210_5", "4210_{5}"), (r"15^\circ", "15"),
    ("15", r"15^\circ"), (r"15^\circ", r"15^{\circ}"), (r"2\sqrt{3} \text{ cm}", r"2\sqrt3"),
    (r"2\sqrt{3} \text{ cm}", r"2\sqrt3 \text{ centimeters}"), ("1 and 2", "2, 1"), (r"1 \text{ and } 2", "1,2"),
    ("1, 2, and 3", "1,2,3"), ("3 hours 20 minutes", r"3 \text{ hours and } 20 \text{ minutes}"), ("5 apples", "5"),
    (r"\pm 3", "3, -3"), (r"1 \pm \sqrt{2}", r"1+\sqrt2, 1-\sqrt2"),
    (r"\frac{1 \pm \sqrt{5}}{2}", r"\frac{1 + \sqrt{5}}{2}, \frac{1-\sqrt5}{2}"),
    (r"1, 3, 5, \dots", r"1,3,5,\ldots"), ("3:4", "6:8"), ("(C)", r"\text{(C)}"), ("C", r"\textbf{(C)}"),
    (r"\text{(C)}", "C"), (r"x < -1 \text{ or } x > 1", r"(-\infty,-1) \cup (1,\infty)"),
    (r"(-\infty,-1) \cup (1,\infty)", r"x < -1 \text{ or } x > 1"),
    (r"(-\infty,-1) \cup (1,\infty)", r"(1,\infty) \cup (-\infty,-1)"), ("x=5", "5"), ("5", "x=5"),
    (r"x=1 \text{ or } x=2", "x = 2, x = 1"), ("1,2", r"x = 1 \text{ or } x = 2"), ("1,000", "1000"),
    ("(1,234)", "(1, 234)"), ("f(x) = 2x", "f(x)=2x"), ("f(x) = 2x", "2x"), ("x^2+y^2=1", "x^2 + y^2 - 1 = 0"),
    (r"n \equiv 1 \pmod 4", r"n \equiv 1 \pmod{4}"), (r"\text{all } n \ge 2", r"all n \ge 2"),
    (r"\begin{align*} x &= 1 \\ y &= 2 \end{align*}", "x=1, y=2"), (r"\{x \mid x > 0\}", r"\{x | x>0\}"),
    (r"\mathbb{R} \setminus \{1\}", r"\mathbb{R}\setminus\{1\}"), (r"\emptyset", r"\varnothing"),
    ("(a,b) = (1,2)", "(a, b) = (1, 2)"), ("(1,2)", "(a,b) = (1,2)"), ("e", r"\mathrm{e}"),
    (r"0.\overline{3}", r"\frac{1}{3}"), ("5.", "5"), ("5", "5."), ("2", r"\text{2}"), ("i", "i"),
    ("9 pm", r"9 \text{ pm}"), ("6:30", "6:30"), ("10^{100}", "10^{100}"), (r"\frac{9}{256}\pi", r"\frac{9\pi}{256}"),
    (r"90^\circ", r"90 \text{ degrees}"), (r"8 \text{ m/s}", "8"), ("0", "0"), (r"2k\pi", r"2 \pi k"),
    (r"\frac{1}{2}", ".5"), ("2√x", r"2\sqrt{x}"), ("3", r"3 \text{ units}"), ("3", r"3 \text{ square units}"),
    ("120", "5!"), ("5", r"\sqrt{25}"), ("2,4,8", "8,4,2"), ("(-1,2)", r"\left(-1,\,2\right)"),
    ("(0,1]", r"0 < x \le 1"), (r"[0, \infty)", r"x \ge 0"), ("x < 2", "2 > x"), ("x < 2", "2x < 4"),
    ("x^2 - 1", "(x-1)(x+1)"), (r"\cos 2x", r"1 - 2\sin^2 x"), (r"\frac{x}{y}", "x/y"), ("e^{-x}", r"\frac{1}{e^x}"),
    (r"\log 2", r"\log(2)"), (r"\ln 4", r"2 \ln 2"), (r"\arctan \frac{1}{2}", r"\tan^{-1}(1/2)"),
    (r"2+\sqrt{3}", r"\frac{1}{2-\sqrt{3}}"), ("3.14", "3.140"), ("3.14159265", r"\pi"),
    (r"\frac{1}{3}", "0.3333333"), (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{-1}{-2}", "0.5"), (r"\dfrac{3}{4}", "0.75"), ("10^{-7}", "0.0000001"),
    (r"\text{No such } n \text{ exists}", "no such n exists"),
    (r"\begin{bmatrix}1&2\end{bmatrix}", r"\left[\begin{array}{cc}1&2\end{array}\right]"),
    ("a = 1, b = 2", "b=2, a=1"), (r"\text{Sunday}", "sunday"), (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
    (r"5\frac{1}{2}", "5.5"), (r"\frac{3}{2}, -1", "-1, 1.5"), (r"0.1\dot{6}", "1/6"), (r"\frac{p}{q}", "p/q"),
    (r"\left(\frac{1}{2}, \infty\right)", r"x > \frac12"),
    (r"\lfloor n/2 \rfloor", r"\left\lfloor \frac{n}{2} \right\rfloor"), (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    ("|x|", r"\sqrt{x^2}"), (r"x \geq 1 \text{ and } y \leq 2", r"x \ge 1, y \le 2"),
    ("P(x) = x^2 + 1", "P(x)=1+x^2"), ("P(x) = x^2 + 1", "x^2+1"),
    (r"f(x) = 0 \text{ and } f(x) = x", "f(x)=x, f(x)=0"),
    (r"f(x)=0 \text{ or } f(x)=x^2", r"f(x) = x^2 \text{ or } f(x)=0"), ("2n-2", "2(n-1)"),
    (r"\sqrt[3]{2}", "2^{1/3}"), (r"1\frac{4}{5}", "9/5"), (r"36\text{ in}^2", "36"),
    (r"3\sqrt{2}\,\text{m}", r"3\sqrt2"), (r"\$5.50", "5.5"), (r"7 \text{ hours}", "7"), ("58,500", "58500"),
    (r"1.5 \times 10^{8}", "150000000"), ("(x-2)(x+3)", "x^2+x-6"), (r"16 \pi", r"16\pi"),
    (r"2, 3 \text{ and } 5", "5,3,2"), (r"70^{\circ}", "70 degrees"), ("50", r"50\%"), (r"120^\circ", "120°"),
    (r"\overline{AB}", r"\overline{AB}"), (r"\text{A, C}", "A, C"), ("A, C", r"\text{C, A}"),
    (r"\text{parallel}", "parallel"), ("k = 2, 3", "k=2,3"), ("2, 3", "k = 2, 3"),
    ("70", "x + 2y = 70"), ("7", r"\frac{x}{y} = 7"), ("7", r"\frac{dy}{dx} = 7"),
    (r"2\sqrt{3}\text{ units}", r"2\sqrt{3}"), (r"6\pi\text{ square feet}", r"6\pi\text{ ft}^2"),
    (r"6\pi\text{ cm}^2", r"6\pi\text{ square units}"), (r"2\pi\text{ sq. units}", r"2\pi"),
    (r"\mathbb{R}", r"(-\infty, \infty)"), (r"(-\infty, \infty)", r"x \in \mathbb{R}"),
    (r"(-\infty, -5) \cup (-5, 2) \cup (2, \infty)", r"\mathbb{R} \setminus \{2, -5\}"),
    ("1 < x < 3", "(1, 3)"), ("(1, 3)", "1 < x < 3"), ("x = 2, y = 3", "(x, y) = (2, 3)"),
    ("(x, y) = (2, 3)", "y = 3, x = 2"), (r"\begin{cases} x = 2 \\ y = 3 \end{cases}", "(x, y) = (2, 3)"),
    ("AB = 5", "5"), ("5", r"\large 5"), (r"\tan 45^\circ", "1"),
    (r"\frac{1}{8}", r"\sin 10^\circ \sin 50^\circ \sin 70^\circ"),
  ],
)  # fmt: skip
def test_right_answers(gold: str, answer: str) -> None:
  assert same(gold, answer)


@pytest.mark.parametrize(
  ("gold", "answer"),
  [
    ("3", r"\neq 3"), ("3", r"\max(3, 2)"), ("3", r"300\%"), ("3", "3_{4}"), ("3", r"\text{not }3"),
    ("13", r"2^{10} \equiv 13 \pmod{1012}"), ("70", r"71 \equiv 70 \pmod 1"), ("70", "71 = 70"),
    ("70", "x = 71 = 70"), ("70", r"71 \approx 70"), ("0.7", r"0.71 \approx 0.7"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"), (r"\text{Evelyn}", "Eve"),
    ("[-2,7]", "(-2,7)"), ("[-2,7]", r"x \in [-2,8]"), ("p - q", "q-p"), ("6 - 5i", "6"), (r"10\%", "0.1"),
    ("0.1", r"10\%"), ("y = 2x+3", "y = 2x-3"), ("2x+3", "2x+4 = 2x+3"), ("2x+4", "2x+3 = 2x+4"),
    (r"\{1,2\}", r"\{1,2,3\}"), ("2^{n-1}", "2^n-1"), ("all primes p ≡ 1 mod 4", "4"),
    ("all primes p ≡ 1 mod 4", "1"), ("No", "on"), ("(2,1), (1,2)", "(1,2)"), ("(1,2)", "(1,2), (2,1)"),
    ("(1,2)", "(2,1)"), (r"\infty", r"-\infty"), ("4210_5", "4210_6"), ("4210_5", "555"),
    (r"2\sqrt{3} \text{ cm}", r"2\sqrt3 \text{ m}"), ("1 and 2", "2"), ("3 hours 20 minutes", "20"),
    ("3 hours 20 minutes", "3"), (r"5 \text{ ft } 11 \text{ in}", "11"), ("5 apples", "6"), ("3", r"\pm 3"),
    (r"1, 3, 5, \dots", "1,3,5"), (r"1, 2, \dots, 10", "1,2,10"), ("3:4", "4:3"), ("x=5", "y=5"), ("x = 5", "5, 6"),
    ("1,2", "x = 1, y = 2"), ("f(x)=2x", "f(x)=x"), ("9 pm", r"9 \text{ am}"), ("0", "10^{-9}"),
    ("70", r"70 \bmod 71"), ("5", "5i"), ("2", "2√x"), ("3", r"3 \text{ and } 4"), ("3", "3, 3"),
    ("3", r"3 \text{ or three}"), ("3", r"3 \text{ not } 4"), ("3", r"3 \text{ not four}"), ("3", r"\text{three}"),
    (r"\text{three apples}", "3"), ("n even", "n"), ("n even", "even"), ("at most 5", "5"), ("5 or more", "5"),
    ("x>5", "5"), ("5", "x>5"), ("5", r"x \ge 5"), ("5", r"\ge 5"), ("5", "{5}_{6}"), ("5", r"5^\prime"),
    ("5", r"\overline{5}"), ("5", r"\{5\}"), ("5", "[5, 5]"), ("5", "(5"), ("5", "5)"), ("5", "|5"), ("5", "5|"),
    ("5", "5!"), ("5", "-5"), ("-5", "5"), ("5", r"\text{-}5"), ("5", "--5?"), ("5", r"\sqrt{25}, 5"),
    ("5", r"5 \cdot"), ("5", "5 +"), ("5", r"\frac{5}{}"), ("5", r"\frac{5}"), ("5", "x"), ("x", "5"), ("x", "x = 5"),
    ("5", "5 + 0x = 6"), ("1", r"\frac{71}{71} = 70^0 = 2"), ("2,4,8", "2,4,8,16"), ("2,4,8", "2,4"),
    ("2,4,8", r"2,4,8 \text{ or } 16"), (r"\{2,4\}", "2,4,"), ("(0,1]", "0 < x < 1"), ("(0,1)", "[0,1]"),
    (r"[0, \infty)", "x > 0"), ("x < 2", "y < 2"), ("x < 2", "x > 2"), ("x < 2", "-x < -2"),
    ("x^2 - 1", "(x-1)(x+2)"), ("3.14", "3.1416"), ("3.14", r"\pi"), (r"\pi", "3.1416"), (r"\frac{1}{3}", "0.333334"),
    ("1234567", "1234567.4"), ("10^{-7}", "10^{-8}"), ("1.0000001", "1.0000002"),
    (r"\text{No such } n \text{ exists}", "n"), ("a = 1, b = 2", "a=2, b=1"), ("a = 1, b = 2", "1, 2"),
    ("k = 2", "3"),
    ("70", r"x = 71 \quad x = 70"), ("70", r"71 \quad x = 70"), ("x = 70", r"x = 71 \quad x = 70"),
    (r"\sin 30^\circ", r"\sin 30"), ("5", r"5 \text{ dozen}"),
    ("5", r"5 \text{ billion}"), ("5", r"5 \text{ squared}"), ("xy = 5", "5"),
    (r"6\pi\text{ cm}^2", r"6\pi\text{ square feet}"), (r"6\pi\text{ cm}", r"6\pi\text{ square cm}"),
    (r"\mathbb{R}", r"\mathbb{R} \setminus \{0\}"), (r"\mathbb{R} \setminus \{0\}", r"(-\infty, \infty)"),
    ("(1, 3)", r"1 < x \le 3"), ("x = 2, y = 3", "(x, y) = (3, 2)"), ("1, 2", "(x, y) = (1, 2)"),
    (r"\frac{1}{3}", r"\frac{1}{2} \; x = \frac{1}{3}"), (r"2\pi", r"\pi \; x = 2\pi"), ("70", "(71) x = 70"),
    ("70", r"\sqrt{71} x = 70"), ("70", r"x = 71 \cdot y = 70"),
  ],
)  # fmt: skip
def test_wrong_answers(gold: str, answer: str) -> None:
  assert not same(gold, answer)


def test_every_reference_is_right_for_itself() -> None:
  golds = [
    "12", "3", r"\frac{1}{8}", r"\frac{3}{8}", "55", "120", "1", "7", "13", "70", "0.7", "0.71", r"\frac{\pi}{2}",
    "10", "6", "5", "4", "30", "24", "2", "8", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
    r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}", r"\begin{pmatrix} 1/2 & 0 \\ 0 & -1 \end{pmatrix}",
    r"\begin{cases} x = 1 \\ y = 2 \end{cases}", r"\begin{cases} x^2 & x > 0 \\ 0 & \text{otherwise} \end{cases}",
    "xyz", "2abc", r"\frac{abc}{2}", r"\triangle ABC", "sqrt(2)", "pi/4", "2*pi", "ln(2)", "+3", "1e-07", "1e+21",
    "Yes", "even", "Monday", "no solutions", r"\text{Evelyn}", r"(3, \frac{\pi}{2})", r"\left( -\infty, 2 \right]",
    r"x \in [-2,7]", "[-2,7]", r"11\sqrt2", "p - q", "6 - 5i", r"\$32{,}348", r"\$32,\!348", r"10\%", "0.1", "3R^2",
    r"C_{20} \cdot 2^{3}", "y = 2x+3", "2x+3", "2x+4", r"\{1,2\}", "2^{n-1}", r"\frac{n(n+1)}{2}",
    "f(x)=x+c for any real c", "all primes p ≡ 1 mod 4", "No", "(2,1), (1,2)", "(1,2)", r"\infty", "4210_5",
    r"15^\circ", "15", r"2\sqrt{3} \text{ cm}", "1 and 2", r"1 \text{ and } 2", "1, 2, and 3", "3 hours 20 minutes",
    r"5 \text{ ft } 11 \text{ in}", "5 apples", r"\pm 3", r"1 \pm \sqrt{2}", r"\frac{1 \pm \sqrt{5}}{2}",
    r"1, 3, 5, \dots", r"1, 2, \dots, 10", "3:4", "(C)", "C", r"\text{(C)}", r"x < -1 \text{ or } x > 1",
    r"(-\infty,-1) \cup (1,\infty)", "x=5", "x = 5", r"x=1 \text{ or } x=2", "1,2", "1,000", "(1,234)", "f(x) = 2x",
    "f(x)=2x", "x^2+y^2=1", r"n \equiv 1 \pmod 4", r"\text{all } n \ge 2",
    r"\begin{align*} x &= 1 \\ y &= 2 \end{align*}", r"\{x \mid x > 0\}", r"\mathbb{R} \setminus \{1\}", r"\emptyset",
    "(a,b) = (1,2)", "e", r"0.\overline{3}", "5.", "i", "9 pm", "6:30", "10^{100}", '1\n2', r"\text{(D)}\ 5",
    r"\frac{9}{256}\pi", r"90^\circ", r"8 \text{ m/s}", "0", r"2k\pi", r"\frac{1}{2}", "2√x", r"\text{three apples}",
    "n even", "at most 5", "5 or more", "x>5", "-5", "x", "2,4,8", r"\{2,4\}", "(-1,2)", "(0,1]", "(0,1)",
    r"[0, \infty)", "x < 2", "x^2 - 1", r"\cos 2x", r"\frac{x}{y}", "e^{-x}", r"\log 2", r"\ln 4",
    r"\arctan \frac{1}{2}", r"2+\sqrt{3}", "3.14", "3.14159265", r"\pi", r"\frac{1}{3}", "1234567", r"-\frac{1}{2}",
    r"\frac{-1}{-2}", r"\dfrac{3}{4}", "10^{-7}", "1.0000001", r"\text{No such } n \text{ exists}",
    r"\begin{bmatrix}1&2\end{bmatrix}", r"\begin{vmatrix}1\end{vmatrix}",
    r"\left\{\begin{array}{ll} x=1 \\ y=2 \end{array}\right.", "a = 1, b = 2", r"12:30 \text{ p.m.}", r"2^{\aleph_0}",
    r"\text{Sunday}", r"\frac{\sqrt{3}}{2}", r"5\frac{1}{2}", r"\frac{3}{2}, -1", r"0.1\dot{6}", r"\frac{p}{q}",
    r"\left(\frac{1}{2}, \infty\right)", r"1+2+\cdots+n", r"\lfloor n/2 \rfloor", r"\binom{n}{2}", "|x|",
    r"x \geq 1 \text{ and } y \leq 2", "P(x) = x^2 + 1", r"f(x) = 0 \text{ and } f(x) = x",
    r"f(x)=0 \text{ or } f(x)=x^2", "2n-2", r"\sqrt[3]{2}", r"1\frac{4}{5}", r"36\text{ in}^2",
    r"3\sqrt{2}\,\text{m}", r"\$5.50", r"7 \text{ hours}", "58,500", r"1.5 \times 10^{8}", "(x-2)(x+3)", r"16 \pi",
    r"2, 3 \text{ and } 5", r"70^{\circ}", "50", r"120^\circ", "AD", r"\overline{AB}", r"m \angle A", r"\text{A, C}",
    "A, C", r"p \mid q", r"\text{parallel}", "k = 2, 3", "2, 3", "k = 2",
  ]  # fmt: skip
  assert [gold for gold in golds if not same(gold, gold)] == []


SEPARATORS = (
  r"\\", "~", r"\dots", r"\mapsto", r"\leftrightarrow", r"\therefore", r"\textsf{ or }", "→", r"\;\;",
  r"\xrightarrow{}",
  r"\circ", r"\star", "≈", "≠", "∨", "，", "|", "!", "'", '"', "`", "@", "#", r"\&", "&", r"\%", r"\_", r"\tag{x}",
  r"\lt", r"\bmod", r"\equiv", r"\approx", r"\in", r"\to", "=", "<", ",", ";", ":", "and", "vs", "x", "{}", "()", "\n",
  r"^\circ", "°", r"\text{ or }", r"\cup", r"\pm", "/", "*", "+", r"\cdot", "", "\u200b", "或", "①",
  r"\newline", r"\not", r"\boxed{}",
)  # fmt: skip


@pytest.mark.parametrize(
  "candidates",
  [
    ("71", "70", "69"), ("69", "70", "71"), ("1/2", "1/3", "1/5"), ("0.71", "0.70", "0.69"), ("Yes", "No", "Maybe"),
    ("(1,2)", "(2,1)", "(3,1)"), ("x+1", "x+2", "x+3"), (r"\{1,2\}", r"\{2,3\}", r"\{5\}"), ("10%", "20%", "30%"),
    ("x=1", "x=2", "x=3"),
  ],
)  # fmt: skip
def test_candidates_in_a_row_are_no_answer(candidates: tuple[str, ...]) -> None:
  rows = [sep.join(candidates) for sep in (*SEPARATORS, *(f" {x} " for x in SEPARATORS))]
  assert [(row, gold) for row in rows for gold in candidates if same(gold, row)] == []
