"""The default preset: math problems solved with a Python tool over several turns, on two CPU cores.

Results on two cores (2026-11-30, before value pretraining was four times as long and the value model trained its
projections and head alone in RL):
  seed   total   held-out success before and after RL
  0      209 s   0.346 -> 0.811
  1      296 s   0.287 -> 0.607   (other programs were running)
  2      207 s   0.232 -> 0.619
With the present settings (2026-12-01, a slower machine):
  0      400 s   0.350 -> 0.809   (warm start 181 s, value pretraining 42 s, RL 171 s, evaluations 5 s)

`experiments/presets/tool_math_cpu.py:quick` runs every stage in about a minute and a half, too short to learn.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from experiments.support.config_flags import to_config_dict
from sao_jax.learner import LearnerConfig, OptimizerConfig
from sao_jax.models import ModelConfig
from sao_jax.rollout import EngineConfig
from sao_jax.tokenizers import MathTokenizer
from sao_jax.training.config import CheckpointConfig, CriticConfig, EnvConfig, RunConfig, WarmStartConfig

MAX_LEN = 128
WARM_START_STEPS = 800
NUM_STEPS = 150


def get_config(budget: str = "full") -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict; `budget` is the part after the colon of `--config=...:quick`."""
  config = make_config()
  if budget == "quick":
    config = dataclasses.replace(
      config,
      num_steps=3,
      eval_episodes=64,
      warm_start=dataclasses.replace(config.warm_start, num_steps=60),
      critic=dataclasses.replace(config.critic, pretraining_trajectories=128),
    )
  elif budget != "full":
    raise ValueError(f"budget must be 'full' or 'quick'; received {budget!r}.")
  return to_config_dict(config)


def make_config() -> RunConfig:
  """Returns the full preset as a dataclass, for use from Python."""
  return RunConfig(
    num_steps=NUM_STEPS,
    eval_episodes=512,
    policy=make_policy(),
    warm_start=WarmStartConfig(
      num_steps=WARM_START_STEPS,
      optimizer=OptimizerConfig(learning_rate=6e-3, warmup_steps=50, decay_steps=WARM_START_STEPS, b2=0.98),
    ),
    # By the curve in RESULTS.md: new trajectories help for longer than further passes, of which two are enough.
    critic=CriticConfig(
      pretraining_trajectories=4_096,
      pretraining_epochs=2,
      pretraining_optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10),
    ),
    learner=LearnerConfig(
      policy_optimizer=OptimizerConfig(learning_rate=3e-4, decay_steps=NUM_STEPS),
      critic_optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10),
      eps_low=0.3,
      eps_high=5.0,
      row_length=MAX_LEN,
      rows_per_microbatch=8,
      min_microbatches=8,
    ),
    engine=EngineConfig(
      num_slots=64,
      max_len=MAX_LEN,
      max_action_tokens=24,
      max_turns=6,
      chunk_steps=8,
      env_workers=64,  # one per slot, so that a slow tool delays no other episode
    ),
    env=EnvConfig(
      factory="experiments.tasks.tool_math:make_domain",
      options={"train_size": 20_000, "max_turns": 6, "tool_sleep_s": 0.0},
    ),
    checkpoint=CheckpointConfig(every_steps=50),
  )


def make_policy() -> ModelConfig:
  """Returns a Qwen3-style mixture of experts with 0.2 M parameters."""
  return ModelConfig(
    model_type="qwen3_moe",
    vocab_size=MathTokenizer().vocab_size,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=192,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    tie_word_embeddings=True,
    rope_theta=10_000.0,
    # 1 / sqrt(hidden_size): near-orthonormal embeddings, from which copying is learned about twice as fast.
    init_std=0.125,
  )
