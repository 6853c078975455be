"""What a run is made of: every room's part, built once from the config, and how they are connected."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from types import TracebackType

import jax

from sao_jax import models
from sao_jax.config import RunConfig
from sao_jax.evaluation import BothSplits
from sao_jax.learner import PackStats, make_baselines, make_update_step, pack_batch
from sao_jax.rollout.engine import Engine, RolloutEngine
from sao_jax.rollout.queue import TrajectoryQueue
from sao_jax.rollout.requests import RequestStream
from sao_jax.rollout.sources import AsyncSource, BatchSource, LaggedSource
from sao_jax.types import Domain, Params, PolicyApply, TokenBatch, Trajectory, ValueApply


class Components:
  """The parts of one run. A context manager: leaving it ends the engine's threads and frees the domain.

  Args:
    config: the run.
    domain: the task; closed with this object.
  """

  def __init__(self, config: RunConfig, domain: Domain):
    if domain.tokenizer.vocab_size > config.policy.vocab_size:
      raise ValueError(
        f"policy.vocab_size must be at least the tokenizer's {domain.tokenizer.vocab_size}; "
        f"received {config.policy.vocab_size}."
      )
    self.config = config
    self.domain = domain
    self.policy_apply: PolicyApply = models.policy_apply(config.policy)
    self.value_apply: ValueApply | None = models.value_apply(config.policy) if config.learner.uses_critic else None
    self.update = make_update_step(config.learner, self.policy_apply, self.value_apply)
    self.baselines = make_baselines(config.learner)
    self.engine = _embedded_engine(config, domain) if config.remote.url is None else _remote_engine(config, domain)
    self.requests = RequestStream(num_tasks=domain.num_train_tasks, group_size=config.group_size, seed=config.seed)

  def init_policy(self) -> Params:
    """The policy's parameters before any stage: a checkpoint's (a Hugging Face directory or a GGUF file), or fresh."""
    wanted = self.config.policy
    if self.config.policy_checkpoint is None:
      return models.init_policy(wanted, self.key("policy"))
    path = pathlib.Path(self.config.policy_checkpoint)
    load = models.load_gguf if path.suffix == ".gguf" else models.load_hf
    loaded, params = load(path, dtype=wanted.dtype, param_dtype=wanted.param_dtype)
    # A checkpoint says what is computed; the config may choose how.
    how = {name: getattr(wanted, name) for name in ("remat", "moe_impl", "attention_impl", "init_std")}
    if dataclasses.replace(loaded, **how) != wanted:
      raise ValueError(f"policy must be that of policy_checkpoint, {loaded}; received {wanted}.")
    return params

  def init_critic(self, policy: Params) -> Params | None:
    """A value model with the policy's trunk and a zero head; None for algorithms without a critic."""
    if not self.config.learner.uses_critic:
      return None
    return models.init_critic(self.config.policy, self.key("critic"), policy_params=policy)

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
    config = self.config
    if config.schedule == "async":
      queue = TrajectoryQueue(
        batch_size=config.batch_size,
        group_size=config.group_size,
        max_staleness=config.max_staleness,
        capacity=config.queue_capacity or 2 * config.batch_size,
      )
      return AsyncSource(engine=self.engine, requests=self.requests, queue=queue)
    return LaggedSource(
      engine=self.engine,
      requests=self.requests,
      batch_size=config.batch_size,
      group_size=config.group_size,
      lag=config.lag,
      switch_chunks=config.lag_switch_chunks,
    )

  def close(self) -> None:
    self.engine.close()
    self.domain.close()

  def __enter__(self) -> Components:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


def _embedded_engine(config: RunConfig, domain: Domain) -> RolloutEngine:
  return Engine(
    model=models.cached_policy(config.policy),
    make_env=functools.partial(BothSplits, domain),
    tokenizer=domain.tokenizer,
    config=config.engine,
    seed=config.seed,
  )


def _remote_engine(config: RunConfig, domain: Domain) -> RolloutEngine:
  from sao_jax.rollout.remote import RemoteEngine  # needs the extra `serve`

  return RemoteEngine(
    remote=config.remote,
    save_weights=lambda params, folder: models.save_hf(folder, config.policy, params),
    make_env=functools.partial(BothSplits, domain),
    tokenizer=domain.tokenizer,
    config=config.engine,
    seed=config.seed,
  )

