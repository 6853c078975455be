"""The axes of the device mesh: their names, and which of them split a dimension."""

from __future__ import annotations

import math

from jax.sharding import AbstractMesh, Mesh

AXES = ("data", "fsdp", "tensor", "expert", "context")
"""Every mesh has all five axes, in this order; an axis that is not used has size 1. See `sharding.MeshConfig`."""
ROWS = ("data", "fsdp", "expert")
"""Rows of a batch and slots of a cache: no device computes what another one computes."""
SHARD = ("fsdp", "expert", "context")
"""What parameters are split over for memory's sake alone: every axis along which they would otherwise be replicas, but
`data`, which stays free for slow links."""
EXPERT_SHARD = ("fsdp", "context")
"""The same for stacked experts, whose first dimension takes `expert`."""


def axes_in_use(mesh: Mesh | AbstractMesh, *names: str) -> tuple[str, ...]:
  """Those of the named axes that the mesh has with more than one device; none off a mesh (an empty one)."""
  return tuple(name for name in names if mesh.shape.get(name, 1) > 1)


def axes_for(mesh: Mesh | AbstractMesh, size: int, *names: str) -> tuple[str, ...]:
  """The axes in use if together they divide `size`, else none: the dimension is then held whole by every device.

  >>> mesh = AbstractMesh((2, 4, 1), ("data", "fsdp", "tensor"))
  >>> axes_for(mesh, 16, "data", "fsdp", "tensor"), axes_for(mesh, 12, "data", "fsdp")
  (('data', 'fsdp'), ())
  """
  used = axes_in_use(mesh, *names)
  return used if size % math.prod(mesh.shape[name] for name in used) == 0 else ()


def check_split(mesh: Mesh | AbstractMesh, name: str, size: int, *names: str) -> None:
  """Refuses a size that the named axes together cannot split evenly.

  Raises:
    ValueError: the message has `name`, the axes and the size.
  """
  used = axes_in_use(mesh, *names)
  ways = math.prod(mesh.shape[axis] for axis in used)
  if size % ways:
    split = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in used)
    raise ValueError(f"{name} must be a multiple of {ways}, since {split} splits it; received {size}.")
