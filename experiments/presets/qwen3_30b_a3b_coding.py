"""The paper's coding agent, with its settings: Qwen3-30B-A3B-Thinking-2507 without fine-tuning, 300 turns.

    python -m experiments.train --config=experiments/presets/qwen3_30b_a3b_coding.py:DIRECTORY

eps 0.8 and 3.0: ratios in (0.2, 4). The paper's agent works in OpenHands on repositories in containers; here the task
is the small one that needs none (HumanEval problems with injected bugs, read, edited and tested by commands, judged by
hidden tests; `pip install -e '.[coding]'`). A domain over repositories of your own goes in with
`--config.env.factory=MODULE:FUNCTION --config.env.options="{...}"`. For 64 devices of 95 GB; see
`published.paper_config` for others. Never run at this size.
"""

from __future__ import annotations

import ml_collections

from experiments.presets.published import find_checkpoint, paper_config
from experiments.support.config_flags import to_config_dict
from sao_jax.training.config import EnvConfig, RunConfig

MAX_TURNS = 300


def get_config(checkpoint: str = "Qwen3-30B-A3B-Thinking-2507") -> ml_collections.ConfigDict:
  """The preset; `checkpoint` is what stands behind the colon of `--config=...:DIRECTORY`."""
  return to_config_dict(make_config(find_checkpoint(checkpoint, repository="Qwen/Qwen3-30B-A3B-Thinking-2507")))


def make_config(checkpoint: str) -> RunConfig:
  """The preset as a dataclass, for use from Python."""
  options = {"checkpoint": checkpoint, "max_turns": MAX_TURNS}
  env = EnvConfig(factory="experiments.tasks.chat:coding", options=options)
  return paper_config(checkpoint, env, eps_low=0.8, eps_high=3.0, max_turns=MAX_TURNS)
