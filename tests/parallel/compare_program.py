"""Compares the learner on meshes of 8 virtual devices with the learner off a mesh, in a process of its own.

Arguments: meshes for whole steps, then `--`, then meshes for the policy's loss and gradient alone.
Last line of output: JSON, per mesh the largest absolute differences.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.learner.update import make_update_step
from sao_jax.models import policy_apply, value_apply
from sao_jax.ops import logprobs, masking, policy_losses
from sao_jax.parallel import batch_shardings, constrain_params, jit_step, make_mesh, on_mesh, parse_mesh, place
from tests.parallel import tiny


def largest_difference(a: Any, b: Any) -> float:
  """Over all leaves; NaNs at the same place count as equal."""
  pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  both = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
  assert all((np.isnan(x) == np.isnan(y)).all() for x, y in both)
  return max(float(np.nanmax(np.abs(x - y), initial=0.0)) for x, y in both)


def sharded_step(mesh, state, batch):
  policy, value = (constrain_params(make(tiny.MODEL), mesh) for make in (policy_apply, value_apply))
  step = make_update_step(tiny.LEARNER, policy, value, jit=False)
  return jit_step(step, state, batch, mesh)


def compare_steps(meshes: list[str]) -> dict[str, Any]:
  state, batch = tiny.make_state(), tiny.make_batch()
  count = jnp.asarray(tiny.MICROBATCHES, jnp.int32)
  plain = make_update_step(tiny.LEARNER, policy_apply(tiny.MODEL), value_apply(tiny.MODEL), jit=False)
  new_state, metrics = jax.device_get(jax.jit(plain)(state, batch, count))
  report: dict[str, Any] = {"moved": largest_difference(new_state.policy, state.policy)}
  for text in meshes:
    mesh = make_mesh(parse_mesh(text))
    got_state, got_metrics = sharded_step(mesh, state, batch)(place(state, mesh), batch, count)
    parts = ("policy", "critic", "policy_opt", "critic_opt")
    report[text] = {part: largest_difference(getattr(got_state, part), getattr(new_state, part)) for part in parts}
    report[text]["metrics"] = {key: largest_difference(value, metrics[key]) for key, value in got_metrics.items()}
  return report


def compare_gradients(meshes: list[str]) -> dict[str, Any]:
  params = tiny.make_state().policy
  batch = jax.tree.map(lambda leaf: leaf[0], tiny.make_batch())

  def loss(apply):
    def fn(params, batch):
      output = apply(params, batch.tokens, batch.positions, batch.segment_ids)
      hidden = masking.align_predictions(output.hidden)
      logp, _ = logprobs.chunked_token_logprobs(hidden, output.lm_head, batch.tokens, chunk_size=64)
      per_token = policy_losses.dis_policy_loss(
        logp, batch.behavior_logp, batch.rewards - 0.3, batch.action_mask, eps_low=0.8, eps_high=3.0
      )
      return masking.masked_mean(per_token, batch.action_mask)

    return jax.value_and_grad(fn)

  value, grads = jax.jit(loss(policy_apply(tiny.MODEL)))(params, batch)
  report: dict[str, Any] = {"largest_gradient": largest_difference(grads, jax.tree.map(jnp.zeros_like, grads))}
  for text in meshes:
    mesh = make_mesh(parse_mesh(text))
    fn = jax.jit(on_mesh(loss(constrain_params(policy_apply(tiny.MODEL), mesh)), mesh))
    placed = jax.tree.map(jax.device_put, batch, batch_shardings(batch, mesh))
    got_value, got_grads = fn(place(params, mesh), placed)
    weight = got_grads["layers_0"]["moe"]["up_proj"]
    report[text] = {
      "loss": largest_difference(got_value, value),
      "gradient": largest_difference(got_grads, grads),
      "expert_weight_shard": list(weight.addressable_shards[0].data.shape),
    }
  return report


def main(arguments: list[str]) -> None:
  cut = arguments.index("--")
  print(json.dumps({"steps": compare_steps(arguments[:cut]), "gradients": compare_gradients(arguments[cut + 1 :])}))


if __name__ == "__main__":
  main(sys.argv[1:])
