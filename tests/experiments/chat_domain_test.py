"""Tasks for checkpoints: a small real tokenizer with a template, real problems, real grading."""

from __future__ import annotations

import json

import pytest
import tokenizers

from experiments.domains import chat

TEMPLATE = (
  "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
  "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
  "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  directory = tmp_path_factory.mktemp("checkpoint")
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  backend = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = tokenizers.decoders.ByteLevel()
  backend.add_special_tokens(["<end>", "<user>", "<assistant>", "<system>", "<tool>"])
  backend.save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "chat_template": TEMPLATE}))
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
  assert ids.count(domain.tokenizer.stop_ids[0]) == 1  # what the tool printed is text
  env.close()
  domain.close()


def write(path, *rows):
  path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
  return str(path)


def test_math(checkpoint, tmp_path):
  pytest.importorskip("math_verify")
  problems = [{"problem": "Half of one?", "answer": "$\\frac{1}{2}$"}, {"problem": "6 * 7?", "answer": 42}]
  train = write(tmp_path / "train.jsonl", *problems)
  held_out = write(tmp_path / "test.jsonl", problems[1])
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
    (['{"problem": "x", "answer": "1"}', "{"], "line 2: a JSON object with 'problem' and 'answer' is wanted"),
    (['{"problem": "x"}'], "line 1: a JSON object"),
    (["[1]"], "line 1: a JSON object"),
    (['{"problem": 1, "answer": true}'], "received 1 and True"),
  ],
)
def test_bad_problem_files(checkpoint, tmp_path, rows, message):
  path = write(tmp_path / "x.jsonl", *rows)
  with pytest.raises(ValueError, match=message):
    chat.math(checkpoint=checkpoint, train=path, held_out=path)


def test_bad_options(checkpoint):
  with pytest.raises(ValueError, match="must hold 'task'"):
    chat.reasoning_gym(checkpoint=checkpoint)
  with pytest.raises(ValueError, match="answer must be one of text, tags, number; received 'guess'"):
    chat.reasoning_gym(checkpoint=checkpoint, task="chain_sum", answer="guess")
  with pytest.raises(ValueError, match="unknown options of ReasoningGymConfig: tasks"):
    chat.reasoning_gym(checkpoint=checkpoint, task="chain_sum", tasks=1)
