"""The learner: packing of trajectories, critic and policy updates, supervised warm start."""

from __future__ import annotations

from sao_jax.learner.algorithms import ALGORITHMS, POLICY_LOSSES, PolicyLoss, learner_config
from sao_jax.learner.baselines import Baselines, make_baselines
from sao_jax.learner.batching import PackedBatch, PackStats, pack, pack_batch
from sao_jax.learner.config import LearnerConfig, OptimizerConfig
from sao_jax.learner.diagnosis import make_diagnosis
from sao_jax.learner.partition import merge, parameter_counts, parameter_report, split
from sao_jax.learner.state import Counters, LearnerState, init_state
from sao_jax.learner.supervised import SftState, demonstration_trajectory, init_sft_state, make_sft_step
from sao_jax.learner.update import Metrics, make_critic_evaluation, make_critic_step, make_update_step

__all__ = [
  "ALGORITHMS",
  "POLICY_LOSSES",
  "Baselines",
  "Counters",
  "LearnerConfig",
  "LearnerState",
  "Metrics",
  "OptimizerConfig",
  "PackStats",
  "PackedBatch",
  "PolicyLoss",
  "SftState",
  "demonstration_trajectory",
  "init_sft_state",
  "init_state",
  "learner_config",
  "make_baselines",
  "make_critic_evaluation",
  "make_critic_step",
  "make_diagnosis",
  "make_sft_step",
  "make_update_step",
  "merge",
  "pack",
  "pack_batch",
  "parameter_counts",
  "parameter_report",
  "split",
]
