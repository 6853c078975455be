"""The suites of `experiments.ablate`: the arms that each compares, and the config of every arm.

A suite of your own is a `Suite` in a module of yours, for `--suite=MODULE:NAME`.

Every arm is the base run with a few changes. All arms share the start (one warm-started policy per seed), the tasks and
their order, the batch, the steps, the engine and the critic pretraining. Group methods draw `batch_size / GROUP_SIZE`
prompts with `GROUP_SIZE` rollouts each, so that all arms see the same number of trajectories.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from experiments.tasks.factory import FactoryError, import_named
from sao_jax.learner.algorithms import ALGORITHMS
from sao_jax.training.config import CriticConfig, RunConfig, WarmStartConfig

GROUP_SIZE = 8
REFERENCE = "SAO"
"""The arm that the others are compared with, seed by seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One way to train, as changes to the base run."""

  name: str
  """The name in tables and plots."""
  algorithm: str = "sao"
  """A key of `learner.algorithms.ALGORITHMS`."""
  learner: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  """Fields of `LearnerConfig` that override the algorithm's."""
  value_pretraining: bool = True
  lag: int | None = None
  """Age in policy versions of the weights behind every token; None for the base run's schedule."""
  length: int = 1
  """Number of steps, as a multiple of the base run's."""
  rated_as: Arm | None = None
  """The arm whose learning rate this one uses; None to tune its own."""
  rate_factor: float = 1.0
  """Multiple of that rate. With four updates per batch, 0.25 matches the nominal step of one."""
  critic_clipping: bool = True
  """False: the critic's gradients are not clipped."""

  @property
  def updates(self) -> int:
    """Policy updates per batch."""
    return int(self.learner.get("policy_minibatches", 1))

  @property
  def slug(self) -> str:
    """The name of the arm's folder. Suites share it if and only if the settings are the same."""
    name = self.name if self.length == 1 else f"{self.name} x{self.length}"
    return "".join(c if c.isalnum() else "_" for c in name.lower()).strip("_")

  @property
  def family(self) -> Arm:
    """The arm at the base run's lag and length, for which the learning rate is tuned."""
    if self.rated_as is not None:
      return self.rated_as.family
    name = self.name if self.lag is None else self.name.removesuffix(f", lag {self.lag}")
    return dataclasses.replace(self, name=name, lag=None, length=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
  """A comparison."""

  title: str
  arms: tuple[Arm, ...]
  curves: tuple[str, ...]
  """The metrics to plot over the learner steps, success first."""
  base: str = "experiments.presets.ablation_cpu:make_config"
  """`module:function` of the run that all arms share."""
  simulation: bool = False
  """Whether the run is `online.simulation.train`, whose users change their preference."""
  tuning_share: float = 0.4
  """The share of the base's steps that a tuning run takes."""
  tuning_end: float = 0.4
  """The share of those steps, at the end, whose training success decides."""


SAO = Arm(name=REFERENCE)
# PPO's clipping acts on the updates of minibatches: with one update per batch, every ratio to pi_old is 1.
_CLIPPED: Mapping[str, Any] = {"policy_minibatches": 4}
_TO_ROLLOUT: Mapping[str, Any] = {"old_policy": "rollout"}
GRPO = Arm(name="GRPO", algorithm="grpo", learner=_CLIPPED)
GRPO_DIS = Arm(name="GRPO + DIS", algorithm="grpo_dis")
# The paper's name for single rollouts with a value model and PPO's clipping; it has VAPO's length-adaptive lambda, but
# neither its alpha of 0.05, nor its loss on positive examples, nor its groups.
VANILLA_VAPO = Arm(name="vanilla VAPO", algorithm="vapo", learner=_CLIPPED)
DIS_ONLY = Arm(name="DIS only", algorithm="sao_dis_only")
RUNNING_MEAN = Arm(name="running mean", algorithm="running_mean")
GLOBAL_RUNNING_MEAN = Arm(name="global running mean", algorithm="global_running_mean")
MAIN_ARMS = (SAO, DIS_ONLY, GRPO_DIS, GRPO, VANILLA_VAPO, RUNNING_MEAN)
LAGS = (0, 2, 8, 32)


def _lagged(arm: Arm, lag: int) -> Arm:
  return dataclasses.replace(arm, name=f"{arm.name}, lag {lag}", lag=lag)


def _one_update_or_four(name: str, algorithm: str) -> tuple[Arm, ...]:
  """Arms of a method with pi_old: one update per batch, one with pi_old = the rollout's, four at a matched step.

  In the first, pi_old is the policy itself, every ratio is 1 and nothing is clipped. In the second, ratios are those to
  the engine's own log-probs. In the third, pi_old is the policy before the first of four updates on a quarter of the
  batch each, at a quarter of the first arm's rate.
  """
  one = Arm(name=f"{name}, 1 update", algorithm=algorithm)
  return (
    one,
    Arm(name=f"{name}, 1 update, pi_old = rollout", algorithm=algorithm, learner=_TO_ROLLOUT, rated_as=one),
    Arm(name=f"{name}, 4 updates", algorithm=algorithm, learner=_CLIPPED, rated_as=one, rate_factor=0.25),
  )


_CORRECTIONS = (
  SAO,
  # With one update per batch this is also PPO's clipping against pi_old = the policy before it, which clips nothing.
  Arm(name="no correction", algorithm="sao_uncorrected", rated_as=SAO),
  Arm(name="PPO clip, pi_old = rollout", algorithm="sao_ppo_clip", learner=_TO_ROLLOUT, rated_as=SAO),
  Arm(name="truncated IS, SAO's rate", algorithm="sao_truncated_is", rated_as=SAO),
  *(
    Arm(name=f"{name}, 4 updates", algorithm=algorithm, learner=_CLIPPED, rated_as=SAO, rate_factor=0.25)
    for name, algorithm in (
      ("DIS", "sao"),
      ("no correction", "sao_uncorrected"),
      ("PPO clip, matched step", "sao_ppo_clip"),
      ("truncated IS", "sao_truncated_is"),
    )
  ),
)
"""Arms that differ only in what they do about old tokens, in two blocks of equal rate and number of updates."""
# Arms that differ from SAO in the value model or the advantages, and not in the policy loss, share its rate.
_CRITIC_FORMS = (
  SAO,
  Arm(name="K = 1", algorithm="sao_one_update", rated_as=SAO),
  Arm(name="attention frozen", algorithm="sao_frozen_attention", rated_as=SAO),
  Arm(name="all parameters", algorithm="sao_full_critic", rated_as=SAO),
)


SUITES: Mapping[str, Suite] = {
  "main": Suite(
    title="SAO against its baselines (Table 1, Figure 3)",
    arms=(
      *MAIN_ARMS,
      GLOBAL_RUNNING_MEAN,
      Arm(name="SPO", algorithm="spo"),
      Arm(name="REINFORCE", algorithm="reinforce"),
    ),
    curves=("success_rate", "entropy", "dis_masked_fraction", "approx_kl"),
  ),
  "critic": Suite(
    title="How the value model is trained (Tables 3 and 4, Figure 4 a and b)",
    arms=(
      *_CRITIC_FORMS,
      Arm(name="K = 4", learner={"critic_updates": 4}, rated_as=SAO),
      Arm(name="no value pretraining", value_pretraining=False, rated_as=SAO),
      Arm(name="values before the updates", algorithm="sao_previous_values", rated_as=SAO),
      Arm(name="GAE through observations", algorithm="sao_all_tokens", rated_as=SAO),
      Arm(name="fixed lambda 0.95", algorithm="sao_fixed_lambda", rated_as=SAO),
    ),
    curves=("success_rate", "explained_variance", "critic_grad_norm", "value_loss"),
  ),
  "critic_forms": Suite(
    title="What the value model trains, with and without clipping of its gradients (Table 4, Figure 4 b)",
    arms=(
      *_CRITIC_FORMS,
      *(
        dataclasses.replace(arm, name=f"{arm.name}, critic not clipped", critic_clipping=False, rated_as=SAO)
        for arm in _CRITIC_FORMS
      ),
    ),
    curves=("success_rate", "explained_variance", "critic_grad_norm", "value_loss"),
  ),
  "updates": Suite(
    title="Methods with pi_old: one update per batch, or four at a matched step",
    arms=(
      SAO,
      *_one_update_or_four("GRPO", "grpo"),
      *_one_update_or_four("vanilla VAPO", "vapo"),
      *_one_update_or_four("PPO clip", "sao_ppo_clip"),
      Arm(name="vanilla VAPO + positive examples", algorithm="vapo", learner={**_CLIPPED, "positive_weight": 0.1}),
    ),
    curves=("success_rate", "dis_masked_fraction", "entropy", "approx_kl"),
  ),
  "correction": Suite(
    title="DIS, other corrections and none, by policy lag",
    arms=tuple(_lagged(arm, lag) for lag in LAGS for arm in _CORRECTIONS),
    curves=("success_rate", "dis_masked_fraction", "entropy", "approx_kl"),
  ),
  "clipping": Suite(
    title="DIS against clipping, by policy lag (Figure 4 c)",
    arms=tuple(
      _lagged(arm, lag)
      for lag in (2, 8)
      for arm in (
        SAO,
        Arm(name="PPO clip", algorithm="sao_ppo_clip", learner=_CLIPPED),
        Arm(name="IcePop", algorithm="sao_icepop", learner=_CLIPPED),
        Arm(name="truncated IS", algorithm="sao_truncated_is"),
      )
    ),
    curves=("success_rate", "dis_masked_fraction", "entropy", "approx_kl"),
  ),
  "granularity": Suite(
    title="One advantage per token or per turn (Table 5, Figure 6)",
    arms=(
      SAO,
      Arm(name="step level, mean", algorithm="sao_step_mean"),
      Arm(name="step level, last token", algorithm="sao_step_last"),
    ),
    curves=("success_rate", "explained_variance", "advantage_std", "value_loss"),
  ),
  "staleness": Suite(
    title="Robustness to old weights",
    arms=tuple(_lagged(arm, lag) for lag in LAGS for arm in MAIN_ARMS),
    curves=("success_rate", "dis_masked_fraction", "entropy", "approx_kl"),
  ),
  "online": Suite(
    title="Users whose preferred style changes twice (Figure 5)",
    arms=(SAO, GLOBAL_RUNNING_MEAN),
    curves=("success_rate", "explained_variance", "entropy", "approx_kl"),
    base="experiments.presets.online_cpu:make_config",
    simulation=True,
    tuning_share=1.0,
    tuning_end=1.0,
  ),
  "stability": Suite(
    title="Stability over four times the steps (Figure 3)",
    arms=tuple(dataclasses.replace(arm, length=4) for arm in MAIN_ARMS),
    curves=("success_rate", "entropy", "policy_grad_norm", "approx_kl"),
  ),
}


def load(name: str) -> Suite:
  """Returns a suite by its key in `SUITES`, or one of your own by `module:NAME`.

  Raises:
    ValueError: there is no such suite, or it lacks the arm that the others are compared with.
  """
  if name in SUITES:
    return SUITES[name]
  module, _, attribute = name.partition(":")
  if not attribute:
    raise ValueError(f"suite must be one of {', '.join(sorted(SUITES))}, or module:NAME; received {name!r}.")
  try:
    suite = getattr(import_named(module), attribute, None)
  except FactoryError as error:
    raise ValueError(f"suite must name a module that can be imported; received {name!r}: {error}") from error
  if not isinstance(suite, Suite):
    raise ValueError(f"suite {name!r} must be a `suites.Suite`; received {type(suite).__name__}.")
  lags = {arm.lag for arm in suite.arms}
  wanted = {REFERENCE if lag is None else _lagged(SAO, lag).name for lag in lags}
  if missing := wanted - {arm.name for arm in suite.arms}:
    raise ValueError(f"suite {name!r} must have the arms that others are compared with; it lacks {sorted(missing)}.")
  return suite


def folder_of(name: str) -> str:
  """Returns the name of a suite's folder and files: NAME of `module:NAME`."""
  return name.rpartition(":")[2]


def reference_of(suite: Suite, arm: Arm) -> Arm:
  """Returns the arm that `arm` is compared with: SAO, at the same lag if the suite has several lags."""
  name = REFERENCE if arm.lag is None else _lagged(SAO, arm.lag).name
  return next(other for other in suite.arms if other.name == name)


def find(suite: str, arm: str) -> Arm:
  """Finds an arm of a suite by the name of its folder.

  Raises:
    ValueError: the suite has no such arm.
  """
  arms = load(suite).arms
  for known in arms:
    if known.slug == arm:
      return known
  raise ValueError(f"arm must be one of {', '.join(x.slug for x in arms)}; received {arm!r}.")


def arm_config(
  base: RunConfig, arm: Arm, *, seed: int, start: str | None, learning_rate: float | None = None
) -> RunConfig:
  """Makes the config of an arm's run.

  Args:
    base: the run that all arms share.
    arm: the changes to it.
    seed: seed of tasks, sampling and critic.
    start: the Hugging Face directory of the seed's warm-started policy; None for the base's own start.
    learning_rate: the policy's learning rate, times `rate_factor` already; None for the base's.
  """
  fields = dict(ALGORITHMS[arm.algorithm])
  if arm.learner.get("policy_minibatches", 1) > 1:
    fields["min_microbatches"] = max(base.learner.min_microbatches, arm.learner["policy_minibatches"])
  learner = dataclasses.replace(base.learner, **fields, **arm.learner)
  if learning_rate is not None:
    optimizer = dataclasses.replace(learner.policy_optimizer, learning_rate=learning_rate)
    learner = dataclasses.replace(learner, policy_optimizer=optimizer)
  if not arm.critic_clipping:
    optimizer = dataclasses.replace(learner.critic_optimizer, max_grad_norm=None)
    learner = dataclasses.replace(learner, critic_optimizer=optimizer)
  changes: dict[str, Any] = {"algorithm": arm.algorithm, "learner": learner, "seed": seed}
  changes["num_steps"] = arm.length * base.num_steps
  changes["group_size"] = GROUP_SIZE if learner.needs_groups else 1
  if not arm.value_pretraining:
    changes["critic"] = dataclasses.replace(base.critic, pretraining_trajectories=0)
  if arm.lag is not None:
    changes.update(
      schedule="lagged", lag=arm.lag, lag_switch_chunks=None, max_staleness=max(arm.lag, base.max_staleness)
    )
  if start is not None:
    changes.update(policy_checkpoint=start, warm_start=WarmStartConfig(num_steps=0))
  return dataclasses.replace(base, **changes)


def quick(base: RunConfig) -> RunConfig:
  """Returns a run of about a hundredth of the time, in which every stage runs but nothing is learned."""
  options = dict(base.env.options)
  if "phase_steps" in options:  # a simulation with three phases
    options["phase_steps"] = 2
  return dataclasses.replace(
    base,
    num_steps=6 if "phase_steps" in options else 4,
    env=dataclasses.replace(base.env, options=options),
    batch_size=16,
    eval_episodes=16,
    warm_start=dataclasses.replace(base.warm_start, num_steps=min(20, base.warm_start.num_steps)),
    critic=CriticConfig(pretraining_trajectories=16, pretraining_epochs=1),
  )
