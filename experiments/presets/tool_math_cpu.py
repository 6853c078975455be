"""The main job on two CPU cores: math problems solved by calling a Python tool over several turns.
"""

from __future__ import annotations

import ml_collections

from experiments.config_flags import to_config_dict
from sao_jax.config import CheckpointConfig, CriticConfig, EnvConfig, RunConfig, WarmStartConfig
from sao_jax.learner import LearnerConfig, OptimizerConfig
from sao_jax.models import ModelConfig
from sao_jax.rollout import EngineConfig
from sao_jax.tokenizers import MathTokenizer

MAX_LEN = 128
WARM_START_STEPS = 800


def get_config() -> ml_collections.ConfigDict:
  """The preset."""
  return to_config_dict(make_config())


def make_config() -> RunConfig:
  """The same as a dataclass, for use from Python."""
  return RunConfig(
    num_steps=150,
    eval_episodes=512,
    policy=ModelConfig(
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
      init_std=0.125,  # 1 / sqrt(hidden_size): near-orthonormal embeddings, from which copying is learned twice as fast
      rope_theta=10_000.0,
    ),
    warm_start=WarmStartConfig(
      num_steps=WARM_START_STEPS,
      optimizer=OptimizerConfig(learning_rate=6e-3, warmup_steps=50, decay_steps=WARM_START_STEPS, b2=0.98),
    ),
    critic=CriticConfig(
      pretraining_trajectories=1_024,
      pretraining_epochs=4,
      pretraining_optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10),
    ),
    learner=LearnerConfig(
      policy_optimizer=OptimizerConfig(learning_rate=4e-4),
      critic_optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=10),
      eps_low=0.3,
      eps_high=5.0,
      row_length=MAX_LEN,
      rows_per_microbatch=16,
      min_microbatches=4,
    ),
    engine=EngineConfig(
      num_slots=64,
      max_len=MAX_LEN,
      max_action_tokens=24,
      max_turns=6,
      chunk_steps=8,
      prefill_rows=(16,),
      prefill_tokens=(16, 32),
      env_workers=4,
    ),
    env=EnvConfig(options={"train_size": 8_192, "max_turns": 6}),
    checkpoint=CheckpointConfig(every_steps=50),
  )
