"""Device meshes of learner and rollout engines: named axes, and the number of devices along each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sao_jax.parallel.axes import AXES, ENGINE_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Axes:
  """Number of devices along each of `AXIS_NAMES`, which are the names of fields."""

  AXIS_NAMES: ClassVar[tuple[str, ...]] = ()

  def __post_init__(self) -> None:
    name = type(self).__name__
    for axis, size in self.axes().items():
      if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ValueError(f"{name}.{axis} must be an int >= 1, or -1 (all remaining devices); received {size!r}.")
    rest = [axis for axis, size in self.axes().items() if size == -1]
    if len(rest) > 1:
      raise ValueError(f"{name}: only one axis may be -1; received -1 for {', '.join(rest)}.")

  def axes(self) -> dict[str, int]:
    """Sizes by name, in the order of the mesh's axes; -1 is not replaced."""
    return {name: getattr(self, name) for name in self.AXIS_NAMES}

  def num_devices(self) -> int | None:
    """Product of the sizes; None if one is -1."""
    sizes = self.axes().values()
    return None if -1 in sizes else math.prod(sizes)

  def sizes(self, num_devices: int) -> tuple[int, ...]:
    """Sizes in the order of the mesh's axes, with -1 replaced.

    >>> MeshConfig(data=-1, fsdp=2, tensor=2).sizes(8)
    (2, 2, 2, 1, 1)

    Raises:
      ValueError: the axes do not multiply to `num_devices`.
    """
    given = self.axes()
    known = math.prod(size for size in given.values() if size != -1)
    filled = {name: num_devices // known if size == -1 else size for name, size in given.items()}
    if math.prod(filled.values()) != num_devices or not num_devices:
      shown = ", ".join(f"{name}={size}" for name, size in given.items())
      wanted = f"must divide the number of devices, {num_devices}" if -1 in given.values() else f"must be {num_devices}"
      raise ValueError(f"{type(self).__name__}({shown}): the product of the sizes {wanted}; received {known}.")
    return tuple(filled.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig(_Axes):
  """Number of devices along each axis of the learner's mesh. One axis may be -1: all devices that are left."""

  AXIS_NAMES: ClassVar[tuple[str, ...]] = AXES

  data: int = -1
  """Splits the rows of a batch; parameters are replicated along it."""
  fsdp: int = 1
  """Splits the rows of a batch, and every parameter and optimizer state (gathered layer by layer when used)."""
  tensor: int = 1
  """Splits heads, widths of the feed-forward layers, and the vocabulary."""
  expert: int = 1
  """Splits experts; outside the expert layers, it splits rows and parameters like `fsdp`."""
  context: int = 1
  """Splits the tokens of a row, and parameters like `fsdp`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineMeshConfig(_Axes):
  """Number of devices along each axis of a rollout engine's own mesh. One axis may be -1: all devices that are left.

  Weights stay where they are; no step gathers them. So each device holds `1 / tensor` of the attention and of the dense
  layers, and `1 / (tensor * expert)` of the experts.
  """

  AXIS_NAMES: ClassVar[tuple[str, ...]] = ENGINE_AXES

  data: int = 1
  """Splits the sequences and their cache; all weights are replicated along it."""
  tensor: int = 1
  """Splits heads and their cache, widths of the dense layers, the vocabulary, and experts."""
  expert: int = 1
  """Splits experts and the vocabulary; outside these, it splits sequences and their cache like `data`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutMeshConfig(EngineMeshConfig):
  """Devices of the rollout engines in the learner's process."""

  placement: Literal["colocated", "split"] = "colocated"
  """`colocated`: one engine on the learner's devices; programs of engine and learner take turns. Without sizes
  (`data=-1`), it uses the learner's mesh and sharding. With sizes, it has a mesh of its own over these devices.

  `split`: engines on devices of their own, next to the learner's: the first devices belong to the learner, the next to
  the first engine, and so on. All of them run at the same time."""
  num_engines: int = 1
  """Number of engines, each on a mesh of these sizes; more than 1 needs `split`."""
  data: int = -1

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.placement not in ("colocated", "split"):
      raise ValueError(f"RolloutMeshConfig.placement must be 'colocated' or 'split'; received {self.placement!r}.")
    allowed = ">= 1" if self.placement == "split" else "1 with placement='colocated'"
    if self.num_engines < 1 or (self.num_engines > 1 and self.placement == "colocated"):
      raise ValueError(f"RolloutMeshConfig.num_engines must be {allowed}; received {self.num_engines}.")

  @property
  def follows_learner(self) -> bool:
    """Whether the engine uses the learner's mesh and sharding rules."""
    return self.placement == "colocated" and (self.data, self.tensor, self.expert) == (-1, 1, 1)


def parse_mesh(text: str) -> MeshConfig:
  """Parses a `MeshConfig` from text such as `"fsdp=8,tensor=2"`; other axes are 1.

  >>> parse_mesh("fsdp=8,tensor=-1").axes()
  {'data': 1, 'fsdp': 8, 'tensor': -1, 'expert': 1, 'context': 1}
  """
  return MeshConfig(**{"data": 1, **_parse_axes(text, AXES)})


def parse_engine_mesh(text: str) -> EngineMeshConfig:
  """Parses an `EngineMeshConfig` from text such as `"data=2,tensor=4"`; other axes are 1."""
  return EngineMeshConfig(**_parse_axes(text, ENGINE_AXES))


def _parse_axes(text: str, axes: Sequence[str]) -> dict[str, int]:
  sizes: dict[str, int] = {}
  for part in filter(None, text.split(",")):
    name, _, size = part.partition("=")
    name = name.strip()
    if name not in axes or name in sizes:
      allowed = f"axis=size,... with each of the axes {', '.join(axes)} once at most"
      raise ValueError(f"a mesh must be written {allowed}; received {part!r} in {text!r}.")
    try:
      sizes[name] = int(size)
    except ValueError as error:
      raise ValueError(f"the size of mesh axis {name!r} must be an int; received {size!r} in {text!r}.") from error
  return sizes


def make_mesh(config: MeshConfig | EngineMeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Makes a mesh over the given devices, by default all devices of all processes, with every axis of type Auto.

  With Auto, the compiler chooses the shardings between the annotated inputs and outputs. The type is explicit because
  JAX's default differs between versions.
  """
  devices = jax.devices() if devices is None else devices
  sizes = config.sizes(len(devices))
  types = (AxisType.Auto,) * len(sizes)
  if devices[0].platform == "cpu":
    # CPU devices have no topology to fit the axes to.
    return Mesh(np.asarray(devices).reshape(sizes), config.AXIS_NAMES, axis_types=types)
  # An axis may use part of a physical one: a mesh of 8 x 8 also fits a torus of 4 x 4 x 4.
  grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  return Mesh(grid, config.AXIS_NAMES, axis_types=types)
