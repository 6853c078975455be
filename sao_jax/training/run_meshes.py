"""Meshes of a run: which devices learn, and which generate."""

from __future__ import annotations

import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from sao_jax import parallel
from sao_jax.parallel.axes import ENGINE_AXES
from sao_jax.parallel.mesh import MeshConfig, RolloutMeshConfig, make_mesh
from sao_jax.types import Params


def make_run_meshes(config: MeshConfig, rollout: RolloutMeshConfig) -> tuple[Mesh, list[Mesh]]:
  """Makes the learner's mesh of the first devices, as many as the sizes multiply to, and the meshes of the engines.

  Raises:
    ValueError: there are too few devices, they do not divide, or some processes would have no device in the mesh.
  """
  devices = jax.devices()
  if rollout.placement == "split":
    if jax.process_count() > 1:
      raise ValueError(
        f"rollout_mesh.placement must be 'colocated' with {jax.process_count()} processes; received 'split'. Use "
        "engines in Ray workers instead (cluster.num_engines)."
      )
    first, size = split_devices(config, rollout, len(devices))
    starts = range(first, first + rollout.num_engines * size, size)
    engines = [make_mesh(rollout, devices[start : start + size]) for start in starts]
    return make_mesh(config, devices[:first]), engines
  mesh = _learner_mesh(config, devices)
  local = mesh if jax.process_count() == 1 else mesh.local_mesh
  if rollout.follows_learner:
    return mesh, [local]
  try:
    grid = local.devices.reshape(rollout.sizes(local.size))
  except ValueError as error:
    raise ValueError(f"rollout_mesh: with placement='colocated', it covers the learner's devices. {error}") from error
  # The learner's order of devices, so that one program can move weights from mesh to mesh.
  return mesh, [Mesh(grid, rollout.AXIS_NAMES, axis_types=(AxisType.Auto,) * grid.ndim)]


def _learner_mesh(config: MeshConfig, devices: list[jax.Device]) -> Mesh:
  wanted = config.num_devices() or len(devices)
  if jax.process_count() > 1 or wanted > len(devices):
    return make_mesh(config)  # raises if the devices do not fit
  return make_mesh(config, devices[:wanted])


def split_devices(config: MeshConfig, rollout: RolloutMeshConfig, count: int) -> tuple[int, int]:
  """Divides devices between learner and engines; returns the numbers for the learner and for each engine.

  >>> split_devices(MeshConfig(data=4), RolloutMeshConfig(placement="split", num_engines=2, tensor=2), 8)
  (4, 2)

  Args:
    config: the learner's mesh.
    rollout: the engines' meshes. Only one of the two meshes may have an axis of -1; it takes what the other leaves.
    count: number of devices.

  Raises:
    ValueError: the sizes do not fit; the message lists allowed ones.
  """
  learner, size, engines = config.num_devices(), rollout.num_devices(), rollout.num_engines
  if learner is None and size is None:
    raise ValueError(
      "mesh and rollout_mesh: only one of them may have an axis of -1 with placement='split', since it takes what the "
      f"other leaves; received {config} and {rollout}."
    )
  if learner is None:
    assert size is not None
    learner = count - engines * size
    if learner < 1:
      most = (count - 1) // engines
      limit = f"at most {most} devices each" if most else f"at most {count - 1} engines"
      raise ValueError(
        f"rollout_mesh must leave at least one of {count} devices for the learner; received {engines} engines of "
        f"{size} devices. Allowed: {limit}."
      )
  elif size is None:
    rest = count - learner
    allowed = [n for n in range(1, rest + 1) if rest % n == 0 and _fits(rollout, rest // n)]
    if engines not in allowed:
      raise ValueError(
        f"rollout_mesh.num_engines must be one of {allowed}, so that engines with {_given(rollout)} share the {rest} "
        f"devices that mesh leaves of {count}; received {engines}."
      )
    size = rest // engines
  elif learner + engines * size > count:
    rest = count - learner
    raise ValueError(
      f"mesh takes {learner} devices, and rollout_mesh {engines} x {size}; there are {count}. Allowed: up to "
      f"{max(rest, 0) // size} engines of {size} devices, or engines of up to {max(rest, 0) // engines} devices."
    )
  config.sizes(learner)
  return learner, size


def _fits(rollout: RolloutMeshConfig, size: int) -> bool:
  known = math.prod(size for size in rollout.axes().values() if size != -1)
  return size % known == 0


def _given(rollout: RolloutMeshConfig) -> str:
  return ", ".join(f"{name}={size}" for name, size in rollout.axes().items() if size != -1)


def check_engine_mesh(name: str, params: Params, mesh: Mesh | AbstractMesh) -> None:
  """Checks that a mesh of `ENGINE_AXES` can split the weights of a model.

  Args:
    name: of the mesh, for the message.
    params: arrays or shapes.
    mesh: the engine's.

  Raises:
    ValueError: it cannot; the message lists the allowed sizes of the axis at fault.
  """
  try:
    parallel.shardings_for(params, mesh, parallel.rules.ENGINE_RULES)
  except ValueError as error:
    for axis in ("tensor", "expert"):
      allowed = [n for n in range(1, mesh.size + 1) if _splits(params, {**dict.fromkeys(ENGINE_AXES, 1), axis: n})]
      if allowed and mesh.shape[axis] not in allowed:  # None is, if the table has no rule for a parameter.
        raise ValueError(f"{name}.{axis} must be one of {allowed}; received {mesh.shape[axis]}: {error}") from error
    raise


def _splits(params: Params, sizes: dict[str, int]) -> bool:
  try:
    parallel.shardings_for(params, AbstractMesh(tuple(sizes.values()), tuple(sizes)), parallel.rules.ENGINE_RULES)
  except ValueError:
    return False
  return True
