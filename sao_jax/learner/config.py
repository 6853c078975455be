"""Validated learner settings."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias, get_args

from sao_jax.learner.partition import PROJECTIONS_AND_HEAD

PolicyLossName: TypeAlias = Literal["dis", "ppo_clip", "icepop", "truncated_is", "gspo", "uncorrected"]
"""Rows of `algorithms.POLICY_LOSSES`."""
Advantage: TypeAlias = Literal["gae", "gae_all_tokens", "step_mean", "step_last", "baseline"]
Baseline: TypeAlias = Literal["none", "group", "batch_mean", "running_mean", "global_running_mean", "spo"]
Truncation: TypeAlias = Literal["terminal", "bootstrap"]
ValuesFrom: TypeAlias = Literal["updated", "previous"]
OldPolicy: TypeAlias = Literal["learner", "rollout"]

_CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
  ("policy_loss", get_args(PolicyLossName)),
  ("advantage", get_args(Advantage)),
  ("baseline", get_args(Baseline)),
  ("truncation", get_args(Truncation)),
  ("values_from", get_args(ValuesFrom)),
  ("old_policy", get_args(OldPolicy)),
)


_LEAST, _MOST = 1e-37, 1e37
"""Bounds of numbers that the optimizer divides by or multiplies with in float32. A smaller number would count as 0, and
a parameter without a gradient become 0 / 0; a larger one would count as infinite."""


def require(condition: bool, name: str, received: Any, allowed: str) -> None:
  """Raises ValueError unless the condition holds, in the form shared by all checks of a config."""
  if not condition:
    raise ValueError(f"{name} must be {allowed}; received {received!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """Adam with linear warm-up, global-norm clipping and optional decoupled weight decay."""

  learning_rate: float
  warmup_steps: int = 0
  """Number of optimizer updates over which the rate rises linearly to `learning_rate`; update i (from 1) uses
  i / warmup_steps of it. With K = 2 critic updates per learner step, ten are five learner steps. The paper's "10 steps"
  leave open which is meant; Adam's moments settle with updates, so we count these."""
  decay_steps: int | None = None
  """Number of optimizer updates after which the rate has fallen along a cosine to 5 % of `learning_rate`, where it
  stays. None: no decay."""
  max_grad_norm: float | None = 1.0
  """Gradients are scaled down to this global norm; None: no clipping."""
  weight_decay: float = 0.0
  """Decoupled (AdamW), for parameters with two or more axes."""
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8

  def __post_init__(self) -> None:
    rate, decay_rate = self.learning_rate, self.weight_decay
    require(0.0 < rate < _MOST, "learning_rate", rate, f"> 0 and < {_MOST:g}")
    require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, ">= 0")
    decay = self.decay_steps
    falls = decay is None or decay > self.warmup_steps
    require(falls, "decay_steps", decay, f"> warmup_steps = {self.warmup_steps}, or None")
    require(self.max_grad_norm is None or self.max_grad_norm > 0.0, "max_grad_norm", self.max_grad_norm, "> 0 or None")
    require(0.0 <= decay_rate < _MOST, "weight_decay", decay_rate, f">= 0 and < {_MOST:g}")
    require(0.0 <= self.b1 < 1.0, "b1", self.b1, "in [0, 1)")
    require(0.0 <= self.b2 < 1.0, "b2", self.b2, "in [0, 1)")
    require(_LEAST <= self.eps < _MOST, "eps", self.eps, f">= {_LEAST:g} and < {_MOST:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LearnerConfig:
  """Settings of a learner step. `algorithms.learner_config(name)` returns those of a named algorithm."""

  policy_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
  critic_optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-6, warmup_steps=10)

  # The policy's loss.
  policy_loss: PolicyLossName = "dis"
  eps_low: float | None = None
  """DIS keeps ratios above 1 - eps_low. `dis` requires both bounds; neither is derived from the other."""
  eps_high: float | None = None
  """DIS keeps ratios below 1 + eps_high: 5.0 means ratios below 6."""
  clip_low: float = 0.2
  """`ppo_clip`, `icepop`, `gspo`: ratios are clipped to (1 - clip_low, 1 + clip_high)."""
  clip_high: float = 0.28
  icepop_low: float = 0.5
  """`icepop`: smallest ratio π_old / π_rollout that is kept; `icepop_high` is the largest."""
  icepop_high: float = 5.0
  is_cap: float = 2.0
  """`truncated_is`: largest ratio; greater ones are set to it."""
  policy_minibatches: int = 1
  """Number of policy updates per step, each on its share of the microbatches."""
  old_policy: OldPolicy = "learner"
  """π_old of `ppo_clip`, `icepop` and `gspo`. `learner`: the policy before the step's first update. With one update per
  step every ratio to it is 1, so PPO and GSPO clip nothing. `rollout`: the policies that sampled the tokens, by the
  engine's own log-probs; then one update clips, too, and IcePop's mismatch ratio is 1."""
  positive_weight: float = 0.0
  """Weight of VAPO's loss on positive examples: the mean negative log-likelihood of the action tokens of trajectories
  with a positive return (VAPO: 0.1)."""
  kl_coef: float = 0.0
  """Coefficient of the KL divergence to the reference policy, the policy at the start of RL, which is added to the loss
  (`ops.policy_losses.kl_loss`). It takes a copy of the policy and a forward pass per step; 0: neither. Not part of
  SAO."""
  entropy_coef: float = 0.0
  """Coefficient of the entropy bonus, which is subtracted from the loss (`ops.policy_losses.entropy_loss`). Not part of
  SAO."""
  hold_policy_steps: int = 0
  """Number of learner steps at the start during which only the critic learns."""
  temperature: float = 1.0
  """Must equal the engine's, so that both score the distribution that was sampled from."""
  logprob_chunk_size: int = 1024
  """Number of tokens whose logits each device holds at once."""

  # Advantages.
  advantage: Advantage = "gae"
  """`gae` skips observations; `gae_all_tokens` reads values at them, too; `step_mean` and `step_last` give one
  advantage per turn; `baseline` takes the advantages that come with the batch, and needs no critic."""
  baseline: Baseline = "none"
  """With `advantage="baseline"`: the baseline that the host computes (see `baselines.py`)."""
  baseline_window: int | None = None
  """Number of rewards that a running mean remembers; None: 8 per prompt, 128 if global."""
  normalize_group_std: bool = True
  discount: float = 1.0
  alpha: float = 1.5
  """α of the length-adaptive λ = 1 - 1 / (α l), l = number of the trajectory's action tokens (turns for `step_*`)."""
  lambda_policy: float | None = None
  """A fixed λ in place of the length-adaptive one."""
  whiten_advantages: bool = False
  truncation: Truncation = "terminal"
  """`bootstrap` adds the value after the last token of a cut-off trajectory to its return; `terminal` does not."""

  # The critic.
  critic_updates: int = 2
  """K: number of critic updates per step, each over the whole batch, before the advantages are computed."""
  lambda_critic: float = 1.0
  frozen_critic: tuple[str, ...] = PROJECTIONS_AND_HEAD
  """Frozen parameters of the critic during RL, by path component or kind of module (see `partition.split`). The
  paper's form trains the MoE or MLP projections and the value head; ("attention",) trains all but attention, () all."""
  values_from: ValuesFrom = "updated"
  """`previous` computes advantages from the values before the K updates (ablation)."""

  # Packing.
  row_length: int = 256
  rows_per_microbatch: int = 8
  min_microbatches: int = 1
  """Batches are padded to at least this many microbatches, so that few shapes are compiled. Padding takes no time."""
  microbatch_multiple: int | None = None
  """Larger batches are padded to multiples of this; None: to powers of two."""

  def __post_init__(self) -> None:
    for name, allowed in _CHOICES:
      require(getattr(self, name) in allowed, name, getattr(self, name), f"one of {', '.join(allowed)}")
    self._check_policy()
    self._check_advantages()
    for name in (
      "critic_updates", "policy_minibatches", "logprob_chunk_size", "rows_per_microbatch", "min_microbatches",
    ):  # fmt: skip
      require(getattr(self, name) >= 1, name, getattr(self, name), ">= 1")
    require(self.hold_policy_steps >= 0, "hold_policy_steps", self.hold_policy_steps, ">= 0")
    require(self.row_length >= 2, "row_length", self.row_length, ">= 2")
    multiple = self.microbatch_multiple
    require(multiple is None or multiple >= 1, "microbatch_multiple", multiple, ">= 1, or None for powers of two")

  def _check_policy(self) -> None:
    if self.policy_loss == "dis":
      low, high = self.eps_low, self.eps_high
      require(low is not None and 0.0 <= low < 1.0, "eps_low", low, "given, and in [0, 1)")
      require(high is not None and high > 0.0, "eps_high", high, "given, and > 0 (it is not copied from eps_low)")
    require(0.0 <= self.clip_low < 1.0, "clip_low", self.clip_low, "in [0, 1)")
    require(self.clip_high > 0.0, "clip_high", self.clip_high, "> 0")
    bounds = (self.icepop_low, self.icepop_high)
    require(0.0 <= bounds[0] < bounds[1], "(icepop_low, icepop_high)", bounds, "0 <= low < high")
    require(self.is_cap > 0.0, "is_cap", self.is_cap, "> 0")
    require(self.positive_weight >= 0.0, "positive_weight", self.positive_weight, ">= 0")
    require(0.0 <= self.kl_coef < _MOST, "kl_coef", self.kl_coef, f">= 0 and < {_MOST:g}")
    require(0.0 <= self.entropy_coef < _MOST, "entropy_coef", self.entropy_coef, f">= 0 and < {_MOST:g}")
    require(self.temperature > 0.0, "temperature", self.temperature, "> 0")

  def _check_advantages(self) -> None:
    require(0.0 <= self.discount <= 1.0, "discount", self.discount, "in [0, 1]")
    require(self.alpha > 0.0, "alpha", self.alpha, "> 0")
    fixed = self.lambda_policy
    require(fixed is None or 0.0 <= fixed <= 1.0, "lambda_policy", fixed, "in [0, 1], or None for length-adaptive")
    require(0.0 <= self.lambda_critic <= 1.0, "lambda_critic", self.lambda_critic, "in [0, 1]")
    window = self.baseline_window
    require(window is None or window >= 1, "baseline_window", window, ">= 1 or None")
    if self.advantage == "baseline":
      require(self.baseline != "none", "baseline", self.baseline, 'other than "none" with advantage="baseline"')
      require(self.truncation == "terminal", "truncation", self.truncation, '"terminal" without a critic')
    else:
      require(self.baseline == "none", "baseline", self.baseline, f'"none" with advantage={self.advantage!r}')
    if self.per_step:
      require(self.lambda_critic == 1.0, "lambda_critic", self.lambda_critic, f"1 with advantage={self.advantage!r}")

  @property
  def uses_critic(self) -> bool:
    """Whether advantages come from a value model."""
    return self.advantage != "baseline"

  @property
  def regularized(self) -> bool:
    """Whether the policy's loss has a term that does not depend on advantages or ratios."""
    return self.kl_coef > 0.0 or self.entropy_coef > 0.0

  @property
  def per_step(self) -> bool:
    """Whether advantages are per turn rather than per token."""
    return self.advantage in ("step_mean", "step_last")

  @property
  def needs_groups(self) -> bool:
    """Whether trajectories of the same prompt are compared with one another."""
    return self.baseline == "group"
