"""Frozen configuration of a whole run. `config.json` in the workdir records it; the command line overrides its fields.

Each package owns the config of its component. This module composes them and checks relations between them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypedDict, get_args

from sao_jax.io.loggers import WandbMode
from sao_jax.learner import algorithms
from sao_jax.learner.config import LearnerConfig, OptimizerConfig, require
from sao_jax.models.config import ModelConfig
from sao_jax.models.lora import LoraConfig
from sao_jax.parallel.mesh import MeshConfig, RolloutMeshConfig
from sao_jax.rollout.engine.config import REMOVED_FIELDS, EngineConfig
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.rollout.remote.config import RemoteConfig

Schedule = Literal["async", "sync", "lagged"]
Stage = Literal["warm_start", "value_pretraining", "rl"]
STAGES: tuple[Stage, ...] = get_args(Stage)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvConfig:
  """The task, given by name for commands: a function and its options."""

  factory: str | None = None
  """`module:function`, which returns a `types.Domain` when called with `options` as keywords. None: the caller of
  `training.loop.train` passes its own domain."""
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Keyword arguments of the factory."""

  def __post_init__(self) -> None:
    if self.factory is not None:
      module, _, function = self.factory.partition(":")
      require(bool(module and function), "env.factory", self.factory, "of the form 'module:function'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmStartConfig:
  """Stage 1: supervised fine-tuning on the domain's demonstrations."""

  num_steps: int = 0
  """Number of optimizer updates; 0 leaves the policy unchanged (a pretrained checkpoint, say)."""
  batch_size: int = 128
  """Demonstrations per update."""
  optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-3, warmup_steps=50)
  log_every: int = 20
  """Updates between log lines, and between checks for skipped updates."""
  save_every: int = 200
  """Updates between checkpoints within the stage, from which an interrupted run continues. Also used in value
  pretraining."""

  def __post_init__(self) -> None:
    require(self.num_steps >= 0, "warm_start.num_steps", self.num_steps, ">= 0")
    require(self.batch_size >= 1, "warm_start.batch_size", self.batch_size, ">= 1")
    require(self.log_every >= 1, "warm_start.log_every", self.log_every, ">= 1")
    require(self.save_every >= 1, "warm_start.save_every", self.save_every, ">= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CriticConfig:
  """Stage 2: value pretraining. The value model starts as a copy of the policy with a zero head and is fitted to
  trajectories of the initial policy.

  The fit does not depend on how the algorithm trains its critic during RL, so all algorithms with a critic start from
  the same one."""

  pretraining_trajectories: int = 0
  """Number of trajectories of the initial policy. 0 starts RL with an untrained critic (ablation). Algorithms without a
  critic ignore it. One in eight, and at most a batch, is held out to measure the explained variance that the fit
  reaches."""
  pretraining_epochs: int = 4
  """Passes over these trajectories, in batches of the run's `batch_size`."""
  pretraining_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-3, warmup_steps=10)
  pretraining_frozen: tuple[str, ...] = ()
  """Parameters that value pretraining leaves as they are, in the form of `learner.frozen_critic`; () trains all. The
  paper freezes attention during RL and says nothing of pretraining."""

  def __post_init__(self) -> None:
    count = self.pretraining_trajectories
    require(count >= 0, "critic.pretraining_trajectories", count, ">= 0")
    require(self.pretraining_epochs >= 1, "critic.pretraining_epochs", self.pretraining_epochs, ">= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
  """Interval and retention of checkpoints."""

  every_steps: int = 50
  """Learner steps between checkpoints; the last step is always saved."""
  keep: int = 2
  """Number of newest checkpoints to keep."""
  keep_best: int = 1
  """Number of further checkpoints to keep, those with the highest training success rate."""

  def __post_init__(self) -> None:
    require(self.every_steps >= 1, "checkpoint.every_steps", self.every_steps, ">= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
  """Settings of what a run writes besides `metrics.jsonl`, TensorBoard's event files and checkpoints."""

  trajectories: Literal["sample", "all"] = "sample"
  """Trajectories in `trajectories.jsonl`: four with every checkpoint, or all that were trained on."""
  wandb_project: str | None = None
  """Project of Weights & Biases (extra `wandb`); None: no logging there."""
  wandb_mode: WandbMode = "online"
  """"online", "offline" or "disabled"."""

  def __post_init__(self) -> None:
    kinds = ("sample", "all")
    require(self.trajectories in kinds, "logging.trajectories", self.trajectories, f"one of {', '.join(kinds)}")
    modes = get_args(WandbMode)
    require(self.wandb_mode in modes, "logging.wandb_mode", self.wandb_mode, f"one of {', '.join(modes)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """Validated settings of a run; `ValueError` if fields are out of range or contradict each other.

  A resumed run may change the fields in `MAY_DIFFER`.
  """

  algorithm: str = "sao"
  """A key of `learner.algorithms.ALGORITHMS`, which sets the learner fields that it names.

  If such a field was given another value than its default and the algorithm's, that is an error. Group methods also
  need a `group_size`. Losses that clip ratios to pi_old (`ppo_clip`, `icepop`, `gspo`) clip from the second of
  `learner.policy_minibatches` on."""
  schedule: Schedule = "async"
  """Rollout schedule: "async", "sync" or "lagged", see `rollout.schedules`."""
  seed: int = 0
  """Seed of parameters, tasks and sampling, in [0, 2**31)."""
  num_steps: int
  """Number of learner steps (policy updates)."""
  batch_size: int = 128
  """Trajectories per learner step."""
  group_size: int = 1
  """Episodes per prompt; 1 for single-rollout methods, a divisor of `batch_size` for group methods."""
  lag: int = 0
  """`lagged` only: age, in versions, of the weights with which a batch starts."""
  lag_switch_chunks: int | None = None
  """`lagged` only: decode chunks after which the engine takes the next version; None: a batch has one version."""
  max_staleness: int = 8
  """Largest allowed staleness of a trajectory: the learner's version at use minus the oldest version among its action
  tokens."""
  queue_capacity: int | None = None
  """No episode starts while this many trajectories wait; None: twice `batch_size`."""
  max_skipped_in_a_row: int = 8
  """The run stops, with a checkpoint, after this many learner steps in a row that skipped an update because a value was
  not finite; 0: never. The batches are kept in `bad_batches/`. The limit also applies to the stages before RL. Value
  pretraining keeps its batches in `stages/value_pretraining/bad_batches/`; the warm start checks every `log_every`
  updates."""
  max_logprob_error: float | None = None
  """The run stops when the engine's log-probs differ by more than this from the learner's with the same weights: mean
  absolute difference in nats. None: 0.005 for a float32 policy, 0.1 for bfloat16, and 0.25 where an engine may keep
  keys and values of older weights (asynchronous, without `engine.recompute_cache_on_update`); 0: never. Each learner
  step compares the tokens that were sampled at its own version, if there are any. A server (`remote`) is checked after
  every update of its weights."""
  eval_episodes: int = 512
  """Number of held-out episodes of an evaluation: pass@1 at the engine's temperature."""
  eval_every_steps: int = 0
  """Learner steps between evaluations during RL, besides those before and after it; 0: none. The learner waits for an
  evaluation. In `async` runs its episodes take the next free slots of the running engine, before new training episodes,
  while training episodes that have started go on."""

  policy: ModelConfig
  policy_checkpoint: str | None = None
  """Starting point: a Hugging Face directory, a GGUF file, or the workdir of another run (or
  `WORKDIR/checkpoints/STEP`), whose policy it takes. None: fresh parameters."""
  lora: LoraConfig = LoraConfig()
  """Low-rank adapters, which then train in all stages in place of the parameters; `lora.rank` turns them on. The
  critic's frozen sets do not apply then: its adapters and its value head train. `policy_checkpoint` must not change
  while the run lasts, because checkpoints hold the adapters only. Needs lag = 0."""
  critic: CriticConfig = CriticConfig()
  warm_start: WarmStartConfig = WarmStartConfig()
  learner: LearnerConfig
  engine: EngineConfig = EngineConfig()
  remote: RemoteConfig = RemoteConfig()
  """Server that generates the rollouts, in place of the embedded engine."""
  cluster: ClusterConfig = ClusterConfig()
  """`async` only: several engines in Ray workers, on this machine or others, each on devices of its own."""
  env: EnvConfig = EnvConfig()
  mesh: MeshConfig = MeshConfig(data=1)
  """Devices of the learner, see `placement.Placement`. data=1 is one device; an axis of -1 takes all remaining ones.
  `learner.rows_per_microbatch` must be a multiple of data x fsdp x expert, and `learner.row_length` of context.
  Unfilled rows of a batch are padding."""
  rollout_mesh: RolloutMeshConfig = RolloutMeshConfig()
  """Devices of the embedded engines; by default those of the learner. `engine.num_slots` counts the slots of one
  engine, and must be, for each stream, a multiple of data x fsdp x expert of its mesh. `engine.page_size` must be a
  multiple of context."""
  checkpoint: CheckpointConfig = CheckpointConfig()
  may_change: tuple[str, ...] = ()
  """Further fields that a resumed run may change, out of `MAY_CHANGE`: a learning rate, for example. The change is
  reported, and recorded in `changes.jsonl`."""
  logging: LoggingConfig = LoggingConfig()

  def __post_init__(self) -> None:
    known = algorithms.ALGORITHMS
    require(self.algorithm in known, "algorithm", self.algorithm, f"one of {', '.join(known)}")
    require(self.schedule in get_args(Schedule), "schedule", self.schedule, f"one of {', '.join(get_args(Schedule))}")
    require(0 <= self.seed < 2**31, "seed", self.seed, "in [0, 2**31)")
    for name in ("num_steps", "lag", "max_staleness", "max_skipped_in_a_row", "eval_episodes", "eval_every_steps"):
      require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")
    error = self.max_logprob_error
    require(error is None or error >= 0, "max_logprob_error", error, ">= 0 or None")
    for name in ("batch_size", "group_size"):
      require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")
    divides = self.batch_size % self.group_size == 0
    require(divides, "group_size", self.group_size, f"a divisor of batch_size = {self.batch_size}")
    for name in self.may_change:
      require(name in MAY_CHANGE, "may_change", name, f"out of {', '.join(sorted(MAY_CHANGE))}")
    self._apply_algorithm()
    self._check_schedule()
    require(
      self.learner.row_length >= self.engine.max_len,
      "learner.row_length",
      self.learner.row_length,
      f"at least engine.max_len = {self.engine.max_len}: a trajectory must fit in one row",
    )
    require(
      self.learner.temperature == self.engine.temperature,
      "learner.temperature",
      self.learner.temperature,
      f"engine.temperature = {self.engine.temperature}: both must score the same distribution",
    )
    require(
      self.engine.top_p == 1.0 or self.num_steps == 0,
      "engine.top_p",
      self.engine.top_p,
      "1.0 with num_steps > 0: the learner scores the whole distribution, not a truncated one",
    )

  @property
  def uses_embedded_engine(self) -> bool:
    """Whether an engine on the learner's devices generates: with `cluster`, only for evaluations and value
    pretraining."""
    if self.remote.url is not None:
      return False
    pretraining = self.learner.uses_critic and self.critic.pretraining_trajectories > 0
    return not self.cluster.num_engines or self.eval_episodes > 0 or pretraining

  def _apply_algorithm(self) -> None:
    """Sets learner fields to the algorithm's values where they have their defaults; other values must agree."""
    fields = algorithms.ALGORITHMS[self.algorithm]
    defaults = {field.name: field.default for field in dataclasses.fields(LearnerConfig)}
    missing = {name: value for name, value in fields.items() if getattr(self.learner, name) == defaults[name]}
    object.__setattr__(self, "learner", dataclasses.replace(self.learner, **missing))
    for name, value in fields.items():
      require(
        getattr(self.learner, name) == value,
        f"learner.{name}",
        getattr(self.learner, name),
        f"{value!r} with algorithm={self.algorithm!r}",
      )
    with_it = f"with algorithm={self.algorithm!r}"
    if self.learner.needs_groups:
      require(self.group_size > 1, "group_size", self.group_size, f"greater than 1 {with_it}")
    else:
      require(self.group_size == 1, "group_size", self.group_size, f"1 {with_it}: single rollouts")

  def _check_schedule(self) -> None:
    lagged = self.schedule == "lagged"
    require(lagged or self.lag == 0, "lag", self.lag, f"0 with schedule={self.schedule!r}")
    switch = self.lag_switch_chunks
    require(lagged or switch is None, "lag_switch_chunks", switch, "None unless lagged")
    require(switch is None or switch >= 1, "lag_switch_chunks", switch, ">= 1 or None")
    require(self.lag == 0 or not self.lora.enabled, "lag", self.lag, "0 with lora.rank")
    require(self.lag <= self.max_staleness, "lag", self.lag, f"at most max_staleness = {self.max_staleness}")
    counted = switch is None or self.remote.url is None
    require(counted, "lag_switch_chunks", switch, "None with a remote.url: a server's decode chunks are not counted")
    engines = self.cluster.num_engines
    require(engines == 0 or self.schedule == "async", "cluster.num_engines", engines, "0 unless async")
    require(engines == 0 or self.remote.url is None, "cluster.num_engines", engines, "0 with a remote.url")
    placed = self.rollout_mesh
    with_others = "RolloutMeshConfig() with cluster.num_engines or a remote.url: it places embedded engines"
    embedded = engines == 0 and self.remote.url is None
    require(embedded or placed.follows_learner, "rollout_mesh", placed, with_others)
    capacity = self.queue_capacity
    enough = capacity is None or capacity >= self.batch_size
    require(enough, "queue_capacity", capacity, f">= batch_size = {self.batch_size}")


MAY_DIFFER = frozenset({
  "num_steps", "max_skipped_in_a_row", "eval_episodes", "eval_every_steps", "checkpoint", "mesh", "rollout_mesh",
  "remote", "cluster", "max_logprob_error",
  "warm_start.log_every", "warm_start.save_every", "engine.max_failed_share", "may_change", "logging",
  *(f"engine.{name}" for name in ("page_size", "cache_tokens", "token_budget", *REMOVED_FIELDS)),
})  # fmt: skip
"""Fields of `RunConfig` that a resumed run may change."""

MAY_CHANGE = frozenset({
  *(f"learner.{which}_optimizer.{field}" for which in ("policy", "critic")
    for field in ("learning_rate", "warmup_steps", "decay_steps", "weight_decay", "max_grad_norm")),
  "learner.eps_low", "learner.eps_high", "learner.alpha", "learner.critic_updates", "max_staleness", "queue_capacity",
})  # fmt: skip
"""Fields that change the method, and that a resumed run may change if `RunConfig.may_change` names them."""


class Comparison(TypedDict):
  """Keyword arguments of `io.workdir.config_differences` and of what calls it."""

  may_differ: Collection[str]
  may_be_missing: Collection[str]


def comparison(config: RunConfig) -> Comparison:
  """Returns the fields that may differ between a recorded config and this one, and those that the record may lack.

  The record of an older release lacks fields that were added since. If they have their defaults, the run is the same.
  """
  return {"may_differ": MAY_DIFFER | set(config.may_change), "may_be_missing": _at_default(config)}


def _at_default(config: Any, prefix: str = "") -> frozenset[str]:
  """Returns the dotted names of the fields that have their default value."""
  names: set[str] = set()
  for field in dataclasses.fields(config):
    name, value = prefix + field.name, getattr(config, field.name)
    factory = field.default_factory
    default = field.default if factory is dataclasses.MISSING else factory()
    if default is not dataclasses.MISSING and value == default:
      names.add(name)
    if dataclasses.is_dataclass(value):
      names |= _at_default(value, f"{name}.")
  return frozenset(names)


def max_logprob_error(config: RunConfig) -> float:
  """Returns `max_logprob_error`, or its default for the policy's dtype; infinity if the check is off."""
  if config.max_logprob_error is None:
    updated_midway = config.schedule == "async" or config.lag_switch_chunks is not None
    if updated_midway and config.remote.url is None and not config.engine.recompute_cache_on_update:
      return 0.25
    return 0.005 if config.policy.dtype == "float32" else 0.1
  return config.max_logprob_error or math.inf


def rl_learner(config: RunConfig) -> LearnerConfig:
  """Returns the learner's settings for RL: with adapters, none of the critic's are frozen."""
  return dataclasses.replace(config.learner, frozen_critic=()) if config.lora.enabled else config.learner


def pretraining_learner(config: RunConfig) -> LearnerConfig:
  """Returns the learner's settings for value pretraining.

  The critic's optimizer and frozen parameters are the stage's, and it is fitted on all action tokens, also where RL
  fits the last one of each turn only. No reference policy is kept.
  """
  return dataclasses.replace(
    config.learner,
    critic_optimizer=config.critic.pretraining_optimizer,
    frozen_critic=() if config.lora.enabled else config.critic.pretraining_frozen,
    advantage="gae",
    kl_coef=0.0,
  )


def to_json(config: Any) -> Any:
  """Converts a config to JSON values, for `config.json`."""
  return dataclasses.asdict(config)
