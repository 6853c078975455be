"""The second base run of `experiments.ablate`: math problems with the real Python tool and a mixture of experts.

The task and the policy are those of the main preset (`tool_math_cpu`). Two things differ. Observations repeat the call
before its output, so that they are longer than the actions, and skipping them in GAE matters. The schedule is `lagged`,
so a run is reproducible bit for bit: a batch starts with weights that are four versions old, and the engine moves up
one version during it.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from experiments.presets import tool_math_cpu
from experiments.support.config_flags import to_config_dict
from sao_jax.learner import OptimizerConfig
from sao_jax.training.config import CheckpointConfig, RunConfig

MAX_LEN = 160
"""A prompt, five calls with their observations, and an answer."""
MAX_TURNS = 7
NUM_STEPS = 80


def get_config() -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict."""
  return to_config_dict(make_config())


def make_config() -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  base = tool_math_cpu.make_config()
  learner = dataclasses.replace(
    base.learner, policy_optimizer=OptimizerConfig(learning_rate=3e-4), row_length=MAX_LEN
  )
  return dataclasses.replace(
    base,
    schedule="lagged",
    lag=4,
    lag_switch_chunks=4,
    num_steps=NUM_STEPS,
    learner=learner,
    engine=dataclasses.replace(base.engine, max_len=MAX_LEN, max_turns=MAX_TURNS),
    env=dataclasses.replace(
      base.env,
      options={
        **base.env.options,
        "echo_calls": True,
        "max_turns": MAX_TURNS,
        # Problems of one to five operations: the question tells how likely a success is.
        "arithmetic_max_terms": 4,
        "chain_max_terms": 6,
      },
    ),
    checkpoint=CheckpointConfig(every_steps=500, keep=1),
  )
