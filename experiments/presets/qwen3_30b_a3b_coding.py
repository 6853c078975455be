"""The paper's coding agent with its settings: Qwen3-30B-A3B-Thinking-2507 without fine-tuning, up to 300 turns.

    python -m experiments.train --config=experiments/presets/qwen3_30b_a3b_coding.py:DIRECTORY

eps_low 0.8 and eps_high 3.0 accept ratios in (0.2, 4). The paper's agent works in OpenHands on repositories in
containers. The task here is small and needs no containers: HumanEval problems with injected bugs, which the agent
reads, edits and tests by commands, graded by hidden tests (`pip install -e '.[coding]'`). To train on your own
repositories, set `--config.env.factory=MODULE:FUNCTION --config.env.options="{...}"`. 64 TPU v5p chips learn and 64
generate, in 16 engines; for other numbers, for GPUs, and for what the paper leaves open, see `published.paper_config`.
This preset has not been run at this size yet.
"""

from __future__ import annotations

import ml_collections

from experiments.presets.published import find_checkpoint, paper_config
from experiments.support.config_flags import to_config_dict
from sao_jax.training.config import EnvConfig, RunConfig

MAX_TURNS = 300


def get_config(checkpoint: str = "Qwen3-30B-A3B-Thinking-2507") -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict; `checkpoint` is the part after the colon of `--config=...:DIRECTORY`."""
  return to_config_dict(make_config(find_checkpoint(checkpoint, repository="Qwen/Qwen3-30B-A3B-Thinking-2507")))


def make_config(checkpoint: str) -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  options = {"checkpoint": checkpoint, "max_turns": MAX_TURNS}
  env = EnvConfig(factory="experiments.tasks.chat:coding", options=options)
  return paper_config(checkpoint, env, eps_low=0.8, eps_high=3.0, max_turns=MAX_TURNS)
