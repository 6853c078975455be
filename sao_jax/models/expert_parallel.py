"""Expert layers on a mesh: tokens travel to the devices that hold the experts, and their sums return.

Along the `expert` axis, tokens are all-gathered. Each device runs its E / n experts on the tokens that chose them. A
reduce-scatter then adds the parts and returns each token to its owner. No token is dropped at any imbalance, because no
array is sized by an expected load. `tensor` splits the width of the experts. Weights that are split over `fsdp` and
`context` are gathered first.

On a mesh of a rollout engine's own (`rules.ENGINE_RULES`), `tensor` splits the experts, too, if there are enough of
them, and no weight is gathered. Its largest array has a row for each (token, choice) pair of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Float32, Int32

from sao_jax.parallel.axes import EXPERT_SHARD, ROWS, axes_for, weights_in_place
from sao_jax.parallel.constraints import ambient_mesh

Kernels = TypeVar("Kernels", bound=tuple[jax.Array, ...])
ExpertMlp: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array, Kernels], jax.Array]
"""`(x [N, D], weights [N, k], experts [N, k], kernels) -> [N, D]`. Ids past the last expert, whose weights are 0,
contribute nothing."""


def apply_experts(
  expert_mlp: ExpertMlp[Kernels],
  x: Float[Array, "*tokens D"],
  weights: Float32[Array, "*tokens k"],
  experts: Int32[Array, "*tokens k"],
  kernels: Kernels,
) -> Float[Array, "*tokens D"]:
  """Applies `expert_mlp` to tokens, spread over the ambient mesh if there is one.

  Args:
    expert_mlp: see `ExpertMlp`.
    x: `[B, T, D]` (packed rows) or `[S, D]` (one token per slot).
    weights: weight of each token's k experts.
    experts: their ids.
    kernels: gate `[E, D, F]`, up `[E, D, F]`, down `[E, F, D]`.

  Returns:
    The weighted sums, in x's dtype.
  """
  mesh = ambient_mesh()
  if mesh is None:
    return _flat(expert_mlp, x, weights, experts, kernels)
  if x.ndim == 2:
    return _on_mesh(mesh, expert_mlp, x[:, None], weights[:, None], experts[:, None], kernels)[:, 0]
  return _on_mesh(mesh, expert_mlp, x, weights, experts, kernels)


def _flat(
  expert_mlp: ExpertMlp[Kernels], x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: Kernels
) -> jax.Array:
  flat_x, flat_weights, flat_experts = (array.reshape(-1, array.shape[-1]) for array in (x, weights, experts))
  return expert_mlp(flat_x, flat_weights, flat_experts, kernels).reshape(x.shape)


def _on_mesh(
  mesh: AbstractMesh,
  expert_mlp: ExpertMlp[Kernels],
  x: jax.Array,
  weights: jax.Array,
  experts: jax.Array,
  kernels: Kernels,
) -> jax.Array:
  make: Any = type(kernels)  # a named tuple, of arrays or of PartitionSpecs
  num_experts, dim, width = kernels[0].shape
  rows, context = axes_for(mesh, x.shape[0], *ROWS), axes_for(mesh, x.shape[1], "context")
  split, tensor = axes_for(mesh, num_experts, "expert"), axes_for(mesh, width, "tensor")
  if weights_in_place(mesh) and (whole := axes_for(mesh, num_experts, "expert", "tensor")):
    split, tensor = whole, ()
  shard = axes_for(mesh, dim, *EXPERT_SHARD)
  # If the rows do not divide, every device already holds all tokens, and only the sum remains.
  travel = ("expert",) if "expert" in split and "expert" in rows else ()

  def local(x: jax.Array, weights: jax.Array, experts: jax.Array, kernels: Kernels) -> jax.Array:
    if shard:
      gate, up, down = kernels
      kernels = make(_gather(gate, shard, 1), _gather(up, shard, 1), _gather(down, shard, 2))
    if travel:
      x, weights, experts = (jax.lax.all_gather(a, travel, axis=0, tiled=True) for a in (x, weights, experts))
    if split:
      count = kernels[0].shape[0]
      experts = experts - jax.lax.axis_index(split) * count
      mine = (experts >= 0) & (experts < count)
      weights, experts = jnp.where(mine, weights, 0.0), jnp.where(mine, experts, count)
    y = _flat(expert_mlp, x, weights, experts, kernels)
    others = (*tensor, *(name for name in split if name not in travel))
    y = jax.lax.psum(y, others) if others else y
    return jax.lax.psum_scatter(y, travel, scatter_dimension=0, tiled=True) if travel else y

  tokens = P(rows or None, context or None, None)
  wide, narrow = P(split or None, shard or None, tensor or None), P(split or None, tensor or None, shard or None)
  run = jax.shard_map(
    local, mesh=mesh, in_specs=(tokens, tokens, tokens, make(wide, wide, narrow)), out_specs=tokens,
    check_vma=False,  # kernels inside cannot declare over which axes their results vary
  )  # fmt: skip
  return run(x, weights, experts, kernels)


def _gather(kernel: jax.Array, shard: tuple[str, ...], axis: int) -> jax.Array:
  """Gathers along one mesh axis after the other, inner axis first: on TPUs a joint gather becomes a costlier sum."""
  for name in reversed(shard):
    kernel = jax.lax.all_gather(kernel, name, axis=axis, tiled=True)
  return kernel
