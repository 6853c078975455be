"""A run as an object: trained in parts, sampled, evaluated, exported, and found again in its workdir."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys

import chex
import jax
import pytest

import sao_jax
from experiments import export as export_command
from sao_jax import models
from sao_jax.io.console import Console
from sao_jax.io.loggers import CallbackLogger
from sao_jax.io.metrics import read_metrics
from sao_jax.training import Trainer, loop
from sao_jax.training.config import WarmStartConfig
from tests.bare_run import bare, busy_domain
from tests.tiny_domain import tiny_domain


def make_trainer(workdir, loggers=(), **changes):
  config = bare(num_steps=4, eval_episodes=4, **changes)
  domain = dataclasses.replace(busy_domain(), num_train_tasks=4)  # a prompt's first reward teaches nothing
  return Trainer(config, domain, workdir, loggers=loggers, console=Console(file=io.StringIO()))


def test_a_run_in_parts(tmp_path):
  seen = []
  logger = CallbackLogger(lambda step, row, trajectories: seen.append((step, "eval_n" in row, len(trajectories))))
  with make_trainer(tmp_path / "run", loggers=[logger]) as trainer:
    first = jax.device_get(trainer.params)  # before any step
    assert trainer.generate([]) == []
    texts = trainer.generate(["?3", "?7", "?3"])
    assert len(texts) == 3 and all(";" not in text for text in texts)
    assert texts == trainer.generate(["?3", "?7", "?3"]) != trainer.generate(["?3", "?7", "?3"], seed=1)
    assert trainer.train(1)["num_steps"] == 1
    summary = trainer.train(3)
    assert summary["num_steps"] == 3 and summary["n"] == 4
    # Every row of `metrics.jsonl`, with the step's batch or the evaluation's episodes.
    assert seen == [(0, True, 4), (1, False, 16), (1, True, 4), (2, False, 16), (3, False, 16), (3, True, 4)]
    evaluation = trainer.evaluate()
    assert evaluation.n == 4 and evaluation.success_rate == summary["success_after"]
    assert trainer.evaluate(6).n == 6
    last = jax.device_get(trainer.params)
    with pytest.raises(AssertionError):
      chex.assert_trees_all_equal(first, last)
    with pytest.raises(ValueError, match="num_steps must be at least 3"):
      trainer.train(2)
    with pytest.raises(ValueError, match=r"prompts must fit into engine\.max_len = 32 tokens; 1 could not"):
      trainer.generate(["?3", "?" * 40])
    assert trainer.save_hf(tmp_path / "out") == ["config.json", "model.safetensors"]
    chex.assert_trees_all_equal(models.load_hf(tmp_path / "out")[1], last)
  assert [row["step"] for row in read_metrics(tmp_path / "run")[0]] == [1, 2, 3]
  with pytest.raises(RuntimeError, match="the trainer is closed"):
    trainer.train()

  # The command exports the same; another trainer finds the policy of the newest checkpoint and goes on to the end.
  assert export_command.export_run(tmp_path / "run", str(tmp_path / "again"))[0] == 3
  chex.assert_trees_all_equal(models.load_hf(tmp_path / "again")[1], last)
  with make_trainer(tmp_path / "run") as trainer:
    chex.assert_trees_all_equal(jax.device_get(trainer.params), last)
    assert trainer.train()["num_steps"] == 4


def test_a_logger_that_fails_ends_the_run_after_the_steps_checkpoint(tmp_path):
  def fail(step, row, trajectories):
    if step == 2:
      raise RuntimeError("the board is full")

  with (
    make_trainer(tmp_path, loggers=[CallbackLogger(fail)]) as trainer,
    pytest.raises(RuntimeError, match="the board is full"),
  ):
    trainer.train()
  assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]
  with make_trainer(tmp_path) as trainer:
    assert trainer.train()["num_steps"] == 4
  assert [row["step"] for row in read_metrics(tmp_path)[0]] == [1, 2, 3, 4]


def test_the_policy_of_a_finished_warm_start_is_found(tmp_path):
  warm_start = WarmStartConfig(num_steps=2, batch_size=8)
  with make_trainer(tmp_path, warm_start=warm_start) as trainer:
    first = jax.device_get(trainer.params)
    assert trainer.train(run_stages=("warm_start",)) is None
    warm = jax.device_get(trainer.params)
    with pytest.raises(AssertionError):
      chex.assert_trees_all_equal(first, warm)
  with make_trainer(tmp_path, warm_start=warm_start) as trainer:
    chex.assert_trees_all_equal(jax.device_get(trainer.params), warm)


def test_a_learning_rate_may_change_if_that_is_said(tmp_path):
  config = bare(num_steps=1, eval_episodes=0)
  loop.train(config, tiny_domain(), tmp_path)
  rate = dataclasses.replace(config.learner.policy_optimizer, learning_rate=0.5)
  changed = dataclasses.replace(config, num_steps=2, learner=dataclasses.replace(config.learner, policy_optimizer=rate))
  with pytest.raises(ValueError, match=r"learner\.policy_optimizer\.learning_rate: recorded .*, now 0\.5"):
    loop.train(changed, tiny_domain(), tmp_path)
  name = "learner.policy_optimizer.learning_rate"
  allowed = dataclasses.replace(changed, may_change=(name,))
  out = io.StringIO()
  assert loop.train(allowed, tiny_domain(), tmp_path, console=Console(file=out)) is not None
  assert f"changed     {name}: recorded " in out.getvalue()
  assert name in (tmp_path / "changes.jsonl").read_text()
  with pytest.raises(ValueError, match=r"may_change must be out of learner\.alpha.*received 'policy'"):
    dataclasses.replace(config, may_change=("policy",))


def test_a_file_of_the_task_that_changed_is_refused(tmp_path):
  file = tmp_path / "problems.jsonl"
  file.write_text("one")
  domain = dataclasses.replace(tiny_domain(), files=(str(file),))
  loop.train(bare(num_steps=1, eval_episodes=0), domain, tmp_path / "run")
  file.write_text("two")
  with pytest.raises(ValueError, match=r"problems\.jsonl: the contents have changed since the run in .* began"):
    loop.train(bare(num_steps=2, eval_episodes=0), domain, tmp_path / "run")
  file.write_text("one")
  assert loop.train(bare(num_steps=2, eval_episodes=0), domain, tmp_path / "run") is not None


def test_it_is_imported_at_its_first_use():
  code = "import sys, sao_jax, sao_jax.training; assert 'sao_jax.training.trainer' not in sys.modules; sao_jax.Trainer"
  subprocess.run([sys.executable, "-c", code], check=True)
  assert sao_jax.Trainer is Trainer
  for module in (sao_jax, sao_jax.training):
    with pytest.raises(AttributeError, match="has no attribute 'Trainr'"):
      module.Trainr
