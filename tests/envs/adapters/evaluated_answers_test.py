"""No answer reaches `eval`, but right answers reach the scorers."""

from __future__ import annotations

import inspect
import pathlib
import re
import time

import pytest
from reasoning_gym.factory import DATASETS

from sao_jax.envs.adapters import _evaluated_answers
from sao_jax.envs.adapters.reasoning_gym import ReasoningGym, ReasoningGymConfig

EVALUATING = _evaluated_answers.LITERAL_TASKS | set(_evaluated_answers.FORMS) - {"complex_arithmetic"}


def test_every_task_whose_scorer_evaluates_is_known() -> None:
  calls = re.compile(r"(?<![\w.])(?:sp\.|sympy\.)?(?:eval|exec|parse_expr|sympify)\(")
  # The first evaluates its own answer. The second has its own parser of that name.
  harmless = {"number_sorting", "propositional_logic"}
  found = {name for name, (kind, _) in DATASETS.items() if calls.search(inspect.getsource(kind.score_answer))}
  assert found - harmless == EVALUATING


@pytest.mark.parametrize("task", sorted(EVALUATING))
def test_code_in_an_answer_does_not_run(task: str, tmp_path: pathlib.Path) -> None:
  env = ReasoningGym(ReasoningGymConfig(task=task, size=10))
  mark = tmp_path / "ran"
  attacks = [
    f"__import__('pathlib').Path('{mark}').touch()",
    f"[open('{mark}', 'w')]",
    f"exec(\"open('{mark}', 'w')\")",
    f"(lambda: open('{mark}', 'w'))()",
    "9**9**9**9",
    "(9**(9**9))**(9**9)",
    "10**(10**10)",
    "((((9**99)**99)**99)**99)**99",
    "1e999999999",
    "exit()",
    "quit()",
    "breakpoint()",
    "input()",
    "9" * 100_000,
    "(" * 50_000,
    "sqrt(" * 200,
    "x(1)",
    "N(pi, 99999999)",
    "factorial(10**9)",
    "1" * 999 + "$",
  ]
  began = time.perf_counter()
  for attack in attacks:
    env.reset(1)
    step = env.step(f"<answer>{attack}</answer><|end|>")
    assert step.done and step.reward < 0.1, attack
  assert time.perf_counter() - began < 60 and not mark.exists()


@pytest.mark.parametrize("task", sorted(EVALUATING))
def test_right_answers_are_scored(task: str) -> None:
  count = 5 if task == "puzzle24" else 20  # the package makes some of these slowly
  env = ReasoningGym(ReasoningGymConfig(task=task, size=count))
  for index in range(count):
    env.reset(index)
    # The package could not integrate its own answer. Returning the question does not solve it.
    solved = "Integral" not in str(env.gold_answer)
    assert (env.step(f"<answer>{env.gold_answer}</answer><|end|>").reward == 1.0) == solved, env.gold_answer


def test_a_list_is_still_read_where_the_package_reads_one() -> None:
  env = ReasoningGym(ReasoningGymConfig(task="string_insertion"))
  env.reset(0)
  assert env.step(f"<answer>{list(str(env.gold_answer))}</answer><|end|>").reward == 0.1


@pytest.mark.parametrize(
  "text",
  [
    "x**3/3 + C",
    "-2*x**2*sin(3*x) + 5*exp(-x)/7 + C",
    "x**(3/2)",
    "exp(2*x)",
    "2**x",
    "e**(2*x)",
    "(x + 1)**2",
    "log(Abs(x))",
    "",
  ],
)
def test_formulas_of_the_usual_kinds_pass(text: str) -> None:
  assert _evaluated_answers.is_formula(text)
