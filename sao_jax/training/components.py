"""Components of a run (models, engine, learner step, schedule), built and connected from its config."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
from collections.abc import Callable, Sequence
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
from sao_jax.models import lora
from sao_jax.parallel.step import on_mesh
from sao_jax.rollout.engine.engine import AsyncEngine, RolloutEngine
from sao_jax.rollout.requests import RequestStream
from sao_jax.rollout.schedules import AsyncSchedule, LaggedSchedule, RolloutSchedule
from sao_jax.rollout.trajectory_queue import TrajectoryQueue
from sao_jax.rollout.weight_sync import WeightHistory, WeightStore, WeightSync
from sao_jax.training import memory, pretrained
from sao_jax.training.config import RunConfig, max_logprob_error, rl_learner
from sao_jax.training.embedded import embedded_engines, num_tokens
from sao_jax.training.evaluation import BothSplits
from sao_jax.training.multi_process import MultiProcessRollouts, MultiProcessSchedule, check_processes
from sao_jax.training.placement import Placement
from sao_jax.training.ray_engines import NoRollouts, RayEngines, check_cluster
from sao_jax.types import Domain, Params, PolicyApply, TokenBatch, Trajectory, ValueApply
from sao_jax.utils.extras import require_extra


class Components:
  """Components of one run. A context manager: its end stops the engine's threads and closes the domain.

  Args:
    config: the run.
    domain: the task; closed with this object.
    make_domain: makes the task again in the processes of `config.cluster`, if it has engines; must be picklable.
    learning: False if there is only sampling, which needs less memory, and no start.

  Raises:
    ValueError: the config does not fit the domain, the checkpoint, the devices and their memory, or the number of
      processes.
  """

  def __init__(
    self,
    config: RunConfig,
    domain: Domain,
    *,
    make_domain: Callable[[], Domain] | None = None,
    learning: bool = True,
  ):
    if domain.tokenizer.vocab_size > config.policy.vocab_size:
      raise ValueError(
        f"policy.vocab_size must be at least the tokenizer's {domain.tokenizer.vocab_size}; "
        f"received {config.policy.vocab_size}."
      )
    check_processes(config, jax.process_count())
    if learning and config.cluster.num_engines and make_domain is None:
      raise ValueError("cluster.num_engines > 0 needs make_domain: each engine makes its own domain; received None.")
    self.config = config
    self.domain = domain
    self.prompts: list[str] = []
    """Texts that `rollouts` can be asked to continue: task `num_train_tasks + num_eval_tasks + i`."""
    self._make_domain = make_domain
    self._ray_engines: RayEngines | None = None
    if config.cluster.num_engines:
      check_cluster(config)
    self.placement = Placement(config)
    # Raises for sizes that the meshes cannot split, before any work.
    self.placement.check_model(functools.partial(models.init_policy, config.policy), self.key("policy"))
    if config.lora.enabled:
      jax.eval_shape(functools.partial(lora.init_adapters, config.policy, config.lora), self.key("adapters"))
    if learning and config.policy_checkpoint is not None:
      pretrained.check(config.policy_checkpoint, config.policy, pinned=config.lora.enabled)
    memory.check(config, self.placement.mesh, self.placement.engine_meshes[0], learning=learning)
    self.learner = rl_learner(config)
    # With adapters, they take the joined parameters; `models_on` gives functions of the trained ones.
    self.policy_apply: PolicyApply = self.placement.constrain(
      lora.with_adapters(config.lora, models.policy_apply(config.policy, num_tokens=num_tokens(config, domain)))
    )
    self.value_apply: ValueApply | None = None
    if config.learner.uses_critic:
      self.value_apply = self.placement.constrain(lora.with_adapters(config.lora, models.value_apply(config.policy)))
    self._update = self.step(lambda policy, value: make_update_step(self.learner, policy, value, jit=False))
    self.baselines = make_baselines(config.learner)
    # Synchronous schedules split each batch over the processes; asynchronous engines run independently.
    independent = config.schedule == "async" and not config.cluster.num_engines
    self._part = (jax.process_index(), jax.process_count()) if independent else (0, 1)
    self.requests = RequestStream(
      num_tasks=domain.num_train_tasks, group_size=config.group_size, seed=config.seed, part=self._part
    )

  @functools.cached_property
  def engine(self) -> RolloutEngine:
    """Engine of this process, embedded or on a server. Made when first used: a run with `config.cluster` needs it only
    for evaluations and value pretraining."""
    if self.config.remote.url is None:
      return embedded_engines(self.config, self.domain, self.placement, self.prompts)
    return _remote_engine(self.config, self.domain, self.placement, self.prompts)

  @functools.cached_property
  def rollouts(self) -> MultiProcessRollouts:
    """`engine`, over all processes."""
    return MultiProcessRollouts(self.engine, self.placement)

  @functools.cached_property
  def base(self) -> Params:
    """With `config.lora`: the frozen parameters, which policy and critic share. They are never donated."""
    return self._initial_parameters()

  def init_policy(self) -> Params:
    """Returns what the policy trains: its parameters, from `policy_checkpoint` or fresh; with `config.lora`, adapters.

    Raises:
      ValueError: a tensor of the checkpoint is missing or not supported.
    """
    config = self.config
    if not config.lora.enabled:
      return self._initial_parameters()
    return self.placement.make(functools.partial(lora.init_adapters, config.policy, config.lora), self.key("adapters"))

  def _initial_parameters(self) -> Params:
    config = self.config
    return pretrained.initial(config.policy_checkpoint, config.policy, config.seed, self.placement)

  def models_on(self, base: Params | None) -> tuple[PolicyApply, ValueApply | None]:
    """Returns policy and value model (None: the algorithm has none) as functions of what they train.

    Args:
      base: the frozen parameters; None without `config.lora`.
    """
    if base is None:
      return self.policy_apply, self.value_apply

    def on_base(apply: Any) -> Any:
      return lambda trained, *tokens: apply(lora.join(base, trained), *tokens)

    return on_base(self.policy_apply), None if self.value_apply is None else on_base(self.value_apply)

  def step(
    self, make: Callable[[PolicyApply, Any], Callable[..., tuple[Any, Any]]]
  ) -> Callable[[Any, TokenBatch, Any], tuple[Any, Any]]:
    """Returns a learner step `(state, batch, num_microbatches)` of the run's models, compiled at its first call.

    Args:
      make: returns the step, not jitted, for a policy and a value model (None: the algorithm has none).
    """
    if not self.config.lora.enabled:
      return self.placement.step(make(*self.models_on(None)))

    def on_base(state: Any, batch: TokenBatch, num_microbatches: Any, base: Params) -> tuple[Any, Any]:
      return make(*self.models_on(base))(state, batch, num_microbatches)

    compiled = self.placement.step(on_base)
    return lambda state, batch, num_microbatches: compiled(state, batch, num_microbatches, self.base)

  def whole_policy(self, policy: Params) -> Params:
    """Returns all parameters of a policy, given what it trains; with `config.lora`, the adapters merged into copies."""
    return self.placement.make(self._merge_all, self.base, policy) if self.config.lora.enabled else policy

  def for_engine(self, policy: Params) -> Params:
    """Returns the weights of a policy for the engines, given what it trains; see `Placement.for_engine`.

    With `config.lora` they are the adapted kernels, merged anew, and the other weights, which all versions share.
    """
    if not self.config.lora.enabled:
      return self.placement.for_engine(policy)
    merged = self.placement.for_engine(self.base, policy, make=self._merge)
    if isinstance(merged, list):
      return [lora.join(fixed, new) for fixed, new in zip(self._engine_base, merged, strict=True)]
    return lora.join(self._engine_base, merged)

  def for_workers(self, policy: Params) -> Params:
    """Returns all weights of a policy for engines in other processes; see `Placement.for_workers`."""
    if not self.config.lora.enabled:
      return self.placement.for_workers(policy)
    return self.placement.for_workers(self.base, policy, make=self._merge_all)

  @functools.cached_property
  def _merge(self) -> Callable[[Params, Params], Params]:
    return functools.partial(lora.merge, self.config.lora)

  @functools.cached_property
  def _merge_all(self) -> Callable[[Params, Params], Params]:
    return functools.partial(lora.merge_all, self.config.lora)

  @functools.cached_property
  def _engine_base(self) -> Any:
    """The engines' weights without adapters."""
    merged = jax.eval_shape(self._merge, self.base, self.state_shapes().policy)
    return self.placement.shared_with_engine(lora.without(self.base, merged))

  def init_critic(self, policy: Params) -> Params | None:
    """Returns a value model with the policy's trunk and a zero head; None for algorithms without a critic."""
    if not self.config.learner.uses_critic:
      return None
    return self.placement.make(functools.partial(models.init_critic, self.config.policy), self.key("critic"), policy)

  def init_state(self, policy: Params, critic: Params | None) -> LearnerState:
    """Returns a fresh learner state, which shares no buffer with its arguments."""
    state: LearnerState = self.placement.make(functools.partial(init_state, self.learner), policy, critic)
    return state

  def state_shapes(self) -> LearnerState:
    """Returns the shapes and shardings of a learner state, as the target for restoring a checkpoint."""
    config, key = self.config, jax.random.key(0)

    def make() -> LearnerState:
      policy = lora.init_trained(config.policy, config.lora, key)
      critic = models.init_critic(config.policy, key, policy) if config.learner.uses_critic else None
      return init_state(self.learner, policy, critic)

    shapes: LearnerState = self.placement.shapes(make)
    return shapes

  def key(self, use: pretrained.Use) -> jax.Array:
    """Returns a PRNG key derived from the run's seed and `use`, "policy", "critic" or "adapters"."""
    return pretrained.key(self.config.seed, use)

  def pack(self, trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Packs a batch for the learner, with advantages from a reward baseline if the algorithm uses one."""
    adv = None if self.baselines is None else self.baselines.advantages(trajectories)
    return pack_batch(self.learner, trajectories, adv)

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
    config = self.config
    if config.schedule == "async":
      return self._async_schedule(on_wait)
    history = WeightHistory(config.lag, self.for_engine)
    return LaggedSchedule(
      engine=self.rollouts,
      requests=self.requests,
      weights=history,
      batch_size=config.batch_size,
      group_size=config.group_size,
      switch_chunks=config.lag_switch_chunks,
    ), history

  def _async_schedule(self, on_wait: Callable[[], None]) -> tuple[RolloutSchedule, WeightStore]:
    config = self.config
    if config.cluster.num_engines:
      assert self._make_domain is not None, "checked when made"
      if self._ray_engines is not None:  # of an earlier `Trainer.train`
        self._ray_engines.close()
      store = WeightStore(self.for_workers)
      self._ray_engines = RayEngines(config, self._make_domain, self.placement, store)
      engine: AsyncEngine | None = self._ray_engines.cluster
    else:
      store, engine = WeightStore(self.for_engine), self.engine
    schedule: RolloutSchedule
    if engine is None:
      assert self._ray_engines is not None
      schedule = NoRollouts(self._ray_engines)
    else:
      _, parts = self._part
      queue = TrajectoryQueue(
        batch_size=config.batch_size // parts,
        group_size=config.group_size,
        max_staleness=config.max_staleness,
        capacity=(config.queue_capacity or 2 * config.batch_size) // parts,
      )
      schedule = AsyncSchedule(engine=engine, requests=self.requests, queue=queue, weights=store, on_wait=on_wait)
    if jax.process_count() > 1:
      schedule = MultiProcessSchedule(schedule, self.placement, config.group_size, part=self._part)
    return schedule, store

  def rollout_counters(self) -> dict[str, Any]:
    """Returns the counters of the rollout engines: of the cluster if there is one, or else of all processes."""
    return self.rollouts.counters() if self._ray_engines is None else self._ray_engines.counters()

  def close(self) -> None:
    with contextlib.ExitStack() as stack:
      stack.callback(self.domain.close)
      if "engine" in vars(self):
        stack.callback(self.engine.close)
      if self._ray_engines is not None:
        stack.callback(self._ray_engines.close)

  def __enter__(self) -> Components:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


def _remote_engine(config: RunConfig, domain: Domain, placement: Placement, prompts: Sequence[str]) -> RolloutEngine:
  with require_extra("serve"):
    from sao_jax.rollout.remote.engine import RemoteEngine
    from sao_jax.rollout.remote.weight_check import WeightCheck

  def save(params: Params, folder: pathlib.Path) -> None:
    as_sent = models.untied if config.remote.untie_embeddings else lambda *unchanged: unchanged
    models.save_hf(folder, *as_sent(config.policy, params))

  policy, learner = models.policy_apply(config.policy), config.learner
  scorer = make_scorer(policy, temperature=learner.temperature, chunk_size=learner.logprob_chunk_size)
  compiled = jax.jit(on_mesh(scorer, placement.engine_meshes[0]))

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
    make_env=functools.partial(BothSplits, domain, prompts),
    tokenizer=domain.tokenizer,
    config=config.engine,
    seed=config.seed,
  )
