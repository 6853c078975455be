"""Mathematics with a dense model of 7B to 8B parameters on 8 accelerators of 80 GB, with the paper's settings.

    python -m experiments.train --config=dense_8b_math:DIRECTORY \
      --config.env.options.train=TRAIN.jsonl --config.env.options.held_out=HELD_OUT.jsonl

DIRECTORY holds a Hugging Face checkpoint such as Qwen3-8B or Llama-3.1-8B-Instruct, from which the architecture is
read. Each line of the two JSONL files holds an object with `problem` and `answer`; without HELD_OUT, every tenth
training problem is held out. Episodes have one turn with reasoning, no tool and at most 8,192 tokens.

Parameters and optimizer states are float32 and split over all devices; the matmuls are bfloat16. For Qwen3-8B this is
40 GB per device for certain and 47 GB with the estimate of the activations (`training.memory`; a test computes both).
This preset has not been run at this size yet.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from experiments.presets import qwen3_0p6b_math
from experiments.presets.published import find_checkpoint
from experiments.support.config_flags import to_config_dict
from sao_jax import models
from sao_jax.parallel import MeshConfig
from sao_jax.training.config import RunConfig

NUM_DEVICES = 8


def get_config(checkpoint: str = "Qwen3-8B") -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict; `checkpoint` is the part after the colon of `--config=...:DIRECTORY`."""
  return to_config_dict(make_config(find_checkpoint(checkpoint, repository="a dense model of 7B to 8B parameters")))


def make_config(checkpoint: str) -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  base = qwen3_0p6b_math.make_config(checkpoint)
  policy = models.read_config(checkpoint, dtype="bfloat16", param_dtype="float32")
  return dataclasses.replace(
    base,
    policy=dataclasses.replace(policy, remat="full"),
    learner=dataclasses.replace(
      base.learner, rows_per_microbatch=NUM_DEVICES, min_microbatches=2, microbatch_multiple=2
    ),
    engine=dataclasses.replace(base.engine, num_slots=8 * NUM_DEVICES, env_workers=8 * NUM_DEVICES),
    env=dataclasses.replace(base.env, options={**base.env.options, "held_out": None}),
    mesh=MeshConfig(data=1, fsdp=NUM_DEVICES),
  )
