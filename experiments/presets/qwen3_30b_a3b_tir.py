"""The paper's mathematics with a Python tool: Qwen3-30B-A3B-Thinking-2507 with its settings, rows of 131,072 tokens.

    python -m experiments.train --config=experiments/presets/qwen3_30b_a3b_tir.py:DIRECTORY \
      --config.env.options.train=TRAIN.jsonl --config.env.options.held_out=HELD_OUT.jsonl

DIRECTORY holds the checkpoint. The paper first fine-tuned its model on tool-integrated reasoning for three epochs. So
can you, with a JSONL file of conversations (`experiments.tasks.chat_demonstrations`):
`--config.env.options.demonstrations=TIR.jsonl --config.warm_start.num_steps=N` and the optimizer in
`--config.warm_start.optimizer`, which the paper does not state. Each line of the two other JSONL files holds an object
with `problem` and `answer`. `published.paper_config` lists what the paper leaves open. eps_low 0.3 and eps_high 5.0
accept ratios in (0.7, 6). The 480 held-out episodes are 16 runs over 30 problems. 64 TPU v5p chips learn and 64
generate, in 16 engines; for other numbers and for GPUs, see `published.paper_config`. This preset has not been run at
this size yet.
"""

from __future__ import annotations

import ml_collections

from experiments.presets.published import find_checkpoint, paper_config
from experiments.support.config_flags import to_config_dict
from sao_jax.training.config import EnvConfig, RunConfig

MAX_TURNS = 50


def get_config(checkpoint: str = "Qwen3-30B-A3B-Thinking-2507") -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict; `checkpoint` is the part after the colon of `--config=...:DIRECTORY`."""
  return to_config_dict(make_config(find_checkpoint(checkpoint, repository="Qwen/Qwen3-30B-A3B-Thinking-2507")))


def make_config(checkpoint: str) -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  options = {
    "checkpoint": checkpoint,
    "train": "train.jsonl",
    "held_out": "held_out.jsonl",
    "demonstrations": "",
    "tool": True,
    "max_turns": MAX_TURNS,
  }
  env = EnvConfig(factory="experiments.tasks.chat:math", options=options)
  return paper_config(checkpoint, env, eps_low=0.3, eps_high=5.0, max_turns=MAX_TURNS)
