"""The scripts of `examples/`: short, and each runs."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import runpy

import pytest

from examples import environment, losses, train
from sao_jax import models
from sao_jax.training.config import RunConfig
from tests.experiments.chat_checkpoint import write_tokenizer
from tests.models import tiny

ROOT = pathlib.Path(__file__).parents[1]
CODE = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_each_is_a_page_and_is_named_in_the_readme():
  paths = sorted((ROOT / "examples").glob("*.py"))
  assert [path.stem for path in paths] == ["environment", "losses", "train"]
  for path in paths:
    assert len(path.read_text().splitlines()) <= 60
    assert f"(examples/{path.name})" in (ROOT / "README.md").read_text()


def test_the_losses_train_a_policy():
  assert losses.main(num_steps=100) > 0.4  # 0.1 by chance


def test_the_scripted_policy_solves_the_environment(capsys: pytest.CaptureFixture[str]):
  runpy.run_path(environment.__file__, run_name="__main__")
  rows = capsys.readouterr().out.splitlines()
  assert len(rows) == 9 and all(row.startswith("1.0 <|user|>guess<|assistant|>") for row in rows)


def test_the_environment_refuses_what_is_no_guess():
  env = environment.Guess()
  env.reset(4)
  assert "?" in env.step("anything").observation
  assert [env.step(environment.base.answer("1")).done for _ in range(3)] == [False, False, True]


@pytest.mark.timeout(600)
def test_training_from_python(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
  monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
  summary = train.main(num_steps=2)
  assert summary["num_steps"] == 2 and "success_after" in summary
  assert re.search(r"success [01]\.\d+ -> [01]\.\d+; metrics are in ", capsys.readouterr().out)


def test_the_code_of_the_readme(capsys: pytest.CaptureFixture[str]):
  exec(CODE[1], {})
  assert capsys.readouterr().out.startswith("[0.74 0.   0.6 ] 0.40")


@pytest.mark.timeout(600)
def test_the_trainer_of_the_readme(
  tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
  """As it stands there, but for two steps with small batches and rows."""
  pytest.importorskip("math_verify")
  monkeypatch.chdir(tmp_path)
  model = tiny.dense(vocab_size=264)
  models.save_hf("DIR", model, tiny.policy_params(model))
  write_tokenizer(pathlib.Path("DIR"))
  rows = [{"problem": f"What is {i} + 4?", "answer": str(i + 4)} for i in range(20)]
  pathlib.Path("PROBLEMS.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  small = 'train="PROBLEMS.jsonl", max_len=112, num_slots=8'
  code = CODE[0].replace('train="PROBLEMS.jsonl"', small).replace("train(100)", "train(1)")
  code = code.replace("\nwith ", '\nfrom tests import examples_test\nconfig = examples_test.shrunk(config)\nwith ')
  exec(code, {})
  assert re.search(r"\n\[.*\] 0\.0\n$", capsys.readouterr().out, re.DOTALL)
  assert {path.name for path in pathlib.Path("TRAINED").iterdir()} == {
    "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
  }  # fmt: skip
  assert models.load_hf("TRAINED")[0] == model


def shrunk(config: RunConfig) -> RunConfig:
  critic = dataclasses.replace(config.critic, pretraining_trajectories=8)
  engine = dataclasses.replace(config.engine, max_action_tokens=8)
  return dataclasses.replace(config, batch_size=8, eval_episodes=4, critic=critic, engine=engine)
