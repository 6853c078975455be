from __future__ import annotations

import re
import time
from typing import Any

import pytest

from sao_jax.envs.adapters import _reasoning_gym_worker as worker
from sao_jax.envs.adapters.reasoning_gym import ReasoningGym, ReasoningGymConfig
from tests.waiting import LONG_S


class InThisProcess:
  """Answers requests like a worker, but in this process."""

  def call(self, request: Any, *, timeout_s: float) -> Any:
    del timeout_s
    return worker.answer(request)


@pytest.mark.parametrize("task", ["leg_counting", "spell_backward", "letter_counting", "number_sorting", "products"])
def test_the_right_answer_between_tags_scores_one(task: str) -> None:
  env = ReasoningGym(ReasoningGymConfig(task=task, size=20))
  for i in (0, 7, 27):
    prompt = env.reset(i)
    assert prompt.startswith("<|user|>") and prompt.endswith("</answer>.<|assistant|>")
    right = env.gold_answer
    step = env.step(f"<answer>1</answer> hm, no: <answer>{right}</answer><|end|>")
    assert step.done and not step.truncated and step.reward == 1.0 and step.info["success"]
  assert prompt == env.reset(7)


def test_wrong_missing_and_partial_answers() -> None:
  env = ReasoningGym(ReasoningGymConfig(task="chain_sum"))
  env.reset(0)
  assert env.step("<answer>nothing</answer><|end|>").reward == 0.0
  env.reset(0)
  step = env.step(f"{env.gold_answer}<|end|>")
  assert step.reward == 0.0 and not step.info["answered"] and not step.info["success"]
  env.reset(0)
  step = env.step(f"<answer>it is {env.gold_answer}</answer><|end|>")
  assert 0.0 < step.reward < 1.0 and not step.info["success"]


def test_a_task_without_a_stored_answer_is_scored() -> None:
  env = ReasoningGym(ReasoningGymConfig(task="graph_color"))
  env.reset(0)
  assert env.gold_answer is None
  assert env.step("<answer>{}</answer><|end|>").reward < 1.0


def test_difficulty_by_settings_and_by_curriculum() -> None:
  def operands(**config: object) -> int:
    env = ReasoningGym(ReasoningGymConfig(task="chain_sum", **config))  # type: ignore[arg-type]
    env.reset(0)
    return len(re.findall(r"\d+", env._question))

  assert operands(settings={"min_terms": 9, "max_terms": 9}) == 9
  assert operands(level=0) == 2
  assert operands(level=0, attribute_levels={"num_terms": 5}, settings={"min_terms": 7}) == 7
  assert operands(level=99) >= 2


@pytest.mark.parametrize("answer", ["nan", "NaN + 3i", "nanj", "inf"])
def test_what_is_no_number_is_not_near_the_right_one(answer: str) -> None:
  env = ReasoningGym(ReasoningGymConfig(task="complex_arithmetic"))
  env.reset(0)
  assert env.step(f"<answer>{answer}</answer><|end|>").reward == 0.0


def test_an_answer_that_the_scorer_stumbles_over_scores_nothing_and_says_why() -> None:
  env = ReasoningGym(ReasoningGymConfig(task="coin_flip"))
  env.reset(0)
  step = env.step("<answer>1e999</answer><|end|>")
  assert step.done and step.reward == 0.0 and "OverflowError" in step.info["scorer_error"]


def test_a_scorer_that_fails_for_the_right_answer_too_is_no_fault_of_the_answer(
  monkeypatch: pytest.MonkeyPatch,
) -> None:
  worker._task_set.cache_clear()
  env = ReasoningGym(ReasoningGymConfig(task="coin_flip"), workers=InThisProcess())
  env.reset(0)
  dataset = worker._task_set(env._settings).dataset
  monkeypatch.setattr(dataset, "score_answer", lambda answer, entry: entry["no such field"])
  with pytest.raises(KeyError, match="no such field"):
    env.step("<answer>0.5</answer><|end|>")


def test_a_scorer_that_says_yes_to_every_text_is_not_asked() -> None:
  env = ReasoningGym(ReasoningGymConfig(task="game_of_life_halting"))
  for index in range(6):
    env.reset(index)
    right = str(env.gold_answer)
    for answer, reward in ((right, 1.0), (right.lower(), 1.0), (str(right != "True"), 0.0), ("banana", 0.0)):
      env.reset(index)
      assert env.step(f"<answer>{answer}</answer><|end|>").reward == reward, (right, answer)


def test_the_first_digits_of_a_probability_are_not_the_whole() -> None:
  env = ReasoningGym(ReasoningGymConfig(task="coin_flip"))
  seen = set()
  for index in range(12):
    env.reset(index)
    right = str(env.gold_answer)
    if len(right) > 5 and float(right) > 0.001:  # closer to 0 the package accepts "0"
      seen.add(right)
      for answer, least, most in ((right, 1.0, 1.0), ("0", 0.0, 0.2), (right[:3], 0.0, 0.6)):
        env.reset(index)
        step = env.step(f"<answer>{answer}</answer><|end|>")
        assert least <= step.reward <= most and step.info["success"] == (step.reward == 1.0), (right, answer)
  assert len(seen) > 3


def test_an_answer_without_end_is_not_scored() -> None:
  env = ReasoningGym(ReasoningGymConfig(task="spell_backward"))
  env.reset(0)
  assert env.step(f"<answer>{'a' * 30_000}</answer><|end|>").reward == 0.0


def test_a_mixture_scores_each_problem_by_the_rules_of_its_own_set() -> None:
  names = ["chain_sum", "n_queens", "puzzle24"]
  settings = {"datasets": [{"name": name, "weight": 1.0, "config": {}} for name in names]}
  env = ReasoningGym(ReasoningGymConfig(task="composite", settings=settings, size=30))
  seen = set()
  for index in range(30):
    env.reset(index)
    seen.add(worker._unpack(env._entry)["metadata"]["source_dataset"])
    assert env.step(f"<answer>{env.gold_answer}</answer><|end|>").reward == 1.0
    env.reset(index)
    assert env.step("<answer>__import__('os').getpid()</answer><|end|>").reward < 0.1
  assert seen == set(names)
  with pytest.raises(ValueError, match=r"missing 2 required .* received .*'name': 'x'"):
    ReasoningGym(ReasoningGymConfig(task="composite", settings={"datasets": [{"name": "x"}]}))


def test_seeds_give_other_problems() -> None:
  one, two = (ReasoningGym(ReasoningGymConfig(task="products", seed=seed)) for seed in (0, 10_000))
  assert one.reset(0) != two.reset(0)


def test_bad_settings_are_refused() -> None:
  for config, message in (
    (ReasoningGymConfig(task="nonsense"), "task must be one of .*'chain_sum'"),
    (ReasoningGymConfig(task="chain_sum", settings={"terms": 3}), "settings do not fit task 'chain_sum'"),
    (ReasoningGymConfig(task="chain_sum", settings={"min_terms": 0}), "settings do not fit task 'chain_sum'"),
    (ReasoningGymConfig(task="chain_sum", attribute_levels={"x": 1}), "attribute_levels must name some of"),
  ):
    with pytest.raises(ValueError, match=message):
      ReasoningGym(config)
  with pytest.raises(ValueError, match="level must be None or at least 0; received -1"):
    ReasoningGymConfig(task="chain_sum", level=-1)
  with pytest.raises(ValueError, match="success_threshold must be in"):
    ReasoningGymConfig(task="chain_sum", success_threshold=0.0)
  for name in ("score_timeout_s", "make_timeout_s"):
    with pytest.raises(ValueError, match=f"{name} must be positive; received 0"):
      ReasoningGymConfig(task="chain_sum", **{name: 0})  # type: ignore[arg-type]


_FUNCTIONS = ("sin", "cos", "tan", "sec", "csc", "cot", "sinh", "cosh", "tanh", "exp")


def nested(depth: int) -> str:
  text = "x"
  for i in range(depth):
    text = f"{_FUNCTIONS[i % len(_FUNCTIONS)]}({text}+{i})"
  return text


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
  ("task", "answer"),
  [
    ("simple_integration", nested(60)),
    ("polynomial_multiplication", nested(60)),
    ("intermediate_integration", "(x+y+z+C+sin(x)+cos(x)+exp(x))**12*(x+y+z+C+sin(y)+cos(y)+exp(y))**12"),
  ],
)
def test_an_answer_that_is_never_scored_scores_nothing_in_time(task: str, answer: str) -> None:
  env = ReasoningGym(ReasoningGymConfig(task=task, size=5, score_timeout_s=1.0))
  env.reset(0)
  before = env._workers.timeouts  # type: ignore[attr-defined]
  began = time.perf_counter()
  step = env.step(f"<answer>{answer}</answer><|end|>")
  assert time.perf_counter() - began < LONG_S
  assert step.done and not step.truncated and step.reward == 0.0 and not step.info["success"]
  assert "it took more than 1 s" in step.info["scorer_error"]
  assert env._workers.timeouts == before + 1  # type: ignore[attr-defined]
  patient = ReasoningGym(ReasoningGymConfig(task=task, size=5, score_timeout_s=60.0))
  patient.reset(0)
  assert patient.step(f"<answer>{patient.gold_answer}</answer><|end|>").reward == 1.0


def test_many_tags_are_read_in_linear_time() -> None:
  env = ReasoningGym(ReasoningGymConfig(task="chain_sum"))
  env.reset(0)
  began = time.process_time()  # that of other programs does not count
  assert not env.step("<answer>" * 200_000 + "<|end|>").info["answered"]
  env.reset(0)
  assert not env.step("</answer>" * 200_000 + "<|end|>").info["answered"]
  assert time.process_time() - began < 5


@pytest.mark.parametrize(
  "text",
  [
    "<answer>1</answer>", "<answer> 1 </answer> or <answer>\n2\n</answer>", "<answer>1", "1</answer>", "",
    "<answer>1<answer>2</answer>3</answer>", "<answer>1</answer></answer><answer>", "<answer></answer>",
  ],
)  # fmt: skip
def test_the_answer_is_the_one_that_the_package_finds(text: str) -> None:
  from reasoning_gym.utils import extract_answer

  from sao_jax.envs.adapters.reasoning_gym import _last_answer

  assert _last_answer(text) == extract_answer(text)
