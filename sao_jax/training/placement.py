"""Placement of a run's arrays: the meshes of its config, and the arrays and programs on them.

A single device is a mesh of size one. With several processes (`parallel.distributed`) the learner's mesh spans the
devices of all of them. Each process's engine runs on its own devices, to which new weights are copied. Within one
process, `config.rollout_mesh` may give the engines other devices than the learner's.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from sao_jax import parallel
from sao_jax.parallel.axes import ROWS, check_split
from sao_jax.parallel.copies import copy_leaves
from sao_jax.parallel.engine_weights import cast_for_engine, jit_layout, layout_mesh, send
from sao_jax.training.config import RunConfig
from sao_jax.training.run_meshes import check_engine_mesh, make_run_meshes
from sao_jax.types import CachedPolicy, Params, TokenBatch

F = TypeVar("F", bound=Callable[..., Any])
_PROCESS = "process"


def _unchanged(params: Params) -> Params:
  return params


def _cast(make: Callable[..., Params], dtype: Any) -> Callable[..., Params]:
  """Returns `make`, with its result cast for an engine; copied as it is if there is no `dtype`."""

  def cast(*args: Params) -> Params:
    made = make(*args)
    return copy_leaves(made) if dtype is None else cast_for_engine(made, dtype)

  return cast


class Placement:
  """Meshes of a run, and the placement of arrays and compilation of programs on them.

  Args:
    config: the run. Its `mesh` uses as many devices as the product of its axes; with an axis of -1, all devices that
      `rollout_mesh` leaves.

  Raises:
    ValueError: the number of rows, tokens or slots is no multiple of the axes that split it, or there are too few
      devices; the message names the sizes.
  """

  def __init__(self, config: RunConfig):
    self._split = config.rollout_mesh.placement == "split"
    self.mesh, self.engine_meshes = make_run_meshes(config.mesh, config.rollout_mesh)
    """Mesh of the learner, over the devices of all processes; and those of this process's engines."""
    self._check(config)
    self._rules = parallel.rules.RULES if config.rollout_mesh.follows_learner else parallel.rules.ENGINE_RULES
    self._compute_dtype = config.policy.compute_dtype
    self._dtype = self._compute_dtype if config.remote.url is None else None
    self._lock = threading.RLock()
    self._engine_locks = [threading.RLock() if self._split else self._lock for _ in self.engine_meshes]
    self._copies: dict[Any, Callable[..., Params]] = {}

  def _check(self, config: RunConfig) -> None:
    learner, engine, mesh = config.learner, config.engine, self.engine_meshes[0]
    check_split(self.mesh, "learner.rows_per_microbatch", learner.rows_per_microbatch, *ROWS)
    check_split(self.mesh, "learner.row_length", learner.row_length, "context")
    if config.uses_embedded_engine:
      check_split(mesh, "engine.num_slots / engine.num_streams", engine.num_slots // engine.num_streams, *ROWS)
      check_split(mesh, "engine.page_size", engine.page_size, "context")

  def check_model(self, make: Callable[..., Any], *args: Any) -> None:
    """Checks, without computing it, that the meshes can split the policy that `make(*args)` returns.

    Raises:
      ValueError: a dimension does not divide. For an engine's mesh, the message lists the allowed sizes of the axis.
    """
    if self.mesh.size > 1:
      self.shapes(make, *args)
    if self._rules is parallel.rules.ENGINE_RULES:
      check_engine_mesh("rollout_mesh", jax.eval_shape(make, *args), self.engine_meshes[0])

  def dispatching(self) -> contextlib.AbstractContextManager[Any]:
    """Lock to hold while a program over several devices is dispatched, so that all devices get programs in one order.

    The threads of engine and learner dispatch programs at any time. Two programs with collectives that are queued in
    different orders on different devices would wait for each other for ever. Dispatching does not wait for the program
    to end. Engines on devices of their own have locks of their own.
    """
    return contextlib.nullcontext() if self.mesh.size == 1 else self._lock

  def constrain(self, apply: F) -> F:
    """Constrains the parameters and gradients of a policy or value model to their shards."""
    return parallel.constrain_params(apply, self.mesh)

  def shapes(self, make: Callable[..., Any], *args: Any) -> Any:
    """Returns the shapes and shardings of `make(*args)`, without computing it."""
    shapes = jax.eval_shape(make, *args)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, parallel.shardings_for(shapes, self.mesh)
    )

  def make(self, make: Callable[..., Any], *args: Any) -> Any:
    """Computes `make(*args)` in a program that places the results on their shards. They share no buffer with `args`."""
    places = parallel.shardings_for(jax.eval_shape(make, *args), self.mesh)
    with self.dispatching():
      return jax.jit(make, out_shardings=places)(*args)

  def parameter(self, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
    """Returns the sharding of a parameter from its path and shape; an argument of `models.load_hf`."""
    return NamedSharding(self.mesh, parallel.rules.spec_for(path, leaf.shape, self.mesh))

  def put(self, params: Params) -> Params:
    """Places parameters on their shards; every process must hold all of them on the host."""
    return parallel.place(params, self.mesh)

  def step(self, fn: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Returns a learner step `(state, batch, num_microbatches, *constants)` that is compiled at its first call.

    Args:
      fn: the step, not jitted; returns `(state, metrics)`.

    Returns:
      The step. Its batch is on the host, and is placed on the mesh. The constants are trees on the mesh that the step
      reads, such as frozen parameters; they are not donated.
    """
    compiled: list[Any] = []

    def step(state: Any, batch: TokenBatch, num_microbatches: Any, *constants: Any) -> tuple[Any, Any]:
      if not compiled:
        compiled.append(parallel.jit_step(fn, state, batch, self.mesh, constants=constants))
      placed = parallel.place_batch(batch, self.mesh)
      with self.dispatching():
        result: tuple[Any, Any] = compiled[0](state, placed, np.int32(num_microbatches), *constants)
      return result

    return step

  def cached_policy(self, policy: CachedPolicy, engine: int = 0) -> CachedPolicy:
    """Returns the policy of engine number `engine`, with its KV cache placed on the engine's mesh."""
    mesh, lock = self.engine_meshes[engine], self._engine_locks[engine]
    return parallel.cached_on_mesh(policy, mesh, contextlib.nullcontext if mesh.size == 1 else lambda: lock)

  def for_engine(self, *args: Params, make: Callable[..., Params] = _unchanged) -> Params:
    """Copies the learner's parameters to the engines' meshes, in the compute dtype, and waits for the copy.

    One program on the learner's devices casts the parameters and lays them out in the engines' shards; engines on other
    devices then receive these. With several processes each one gets a whole copy on its own devices, and every process
    must call this.

    Args:
      *args: the parameters, or the arguments of `make`; trees on the learner's mesh.
      make: computes the parameters, in the same program.

    Returns:
      The engine's parameters; with `placement="split"`, a list of them, one per engine (`rollout.EngineGroup`).
    """
    copied = self._copy("engine", make, args)
    if self._split:
      copied = [send(copied, mesh) for mesh in self.engine_meshes]
    copied = jax.block_until_ready(copied)
    if jax.process_count() == 1:
      return copied
    return jax.tree.map(self._local, copied, parallel.shardings_for(copied, self.engine_meshes[0], self._rules))

  def shared_with_engine(self, params: Params) -> Params:
    """Returns the result of `for_engine`, but without a copy of arrays that the engine takes as they are.

    These are shared, so the caller must never donate them.
    """
    copied = self.for_engine(params)
    if self._split or jax.process_count() > 1:
      return copied

    def one(old: jax.Array, new: jax.Array) -> jax.Array:
      same = old.dtype == new.dtype and old.sharding.is_equivalent_to(new.sharding, old.ndim)
      return old if same else new

    return jax.tree.map(one, params, copied)

  def for_workers(self, *args: Params, make: Callable[..., Params] = _unchanged) -> Params:
    """Copies the learner's parameters for engines in other processes, in the compute dtype, and waits for the copy.

    Every shard stays on its device. With several processes every one must call this. The arguments are those of
    `for_engine`.
    """
    return jax.block_until_ready(self._copy("workers", make, args))

  def _copy(self, target: str, make: Callable[..., Params], args: Sequence[Params]) -> Params:
    """Runs the program for a target, which is compiled once for each `make` and structure of its arguments."""
    key = (target, make, jax.tree.structure(args))
    if key not in self._copies:
      shapes = jax.eval_shape(make, *args)
      self._copies[key] = (self._make_copies if target == "engine" else self._make_worker_copies)(make, shapes)
    with self.dispatching():
      return self._copies[key](*args)

  def engine_shardings(self, shapes: Params) -> Params:
    """Returns the shardings of the weights on the first engine's mesh."""
    return parallel.shardings_for(shapes, self.engine_meshes[0], self._rules)

  def for_checkpoint(self, copied: Params, like: Params) -> Params:
    """Returns a result of `for_engine` as parameters in the dtypes of `like`."""
    first = copied[0] if self._split else copied
    return jax.tree.map(lambda x, y: x.astype(y.dtype), first, like)

  def _make_worker_copies(self, make: Callable[..., Params], shapes: Params) -> Callable[..., Params]:
    """Returns a jitted copy in the learner's layout."""
    return jax.jit(_cast(make, self._compute_dtype), out_shardings=parallel.shardings_for(shapes, self.mesh))

  def _make_copies(self, make: Callable[..., Params], shapes: Params) -> Callable[..., Params]:
    """Returns a jitted copy in the engines' layout, on the learner's devices.

    With several processes, every process gets all of it: it is replicated along the first axis of a
    `processes x engine mesh` mesh.
    """
    engine = self.engine_meshes[0]
    if self._split:
      return jit_layout(shapes, layout_mesh(self.mesh, tuple(engine.shape.values())), self._dtype, make=make)
    local_places = places = parallel.shardings_for(shapes, engine, self._rules)
    if jax.process_count() > 1:
      devices = self.mesh.devices.reshape((jax.process_count(), *engine.shape.values()))
      if set(devices[jax.process_index()].flat) != set(engine.devices.flat):
        raise ValueError(f"mesh must be ordered by process, so that each process has one block; received {self.mesh}.")
      types = (jax.sharding.AxisType.Auto,) * devices.ndim
      wide = Mesh(devices, (_PROCESS, *engine.axis_names), axis_types=types)
      places = jax.tree.map(lambda place: NamedSharding(wide, place.spec), local_places)
    return jax.jit(_cast(make, self._dtype), out_shardings=places)

  @staticmethod
  def _local(leaf: jax.Array, place: NamedSharding) -> jax.Array:
    shards = {shard.device: shard.data for shard in leaf.addressable_shards}
    on_devices = [shards[device] for device in place.mesh.devices.flat]
    return jax.make_array_from_single_device_arrays(leaf.shape, place, on_devices)

  def exchange(self, value: Any) -> list[Any]:
    """Gathers a JSON value from every process, in the order of the processes.

    All processes must call it, on the learner's thread. Engine programs on the same devices are not dispatched
    meanwhile.
    """
    if jax.process_count() == 1:
      return [value]
    data = np.frombuffer(json.dumps(value).encode("utf-8"), np.uint8)
    with self.dispatching():
      sizes = np.asarray(multihost_utils.process_allgather(np.asarray([data.size], np.int32))).reshape(-1)
      # Padded to powers of two, so that few programs are compiled.
      padded = np.zeros(1 << int(max(sizes) - 1).bit_length(), np.uint8)
      padded[: data.size] = data
      rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
