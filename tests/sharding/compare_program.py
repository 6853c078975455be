"""Run as a process of its own with 8 virtual devices: one learner step per mesh against the unsharded step.

Arguments: meshes as text. Last line of output: JSON, per mesh the largest absolute differences.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.learner.update import make_update_step
from sao_jax.models import policy_apply, value_apply
from sao_jax.sharding import hold_sharded, jit_step, make_mesh, parse_mesh, place
from tests.sharding import tiny


def largest_difference(a, b) -> float:
  """Over all leaves; NaNs at the same place count as equal."""
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  both = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
  assert all((np.isnan(x) == np.isnan(y)).all() for x, y in both)
  return max(float(np.nanmax(np.abs(x - y), initial=0.0)) for x, y in both)


def plain_step():
  return make_update_step(tiny.LEARNER, policy_apply(tiny.MODEL), value_apply(tiny.MODEL), jit=False)


def sharded_step(mesh, state, batch):
  policy, value = (hold_sharded(make(tiny.MODEL), mesh) for make in (policy_apply, value_apply))
  step = make_update_step(tiny.LEARNER, policy, value, jit=False)
  return jit_step(step, state, batch, mesh)


def main(meshes: list[str]) -> None:
  state, batch = tiny.make_state(), tiny.make_batch()
  count = jnp.asarray(tiny.MICROBATCHES, jnp.int32)
  new_state, metrics = jax.device_get(jax.jit(plain_step())(state, batch, count))
  report = {"moved": largest_difference(new_state.policy, state.policy)}
  for text in meshes:
    mesh = make_mesh(parse_mesh(text))
    placed = place(state, mesh)
    got_state, got_metrics = sharded_step(mesh, state, batch)(placed, batch, count)
    print(text, time.process_time(), file=sys.stderr)
    weight = got_state.policy["layers_0"]["moe"]["up_proj"]
    report[text] = {
      "policy": largest_difference(got_state.policy, new_state.policy),
      "critic": largest_difference(got_state.critic, new_state.critic),
      "policy_opt": largest_difference(got_state.policy_opt, new_state.policy_opt),
      "critic_opt": largest_difference(got_state.critic_opt, new_state.critic_opt),
      "metrics": {k: largest_difference(v, metrics[k]) for k, v in got_metrics.items()},
      "expert_weight_shard": list(weight.addressable_shards[0].data.shape),
    }
  print(json.dumps(report))


if __name__ == "__main__":
  main(sys.argv[1:])
