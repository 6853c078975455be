"""The base run of `experiments.ablate`. Takes a minute on one CPU core, so that arms x seeds fit in an hour.

The task is `experiments.tasks.bisection`; the policy has 27,000 parameters. The schedule is `lagged`: a batch starts
with weights that are four versions old, and the engine moves up one version with every action. Trajectories therefore
mix several versions, as in an asynchronous run, but the run is reproducible bit for bit.
"""

from __future__ import annotations

import ml_collections

from experiments.support.config_flags import to_config_dict
from experiments.tasks.bisection import BisectionTokenizer
from sao_jax.learner import LearnerConfig, OptimizerConfig
from sao_jax.models import ModelConfig
from sao_jax.rollout import EngineConfig
from sao_jax.training.config import CheckpointConfig, CriticConfig, EnvConfig, RunConfig, WarmStartConfig

MAX_LEN = 36
"""A prompt, five guesses and the replies."""
WARM_START_STEPS = 300
NUM_STEPS = 250


def get_config() -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict."""
  return to_config_dict(make_config())


def make_config() -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  return RunConfig(
    schedule="lagged",
    lag=4,
    lag_switch_chunks=1,
    num_steps=NUM_STEPS,
    batch_size=64,
    eval_episodes=512,
    policy=make_policy(),
    warm_start=WarmStartConfig(
      num_steps=WARM_START_STEPS,
      batch_size=64,
      optimizer=OptimizerConfig(learning_rate=6e-3, warmup_steps=20, decay_steps=WARM_START_STEPS, b2=0.98),
    ),
    critic=CriticConfig(
      pretraining_trajectories=2_048,
      pretraining_epochs=2,
      pretraining_optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
    ),
    learner=LearnerConfig(
      policy_optimizer=OptimizerConfig(learning_rate=1e-3),
      critic_optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=10),
      eps_low=0.3,
      eps_high=5.0,
      row_length=MAX_LEN,
      rows_per_microbatch=8,
      min_microbatches=8,
    ),
    engine=EngineConfig(
      num_slots=64,
      max_len=MAX_LEN,
      max_action_tokens=4,
      max_turns=5,
      chunk_steps=3,
      env_workers=0,
    ),
    env=EnvConfig(factory="experiments.tasks.bisection:make_domain"),
    checkpoint=CheckpointConfig(every_steps=500, keep=1),
  )


def make_policy() -> ModelConfig:
  """Returns a Qwen3-style decoder with two layers."""
  return ModelConfig(
    model_type="qwen3",
    vocab_size=BisectionTokenizer().vocab_size,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=96,
    tie_word_embeddings=True,
    rope_theta=10_000.0,
    init_std=0.18,
  )
