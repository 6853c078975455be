"""The preference-shift simulation on one CPU core. Episodes have one turn; the policy has 30,000 parameters.

The second style is not found within a phase, nor was it in one run with phases of 400 steps; see RESULTS.md.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from experiments.online.questions import WordTokenizer
from experiments.presets import ablation_cpu
from experiments.support.config_flags import to_config_dict
from sao_jax.training.config import EnvConfig, RunConfig

MAX_LEN = 48
PHASE_STEPS = 150


def get_config() -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict."""
  return to_config_dict(make_config())


def make_config() -> RunConfig:
  """Returns the preset as a dataclass, for use from Python."""
  base = ablation_cpu.make_config()
  engine = dataclasses.replace(
    base.engine, max_len=MAX_LEN, max_action_tokens=28, max_turns=1, chunk_steps=8
  )
  # Low enough that a style is still sampled now and then after it has lost the preference, and can come back.
  policy_optimizer = dataclasses.replace(base.learner.policy_optimizer, learning_rate=2e-4)
  return dataclasses.replace(
    base,
    num_steps=3 * PHASE_STEPS,
    eval_episodes=240,
    policy=dataclasses.replace(base.policy, vocab_size=WordTokenizer().vocab_size),
    learner=dataclasses.replace(base.learner, row_length=MAX_LEN, policy_optimizer=policy_optimizer),
    engine=engine,
    env=EnvConfig(factory="experiments.online.simulation:make_domain", options={"phase_steps": PHASE_STEPS}),
  )
