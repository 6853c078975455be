"""Any checkpoint on your own problems: `--config=chat:DIR --config.env.options.train=PROBLEMS.jsonl`.

    python -m experiments.train --config=chat:DIR --config.env.options.train=PROBLEMS.jsonl

DIR is a Hugging Face directory or a GGUF file with a chat template, or the workdir of an earlier run, whose policy is
trained further. `--config.policy_checkpoint=DIR` does the same as `:DIR`. The architecture comes from the checkpoint.
The length of a trajectory, the engine's slots and the mesh are the largest that fit into the devices' memory
(`training.defaults.config_for`); `--help` shows what they are here. Any field can be overridden, and others follow:
`--config.engine.max_len=1024` also sets the learner's rows, and leaves room for more slots.

A line of PROBLEMS.jsonl holds an object with `problem` and `answer`. Every tenth problem is held out, unless
`--config.env.options.held_out` names another file. math-verify grades the answers, in one turn and without a tool. For
Python as a tool, add `--config.env.options.tool=True --config.env.options.max_turns=8`. Reward functions and tools of
your own are `--config.env.options.rewards=mine:brevity` and `--config.env.options.tools=mine:population`.

The learning rates are the paper's, for a model of 30B parameters. A small model learns faster with a larger one, such
as `--config.learner.policy_optimizer.learning_rate=1e-5`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import ml_collections

from experiments.support.config_flags import parse_mapping, to_config_dict
from experiments.tasks.chat import MATH_INSTRUCTION, math
from experiments.tasks.rewards import Rewards
from sao_jax.parallel import MeshConfig
from sao_jax.training import defaults, pretrained
from sao_jax.training.config import EnvConfig, RunConfig


def get_config(checkpoint: str = "", *, overrides: Mapping[str, str] | None = None) -> ml_collections.ConfigDict:
  """Returns the preset as a ConfigDict.

  Args:
    checkpoint: the part after the colon of `--config=chat:DIR`.
    overrides: the command line's overrides, from which other fields are derived.
  """
  given = overrides or {}
  checkpoint = given.get("policy_checkpoint", checkpoint)
  if not checkpoint:
    raise ValueError("this preset needs a checkpoint: --config=chat:DIR or --config.policy_checkpoint=DIR.")
  names = ("data", "fsdp", "tensor", "expert", "context")
  axes = {name: _number(given, f"mesh.{name}") for name in names if f"mesh.{name}" in given}
  choices: dict[str, Any] = {
    "max_len": _number(given, "engine.max_len"),
    "num_slots": _number(given, "engine.num_slots"),
    "max_turns": _max_turns(given),
    "mesh": MeshConfig(**{"data": 1, **axes}) if axes else None,
    "dtype": given.get("policy.dtype"),
    "param_dtype": given.get("policy.param_dtype", "float32"),
  }
  return to_config_dict(make_config(checkpoint, **choices))


def make_config(
  checkpoint: str,
  *,
  train: str | None = None,
  held_out: str | None = None,
  rewards: Rewards | None = None,
  tools: str | Sequence[str] | None = None,
  **choices: Any,
) -> RunConfig:
  """Returns the preset as a dataclass, for use from Python.

  Args:
    checkpoint: a Hugging Face directory, a GGUF file, or the workdir of another run.
    train: JSONL or CSV file of training problems.
    held_out: such a file of held-out problems; None holds out every tenth of `train`.
    rewards: reward functions of your own; see `experiments.tasks.rewards`.
    tools: functions of your own as tools, `module:function`. They need `max_turns` of at least 2.
    **choices: arguments of `defaults.config_for` that it should not choose itself, such as `max_turns`.
  """
  checkpoint = os.path.abspath(checkpoint)  # a run may be continued from another directory
  options = {
    "checkpoint": pretrained.tokenizer_source(checkpoint),
    "train": os.path.abspath(train) if train else "",
    "held_out": os.path.abspath(held_out) if held_out else None,
    "question_field": "problem",
    "answer_field": "answer",
    "instruction": MATH_INSTRUCTION,
    "system": None,
    "tool": False,
    "packages": (),
    "max_turns": choices.get("max_turns", 1),
    "on_unreadable": "error",
    "template": {},
    "rewards": rewards,
    "success_threshold": 1.0,
    "tools": tools,
    "demonstrations": None,
  }
  env = EnvConfig(factory="experiments.tasks.chat:math", options=options)
  return defaults.config_for(checkpoint, env=env, **choices)


def _max_turns(given: Mapping[str, str]) -> int:
  """Returns the actions of an episode, for the engine: as many as the task allows."""
  if (options := parse_mapping(given.get("env.options", ""))) is not None:  # replaces the preset's options
    return int(options.get("max_turns", inspect.signature(math).parameters["max_turns"].default))
  return _number(given, "env.options.max_turns") or _number(given, "engine.max_turns") or 1


def _number(given: Mapping[str, str], field: str) -> int | None:
  try:
    return int(given[field]) if field in given else None
  except ValueError as error:
    raise ValueError(f"--config.{field} must be an int; received {given[field]!r}.") from error
