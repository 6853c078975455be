"""Run as a process of its own with 8 virtual devices: layers that place themselves, against the same off a mesh.

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

from sao_jax.models.attention import packed_attention
from sao_jax.models.expert_parallel import apply_experts
from sao_jax.models.moe import ExpertKernels, expert_mlp
from sao_jax.sharding import make_mesh, on_mesh, parse_mesh, replicated

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


def compare(fn: Callable[..., jax.Array], mesh_text: str, inputs: tuple, cases: dict[str, Any]) -> dict[str, float]:
  """`fn(*inputs, case)` and its gradients, jitted once on the mesh and once off it."""
  mesh = make_mesh(parse_mesh(mesh_text))

  def both(*args: Any) -> Any:
    y = fn(*args)
    return jnp.sum(jnp.sin(y)), y

  gradient = jax.value_and_grad(both, argnums=tuple(range(len(inputs))), has_aux=True)
  plain, spread = jax.jit(gradient), jax.jit(on_mesh(gradient, mesh))
  report = {}
  for name, case in cases.items():
    wanted = jax.tree.leaves(plain(*inputs, case))
    got = jax.tree.leaves(spread(*jax.device_put((*inputs, case), replicated(mesh))))
    scale = max(float(jnp.max(jnp.abs(x))) for x in wanted)
    differences = (np.abs(np.asarray(x) - np.asarray(y)).max() for x, y in zip(got, wanted, strict=True))
    report[name] = float(max(differences)) / scale
  return report


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
  print(json.dumps(report))


if __name__ == "__main__":
  main()
