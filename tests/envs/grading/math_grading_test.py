from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sao_jax.envs.grading.math_grading import MathGrader
from sao_jax.utils import limited_process
from sao_jax.utils.extras import MissingExtraError
from tests.waiting import LONG_S

pytest.importorskip("math_verify", reason="needs the extra 'envs'")

pytestmark = pytest.mark.timeout(600)  # Starting the grading process imports SymPy: minutes on a busy machine.


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
  with MathGrader(timeout_s=30.0, start_timeout_s=300.0) as grader:
    yield grader


@pytest.mark.parametrize(
  ("gold", "answer", "equal"),
  [
    ("$\\frac{1}{2}$", "0.5", True),
    ("$2\\sqrt{2}$", "$\\sqrt{8}$", True),
    ("42", "The answer is $\\boxed{42}$.", True),
    ("42", "43", False),
    ("$x^2 + 2x + 1$", "$(x+1)^2$", True),
    ("42", "", False),
    ("42", "no idea", False),
    ("$\\{1, 2\\}$", "$\\{2, 1\\}$", True),
  ],
)
def test_values_are_compared_not_texts(grader: MathGrader, gold: str, answer: str, equal: bool) -> None:
  assert grader.is_equal(gold, answer) == equal


def test_from_many_threads(grader: MathGrader) -> None:
  results: dict[int, bool] = {}

  def grade(i: int) -> None:
    results[i] = grader.is_equal(f"${i}/4$", str(i / 4 if i % 2 else i))

  threads = [threading.Thread(target=grade, args=(i,)) for i in range(1, 9)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(LONG_S)
  assert results == {i: i % 2 == 1 for i in range(1, 9)}


def test_a_nasty_expression_is_wrong_in_time_and_the_next_one_is_graded(grader: MathGrader) -> None:
  assert grader.is_equal("1", "1.0")  # its process has started
  grader._timeout_s = 1.0
  try:
    start = time.perf_counter()
    assert not grader.is_equal("$9^{9^{9^{9}}}$", "$9^{9^{9^{9}}} + 1 - 2$")
    assert time.perf_counter() - start < LONG_S
  finally:
    grader._timeout_s = 30.0
  assert grader.is_equal("1", "1.0")


def test_bad_settings_are_refused() -> None:
  with pytest.raises(ValueError, match="timeout_s and start_timeout_s must be positive"):
    MathGrader(timeout_s=0)


@pytest.mark.parametrize(
  ("gold", "answer", "equal"),
  [
    ("$(1,2)$", "$(2,1)$", False),
    ("$[1,2)$", "$[1, 2)$", True),
    ("$(0,1)\\cup(2,3)$", "$(2,3)\\cup(0,1)$", True),
    ("$\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}$", "$\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}$", False),
    ("$50\\%$", "$50\\%$", True),
    ("$\\log_2 8$", "3", True),
  ],
)
def test_sets_intervals_matrices_and_units(grader: MathGrader, gold: str, answer: str, equal: bool) -> None:
  assert grader.is_equal(gold, answer) == equal


@pytest.mark.parametrize(
  ("gold", "answer", "equal"),
  [
    # References of data sets have no dollar signs.
    ("3\\sqrt{13}", "$3\\sqrt{13}$", True),
    ("3\\sqrt{13}", "3", False),
    ("2k+2", "2", False),
    ("p - q", "\\boxed{p-q}", True),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\frac{\\pi}{2})", True),
    ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", True),
    ("5", "6 - 5i", False),
    ("$(1,2)$", "(1, 2)", True),
    ("1,2", "$1,2$", True),
    ("1,000", "1000", True),
    ("50%", "$50\\%$", True),
    ("5", "5 cm", True),
    ("12", "It is 12.", True),
    ("4", "so 2+2=4", True),
  ],
)
def test_bare_expressions_count_as_a_whole(grader: MathGrader, gold: str, answer: str, equal: bool) -> None:
  assert grader.is_equal(gold, answer) == equal


@pytest.mark.parametrize(
  ("gold", "answer", "equal"),
  [
    ("70", "\\boxed{71} no, \\boxed{70}", True),
    ("70", "\\boxed{70} no, \\boxed{71}", False),
    ("70", "$\\boxed{71}$. Wait.\n$$\\boxed{x = 70}$$ since 2 * 35 is not 71.", True),
    ("70", "\\boxed{70} no, \\boxed{7", False),
    ("70", "\\boxed{71 no, \\boxed{70}", True),
    ("70", "\\boxed{\\fbox{70}}", True),
    ("$\\frac{1}{2}$", "\\boxed{3} or rather $\\boxed{\\frac{1}{2}}$", True),
    ("1,2", "$\\boxed{1}$ and $\\boxed{2}$", True),
    ("70", "\\boxed{70}, \\boxed{71}", False),
    ("70", "\\boxed{71} \\boxed{70}", False),
  ],
)
def test_the_last_box_counts(grader: MathGrader, gold: str, answer: str, equal: bool) -> None:
  assert grader.is_equal(gold, answer) == equal


@pytest.mark.parametrize(
  ("gold", "answer", "equal"),
  [
    ("12", "The answer is 12 apples.", True),
    ("12", "Adding them gives 12.", True),
    ("12", "It is not 12.", False),
    ("12", "It is more than 12.", False),
    ("12", "It is 12 thousand.", False),
    ("12", "It is 12 and a half.", False),
    ("12", "3 * 4 = 12 apples, of 20.\n#### 12", True),
    ("12", "**12**", True),
    ("10^{10^{10}}", "So it is $10^{10^{10}}$.", True),
    ("12", "It is 11 or 12.", False),
    ("71", "71\n70", False),
    ("70", "$71$ 70 $69$", False),
    ("69", "$71 \\to 69$", False),
    ("5", "5i", False),
    ("2", "It is 2√x", False),
    ("Evelyn", "The answer is Evelyn.", True),
    ("all p = 1 mod 4", "The answer is 4.", False),
    ("70", "\\boxed{71} \\to \\boxed{70}", False),
    ("70", "\\boxed{70}. Again: \\boxed{70}", True),
    ("70", "\\boxed{70} \\boxed{70}", True),
    ("70", "\\boxed{70} 71}", False),
    ("70", "{so} \\boxed{70}\n}", True),
  ],
)
def test_the_answer_of_a_text(grader: MathGrader, gold: str, answer: str, equal: bool) -> None:
  assert grader.is_equal(gold, answer) == equal


def test_references_that_are_not_right_for_themselves(grader: MathGrader) -> None:
  golds = ["12", "\\frac{1}{", "$\\pi$", "No", "\\boxed{3}", "{", "\\frac{1}{", "", "?"]
  assert grader.unreadable(golds) == ["\\frac{1}{", "{", "", "?"]


def test_plain_references_need_no_process() -> None:
  with MathGrader() as idle:
    assert idle.unreadable(str(i) for i in range(10_000)) == [] and idle._workers._num_workers == 0


@pytest.mark.parametrize(
  "content",
  [
    "70, 71", "71 \\text{ or } 70", "71; 70", "\\{70, 71\\}", "71 \\to 70", "71 = 70", "x = 71 = 70", "71. 70",
    "71? 70", "71 \\mid 70", "71 | 70", "71 & 70", "71 \\lor 70", "71 \\cup 70", "71\\boxed{70}", "70 \\text{ (or 71)}",
    "\\pm 70",
  ],
)  # fmt: skip
def test_a_list_of_candidates_is_no_answer(grader: MathGrader, content: str) -> None:
  assert not grader.is_equal("70", f"\\boxed{{{content}}}")


@pytest.mark.parametrize(
  "content",
  ["x = y = 70", "35 \\cdot 2 = 70", "70 \\text{ cm}^2", "70 \\approx 70.1", "|-70|"],
)
def test_a_way_to_the_answer_is_no_list(grader: MathGrader, content: str) -> None:
  assert grader.is_equal("70", f"\\boxed{{{content}}}")


@pytest.mark.parametrize(
  "answer",
  [
    "\\boxed{" * 100_000,
    "\\boxed{" * 20_000 + "5" + "}" * 19_999,
    "$10^{10^{10}}$",
    "$(((10)^{100})!)!$",
    "$" + "(" * 5000 + "1" + ")" * 5000 + "$",
    "\ud800\0",
    "9" * 100_000,
    "a" * 1_000_000,
  ],
)
def test_hostile_answers_are_wrong_in_time(grader: MathGrader, answer: str) -> None:
  assert grader.is_equal("1", "1.0")  # its process has started
  grader._timeout_s = 1.0
  try:
    start = time.perf_counter()
    assert not grader.is_equal("5", answer)
    assert time.perf_counter() - start < LONG_S
  finally:
    grader._timeout_s = 30.0


def test_a_killed_process_is_started_again(grader: MathGrader) -> None:
  assert grader.is_equal("1", "1.0")
  for worker in grader._workers._idle:
    assert worker.process is not None
    worker.process.popen.kill()
    worker.process.popen.wait()
  assert grader.is_equal("1", "1.0") and not grader.is_equal("1", "2")


def test_a_stopped_process_is_a_timeout() -> None:
  with MathGrader(timeout_s=30.0, start_timeout_s=300.0) as grader:
    assert grader.is_equal("1", "1.0")
    (worker,) = grader._workers._idle
    assert worker.process is not None
    os.kill(worker.process.popen.pid, signal.SIGSTOP)
    grader._timeout_s = 0.2
    assert not grader.is_equal("1", "x" * 1_000_000) and grader.timeouts == 1


def test_an_interrupted_comparison_leaves_no_reply_for_the_next_one(
  grader: MathGrader, monkeypatch: pytest.MonkeyPatch
) -> None:
  assert grader.is_equal("1", "1.0")

  def interrupt(*arguments: Any) -> bytes:
    exchange(*arguments)
    raise KeyboardInterrupt

  exchange = limited_process._exchange
  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(limited_process, "_exchange", interrupt)
    grader.is_equal("1", "1.0")
  assert not grader.is_equal("1", "2") and grader.is_equal("1", "1.0")


def test_a_script_without_a_guard(tmp_path: pathlib.Path) -> None:
  script = tmp_path / "script.py"
  # Files beside the script and beside the worker do not replace modules of the same names.
  (tmp_path / "base.py").write_text("raise SystemExit('imported')")
  script.write_text(
    "from sao_jax.envs.grading.math_grading import MathGrader\n"
    "grader = MathGrader(timeout_s=60.0, start_timeout_s=300.0)\n"
    "print(grader.is_equal('$\\\\frac12$', '0.5'), grader._workers._idle[0].process.popen.pid)\n"
  )
  done = subprocess.run(
    [sys.executable, str(script)], capture_output=True, text=True, timeout=500, check=False,
    env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[3])},
  )  # fmt: skip
  answer, pid = done.stdout.split()
  assert answer == "True", done.stderr
  # The grader was not closed, but its process ends with the script.
  deadline = time.monotonic() + 60
  while pathlib.Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not pathlib.Path(f"/proc/{pid}").exists()


def test_a_process_that_does_not_start_is_said_why(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  (tmp_path / "math_verify.py").write_text("raise ImportError('no LaTeX parser here')")
  monkeypatch.setenv("PYTHONPATH", str(tmp_path))
  with pytest.raises(MissingExtraError, match=r"math-verify .*\.\[envs\]' \(no LaTeX parser here\)"):
    MathGrader(start_timeout_s=300.0).is_equal("1", "1")
