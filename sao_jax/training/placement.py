"""Where a run's arrays live: the mesh of its config, and everything that is placed on it or compiled for it.

One device is a mesh of one: the same code. With several processes (`parallel.distributed`) the learner's mesh spans the
devices of all of them, while every process's engine runs on its own devices, to which new weights are copied.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from sao_jax import parallel
from sao_jax.parallel.axes import AXES, ROWS, check_split
from sao_jax.parallel.copies import copy_leaves
from sao_jax.training.config import RunConfig
from sao_jax.types import CachedPolicy, Params, TokenBatch

F = TypeVar("F", bound=Callable[..., Any])
_PROCESS = "process"


class Placement:
  """The meshes of a run, and what lies on them.

  Args:
    config: the run; its `mesh` takes as many of the devices as it multiplies to, all of them where an axis is -1.

  Raises:
    ValueError: rows, tokens or slots do not divide by the axes that split them; the message names both.
  """

  def __init__(self, config: RunConfig):
    self.mesh = make_run_mesh(config.mesh)
    """The learner's: over the devices of all processes."""
    self.engine_mesh = self.mesh if jax.process_count() == 1 else self.mesh.local_mesh
    """The engine's: this process's part of the learner's."""
    self._check(config)
    self._lock = threading.RLock()
    self._copies: Any = None

  def _check(self, config: RunConfig) -> None:
    learner, engine = config.learner, config.engine
    for mesh, axes, name, size in (
      (self.mesh, ROWS, "learner.rows_per_microbatch", learner.rows_per_microbatch),
      (self.mesh, ("context",), "learner.row_length", learner.row_length),
      (self.engine_mesh, ROWS, "engine.num_slots / engine.num_streams", engine.num_slots // engine.num_streams),
      (self.engine_mesh, ("context",), "engine.max_len", engine.max_len),
    ):
      check_split(mesh, name, size, *axes)

  @contextlib.contextmanager
  def dispatching(self) -> Any:
    """Held while a program over several devices is started, so that all devices see all programs in one order.

    The engine's thread and the learner's start theirs at any time; two programs that exchange data among their devices
    and are queued in different orders on different devices would wait for each other for ever. Starting does not wait
    for the program's end.
    """
    if self.mesh.size == 1:
      yield
      return
    with self._lock:
      yield

  def constrain(self, apply: F) -> F:
    """A policy or value model whose parameters and gradients stay on their shards."""
    return parallel.constrain_params(apply, self.mesh)

  def shapes(self, make: Callable[..., Any], *args: Any) -> Any:
    """What `make(*args)` would return, as shapes with their shardings; nothing is computed."""
    shapes = jax.eval_shape(make, *args)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, parallel.shardings_for(shapes, self.mesh)
    )

  def make(self, make: Callable[..., Any], *args: Any) -> Any:
    """`make(*args)`, compiled so that its results come into being on their shards; nothing is shared with `args`."""
    places = parallel.shardings_for(jax.eval_shape(make, *args), self.mesh)
    with self.dispatching():
      return jax.jit(make, out_shardings=places)(*args)

  def parameter(self, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """Where a parameter lives: for `models.load_hf`."""
    return NamedSharding(self.mesh, parallel.rules.spec_for(path, leaf.shape, self.mesh))

  def put(self, params: Params) -> Params:
    """Parameters that lie whole in every process's memory, on their shards."""
    return parallel.place(params, self.mesh)

  def step(self, fn: Callable[..., tuple[Any, Any]]) -> Callable[[Any, TokenBatch, Any], tuple[Any, Any]]:
    """Compiles a learner step `(state, batch, num_microbatches)`, at its first call; it takes batches off the host."""
    compiled: list[Any] = []

    def step(state: Any, batch: TokenBatch, num_microbatches: Any) -> tuple[Any, Any]:
      if not compiled:
        compiled.append(parallel.jit_step(fn, state, batch, self.mesh))
      placed = parallel.place_batch(batch, self.mesh)
      with self.dispatching():
        result: tuple[Any, Any] = compiled[0](state, placed, np.int32(num_microbatches))
      return result

    return step

  def cached_policy(self, policy: CachedPolicy) -> CachedPolicy:
    """The policy as the engine drives it, on the engine's mesh."""
    return parallel.cached_on_mesh(policy, self.engine_mesh, self.dispatching)

  def for_engine(self, params: Params) -> Params:
    """A copy of the learner's parameters on the engine's mesh, sharded by the same rules; waits until it is there.

    With several processes each gets a whole copy on its own devices. Every process must call it.
    """
    if self._copies is None:
      self._copies = self._make_copies(params)
    with self.dispatching():
      copied = self._copies(params)
    copied = jax.block_until_ready(copied)
    if jax.process_count() == 1:
      return copied
    return jax.tree.map(self._local, copied, parallel.shardings_for(copied, self.engine_mesh))

  def _make_copies(self, params: Params) -> Callable[[Params], Params]:
    """A copy per process: the learner's mesh seen as `processes x engine mesh`, replicated along the first."""
    local = tuple(self.engine_mesh.shape[axis] for axis in AXES)
    devices = self.mesh.devices.reshape((jax.process_count(), *local))
    if jax.process_count() == 1:
      places = parallel.shardings_for(params, self.mesh)
    elif set(devices[jax.process_index()].flat) != set(self.engine_mesh.devices.flat):
      raise ValueError(f"the mesh must be ordered by process, so that each has one block of it; received {self.mesh}.")
    else:
      wide = Mesh(devices, (_PROCESS, *AXES), axis_types=(jax.sharding.AxisType.Auto,) * (1 + len(AXES)))
      local_places = parallel.shardings_for(params, self.engine_mesh)
      places = jax.tree.map(lambda place: NamedSharding(wide, place.spec), local_places)
    return jax.jit(copy_leaves, out_shardings=places)

  @staticmethod
  def _local(leaf: jax.Array, place: NamedSharding) -> jax.Array:
    shards = {shard.device: shard.data for shard in leaf.addressable_shards}
    on_devices = [shards[device] for device in place.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(leaf.shape, place, on_devices)

  def exchange(self, value: Any) -> list[Any]:
    """Every process's JSON value, in the order of the processes; all of them must call it, from the learner's thread.

    The engine's programs queue up behind it meanwhile, as they do behind a learner step.
    """
    if jax.process_count() == 1:
      return [value]
    data = np.frombuffer(json.dumps(value).encode("utf-8"), np.uint8)
    with self.dispatching():
      sizes = np.asarray(multihost_utils.process_allgather(np.asarray([data.size], np.int32))).reshape(-1)
      # Powers of two: few programs are compiled.
      padded = np.zeros(1 << int(max(sizes) - 1).bit_length(), np.uint8)
      padded[: data.size] = data
      rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def make_run_mesh(config: parallel.MeshConfig) -> Mesh:
  """The mesh over the first devices where its sizes are all given, over all devices where one is left open.

  Raises:
    ValueError: there are fewer devices than that, or several processes of which some would have no part.
  """
  devices = jax.devices()
  sizes = config.axes().values()
  wanted = len(devices) if -1 in sizes else math.prod(sizes)
  if jax.process_count() > 1 or wanted > len(devices):
    return parallel.make_mesh(config)  # which says what does not fit
  return parallel.make_mesh(config, devices[:wanted])
