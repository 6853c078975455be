"""A starting point for your own task on a CPU. Takes a few minutes.

Set `--config.env.factory=your_module:make_domain`. The domain needs the small tokenizer of `sao_jax.tokenizers`, and
demonstrations for the warm start. Without demonstrations, set `--config.warm_start.num_steps=0`.
"""

from __future__ import annotations

import dataclasses

import ml_collections

from experiments.presets import tool_math_cpu
from experiments.support.config_flags import to_config_dict
from sao_jax.training.config import EnvConfig


def get_config() -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict."""
  base = tool_math_cpu.make_config()
  steps = 200  # of the warm start and of RL
  optimizer = dataclasses.replace(base.warm_start.optimizer, decay_steps=steps)
  policy_optimizer = dataclasses.replace(base.learner.policy_optimizer, learning_rate=1e-3, decay_steps=steps)
  return to_config_dict(
    dataclasses.replace(
      base,
      num_steps=steps,
      eval_episodes=256,
      warm_start=dataclasses.replace(base.warm_start, num_steps=steps, optimizer=optimizer),
      critic=dataclasses.replace(base.critic, pretraining_trajectories=2_048),
      learner=dataclasses.replace(base.learner, policy_optimizer=policy_optimizer),
      env=EnvConfig(factory="your_module:make_domain"),
    )
  )
