"""The task of repositories, through the factory and a chat template."""

from __future__ import annotations

import json

import pytest

from experiments.tasks import repository
from tests.envs.coding.instances import SPECS, make_instance
from tests.experiments.chat_checkpoint import write_tokenizer


def test_an_agent_solves_an_instance_with_the_tools(tmp_path):
  write_tokenizer(tmp_path)
  rows = [make_instance(spec, tmp_path / "folders") for spec in SPECS[:2]]
  path = tmp_path / "instances.jsonl"
  path.write_text("\n".join(map(json.dumps, rows)))
  options = {"checkpoint": str(tmp_path), "train": str(path), "folders": str(tmp_path / "folders")}
  domain = repository.make_domain(**options, tool={"backend": "subprocess"}, max_turns=5)
  assert (domain.num_train_tasks, domain.num_eval_tasks, domain.files) == (1, 1, (str(path),))
  env, other = domain.make_env("train"), domain.make_env("eval")
  prompt = env.reset(0)
  assert "`encode` in mdurl/_encode.py is wrong." in prompt and "edit_file" in prompt and "test_bug" not in prompt
  assert "check_type" in other.reset(0)

  def call(name, **arguments):
    step = env.step(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call><end>")
    assert not step.done
    return step.observation

  assert "while i <= l:" in call("search", text="while i")
  assert "error: edit_file takes" in call("edit_file", path="x")
  assert "edited" in call("edit_file", path="mdurl/_encode.py", old="while i <= l:", new="while i < l:")
  step = env.step("Done.<end>")
  assert step.done and step.reward == 1.0 and step.info["success"]
  assert other.step("Done.<end>").reward == 0.0
  with pytest.raises(ValueError, match="either folders or images must be given"):
    repository.make_domain(**{**options, "folders": None})
  with pytest.raises(ValueError, match="there is no folder"):
    repository.make_domain(**{**options, "folders": str(path)})
  with pytest.raises(ValueError, match="packages of the tool must hold 'pytest'"):
    repository.make_domain(**options, tool={"packages": ("numpy",)})
  domain.close()


def test_images_hold_the_repository_in_a_folder(tmp_path):
  write_tokenizer(tmp_path)
  rows = [make_instance(spec, tmp_path / "made") for spec in SPECS[:2]]
  for row in rows:
    (tmp_path / "images" / row["instance_id"]).mkdir(parents=True)
    (tmp_path / "made" / row["instance_id"]).rename(tmp_path / "images" / row["instance_id"] / "src")
  path = tmp_path / "instances.jsonl"
  path.write_text("\n".join(map(json.dumps, rows)))
  options = {"checkpoint": str(tmp_path), "train": str(path), "images": str(tmp_path / "images")}
  assert "is wrong" in repository.make_domain(**options, image={"folder": "/src"}).make_env("eval").reset(0)
  with pytest.raises(ValueError, match=r"there is no folder '.*/mdurl-1/testbed'"):
    repository.make_domain(**options)
