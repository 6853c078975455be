"""What a run is made of: every room's part, built once from the config, and how they are connected."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import jax

from sao_jax import models
from sao_jax.learner import LearnerState, PackStats, init_state, make_baselines, make_update_step, pack_batch
from sao_jax.parallel.mesh import MeshConfig
from sao_jax.rollout.engine.engine import Engine, RolloutEngine
from sao_jax.rollout.ray.cluster import EngineCluster
from sao_jax.rollout.requests import RequestStream
from sao_jax.rollout.schedules import AsyncSource, BatchSource, LaggedSource
from sao_jax.rollout.trajectory_queue import TrajectoryQueue
from sao_jax.training.config import RunConfig
from sao_jax.training.evaluation import BothSplits
from sao_jax.training.multi_process import SharedRollouts, SharedSource, check_processes
from sao_jax.training.placement import Placement
from sao_jax.types import Domain, Params, PolicyApply, TokenBatch, Trajectory, ValueApply
from sao_jax.utils.extras import needed


class Components:
  """The parts of one run. A context manager: leaving it ends the engine's threads and frees the domain.

  Args:
    config: the run.
    domain: the task; closed with this object.
    make_domain: makes the task anew, for the engines of `config.cluster`, if there are any; can be pickled.
  """

  def __init__(self, config: RunConfig, domain: Domain, *, make_domain: Callable[[], Domain] | None = None):
    if domain.tokenizer.vocab_size > config.policy.vocab_size:
      raise ValueError(
        f"policy.vocab_size must be at least the tokenizer's {domain.tokenizer.vocab_size}; "
        f"received {config.policy.vocab_size}."
      )
    check_processes(config, jax.process_count())
    if config.cluster.num_engines and make_domain is None:
      raise ValueError("cluster.num_engines > 0 needs make_domain: each engine makes a domain of its own.")
    self.config = config
    self.domain = domain
    self._make_domain = make_domain
    self._cluster: EngineCluster | None = None
    self.placement = Placement(config)
    if self.placement.mesh.size > 1:
      # What the mesh cannot split is told before any work.
      self.placement.shapes(functools.partial(models.init_policy, config.policy), self.key("policy"))
    self.policy_apply: PolicyApply = self.placement.hold(models.policy_apply(config.policy))
    self.value_apply: ValueApply | None = None
    if config.learner.uses_critic:
      self.value_apply = self.placement.hold(models.value_apply(config.policy))
    self.update = self.placement.step(make_update_step(config.learner, self.policy_apply, self.value_apply, jit=False))
    self.baselines = make_baselines(config.learner)
    self.engine: RolloutEngine
    if config.remote.url is None:
      self.engine = _embedded_engine(config, domain, self.placement)
    else:
      self.engine = _remote_engine(config, domain)
    self.rollouts = SharedRollouts(self.engine, self.placement)
    # Synchronous schedules share out each batch; asynchronous engines run without looking at one another.
    part = (jax.process_index(), jax.process_count()) if config.schedule == "async" else (0, 1)
    self.requests = RequestStream(
      num_tasks=domain.num_train_tasks, group_size=config.group_size, seed=config.seed, part=part
    )

  def init_policy(self) -> Params:
    """The policy's parameters before any stage: a checkpoint's (a Hugging Face directory or a GGUF file), or fresh."""
    wanted = self.config.policy
    if self.config.policy_checkpoint is None:
      return self.placement.make(functools.partial(models.init_policy, wanted), self.key("policy"))
    path = pathlib.Path(self.config.policy_checkpoint)
    if path.suffix == ".gguf":
      loaded, params = models.load_gguf(path, dtype=wanted.dtype, param_dtype=wanted.param_dtype)
      params = self.placement.put(params)
    else:
      place = self.placement.parameter
      loaded, params = models.load_hf(path, dtype=wanted.dtype, param_dtype=wanted.param_dtype, sharding=place)
    # A checkpoint says what is computed; the config may choose how.
    how = {name: getattr(wanted, name) for name in ("remat", "moe_impl", "attention_impl", "init_std")}
    if dataclasses.replace(loaded, **how) != wanted:
      raise ValueError(f"policy must be that of policy_checkpoint, {loaded}; received {wanted}.")
    return params

  def init_critic(self, policy: Params) -> Params | None:
    """A value model with the policy's trunk and a zero head; None for algorithms without a critic."""
    if not self.config.learner.uses_critic:
      return None
    return self.placement.make(functools.partial(models.init_critic, self.config.policy), self.key("critic"), policy)

  def init_state(self, policy: Params, critic: Params | None) -> LearnerState:
    """A fresh learner state, which owns its buffers."""
    state: LearnerState = self.placement.make(functools.partial(init_state, self.config.learner), policy, critic)
    return state

  def state_shapes(self) -> LearnerState:
    """Shapes and places of a learner state: what a checkpoint is restored into."""
    config = self.config

    def make() -> LearnerState:
      policy = models.init_policy(config.policy, jax.random.key(0))
      uses_critic = config.learner.uses_critic
      return init_state(
        config.learner, policy, models.init_critic(config.policy, jax.random.key(0), policy) if uses_critic else None
      )

    shapes: LearnerState = self.placement.shapes(make)
    return shapes

  def key(self, use: str) -> jax.Array:
    """A PRNG key of the run's seed, a different one for every use."""
    uses = ("policy", "critic")
    return jax.random.fold_in(jax.random.key(self.config.seed), uses.index(use))

  def pack(self, trajectories: Sequence[Trajectory]) -> tuple[TokenBatch, PackStats]:
    """Packs a batch for the learner, with its advantages from rewards alone where the algorithm uses them."""
    adv = None if self.baselines is None else self.baselines.advantages(trajectories)
    return pack_batch(self.config.learner, trajectories, adv)

  def make_source(self) -> BatchSource:
    """Where the learner's batches come from, by the config's schedule."""
    config, processes = self.config, jax.process_count()
    if config.schedule == "async":
      queue = TrajectoryQueue(
        batch_size=config.batch_size // processes,
        group_size=config.group_size,
        max_staleness=config.max_staleness,
        capacity=(config.queue_capacity or 2 * config.batch_size) // processes,
      )
      if config.cluster.num_engines:
        self._cluster = self._make_cluster()
      source = AsyncSource(
        engine=self._cluster or self.engine, requests=self.requests, queue=queue, copy=self.placement.for_engine
      )
      return source if processes == 1 else SharedSource(source, self.placement, config.group_size)
    return LaggedSource(
      engine=self.rollouts,
      requests=self.requests,
      batch_size=config.batch_size,
      group_size=config.group_size,
      lag=config.lag,
      switch_chunks=config.lag_switch_chunks,
      copy=self.placement.for_engine,
    )

  def rollout_counters(self) -> dict[str, Any]:
    """Of what generates the training episodes: the cluster, once there is one; else the engines of all processes."""
    return self.rollouts.counters() if self._cluster is None else self._cluster.counters

  def _make_cluster(self) -> EngineCluster:
    assert self._make_domain is not None, "checked when made"
    # The mesh is the learner's: an engine in an actor has one device.
    config = dataclasses.replace(self.config, mesh=MeshConfig(data=1))
    make_engine = functools.partial(engine_with_domain, config, self._make_domain)
    return EngineCluster(make_engine, config.cluster, slots_per_engine=config.engine.num_slots)

  def close(self) -> None:
    with contextlib.closing(self.domain), contextlib.closing(self.engine):
      if self._cluster is not None:
        self._cluster.close()

  def __enter__(self) -> Components:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


@contextlib.contextmanager
def engine_with_domain(config: RunConfig, make_domain: Callable[[], Domain]) -> Iterator[Engine]:
  """An engine, and a domain that is closed with it: what a process far from the learner's needs."""
  with contextlib.closing(make_domain()) as domain, _embedded_engine(config, domain, Placement(config)) as engine:
    yield engine


def _embedded_engine(config: RunConfig, domain: Domain, placement: Placement) -> Engine:
  return Engine(
    model=placement.cached_policy(models.cached_policy(config.policy)),
    make_env=functools.partial(BothSplits, domain),
    tokenizer=domain.tokenizer,
    config=config.engine,
    seed=config.seed,
  )


def _remote_engine(config: RunConfig, domain: Domain) -> RolloutEngine:
  with needed("serve"):
    from sao_jax.rollout.remote.engine import RemoteEngine

  return RemoteEngine(
    remote=config.remote,
    save_weights=lambda params, folder: models.save_hf(folder, config.policy, params),
    make_env=functools.partial(BothSplits, domain),
    tokenizer=domain.tokenizer,
    config=config.engine,
    seed=config.seed,
  )
