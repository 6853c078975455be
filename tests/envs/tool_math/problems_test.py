from __future__ import annotations

import concurrent.futures
import os
import signal
import time

import pytest

from sao_jax.envs import ProblemBank, ToolMathConfig
from sao_jax.envs.grading import scoring_process
from sao_jax.envs.tool_math import problems
from sao_jax.envs.tool_math.expressions import evaluate
from sao_jax.envs.tool_math.problems import plan_solution
from sao_jax.tokenizers import MathTokenizer

CONFIG = ToolMathConfig(train_size=3_000, eval_size=300)


@pytest.fixture(scope="module")
def train() -> ProblemBank:
  return ProblemBank(CONFIG, "train")


@pytest.fixture(scope="module")
def held_out() -> ProblemBank:
  return ProblemBank(CONFIG, "eval")


def test_splits_share_no_question(train: ProblemBank, held_out: ProblemBank) -> None:
  assert len(held_out.questions()) == held_out.size
  assert not train.questions() & held_out.questions()


def test_splits_share_no_question_where_the_task_sets_are_tiny() -> None:
  # Many draws repeat an earlier question, so that only the check keeps the splits apart.
  config = ToolMathConfig(
    min_digits=1,
    max_digits=1,
    arithmetic_max_terms=2,
    chain_max_terms=2,
    lcm_max_value=40,
    train_size=500,
    eval_size=100,
  )
  held_out = ProblemBank(config, "eval").questions()
  assert len(held_out) == 100
  assert not ProblemBank(config, "train").questions() & held_out


def test_a_task_set_that_is_too_small_is_an_error() -> None:
  config = ToolMathConfig(min_digits=1, max_digits=1, chain_max_terms=2, arithmetic_max_terms=2, eval_size=2_000)
  with pytest.raises(ValueError, match=r"no new question for eval problem .* too few different questions"):
    ProblemBank(config, "eval").questions()


def test_index_decides_the_problem_whatever_was_asked_before(train: ProblemBank, held_out: ProblemBank) -> None:
  other = ProblemBank(CONFIG, "train")
  for i in (2_999, 17, 0, 3_017, 10**12 + 17):
    assert other.problem(i).question == train.problem(i % 3_000).question
  assert ProblemBank(CONFIG, "eval").problem(42).question == held_out.problem(42).question
  seeded = ProblemBank(ToolMathConfig(train_size=3_000, eval_size=300, problem_seed=1), "train")
  assert sum(seeded.problem(i).question == train.problem(i).question for i in range(50)) < 5


def test_threads_get_the_same_problems(train: ProblemBank) -> None:
  bank = ProblemBank(CONFIG, "train")
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    got = list(pool.map(lambda i: bank.problem(i % 100).question, range(400)))
  assert got == [train.problem(i % 100).question for i in range(400)]


def test_the_packages_scorer_agrees_with_the_plan(train: ProblemBank) -> None:
  tasks = set()
  for i in range(1_000):
    problem = train.problem(i)
    tasks.add(problem.task)
    value = evaluate(problem.expression)
    assert train.score(problem, str(value)) == 1.0
    assert train.score(problem, str(value + 1)) < 1.0
    assert 1 <= problem.num_operations <= 4
    namespace = {"gcd": __import__("math").gcd}
    assert eval(problem.expression_text, namespace) == value  # noqa: S307
  assert tasks == {"arithmetic", "parentheses", "chain_sum", "products", "equations", "lcm"}


def test_an_answer_among_other_text_is_not_right(train: ProblemBank) -> None:
  problem = train.problem(0)
  right = problem.entry["answer"]
  assert train.is_right(problem, right)
  assert not train.is_right(problem, f"The answer is {right}.")
  assert not train.is_right(problem, f"{right} {right}")
  lenient = ProblemBank(ToolMathConfig(train_size=3_000, eval_size=300, success_threshold=0.01), "train")
  assert lenient.is_right(lenient.problem(0), f"The answer is {right}.")


def test_questions_have_no_unknown_token_and_are_short(train: ProblemBank) -> None:
  tokenizer = MathTokenizer()
  unknown = tokenizer.encode("<|unk|>")[0]
  lengths = []
  for i in range(500):
    ids = tokenizer.encode(train.problem(i).question)
    assert unknown not in ids
    lengths.append(len(ids))
  assert max(lengths) <= 30


def test_numbers_of_operations_vary(train: ProblemBank) -> None:
  counts = [train.problem(i).num_operations for i in range(1_000)]
  for n, share in ((1, 0.2), (2, 0.2), (3, 0.1), (4, 0.04)):
    assert counts.count(n) >= share * len(counts), (n, counts.count(n))


@pytest.mark.parametrize(
  ("equation", "text", "value"),
  [
    ("84*t + 4370 = 9410", "(9410 - 4370) // 84", 60),
    ("34*t - 1190 = 2040", "(2040 + 1190) // 34", 95),
    ("840*t = 10920", "10920 // 840", 13),
    ("-3*t = -27", "-27 // -3", 9),
    ("7 - 3*t = -20", "(-20 - 7) // -3", 9),
    ("-3*t - 7 = -34", "(-34 + 7) // -3", 9),
    ("5 - t = -4", "(-4 - 5) // -1", 9),
    ("t + 5 = 14", "14 - 5", 9),
  ],
)
def test_equations_are_planned(equation: str, text: str, value: int) -> None:
  plan = plan_solution("equations", {"metadata": {"equation": equation, "variable": "t"}, "answer": str(value)})
  assert plan is not None and plan[1] == text and evaluate(plan[0]) == value


@pytest.mark.parametrize("equation", ["t = 4", "2*t**2 = 8", "7 - -3*t = 4", "t + t = 8"])
def test_other_equations_are_left_out(equation: str) -> None:
  assert plan_solution("equations", {"metadata": {"equation": equation, "variable": "t"}, "answer": "4"}) is None


def test_bad_indices_and_splits_are_refused(train: ProblemBank) -> None:
  for index in (-1, 1.0, True, "3"):
    with pytest.raises(ValueError, match="task_index must be an int >= 0"):
      train.problem(index)  # type: ignore[arg-type]
  with pytest.raises(ValueError, match="split must be one of"):
    ProblemBank(CONFIG, "test")  # type: ignore[arg-type]


def test_making_problems_is_fast() -> None:
  bank = ProblemBank(ToolMathConfig(), "train")
  bank.problem(0)
  start = time.process_time()
  for i in range(1_000):
    bank.problem(i)
  assert time.process_time() - start < 5.0  # About 0.15 s on an idle core.


@pytest.mark.timeout(600)
def test_an_answer_that_is_not_scored_in_time_scores_nothing(
  held_out: ProblemBank, monkeypatch: pytest.MonkeyPatch
) -> None:
  problem = held_out.problem(0)
  right = str(evaluate(problem.expression))
  pool = scoring_process.shared_pool("sao_jax.envs.adapters._reasoning_gym_worker")
  pool.close()  # Other tests may have left several processes.
  assert held_out.score(problem, right) == 1.0
  (worker,) = pool._idle
  assert worker.process is not None
  os.kill(worker.process.popen.pid, signal.SIGSTOP)
  with monkeypatch.context() as patch:
    patch.setattr(problems, "_SCORE_TIMEOUT_S", 0.5)
    before = pool.timeouts
    assert not held_out.is_right(problem, right)
    assert pool.timeouts == before + 1
  assert held_out.is_right(problem, right)
