"""A run with low-rank adapters: what trains, what is shared, what its checkpoints hold, and what comes out."""

from __future__ import annotations

import dataclasses
import io
import json
import pathlib
import shutil
import subprocess
import sys

import chex
import jax
import numpy as np
import pytest

from experiments import evaluate
from experiments import export as export_command
from experiments.support import recorded_config
from sao_jax import models
from sao_jax.io.checkpoints import CheckpointError
from sao_jax.io.console import Console
from sao_jax.io.metrics import read_metrics
from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.models import lora
from sao_jax.models.lora import LoraConfig
from sao_jax.training import Trainer, loop, memory, pretrained
from sao_jax.training.components import Components
from sao_jax.training.config import CheckpointConfig, CriticConfig, EnvConfig, WarmStartConfig
from tests.bare_run import bare, busy_domain
from tests.child_environment import fast_compile

ROOT = pathlib.Path(__file__).parents[2]
LORA = LoraConfig(rank=2, alpha=4.0)


def make_config(**changes):
  """A small mixture of experts that runs every stage, on a task in which every action earns something."""
  policy = dataclasses.replace(
    bare().policy, model_type="qwen3_moe", num_layers=2, num_kv_heads=2, num_experts=2, num_experts_per_tok=1,
    moe_intermediate_size=16,
  )  # fmt: skip
  optimizer = OptimizerConfig(learning_rate=1e-2)
  learner = learner_config(
    "sao", eps_low=0.3, eps_high=5.0, row_length=32, rows_per_microbatch=4, min_microbatches=4,
    policy_optimizer=optimizer, critic_optimizer=optimizer,
  )  # fmt: skip
  settings = {
    "algorithm": "sao", "num_steps": 2, "eval_episodes": 4, "policy": policy, "learner": learner, "lora": LORA,
    "warm_start": WarmStartConfig(num_steps=3, batch_size=8),
    "critic": CriticConfig(pretraining_trajectories=32, pretraining_epochs=1),
    "env": EnvConfig(factory="tests.bare_run:busy_domain"), "checkpoint": CheckpointConfig(every_steps=1),
  }  # fmt: skip
  return bare(**{**settings, **changes})


def make_trainer(workdir, **changes):
  return Trainer(make_config(**changes), busy_domain(), workdir, console=Console(file=io.StringIO()))


def names(tree):
  flat = jax.tree_util.tree_flatten_with_path(tree)[0]
  return {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat}


@pytest.fixture(name="run", scope="module")
def fixture_run(tmp_path_factory):
  """A finished run of all stages and two steps: `(workdir, adapters before and after RL, merged policy)`."""
  workdir = tmp_path_factory.mktemp("run")
  with make_trainer(workdir) as trainer:
    base = trainer._open().base
    before = jax.device_get(base)
    buffers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(base)]
    trainer.train(run_stages=("warm_start",))
    warm = jax.device_get(trainer._trained())
    trainer.train()
    # Neither stage nor step donated, moved or changed the frozen parameters.
    assert trainer._open().base is base
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(base)] == buffers
    chex.assert_trees_all_equal(jax.device_get(base), before)
    adapters = jax.device_get(trainer._trained())
    merged = jax.device_get(trainer.params)
  chex.assert_trees_all_close(merged, lora.merge_all(LORA, before, adapters), rtol=1e-6, atol=1e-7)
  return workdir, warm, adapters, merged


def test_adapters_and_value_head_train_and_nothing_else(run):
  workdir, warm, adapters, _ = run
  with Components(make_config(), busy_domain()) as parts:
    state = parts.state_shapes()
    base = jax.eval_shape(lambda: models.init_policy(parts.config.policy, jax.random.key(0)))
    shared = {leaf.rpartition("/")[0] for leaf in names(state.policy)}
    assert shared == {f"layers_{i}/attention/{x}_proj" for i in (0, 1) for x in "qkvo"}
    assert names(state.critic) == names(state.policy) | {"value_head/kernel", "value_head/bias"}
    for optimizer, trained in ((state.policy_opt, state.policy), (state.critic_opt, state.critic)):
      moments = {name.partition("u/")[2] for name in names(optimizer) if "/mu/" in name or "/nu/" in name}
      assert moments == names(trained)
    _, restored = pretrained.restore_policy(workdir, state.policy)
    chex.assert_trees_all_equal(jax.device_get(restored), adapters)
    with pytest.raises(CheckpointError):  # the frozen parameters are not in the checkpoint
      pretrained.restore_policy(workdir, base)
  for moved, kept in zip(jax.tree.leaves(adapters), jax.tree.leaves(warm), strict=True):
    assert np.any(moved != kept) and np.any(kept)


def test_a_reference_policy_is_the_adapters_at_the_start(tmp_path):
  learner = dataclasses.replace(make_config().learner, kl_coef=0.1)
  stages = {"warm_start": WarmStartConfig(), "critic": CriticConfig()}
  with make_trainer(tmp_path, learner=learner, **stages) as trainer:
    state = trainer._open().state_shapes()
    assert names(state.reference) == names(state.policy)
    trainer.train()
  rows, _ = read_metrics(tmp_path)
  assert rows[0]["reference_kl"] < 1e-9 < rows[1]["reference_kl"]


def test_the_engine_samples_from_the_learner_s_policy(run):
  rows, _ = read_metrics(run[0])
  assert len(rows) == 2
  for row in rows:
    assert abs(row["ratio_mean"] - 1) < 1e-5 and row["approx_kl"] < 1e-6 and row["logprob_error"] < 1e-5
    assert np.isfinite(row["value_loss"]) and row["critic_grad_norm"] > 0 and row["policy_grad_norm"] > 0


def test_versions_of_the_engine_s_weights_share_what_has_no_adapters(run):
  _, warm, adapters, merged = run
  with Components(make_config(), busy_domain()) as parts:
    first, second = (parts.for_engine(parts.placement.put(x)) for x in (warm, adapters))
    chex.assert_trees_all_close(jax.device_get(second), merged, rtol=1e-6, atol=1e-7)
    embedding = parts.base["embed"]["embedding"]
    assert first["embed"]["embedding"] is second["embed"]["embedding"] is embedding
    assert first["layers_0"]["moe"]["up_proj"] is parts.base["layers_0"]["moe"]["up_proj"]
    one, two = (x["layers_0"]["attention"]["q_proj"]["kernel"] for x in (first, second))
    assert one.unsafe_buffer_pointer() != two.unsafe_buffer_pointer() and np.any(one != two)
    workers = parts.for_workers(parts.placement.put(adapters))
    chex.assert_trees_all_close(jax.device_get(workers), merged, rtol=1e-6, atol=1e-7)
    assert workers["embed"]["embedding"] is not embedding


def test_a_resumed_run_ends_with_the_same_adapters(run, tmp_path):
  workdir, _, adapters, _ = run
  shutil.copytree(workdir, tmp_path / "run")
  shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
  with make_trainer(tmp_path / "run") as trainer:
    trainer.train()
    chex.assert_trees_all_equal(jax.device_get(trainer._trained()), adapters)


def test_it_is_evaluated_and_exported(run, tmp_path, capsys):
  workdir, _, _, merged = run
  evaluate.evaluate_run(workdir, 4, None)
  assert "checkpoint 2: success" in capsys.readouterr().out
  files = ["config.json", "model.safetensors", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"]
  assert export_command.export_run(workdir, str(tmp_path / "out")) == (2, files, None)
  chex.assert_trees_all_close(jax.device_get(models.load_hf(tmp_path / "out")[1]), merged, rtol=1e-6, atol=1e-7)
  settings = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
  assert settings["r"] == 2 and settings["lora_alpha"] == 4 and len(settings["target_modules"]) == 8
  with make_trainer(workdir) as trainer:
    assert trainer.save_hf(tmp_path / "again") == files
    with pytest.raises(AssertionError):
      chex.assert_trees_all_equal(trainer._open().base, trainer.params)


def test_another_run_starts_from_its_merged_policy(run):
  workdir, _, _, merged = run
  path = str(workdir / "checkpoints" / "2")
  plain = make_config(lora=LoraConfig(), policy_checkpoint=str(workdir))
  with Components(plain, busy_domain()) as parts:
    chex.assert_trees_all_close(jax.device_get(parts.init_policy()), merged, rtol=1e-6, atol=1e-7)
  with Components(make_config(policy_checkpoint=path), busy_domain()) as parts:
    chex.assert_trees_all_close(jax.device_get(parts.base), merged, rtol=1e-6, atol=1e-7)
  # Its newest checkpoint may be replaced, and checkpoints of the new run would not hold the parameters.
  with pytest.raises(ValueError, match=r"policy_checkpoint must name one checkpoint of the run, WORKDIR/checkpoints/"):
    Components(make_config(policy_checkpoint=str(workdir)), busy_domain())


def test_the_memory_that_is_counted_is_what_is_allocated():
  config = make_config()
  with Components(config, busy_domain()) as parts:
    policy = parts.init_policy()
    state = parts.init_state(policy, parts.init_critic(policy))
    found = memory.needs(config, parts.placement.mesh, parts.placement.engine_meshes[0])

    def size(tree):
      return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    assert found["policy"] == size((parts.base, state.policy, state.policy_opt))
    assert found["critic"] == size((state.critic, state.critic_opt))
    assert found["gradients"] == size(state.critic)
    assert found["weights of the engine"] == 2 * size(lora.merge(LORA, parts.base, policy))


def test_a_bad_batch_is_diagnosed(tmp_path, monkeypatch):
  original = Components.init_critic
  monkeypatch.setattr(Components, "init_critic", lambda *args: jax.tree.map(lambda x: x * np.nan, original(*args)))
  config = make_config(num_steps=1, eval_episodes=0, warm_start=WarmStartConfig(), critic=CriticConfig())
  loop.train(config, busy_domain(), tmp_path, console=Console(quiet=True))
  (report,) = (tmp_path / "bad_batches").glob("*.json")
  assert "value" in json.loads(report.read_text())["nonfinite"]


PRESET = """
from experiments.support import config_flags
from sao_jax.models import LoraConfig
from tests.training.adapted_run_test import make_config

def get_config():
  return config_flags.to_config_dict(make_config(schedule="async", lora=LoraConfig()))
"""


@pytest.mark.timeout(600)
def test_the_command_trains_adapters(tmp_path):
  """In the asynchronous schedule, with the engine in another thread."""
  (tmp_path / "preset.py").write_text(PRESET)
  settings = ("eval_episodes=0", "warm_start.num_steps=0", "critic.pretraining_trajectories=0")
  done = subprocess.run(
    [sys.executable, "-m", "experiments.train", f"--config={tmp_path}/preset.py", f"--workdir={tmp_path}/run",
     "--config.lora.rank=2", "--config.lora.alpha=4", "--config.lora.modules=.*/[qv]_proj",
     *(f"--config.{setting}" for setting in settings)],
    capture_output=True, text=True, cwd=ROOT, timeout=500, env=fast_compile(PYTHONPATH=str(ROOT)),
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-3_000:]
  rows, _ = read_metrics(tmp_path / "run")
  assert [row["step"] for row in rows] == [1, 2] and all(row["logprob_error"] < 0.25 for row in rows)
  config = recorded_config.read(tmp_path / "run")
  assert config.lora == LoraConfig(rank=2, alpha=4.0, modules=".*/[qv]_proj")
  shapes = jax.eval_shape(lambda: lora.init_adapters(config.policy, config.lora, jax.random.key(0)))
  _, adapters = pretrained.restore_policy(tmp_path / "run", shapes)
  assert len(names(adapters)) == 2 * 2 * 2 and all(np.any(leaf) for leaf in jax.tree.leaves(adapters))


def test_lagged_weights_are_refused():
  with pytest.raises(ValueError, match=r"lag must be 0 with lora\.rank; received 2"):
    make_config(schedule="lagged", lag=2)


def test_modules_without_a_match_are_refused_before_anything_is_allocated():
  with pytest.raises(ValueError, match=r"lora\.modules = 'q_proj' matches no module"):
    Components(make_config(lora=LoraConfig(rank=2, modules="q_proj")), busy_domain())
