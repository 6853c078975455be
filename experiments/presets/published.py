"""Shared parts of the presets for published checkpoints: a check of files, and the paper's long-context settings."""

from __future__ import annotations

import dataclasses
import pathlib

from experiments.presets.model_configs import qwen3_30b_a3b
from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.models import ModelConfig
from sao_jax.parallel import EngineMeshConfig, MeshConfig
from sao_jax.rollout import EngineConfig
from sao_jax.rollout.ray.config import ClusterConfig
from sao_jax.training.config import CheckpointConfig, CriticConfig, EnvConfig, RunConfig

PAPER_LEN = 131_072
PAPER_MESH = MeshConfig(data=1, fsdp=8, context=8)
PAPER_ENGINES = ClusterConfig(num_engines=16, mesh=EngineMeshConfig(tensor=4), resources={"TPU": 4})
"""16 engines, each on the four chips of a TPU host, which split heads and experts."""
VALUE_OPTIMIZER = OptimizerConfig(learning_rate=5e-6, warmup_steps=10)


def find_checkpoint(directory: str, *, repository: str) -> str:
  """Returns the directory if it holds a checkpoint with its tokenizer.

  Args:
    directory: the part after the colon of `--config=PRESET.py:DIRECTORY`.
    repository: the repository that the files come from, for the message.

  Raises:
    FileNotFoundError: there is no such directory, or it lacks `config.json` or `tokenizer.json`.
  """
  folder = pathlib.Path(directory)
  missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
  if missing:
    state = f"has no {' and no '.join(missing)}" if folder.is_dir() else "is not a directory"
    raise FileNotFoundError(
      f"this preset needs the files of {repository} (config, weights, tokenizer) in a directory after a colon: "
      f"--config=PRESET.py:DIRECTORY; received {directory!r}, which {state}."
    )
  return directory


def paper_config(
  checkpoint: str,
  env: EnvConfig,
  *,
  eps_low: float,
  eps_high: float,
  max_turns: int,
  policy: ModelConfig | None = None,
  mesh: MeshConfig = PAPER_MESH,
  cluster: ClusterConfig = PAPER_ENGINES,
  slots_per_engine: int = 32,
) -> RunConfig:
  """Returns the settings that the paper's two experiments share: Qwen3-30B-A3B on rows of 131,072 tokens.

  From the paper: a batch of 128 single rollouts, learning rates of 1e-6 for the policy and of 5e-6 with 10 warm-up
  steps for the value model, K = 2, only MoE projections and head of the value model trained in RL, lambda 1 for the
  critic and 1 - 1 / (1.5 l) for the policy, and temperature 1.

  Our choices, where the paper states nothing:

  - discount 1; gradients clipped to norm 1 in both models; Adam with betas 0.9 and 0.999 and eps 1e-8, no weight decay;
  - a truncated trajectory counts as ended (no bootstrap), with the rewards that it has;
  - "10 steps" of warm-up are optimizer updates, five learner steps at K = 2;
  - value pretraining trains all parameters, in two passes over 8,192 trajectories (126 updates). The curve of the small
    preset in RESULTS.md stops rising at about two passes and still gains from 64 to 256 updates. It was not measured at
    this size: a run prints what it reached;
  - routers, norms and embeddings of the value model are frozen with its attention;
  - 400 learner steps, a staleness of at most 8 versions, checkpoints, evaluations, and the sizes of engines and meshes.

  The sizes are for 128 TPU v5p chips: 64 learn, in 16 processes, and 16 engines in Ray workers have 4 each. For another
  number of learning devices, set `--config.mesh.fsdp=N` with a divisor of 8, or -1; of engines,
  `--config.cluster.num_engines=N`. On hosts with 8 GPUs, replace the resources:
  `--config.cluster.resources="{}" --config.cluster.num_gpus=8 --config.cluster.mesh.expert=2`.

  Args:
    checkpoint: the model's directory.
    env: the task.
    eps_low: the lower bound of the ratio is 1 - eps_low.
    eps_high: the upper bound of the ratio is 1 + eps_high.
    max_turns: maximum number of actions of a trajectory.
    policy: the model; None: Qwen3-30B-A3B.
    mesh: the learner's devices.
    cluster: the engines and their devices.
    slots_per_engine: sequences that an engine decodes at once.
  """
  return RunConfig(
    num_steps=400,
    batch_size=128,
    group_size=1,
    eval_episodes=480,
    policy=dataclasses.replace(policy or qwen3_30b_a3b(), dtype="bfloat16", remat="full"),
    policy_checkpoint=checkpoint,
    critic=CriticConfig(pretraining_trajectories=8_192, pretraining_epochs=2, pretraining_optimizer=VALUE_OPTIMIZER),
    learner=learner_config(
      "sao",
      policy_optimizer=OptimizerConfig(learning_rate=1e-6),
      critic_optimizer=VALUE_OPTIMIZER,
      eps_low=eps_low,
      eps_high=eps_high,
      alpha=1.5,
      critic_updates=2,
      lambda_critic=1.0,
      row_length=PAPER_LEN,
      rows_per_microbatch=8,
      logprob_chunk_size=1_024,
    ),
    engine=EngineConfig(
      num_slots=slots_per_engine,
      max_len=PAPER_LEN,
      max_action_tokens=PAPER_LEN,
      max_turns=max_turns,
      temperature=1.0,
      chunk_steps=32,
      page_size=64,
      cache_tokens=slots_per_engine * 65_536,  # half of what full trajectories need
      token_budget=4_096,
      env_workers=slots_per_engine,
      env_timeout_s=600.0,
    ),
    env=env,
    mesh=mesh,
    cluster=cluster,
    checkpoint=CheckpointConfig(every_steps=10),
  )
