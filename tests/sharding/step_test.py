"""A learner step on meshes of 8 virtual devices against the unsharded step."""

from __future__ import annotations

import pytest

from tests.sharding import processes

MESHES = {  # and the shape of one shard of up_proj [E = 8, D = 32, F = 16]
  "data=8": [8, 32, 16],
  "fsdp=8": [8, 4, 16],
  "tensor=8": [8, 32, 2],
  "expert=8": [1, 32, 16],
  "context=8": [8, 4, 16],
  "fsdp=2,tensor=2,expert=2": [4, 16, 8],
}


@pytest.mark.timeout(600)
def test_one_step_equals_the_unsharded_step_on_every_mesh():
  """Rows hold between none and 30 action tokens, so that shards differ; see `tiny.make_batch`."""
  report = processes.finish(processes.start("tests.sharding.compare_program", *MESHES, devices=8), 570)
  assert report.pop("moved") > 1e-3  # the step did something
  assert report.keys() == MESHES.keys()
  for mesh, shard in MESHES.items():
    differences = report[mesh]
    assert differences["expert_weight_shard"] == shard, mesh
    for name in ("policy", "critic", "policy_opt", "critic_opt"):
      assert differences[name] < 1e-5, (mesh, name, differences[name])
    assert differences["metrics"]["value_loss"] < 1e-5 and differences["metrics"]["policy_loss"] < 1e-5, mesh
    assert max(differences["metrics"].values()) < 1e-4, (mesh, differences["metrics"])
