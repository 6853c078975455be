"""`config_for`: the checkpoint decides the architecture, the free memory decides the sizes."""

from __future__ import annotations

import dataclasses

import jax
import pytest

from sao_jax import models
from sao_jax.parallel import MeshConfig
from sao_jax.training import defaults, memory
from tests.models import tiny


@pytest.fixture(name="checkpoint")
def fixture_checkpoint(tmp_path):
  config = tiny.dense(vocab_size=64)
  models.save_hf(tmp_path, config, tiny.policy_params(config))
  return tmp_path, config


def test_the_architecture_comes_from_the_checkpoint(checkpoint):
  folder, config = checkpoint
  found = defaults.config_for(folder)
  assert dataclasses.replace(found.policy, remat=config.remat) == dataclasses.replace(config, dtype="float32")
  assert found.policy_checkpoint == str(folder)
  assert found.engine.max_len == found.learner.row_length == 512 and found.engine.num_slots == 16
  with pytest.raises(FileNotFoundError):
    defaults.config_for(folder / "nowhere")


def test_less_memory_gives_fewer_slots_then_shorter_rows_and_what_is_given_is_kept(checkpoint, monkeypatch):
  folder, _ = checkpoint
  sizes = {}
  for length in (512, 256):
    for slots in (16, 8):
      config = defaults.config_for(folder, max_len=length, num_slots=slots)
      mesh, _ = defaults.make_run_meshes(config.mesh, config.rollout_mesh)
      sizes[length, slots] = sum(memory.needs(config, mesh, mesh).values()) + memory.activations(config, mesh)
  for (length, slots), need in sizes.items():
    monkeypatch.setattr(memory, "host_memory", lambda total, need=need: int(need / defaults.SHARE) + 1)
    found = defaults.config_for(folder)
    assert (found.engine.max_len, found.engine.num_slots) == (length, slots)
  monkeypatch.setattr(memory, "host_memory", lambda total: 1_000)  # nothing fits
  found = defaults.config_for(folder)
  assert (found.engine.max_len, found.engine.num_slots) == (256, 8)
  found = defaults.config_for(folder, max_len=100, num_slots=2, mesh=MeshConfig(data=1), max_turns=3)
  assert (found.learner.row_length, found.engine.num_slots, found.engine.max_turns) == (100, 2, 3)


def test_parameters_are_split_over_as_few_devices_as_fit(checkpoint, monkeypatch):
  folder, _ = checkpoint
  monkeypatch.setattr(jax, "device_count", lambda: 4)
  assert [(mesh.data, mesh.fsdp) for mesh in defaults._meshes(4)] == [(4, 1), (2, 2), (1, 4)]
  needed = {1: 90, 2: 60, 4: 50}
  monkeypatch.setattr(defaults, "_fits", lambda config, shapes: needed[config.mesh.fsdp] <= 60)
  found = defaults.config_for(folder)
  assert (found.mesh.data, found.mesh.fsdp, found.learner.rows_per_microbatch) == (2, 2, 4)
