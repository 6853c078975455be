"""GLM-4.5 (355B parameters, 32B per token) on mathematics with a Python tool, with the paper's settings.

    python -m experiments.train --config=experiments/presets/glm4_355b_tir.py:DIRECTORY \
      --config.env.options.train=TRAIN.jsonl --config.env.options.held_out=HELD_OUT.jsonl

DIRECTORY holds the checkpoint; the JSONL files are those of `qwen3_30b_a3b_tir`. 128 devices of 95 GB or more learn.
Each engine needs 8 GPUs of 288 GB on one host: 89 GB of weights on each, the same again while new weights arrive, and
room for 8 sequences of 60,000 tokens. Engines of several hosts are not supported, and four TPU chips do not hold the
weights. This preset has not been run at this size yet.
"""

from __future__ import annotations

import ml_collections

from experiments.presets.model_configs import glm4_moe_355b
from experiments.presets.published import find_checkpoint, paper_config
from experiments.support.config_flags import to_config_dict
from sao_jax.parallel import EngineMeshConfig, MeshConfig
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.training.config import EnvConfig, RunConfig

MAX_TURNS = 50


def get_config(checkpoint: str = "GLM-4.5") -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict; `checkpoint` is the part after the colon of `--config=...:DIRECTORY`."""
  return to_config_dict(make_config(find_checkpoint(checkpoint, repository="zai-org/GLM-4.5")))


def make_config(checkpoint: str) -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  options = {
    "checkpoint": checkpoint,
    "train": "train.jsonl",
    "held_out": "held_out.jsonl",
    "tool": True,
    "max_turns": MAX_TURNS,
  }
  return paper_config(
    checkpoint,
    EnvConfig(factory="experiments.tasks.chat:math", options=options),
    eps_low=0.3,
    eps_high=5.0,
    max_turns=MAX_TURNS,
    policy=glm4_moe_355b(),
    mesh=MeshConfig(data=1, fsdp=8, context=16),
    cluster=ClusterConfig(num_engines=16, num_gpus=8, mesh=EngineMeshConfig(tensor=8)),
    slots_per_engine=8,
  )
