"""What layers need to know of the mesh they are traced on: JAX's ambient mesh, if there is one.

The compiler places what a layer leaves open. Layers with kernels of their own (expert layers, attention over long rows)
run under `jax.shard_map` instead, because the compiler cannot look into a kernel, a sort or a loop over blocks.
"""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from sao_jax.parallel.axes import ROWS, axes_for


def ambient_mesh() -> AbstractMesh | None:
  """The mesh of the computation being traced; None off a mesh, on a single device and inside `shard_map`."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or AxisType.Manual in mesh.axis_types:
    return None
  return mesh


def hold(x: jax.Array, *dims: tuple[str, ...]) -> jax.Array:
  """Tells the compiler which axes split each dimension of `x`, where they divide it; off a mesh, `x` as it is.

  Activations are held where one layer ends and the next begins, so that it is the weights that are gathered there.
  """
  mesh = ambient_mesh()
  if mesh is None:
    return x
  spec = PartitionSpec(*(axes_for(mesh, size, *names) or None for size, names in zip(x.shape, dims, strict=True)))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def hold_tokens(x: jax.Array) -> jax.Array:
  """`hold` for activations: `[B, T, D]` by rows and tokens, `[S, D]` by rows."""
  return hold(x, ROWS, ("context",), ()) if x.ndim == 3 else hold(x, ROWS, ())


def hold_residual(x: jax.Array) -> jax.Array:
  """`hold` for what passes between layers, `[B, T, D]`: tokens lie over `tensor`, too, where they divide.

  Inside a layer `tensor` splits heads and widths. What a layer receives and returns would be the same on every device
  along it, and so would all that is kept for the backward pass (sequence parallelism, arXiv 2205.05198).
  """
  mesh = ambient_mesh()
  if mesh is None:
    return x
  split = ("context", "tensor")
  # A layer's own results are held as `hold_tokens` does first: else `tensor` would split tokens inside the layer, too.
  return hold(hold_tokens(x), ROWS, split, ()) if axes_for(mesh, x.shape[1], *split) else hold_tokens(x)
