"""A learner step on meshes of 8 virtual devices against the unsharded step."""

from __future__ import annotations

import pytest

from tests.parallel import processes

STEPS = ["fsdp=2,tensor=2,expert=2", "data=2,context=4"]
GRADIENTS = {  # and the shape of one shard of the gradient of up_proj [E = 8, D = 32, F = 16]
  "data=8": [8, 32, 16],
  "fsdp=8": [8, 4, 16],
  "tensor=8": [8, 32, 2],
  "expert=8": [1, 32, 16],
  "context=8": [8, 4, 16],
}


@pytest.fixture(scope="module")
def report():
  process = processes.start("tests.parallel.compare_program", *STEPS, "--", *GRADIENTS, devices=8)
  return processes.finish(process, 900)


@pytest.mark.timeout(900)
def test_one_step_equals_the_unsharded_step(report):
  """Rows hold between none and 30 action tokens, so that shards differ; see `tiny.make_batch`."""
  steps = report["steps"]
  assert steps.pop("moved") > 1e-3  # the step did something
  assert list(steps) == STEPS
  for mesh, differences in steps.items():
    for name in ("policy", "critic", "policy_opt", "critic_opt"):
      assert differences[name] < 1e-5, (mesh, name, differences[name])
    assert differences["metrics"]["value_loss"] < 1e-5 and differences["metrics"]["policy_loss"] < 1e-5, mesh
    assert max(differences["metrics"].values()) < 1e-4, (mesh, differences["metrics"])


@pytest.mark.timeout(900)
def test_loss_and_gradient_on_each_axis_alone(report):
  gradients = report["gradients"]
  assert gradients.pop("largest_gradient") > 1e-2
  assert list(gradients) == list(GRADIENTS)
  for mesh, differences in gradients.items():
    assert differences["loss"] < 1e-5 and differences["gradient"] < 1e-5, (mesh, differences)
    assert differences["expert_weight_shard"] == GRADIENTS[mesh], mesh
