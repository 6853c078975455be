"""Runs the whole loop on meshes: `python -m tests.parallel.loop_program ROOT NAME:MESH:SCHEDULE:STEPS ...`.

Runs of the same NAME share a workdir: a later one goes on where the earlier one ended, on another mesh. The last line
holds, for each run in turn, what it returned; the workdirs hold the rest.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax

from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.models import ModelConfig
from sao_jax.parallel import parse_mesh
from sao_jax.parallel.distributed import initialize_from_environment
from sao_jax.rollout import EngineConfig
from sao_jax.training import loop
from sao_jax.training.config import CheckpointConfig, CriticConfig, RunConfig, WarmStartConfig
from sao_jax.types import Domain, Environment, Step
from tests.tiny_domain import VOCABULARY, TinyEnv, TinyTokenizer, tiny_domain

MODEL = ModelConfig(
  model_type="qwen3_moe", vocab_size=16, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
  intermediate_size=32, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, init_std=0.25,
)  # fmt: skip
# A large eps makes Adam's first steps smooth in the gradient: its noise is compared, not the noise's sign.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2)


class PaddedTokenizer(TinyTokenizer):
  """With a character more, so that the vocabulary splits in two."""

  vocab_size = len(VOCABULARY) + 1

  def decode(self, ids: list[int]) -> str:
    return "".join((VOCABULARY + "_")[i] for i in ids)


class LengthEnv(TinyEnv):
  """Pays for actions of an odd length: a policy that knows nothing gets rewards, too."""

  def step(self, action: str) -> Step:
    return dataclasses.replace(super().step(action), reward=float(len(action) % 2))


def make_domain() -> Domain:
  def make_env(split: str) -> Environment:
    return LengthEnv()

  return dataclasses.replace(tiny_domain(), tokenizer=PaddedTokenizer(), make_env=make_env)


def make_config(mesh: str, schedule: Any, steps: int) -> RunConfig:
  """A tiny run; asynchronous ones leave out the first two stages and evaluate nothing."""
  asynchronous = schedule == "async"
  threads = 4 if asynchronous else 0
  return RunConfig(
    schedule=schedule, num_steps=steps, batch_size=16, eval_episodes=0 if asynchronous else 8, policy=MODEL,
    mesh=parse_mesh(mesh),
    warm_start=WarmStartConfig(num_steps=0 if asynchronous else 8, batch_size=16, optimizer=OPTIMIZER),
    critic=CriticConfig(
      pretraining_trajectories=0 if asynchronous else 16, pretraining_epochs=1, pretraining_optimizer=OPTIMIZER
    ),
    learner=learner_config(
      "sao", eps_low=0.3, eps_high=5.0, policy_optimizer=OPTIMIZER, critic_optimizer=OPTIMIZER, row_length=32,
      rows_per_microbatch=8, logprob_chunk_size=64,
    ),
    engine=EngineConfig(
      num_slots=8, max_len=32, max_action_tokens=6, max_turns=4, chunk_steps=4, token_budget=32,
      env_workers=threads, env_timeout_s=60.0 if threads else None,
    ),
    checkpoint=CheckpointConfig(every_steps=100),
  )  # fmt: skip


def main(root: str, *runs: str) -> None:
  initialize_from_environment()
  summaries = []
  for run in runs:
    name, mesh, schedule, steps = run.split(":")
    config = make_config(mesh, schedule, int(steps))
    summaries.append(loop.train(config, make_domain(), pathlib.Path(root) / name))
  print(json.dumps({"processes": jax.process_count(), "devices": jax.device_count(), "summaries": summaries}))


if __name__ == "__main__":
  main(*sys.argv[1:])
