"""Sharding constraints for layers, which read JAX's ambient mesh while they are traced.

The compiler chooses every sharding that a layer does not constrain. Layers with their own kernels (expert layers,
attention over long rows) run under `jax.shard_map` instead, because the compiler cannot see into a kernel, a sort or a
loop over blocks.
"""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sao_jax.parallel.axes import ROWS, axes_for


def ambient_mesh() -> AbstractMesh | None:
  """The mesh of the computation being traced; None without a mesh, on a single device and inside `shard_map`."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
    return None
  return mesh


def constrain(x: jax.Array, *dims: tuple[str, ...]) -> jax.Array:
  """Constrains each dimension of `x` to be split over the given axes, if they divide it. Without a mesh, returns `x`.

  Activations are constrained between layers, so that the compiler gathers weights, not activations.
  """
  mesh = ambient_mesh()
  if mesh is None:
    return x
  spec = PartitionSpec(*(axes_for(mesh, size, *names) or None for size, names in zip(x.shape, dims, strict=True)))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def constrain_tokens(x: jax.Array) -> jax.Array:
  """`constrain` for activations: `[B, T, D]` by rows and tokens, `[S, D]` by rows."""
  return constrain(x, ROWS, ("context",), ()) if x.ndim == 3 else constrain(x, ROWS, ())


def constrain_residual(x: jax.Array) -> jax.Array:
  """`constrain` for activations between layers, `[B, T, D]`: `tensor` splits tokens, too, if it divides them.

  Inside a layer `tensor` splits heads and widths. Without this constraint, every device along `tensor` would hold the
  same inputs and outputs of a layer, and keep them for the backward pass (sequence parallelism, arXiv 2205.05198).
  """
  mesh = ambient_mesh()
  if mesh is None:
    return x
  split = ("context", "tensor")
  # The layer's own results need `constrain_tokens` first, or `tensor` would split tokens inside the layer, too.
  return constrain(constrain_tokens(x), ROWS, split, ()) if axes_for(mesh, x.shape[1], *split) else constrain_tokens(x)
