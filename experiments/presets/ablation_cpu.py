"""The run that all arms of `experiments.ablate` share: a minute on one CPU core, so that arms x seeds fit in an hour.

Problems of `experiments.tasks.bisection`, a policy of 27,000 parameters. The schedule is `lagged`: a batch is begun
with weights that are four versions old and the engine goes one version up with every action, so that trajectories are
of several versions, as in an asynchronous run, and yet a run repeats bit for bit.
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
"""A prompt, five guesses and what comes back."""
WARM_START_STEPS = 300
NUM_STEPS = 250


def get_config() -> ml_collections.ConfigDict:
  """The preset."""
  return to_config_dict(make_config())


def make_config() -> RunConfig:
  """The preset as a dataclass."""
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
      pretraining_trajectories=1_024,
      pretraining_epochs=4,
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
      prefill_rows=(64,),
      prefill_tokens=(3,),
      live_buckets=(MAX_LEN,),
      env_workers=0,
      prefix_rows=0,
    ),
    env=EnvConfig(factory="experiments.tasks.bisection:make_domain"),
    checkpoint=CheckpointConfig(every_steps=500, keep=1),
  )


def make_policy() -> ModelConfig:
  """A Qwen3-style decoder with two layers."""
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
