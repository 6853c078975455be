"""Components of a run (models, engine, learner step, schedule), built and connected from its config."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import jax
import numpy as np

from sao_jax import models
from sao_jax.learner import (
  LearnerState,
  Metrics,
  PackedBatch,
  init_state,
  make_baselines,
  make_update_step,
  pack_batch,
)
from sao_jax.learner.scoring import make_scorer
from sao_jax.parallel.mesh import MeshConfig
from sao_jax.parallel.step import on_mesh
from sao_jax.rollout.engine.engine import Engine, RolloutEngine
from sao_jax.rollout.ray.cluster import EngineCluster
from sao_jax.rollout.requests import RequestStream
from sao_jax.rollout.schedules import AsyncSchedule, LaggedSchedule, RolloutSchedule
from sao_jax.rollout.trajectory_queue import TrajectoryQueue
from sao_jax.rollout.weight_sync import WeightHistory, WeightStore, WeightSync
from sao_jax.training.config import RunConfig, max_logprob_error
from sao_jax.training.evaluation import BothSplits
from sao_jax.training.multi_process import MultiProcessRollouts, MultiProcessSchedule, check_processes
from sao_jax.training.placement import Placement
from sao_jax.types import Domain, Params, PolicyApply, Trajectory, ValueApply
from sao_jax.utils.extras import require_extra


class Components:
  """Components of one run. A context manager: its end stops the engine's threads and closes the domain.

  Args:
    config: the run.
    domain: the task; closed with this object.
    make_domain: makes the task again in the processes of `config.cluster`, if it has engines; must be picklable.

  Raises:
    ValueError: the config does not fit the domain, the devices or the number of processes.
  """

  def __init__(self, config: RunConfig, domain: Domain, *, make_domain: Callable[[], Domain] | None = None):
    if domain.tokenizer.vocab_size > config.policy.vocab_size:
      raise ValueError(
        f"policy.vocab_size must be at least the tokenizer's {domain.tokenizer.vocab_size}; "
        f"received {config.policy.vocab_size}."
      )
    check_processes(config, jax.process_count())
    if config.cluster.num_engines and make_domain is None:
      raise ValueError("cluster.num_engines > 0 needs make_domain: each engine makes its own domain; received None.")
    self.config = config
    self.domain = domain
    self._make_domain = make_domain
    self._cluster: EngineCluster | None = None
    self.placement = Placement(config)
    if self.placement.mesh.size > 1:
      # Raises for sizes that the mesh cannot split, before any work.
      self.placement.shapes(functools.partial(models.init_policy, config.policy), self.key("policy"))
    self.policy_apply: PolicyApply = self.placement.constrain(models.policy_apply(config.policy))
    self.value_apply: ValueApply | None = None
    if config.learner.uses_critic:
      self.value_apply = self.placement.constrain(models.value_apply(config.policy))
    self._update = self.placement.step(make_update_step(config.learner, self.policy_apply, self.value_apply, jit=False))
    self.baselines = make_baselines(config.learner)
    self.engine: RolloutEngine
    if config.remote.url is None:
      self.engine = _embedded_engine(config, domain, self.placement)
    else:
      self.engine = _remote_engine(config, domain, self.placement)
    self.rollouts = MultiProcessRollouts(self.engine, self.placement)
    # Synchronous schedules split each batch over the processes; asynchronous engines run independently.
    part = (jax.process_index(), jax.process_count()) if config.schedule == "async" else (0, 1)
    self.requests = RequestStream(
      num_tasks=domain.num_train_tasks, group_size=config.group_size, seed=config.seed, part=part
    )

  def init_policy(self) -> Params:
    """Returns the initial parameters of the policy: from `policy_checkpoint`, or fresh ones.

    Raises:
      ValueError: the checkpoint is of another model than the config's `policy`.
    """
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
    # The checkpoint defines the model; these fields only choose how it is computed.
    how = {name: getattr(wanted, name) for name in ("remat", "moe_impl", "attention_impl", "init_std")}
    if dataclasses.replace(loaded, **how) != wanted:
      raise ValueError(f"policy must be that of policy_checkpoint, {loaded}; received {wanted}.")
    return params

  def init_critic(self, policy: Params) -> Params | None:
    """Returns a value model with the policy's trunk and a zero head; None for algorithms without a critic."""
    if not self.config.learner.uses_critic:
      return None
    return self.placement.make(functools.partial(models.init_critic, self.config.policy), self.key("critic"), policy)

  def init_state(self, policy: Params, critic: Params | None) -> LearnerState:
    """Returns a fresh learner state, which shares no buffer with its arguments."""
    state: LearnerState = self.placement.make(functools.partial(init_state, self.config.learner), policy, critic)
    return state

  def state_shapes(self) -> LearnerState:
    """Returns the shapes and shardings of a learner state, as the target for restoring a checkpoint."""
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
    """Returns a PRNG key derived from the run's seed and `use`, "policy" or "critic"."""
    uses = ("policy", "critic")
    return jax.random.fold_in(jax.random.key(self.config.seed), uses.index(use))

  def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Packs a batch for the learner, with advantages from a reward baseline if the algorithm uses one."""
    adv = None if self.baselines is None else self.baselines.advantages(trajectories)
    return pack_batch(self.config.learner, trajectories, adv)

  def update(self, state: LearnerState, batch: PackedBatch) -> tuple[LearnerState, Metrics]:
    """Runs one learner step (`learner.make_update_step`), compiled at the first call.

    Args:
      state: learner state; donated.
      batch: packed by `pack`.

    Returns:
      The new state, and metrics as float32 scalars on the device.
    """
    tokens, stats = batch
    result: tuple[LearnerState, Metrics] = self._update(state, tokens, np.int32(stats.num_microbatches))
    return result

  def make_schedule(self, *, on_wait: Callable[[], None] = lambda: None) -> tuple[RolloutSchedule, WeightSync]:
    """Returns the config's rollout schedule, and the weight sync to publish its weights to.

    Args:
      on_wait: called every half second while the schedule waits for another thread. An exception that it raises ends
        the wait.
    """
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
      store = WeightStore(self.placement.for_engine)
      schedule = AsyncSchedule(
        engine=self._cluster or self.engine, requests=self.requests, queue=queue, weights=store, on_wait=on_wait
      )
      if processes == 1:
        return schedule, store
      return MultiProcessSchedule(schedule, self.placement, config.group_size), store
    history = WeightHistory(config.lag, self.placement.for_engine)
    return LaggedSchedule(
      engine=self.rollouts,
      requests=self.requests,
      weights=history,
      batch_size=config.batch_size,
      group_size=config.group_size,
      switch_chunks=config.lag_switch_chunks,
    ), history

  def rollout_counters(self) -> dict[str, Any]:
    """Returns the counters of the rollout engines: of the cluster if there is one, or else of all processes."""
    return self.rollouts.counters() if self._cluster is None else self._cluster.counters

  def _make_cluster(self) -> EngineCluster:
    assert self._make_domain is not None, "checked when made"
    # `config.mesh` is for the learner; an engine in a Ray worker has one device.
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
  """Makes an engine and its own domain, for a Ray worker; both are closed at the end of the block."""
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


def _remote_engine(config: RunConfig, domain: Domain, placement: Placement) -> RolloutEngine:
  with require_extra("serve"):
    from sao_jax.rollout.remote.engine import RemoteEngine
    from sao_jax.rollout.remote.weight_check import WeightCheck

  def save(params: Params, folder: pathlib.Path) -> None:
    as_sent = models.untied if config.remote.untie_embeddings else lambda *unchanged: unchanged
    models.save_hf(folder, *as_sent(config.policy, params))

  policy, learner = models.policy_apply(config.policy), config.learner
  scorer = make_scorer(policy, temperature=learner.temperature, chunk_size=learner.logprob_chunk_size)
  compiled = jax.jit(on_mesh(scorer, placement.engine_mesh))

  def score(params: Params, tokens: np.ndarray) -> np.ndarray:
    with placement.dispatching():
      logp = compiled(params, tokens)
    return np.asarray(logp)

  bound, engine = max_logprob_error(config), config.engine
  check = WeightCheck(
    score=score, max_error=bound, max_len=engine.max_len, max_action_tokens=engine.max_action_tokens
  )
  return RemoteEngine(
    remote=config.remote,
    save_weights=save,
    check=check if bound < math.inf else None,
    make_env=functools.partial(BothSplits, domain),
    tokenizer=domain.tokenizer,
    config=config.engine,
    seed=config.seed,
  )
