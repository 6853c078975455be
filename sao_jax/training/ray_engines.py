"""Engines in Ray workers, of a learner in one process or several.

The main process talks to the engines and has all their trajectories. Each process puts its own shards of the weights
into Ray's object store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh

from sao_jax import models
from sao_jax.parallel.axes import ROWS, check_split
from sao_jax.parallel.distributed import is_main_process
from sao_jax.parallel.mesh import MeshConfig, RolloutMeshConfig
from sao_jax.rollout.engine.engine import Engine
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.ray.cluster import EngineCluster
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.ray.hub import HubAddress, RemoteSender
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.training.config import RunConfig
from sao_jax.training.embedded import embedded_engine
from sao_jax.training.placement import Placement
from sao_jax.training.run_meshes import check_engine_mesh
from sao_jax.types import Domain, Params, Trajectory


class RayEngines:
  """The engines of `config.cluster`. Every process must make this object, and call each method in the same order.

  Args:
    config: the run.
    make_domain: makes the task in each engine's process; must be picklable.
    placement: exchanges values with the other processes.
    store: where the learner publishes.

  Raises:
    ConnectionError: Ray cannot be reached or started in time.
  """

  def __init__(self, config: RunConfig, make_domain: Callable[[], Domain], placement: Placement, store: WeightStore):
    self._placement = placement
    self._sender: RemoteSender | None = None
    self.cluster: EngineCluster | None = None
    """Set in the main process."""
    if is_main_process():
      self.cluster = EngineCluster(
        functools.partial(engine_with_domain, config, make_domain),
        config.cluster,
        slots_per_engine=config.engine.num_slots,
        shardings=functools.partial(worker_shardings, config),
        num_senders=jax.process_count(),
      )
    if jax.process_count() > 1:
      address = placement.exchange(None if self.cluster is None else self.cluster.hub_address)[0]
      if self.cluster is None:
        self._sender = RemoteSender(config.cluster, HubAddress(*address), store, index=jax.process_index())

  def counters(self) -> dict[str, Any]:
    """Returns `EngineCluster.counters`."""
    counters: dict[str, Any] = self._placement.exchange(None if self.cluster is None else self.cluster.counters)[0]
    return counters

  def check(self) -> None:
    """Raises the exception that ended the thread which sends this process's weights, if there is one."""
    if self._sender is not None:
      self._sender.check()

  def close(self) -> None:
    """Stops what this process runs, and disconnects it from Ray."""
    for part in (self.cluster, self._sender):
      if part is not None:
        part.close()


class NoRollouts:
  """Schedule of a process that has no rollouts, next to one that has those of the cluster; see `RolloutSchedule`.

  Args:
    engines: checked with every batch.
  """

  runs_on_caller = False

  def __init__(self, engines: RayEngines):
    self._engines = engines

  def next_batch(self, version: int) -> list[Trajectory]:
    self._engines.check()
    return []

  def evaluate(self, requests: Sequence[EpisodeRequest], *, seed: int) -> list[Trajectory]:
    self._engines.check()
    return []

  def counters(self) -> dict[str, int]:
    return {"queue_size": 0, "dropped_stale": 0, "dropped_incomplete_group": 0}

  def state(self, step: int) -> tuple[dict[str, Any], list[Trajectory]]:
    return {}, []

  def restore(self, state: Mapping[str, Any], waiting: list[Trajectory]) -> None:
    pass  # the main process has everything

  def close(self) -> None:
    pass


def check_cluster(config: RunConfig) -> None:
  """Checks, without devices, that the engines' mesh can split the model and the slots.

  Sizes with an axis of -1 are checked in the worker's process.

  Raises:
    ValueError: it cannot; the message names the sizes.
  """
  mesh = config.cluster.mesh
  if mesh.num_devices() is None:
    return
  sizes = AbstractMesh(tuple(mesh.axes().values()), mesh.AXIS_NAMES)
  slots = config.engine.num_slots // config.engine.num_streams
  check_split(sizes, "engine.num_slots / engine.num_streams", slots, *ROWS)
  shapes = jax.eval_shape(functools.partial(models.init_policy, config.policy), jax.random.key(0))
  check_engine_mesh("cluster.mesh", shapes, sizes)


def worker_config(config: RunConfig) -> RunConfig:
  """Returns the config of a worker: there, `cluster.mesh` is the mesh of the embedded engine."""
  mesh = config.cluster.mesh
  count = mesh.num_devices() or jax.device_count()
  data, tensor, expert = mesh.sizes(count)
  return dataclasses.replace(
    config,
    mesh=MeshConfig(data=1, tensor=count),  # only its devices matter
    rollout_mesh=RolloutMeshConfig(data=data, tensor=tensor, expert=expert),
    cluster=ClusterConfig(),
  )


@contextlib.contextmanager
def engine_with_domain(config: RunConfig, make_domain: Callable[[], Domain]) -> Iterator[Engine]:
  """Makes an engine and its own domain, for a Ray worker; both are closed at the end of the block."""
  config = worker_config(config)
  with contextlib.closing(make_domain()) as domain, embedded_engine(config, domain, Placement(config)) as engine:
    yield engine


def worker_shardings(config: RunConfig, shapes: Params) -> Params:
  """Returns the shardings of an engine's weights in a Ray worker."""
  return Placement(worker_config(config)).engine_shardings(shapes)
