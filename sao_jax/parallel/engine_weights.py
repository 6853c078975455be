"""Weights on their way from the learner's devices to those of rollout engines.

One program on the learner's devices casts the policy and lays it out in the engines' shards (`jit_layout`). `send` then
copies these shards to an engine's devices, which may be other ones. Both read the same table, `rules.ENGINE_RULES`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from sao_jax.parallel.axes import ENGINE_AXES
from sao_jax.parallel.rules import ENGINE_RULES, path_components, rules_for, shardings_for
from sao_jax.types import Params

_Index: TypeAlias = tuple[slice, ...]


def cast_for_engine(params: Params, dtype: Any) -> Params:
  """Copies weights, cast to the model's compute dtype where the model casts them itself.

  So the casts change no result. Norms, router and output head keep their dtype. Under `jax.jit`, no output aliases an
  input.
  """

  def leaf(path: Any, x: jax.Array) -> jax.Array:
    rules = rules_for(path_components(path), ENGINE_RULES)
    return jnp.copy(x.astype(dtype) if rules and rules[0].cast else x)

  return jax.tree_util.tree_map_with_path(leaf, params)


def layout_mesh(mesh: Mesh, engine_sizes: Sequence[int]) -> Mesh:
  """Returns a mesh of `ENGINE_AXES` over the learner's devices, on which weights lie in an engine's shards.

  It splits weights as an engine does, and replicates them along `data`. If the engine splits them over more devices
  than divide those of the learner, it splits them as often as possible; a shard then holds several of the engine's.

  Args:
    mesh: the learner's.
    engine_sizes: sizes of an engine's mesh along `ENGINE_AXES`.
  """
  _, tensor, expert = engine_sizes
  candidates = itertools.product(_divisors(tensor), _divisors(expert))
  fits = [(t * e, t, e) for t, e in candidates if mesh.size % (t * e) == 0]
  ways, tensor, expert = max(fits)
  devices = mesh.devices.reshape(mesh.size // ways, tensor, expert)
  return Mesh(devices, ENGINE_AXES, axis_types=(AxisType.Auto,) * len(ENGINE_AXES))


def jit_layout(
  shapes: Params, mesh: Mesh, dtype: Any, *, make: Callable[..., Params] = lambda params: params
) -> Callable[..., Params]:
  """Returns a program that casts weights (`cast_for_engine`) and shards them by `ENGINE_RULES`, in new buffers.

  Args:
    shapes: arrays or shapes of the weights.
    mesh: a mesh of `ENGINE_AXES` over the devices that hold them.
    dtype: the model's compute dtype.
    make: computes the weights from the program's arguments; by default its one argument are the weights.
  """

  def lay_out(*args: Params) -> Params:
    return cast_for_engine(make(*args), dtype)

  return jax.jit(lay_out, out_shardings=shardings_for(shapes, mesh, ENGINE_RULES))


def send(params: Params, mesh: Mesh) -> Params:
  """Copies weights from `jit_layout` to an engine's mesh, which may have other devices, without a program on these.

  The weights must be addressable: one process holds both meshes. Returns without waiting for the copies.
  """
  leaves, tree = jax.tree.flatten(params)
  places = jax.tree.leaves(shardings_for(params, mesh, ENGINE_RULES))
  pieces: list[jax.Array] = []
  devices: list[SingleDeviceSharding] = []
  for leaf, place in zip(leaves, places, strict=True):
    for number, (device, index) in enumerate(place.addressable_devices_indices_map(leaf.shape).items()):
      pieces.append(_piece(leaf, index, number))
      devices.append(SingleDeviceSharding(device))
  sent = iter(jax.device_put(pieces, devices))

  def assemble(leaf: jax.Array, place: NamedSharding) -> jax.Array:
    shards = [next(sent) for _ in place.addressable_devices]
    return jax.make_array_from_single_device_arrays(leaf.shape, place, shards)

  return jax.tree.unflatten(tree, map(assemble, leaves, places))


def _piece(leaf: jax.Array, index: _Index, number: int) -> jax.Array:
  """Returns the part of an array at `index`, from a shard that holds all of it; replicas take turns by `number`."""
  wanted = _bounds(index, leaf.shape)
  holders = []
  for shard in leaf.addressable_shards:
    held = _bounds(shard.index, leaf.shape)
    if np.all((held[0] <= wanted[0]) & (wanted[1] <= held[1])):
      holders.append((shard.data, held[0]))
  if not holders:
    raise ValueError(f"no shard of the layout holds {index} of an array of shape {leaf.shape}; use `layout_mesh`.")
  data, first = holders[number % len(holders)]
  if data.shape == tuple(wanted[1] - wanted[0]):
    return data
  return data[tuple(map(slice, wanted[0] - first, wanted[1] - first))]


def _bounds(index: _Index, shape: Sequence[int]) -> np.ndarray:
  """First and last position, `[2, dimensions]`."""
  return np.array([part.indices(size)[:2] for part, size in zip(index, shape, strict=True)], int).reshape(-1, 2).T


def _divisors(size: int) -> list[int]:
  return [i for i in range(1, size + 1) if size % i == 0]
