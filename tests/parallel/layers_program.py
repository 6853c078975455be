"""Compares layers on meshes of 8 virtual devices with the same layers off a mesh, in a process of its own.

Last line of output: JSON, per case the largest difference of outputs and gradients relative to the largest number.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.learner import scoring
from sao_jax.models.attention import packed_attention
from sao_jax.models.expert_parallel import apply_experts
from sao_jax.models.moe import ExpertKernels, expert_mlp
from sao_jax.ops import masking
from sao_jax.parallel import make_mesh, on_mesh, parse_mesh, replicated
from sao_jax.parallel.constraints import constrain_residual
from sao_jax.types import PolicyOutput
from tests.parallel import tiny

ROWS, LENGTH, EXPERTS, DIM, WIDTH, CHOICES = 8, 8, 8, 16, 12, 2


def routings() -> dict[str, np.ndarray]:
  """Expert ids `[B, T, k]`: from even to as uneven as can be."""
  rng = np.random.default_rng(0)
  shape = (ROWS, LENGTH, 1)
  return {
    "even": np.stack([rng.permutation(EXPERTS)[:CHOICES] for _ in range(ROWS * LENGTH)]).reshape(ROWS, LENGTH, CHOICES),
    "every token on the first two": np.tile(np.array([0, 1]), shape),
    "every token on the last two": np.tile(np.array([7, 6]), shape),
    "one expert without a token": np.tile(np.array([2, 5]), shape) + rng.integers(0, 2, shape),
  }


def random(*shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)


def compare(
  fn: Callable[..., jax.Array],
  mesh_text: str,
  inputs: tuple,
  cases: dict[str, Any],
  oracle: Callable[..., jax.Array] | None = None,
) -> dict[str, float]:
  """`fn(*inputs, case)` and its gradients, jitted once on the mesh, against it (or an oracle) off the mesh."""
  mesh = make_mesh(parse_mesh(mesh_text))

  def gradient(fn: Callable[..., jax.Array]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
      y = fn(*args)
      return jnp.sum(jnp.sin(y)), y

    return jax.value_and_grad(both, argnums=tuple(range(len(inputs))), has_aux=True)

  plain, spread = jax.jit(gradient(oracle or fn)), jax.jit(on_mesh(gradient(fn), mesh))
  report = {}
  for name, case in cases.items():
    wanted = jax.tree.leaves(plain(*inputs, case))
    got = jax.tree.leaves(spread(*jax.device_put((*inputs, case), replicated(mesh))))
    scale = max(float(jnp.max(jnp.abs(x))) for x in wanted) or 1.0
    pairs = zip(got, wanted, strict=True)
    differences = (np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32)).max() for x, y in pairs)
    report[name] = float(max(differences)) / scale
  return report


def action_masks() -> dict[str, np.ndarray]:
  """`[B, T]`: from none on any device to all on one."""
  none = np.zeros((ROWS, LENGTH), bool)
  one_device, one_token, uneven = none.copy(), none.copy(), none.copy()
  one_device[:4, LENGTH // 2 :] = one_token[5, 1] = True
  uneven[1::2, :3] = uneven[:2] = uneven[-1, -1] = True
  return {"none": none, "all of one device": one_device, "one token": one_token, "uneven": uneven}


def log_probs(hidden: jax.Array, head: jax.Array, mask: jax.Array) -> jax.Array:
  """Log-probs and entropies of action tokens as the learner computes them, `[2, B, T]`; 0 elsewhere."""
  batch = tiny.make_batch()
  batch = batch.replace(tokens=jnp.asarray(batch.tokens[0, :, :LENGTH] % head.shape[1]), action_mask=mask)
  return jnp.stack(scoring.action_logprobs(PolicyOutput(hidden, head), batch, temperature=0.7, chunk_size=5))


def full_log_probs(hidden: jax.Array, head: jax.Array, mask: jax.Array) -> jax.Array:
  """The same from the logits of all tokens."""
  tokens = tiny.make_batch().tokens[0, :, :LENGTH] % head.shape[1]
  every = jax.nn.log_softmax(masking.align_predictions(hidden) @ head / 0.7)
  chosen = jnp.take_along_axis(every, tokens[..., None], axis=-1)[..., 0]
  return jnp.where(mask, jnp.stack([chosen, -jnp.sum(jnp.exp(every) * every, axis=-1)]), 0.0)


def residual_shards() -> dict[int, tuple[int, ...]]:
  """By length of a row: what each of 2 x 2 x 2 devices holds of activations between layers."""
  mesh = make_mesh(parse_mesh("fsdp=2,tensor=2,context=2"))
  inputs = {length: jax.device_put(random(ROWS, length, DIM), replicated(mesh)) for length in (8, 6, 5)}
  held = {length: jax.jit(on_mesh(constrain_residual, mesh))(x) for length, x in inputs.items()}
  return {length: x.sharding.shard_shape(x.shape) for length, x in held.items()}


def main() -> None:
  kernels = ExpertKernels(random(EXPERTS, DIM, WIDTH), random(EXPERTS, DIM, WIDTH), random(EXPERTS, WIDTH, DIM))
  weights = jax.nn.softmax(random(ROWS, LENGTH, CHOICES))
  cases = {name: jnp.asarray(ids, jnp.int32) for name, ids in routings().items()}

  def experts(x: jax.Array, weights: jax.Array, kernels: ExpertKernels, ids: jax.Array) -> jax.Array:
    return apply_experts(functools.partial(expert_mlp, impl="blocks"), x, weights, ids, kernels)

  inputs = (random(ROWS, LENGTH, DIM), weights, kernels)
  report = {"experts": compare(experts, "expert=4,context=2", inputs, cases)}
  # Five rows cannot be split over the mesh: every device then holds all tokens.
  uneven = (inputs[0][:5], weights[:5], kernels)
  report["experts, rows whole"] = compare(experts, "expert=4,tensor=2", uneven, {"even": cases["even"][:5]})

  segments = jnp.asarray(np.repeat([[1, 1, 2, 2, 2, 3, 3, 3], [1, 1, 1, 1, 1, 1, 2, 2]], 4, axis=1), jnp.int32)
  attention = functools.partial(packed_attention, scale=0.3, impl="chunked")
  heads = (random(2, 32, 4, 8), random(2, 32, 2, 8), random(2, 32, 2, 8))
  report["attention"] = compare(attention, "fsdp=2,tensor=2,context=2", heads, {"chunked": segments})

  cases = {name: jnp.asarray(mask) for name, mask in action_masks().items()}
  for mesh in ("fsdp=2,tensor=2,context=2", "context=8"):
    report[f"log-probs, {mesh}"] = compare(
      log_probs, mesh, (random(ROWS, LENGTH, DIM), random(DIM, EXPERTS)), cases, full_log_probs
    )
  halves = (random(ROWS, LENGTH, DIM).astype(jnp.bfloat16), random(DIM, EXPERTS).astype(jnp.bfloat16))
  report["log-probs, bfloat16"] = compare(log_probs, "fsdp=2,tensor=2,context=2", halves, {"uneven": cases["uneven"]})
  print(json.dumps({"layers": report, "residual": residual_shards()}))


if __name__ == "__main__":
  main()
