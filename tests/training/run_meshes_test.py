"""Which devices learn and which generate: divisions, and sizes that are refused."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest
from jax.sharding import AbstractMesh

from sao_jax.models import init_policy
from sao_jax.parallel import EngineMeshConfig, MeshConfig, RolloutMeshConfig, parse_engine_mesh
from sao_jax.parallel.axes import ENGINE_AXES
from sao_jax.training.run_meshes import check_engine_mesh, make_run_meshes, split_devices
from tests.parallel import loop_program, tiny


def split(**sizes):
  return RolloutMeshConfig(placement="split", **sizes)


@pytest.mark.parametrize(
  ("learner", "rollout", "count", "expected"),
  [
    (MeshConfig(data=4), split(data=4), 8, (4, 4)),
    (MeshConfig(data=4), split(num_engines=2, data=2), 8, (4, 2)),
    (MeshConfig(data=4), split(num_engines=2, tensor=2), 8, (4, 2)),
    (MeshConfig(data=-1), split(data=1, num_engines=3), 8, (5, 1)),
    (MeshConfig(data=-1, fsdp=4), split(data=1, tensor=4), 12, (8, 4)),
    (MeshConfig(data=6), split(tensor=3, num_engines=2), 12, (6, 3)),
    (MeshConfig(data=2), split(data=1), 8, (2, 1)),
  ],
)
def test_devices_are_divided(learner, rollout, count, expected):
  assert split_devices(learner, rollout, count) == expected


@pytest.mark.parametrize(
  ("learner", "rollout", "message"),
  [
    (MeshConfig(data=-1), split(), "only one of them may have an axis of -1"),
    (MeshConfig(data=4), split(num_engines=3), "num_engines must be one of [1, 2, 4], so that engines with tensor=1, "),
    (MeshConfig(data=4), split(num_engines=4, tensor=2), "num_engines must be one of [1, 2], so that engines with te"),
    (MeshConfig(data=4), split(data=8), "there are 8. Allowed: up to 0 engines of 8 devices, or engines of up to 4"),
    (MeshConfig(data=-1), split(data=4, num_engines=2), "received 2 engines of 4 devices. Allowed: at most 3 devices"),
    (MeshConfig(data=-1, fsdp=4), split(data=2), "the product of the sizes must divide the number of devices, 6"),
  ],
)
def test_sizes_that_do_not_divide_are_refused(learner, rollout, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    split_devices(learner, rollout, 8)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("tensor=3", r"rollout_mesh.tensor must be one of \[1, 2\]; received 3: .*must be a multiple of 3"),
    ("data=2,tensor=6", r"rollout_mesh.tensor must be one of \[1, 2, 4, 8\]; received 6"),
    ("expert=5,data=2", r"rollout_mesh.expert must be one of \[1, 2, 4, 8\]; received 5"),
    ("data=5,tensor=2,expert=2", None),
  ],
)
def test_a_models_sizes_limit_the_axes(text, message):
  mesh = parse_engine_mesh(text)
  mesh = AbstractMesh(tuple(mesh.axes().values()), ENGINE_AXES)
  shapes = jax.eval_shape(lambda: init_policy(tiny.MODEL, jax.random.key(0)))
  if message is None:
    check_engine_mesh("rollout_mesh", shapes, mesh)
    return
  with pytest.raises(ValueError, match=message):
    check_engine_mesh("rollout_mesh", shapes, mesh)


def test_a_parameter_without_a_rule_is_named():
  shapes = {"mystery": {"weights": jax.ShapeDtypeStruct((4, 4), "float32")}}
  with pytest.raises(ValueError, match=r"^no sharding rule matches 'mystery/weights' of shape \(4, 4\)"):
    check_engine_mesh("rollout_mesh", shapes, AbstractMesh((1, 2, 1), ENGINE_AXES))


def test_settings_are_checked():
  with pytest.raises(ValueError, match="num_engines must be 1 with placement='colocated'; received 2"):
    RolloutMeshConfig(num_engines=2)
  with pytest.raises(ValueError, match="placement must be 'colocated' or 'split'; received 'shared'"):
    RolloutMeshConfig(placement="shared")
  with pytest.raises(ValueError, match=r"EngineMeshConfig.tensor must be an int >= 1, or -1"):
    EngineMeshConfig(tensor=0)
  config = loop_program.make_config("data=1", "async", 1)
  remote = dataclasses.replace(config.remote, url="http://localhost:1", weights_dir="weights")
  with pytest.raises(ValueError, match=r"rollout_mesh must be RolloutMeshConfig\(\) with cluster.num_engines or a re"):
    dataclasses.replace(config, remote=remote, rollout_mesh=split(data=1))


def test_by_default_the_engine_uses_the_learners_mesh():
  mesh, engines = make_run_meshes(MeshConfig(data=1), RolloutMeshConfig())
  assert engines == [mesh]
  with pytest.raises(ValueError, match=r"it covers the learner's devices.*must be 1; received 2"):
    make_run_meshes(MeshConfig(data=1), RolloutMeshConfig(data=1, tensor=2))
