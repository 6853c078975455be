"""Mathematics with Qwen3-0.6B on one 80 GB accelerator, with the paper's settings and rows short enough to fit.

    python -m experiments.train --config=experiments/presets/qwen3_0p6b_math.py:DIRECTORY \
      --config.env.options.train=TRAIN.jsonl --config.env.options.held_out=HELD_OUT.jsonl

DIRECTORY holds the files of Qwen/Qwen3-0.6B. Each line of the two JSONL files holds an object with `problem` and
`answer`. Episodes have one turn with reasoning, no tool and at most 8,192 tokens. To add Python as a tool, use
`--config.env.options.tool=True --config.env.options.max_turns=8 --config.engine.max_turns=8`. This preset has not been
run yet.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from experiments.presets.model_configs import qwen3_0p6b
from experiments.presets.published import VALUE_OPTIMIZER, find_checkpoint
from experiments.support.config_flags import to_config_dict
from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.rollout import EngineConfig
from sao_jax.training.config import CheckpointConfig, CriticConfig, EnvConfig, RunConfig

MAX_LEN = 8_192


def get_config(checkpoint: str = "Qwen3-0.6B") -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict; `checkpoint` is the part after the colon of `--config=...:DIRECTORY`."""
  return to_config_dict(make_config(find_checkpoint(checkpoint, repository="Qwen/Qwen3-0.6B")))


def make_config(checkpoint: str) -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  options = {
    "checkpoint": checkpoint,
    "train": "train.jsonl",
    "held_out": "held_out.jsonl",
    "demonstrations": "",
    "tool": False,
    "max_turns": 1,
  }
  return RunConfig(
    num_steps=400,
    batch_size=128,
    group_size=1,
    eval_episodes=480,
    policy=dataclasses.replace(qwen3_0p6b(), dtype="bfloat16", remat="full"),
    policy_checkpoint=checkpoint,
    critic=CriticConfig(pretraining_trajectories=8_192, pretraining_epochs=2, pretraining_optimizer=VALUE_OPTIMIZER),
    learner=learner_config(
      "sao",
      policy_optimizer=OptimizerConfig(learning_rate=1e-6),
      critic_optimizer=VALUE_OPTIMIZER,
      eps_low=0.3,
      eps_high=5.0,
      row_length=MAX_LEN,
      rows_per_microbatch=1,
      min_microbatches=16,
      microbatch_multiple=16,
      logprob_chunk_size=1_024,
    ),
    engine=EngineConfig(
      num_slots=32,
      max_len=MAX_LEN,
      max_action_tokens=MAX_LEN,
      max_turns=1,
      temperature=1.0,
      chunk_steps=32,
      page_size=64,
      token_budget=1_024,
      env_workers=32,
    ),
    env=EnvConfig(factory="experiments.tasks.chat:math", options=options),
    checkpoint=CheckpointConfig(every_steps=10),
  )
