"""Axes of the device mesh: their names, and the axes that split a dimension."""

from __future__ import annotations

import math

from jax.sharding import AbstractMesh, Mesh

AXES = ("data", "fsdp", "tensor", "expert", "context")
"""Every mesh of a learner has all five axes, in this order; an unused axis has size 1. See `mesh.MeshConfig`."""
ENGINE_AXES = ("data", "tensor", "expert")
"""Axes of a mesh of a rollout engine's own, in this order. See `mesh.EngineMeshConfig`."""
ROWS = ("data", "fsdp", "expert")
"""Axes that split the rows of a batch and the slots of a cache."""
SHARD = ("fsdp", "expert", "context")
"""Axes that split parameters only to save memory. Without them, parameters would be replicated along these axes. `data`
is not among them, so that it can run over slow links."""
EXPERT_SHARD = ("fsdp", "context")
"""`SHARD` for stacked experts, whose first dimension is split over `expert`."""


def weights_in_place(mesh: Mesh | AbstractMesh) -> bool:
  """Whether this is a mesh of a rollout engine's own, on which no weight is gathered (`rules.ENGINE_RULES`)."""
  return mesh.axis_names == ENGINE_AXES


def axes_in_use(mesh: Mesh | AbstractMesh, *names: str) -> tuple[str, ...]:
  """The named axes along which the mesh has more than one device; none for an empty mesh."""
  return tuple(name for name in names if mesh.shape.get(name, 1) > 1)


def axes_for(mesh: Mesh | AbstractMesh, size: int, *names: str) -> tuple[str, ...]:
  """The axes in use if together they divide `size`; otherwise none, and the dimension is not split.

  >>> mesh = AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
  >>> axes_for(mesh, 16, "data", "fsdp", "tensor"), axes_for(mesh, 12, "data", "fsdp")
  (('data', 'fsdp'), ())
  """
  used = axes_in_use(mesh, *names)
  return used if size % math.prod(mesh.shape[name] for name in used) == 0 else ()


def check_split(mesh: Mesh | AbstractMesh, name: str, size: int, *names: str) -> None:
  """Checks that the named axes together split a size evenly.

  Raises:
    ValueError: they do not; the message gives `name`, the axes and the size.
  """
  used = axes_in_use(mesh, *names)
  ways = math.prod(mesh.shape[axis] for axis in used)
  if size % ways:
    split = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in used)
    raise ValueError(f"{name} must be a multiple of {ways}, since {split} splits it; received {size}.")
