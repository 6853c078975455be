"""The device mesh: five named axes, and the number of devices along each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from sao_jax.parallel.axes import AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Number of devices along each axis. One axis may be -1: all devices that are left."""

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

  def __post_init__(self) -> None:
    for name, size in self.axes().items():
      if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
        raise ValueError(f"MeshConfig.{name} must be an int >= 1, or -1 (the devices left); received {size!r}.")
    rest = [name for name, size in self.axes().items() if size == -1]
    if len(rest) > 1:
      raise ValueError(f"MeshConfig: only one axis may be -1; received -1 for {', '.join(rest)}.")

  def axes(self) -> dict[str, int]:
    """Sizes by name, in the order of `AXES`; -1 is not replaced."""
    return {name: getattr(self, name) for name in AXES}

  def sizes(self, num_devices: int) -> tuple[int, ...]:
    """Sizes in the order of `AXES`, with -1 replaced.

    >>> MeshConfig(data=-1, fsdp=2, tensor=2).sizes(8)
    (2, 2, 2, 1, 1)

    Raises:
      ValueError: the axes do not multiply to `num_devices`.
    """
    given = self.axes()
    known = math.prod(size for size in given.values() if size != -1)
    filled = {name: num_devices // known if size == -1 else size for name, size in given.items()}
    if math.prod(filled.values()) != num_devices:
      shown = ", ".join(f"{name}={size}" for name, size in given.items())
      wanted = f"must divide the number of devices, {num_devices}" if -1 in given.values() else f"must be {num_devices}"
      raise ValueError(f"MeshConfig({shown}): the product of the sizes {wanted}; received {known}.")
    return tuple(filled.values())


def parse_mesh(text: str) -> MeshConfig:
  """Parses a `MeshConfig` from text such as `"fsdp=8,tensor=2"`; other axes are 1.

  >>> parse_mesh("fsdp=8,tensor=-1").axes()
  {'data': 1, 'fsdp': 8, 'tensor': -1, 'expert': 1, 'context': 1}
  """
  sizes: dict[str, int] = {}
  for part in filter(None, text.split(",")):
    name, _, size = part.partition("=")
    name = name.strip()
    if name not in AXES or name in sizes:
      allowed = f"axis=size,... with each of the axes {', '.join(AXES)} once at most"
      raise ValueError(f"a mesh must be written {allowed}; received {part!r} in {text!r}.")
    try:
      sizes[name] = int(size)
    except ValueError as error:
      raise ValueError(f"the size of mesh axis {name!r} must be an int; received {size!r} in {text!r}.") from error
  return MeshConfig(**{"data": 1, **sizes})


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
  """Makes a mesh over the given devices, by default all devices of all processes, with every axis of type Auto.

  With Auto, the compiler chooses the shardings between the annotated inputs and outputs. The type is explicit because
  JAX's default differs between versions.
  """
  devices = jax.devices() if devices is None else devices
  sizes = config.sizes(len(devices))
  types = (AxisType.Auto,) * len(AXES)
  if devices[0].platform == "cpu":
    # CPU devices have no topology to fit the axes to.
    return Mesh(np.asarray(devices).reshape(sizes), AXES, axis_types=types)
  # An axis may use part of a physical one: a mesh of 8 x 8 also fits a torus of 4 x 4 x 4.
  grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  return Mesh(grid, AXES, axis_types=types)
