"""The paper's mathematics with a Python tool, with its settings: Qwen3-30B-A3B-Thinking-2507, rows of 131,072 tokens.

    python -m experiments.train --config=experiments/presets/qwen3_30b_a3b_tir.py:DIRECTORY \
      --config.env.options.train=TRAIN.jsonl --config.env.options.held_out=HELD_OUT.jsonl

DIRECTORY holds the checkpoint; the paper's was fine-tuned for three epochs on tool-integrated reasoning first. The two
files hold an object with `problem` and `answer` per line. eps 0.3 and 5.0: ratios in (0.7, 6). 480 held-out episodes
are 16 runs over 30 problems. For 64 devices of 95 GB; see `published.paper_config` for others. Never run at this size.
"""

from __future__ import annotations

import ml_collections

from experiments.presets.published import find_checkpoint, paper_config
from experiments.support.config_flags import to_config_dict
from sao_jax.training.config import EnvConfig, RunConfig

MAX_TURNS = 50


def get_config(checkpoint: str = "Qwen3-30B-A3B-Thinking-2507") -> ml_collections.ConfigDict:
  """The preset; `checkpoint` is what stands behind the colon of `--config=...:DIRECTORY`."""
  return to_config_dict(make_config(find_checkpoint(checkpoint, repository="Qwen/Qwen3-30B-A3B-Thinking-2507")))


def make_config(checkpoint: str) -> RunConfig:
  """The preset as a dataclass, for use from Python."""
  options = {
    "checkpoint": checkpoint,
    "train": "train.jsonl",
    "held_out": "held_out.jsonl",
    "tool": True,
    "max_turns": MAX_TURNS,
  }
  env = EnvConfig(factory="experiments.tasks.chat:math", options=options)
  return paper_config(checkpoint, env, eps_low=0.3, eps_high=5.0, max_turns=MAX_TURNS)
