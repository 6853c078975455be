"""A run's config from the path of a checkpoint: `config_for` takes the architecture from it, and sizes from memory."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator

import jax

from sao_jax.learner import OptimizerConfig, learner_config
from sao_jax.models.config import ModelConfig
from sao_jax.parallel import MeshConfig
from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.training import memory, pretrained
from sao_jax.training.config import CheckpointConfig, CriticConfig, EnvConfig, RunConfig
from sao_jax.training.run_meshes import make_run_meshes

SHARE = 0.75
"""Share of a device's memory that a choice may fill by the estimate, which is a rough one. What is free at the moment
does not count, so that the same command makes the same choice when a run is resumed."""
_VALUE_OPTIMIZER = OptimizerConfig(learning_rate=5e-6, warmup_steps=10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
  """Sizes to try on a kind of device, and the settings of a run there."""

  lengths: tuple[int, ...]
  slots: tuple[int, ...]
  """Slots per device."""
  batch_size: int
  pretraining_trajectories: int
  eval_episodes: int
  dtype: str
  remat: str


_ACCELERATOR = _Sizes(
  lengths=(8_192, 4_096, 2_048, 1_024, 512), slots=(64, 32, 16, 8), batch_size=128, pretraining_trajectories=1_024,
  eval_episodes=256, dtype="bfloat16", remat="full",
)  # fmt: skip
_CPU = _Sizes(
  lengths=(512, 256), slots=(16, 8), batch_size=32, pretraining_trajectories=64, eval_episodes=64, dtype="float32",
  remat="none",
)  # fmt: skip


def config_for(
  checkpoint: str | os.PathLike[str],
  *,
  env: EnvConfig = EnvConfig(),  # noqa: B008 (frozen)
  max_turns: int = 1,
  max_len: int | None = None,
  num_slots: int | None = None,
  mesh: MeshConfig | None = None,
  dtype: str | None = None,
  param_dtype: str = "float32",
) -> RunConfig:
  """Makes the config of an SAO run that starts from a checkpoint, with the paper's hyper-parameters.

  The length of a trajectory, the engine's slots and the mesh are the largest that fit into the devices' memory, by
  `memory.needs` and `memory.activations`: first the length is as long as possible, then there are as many slots as
  possible, then the parameters are split over as few devices as possible. If nothing fits, the smallest sizes are
  returned, which the run refuses with a message.

  Args:
    checkpoint: a Hugging Face directory, a GGUF file, or the workdir of another run.
    env: the task; for commands only.
    max_turns: maximum number of actions per episode.
    max_len: maximum tokens of a trajectory; None: chosen.
    num_slots: sequences decoded at once; None: chosen.
    mesh: the mesh; None: chosen, over all devices.
    dtype: dtype of activations and matmuls; None: bfloat16 on accelerators, float32 on CPUs.
    param_dtype: dtype of the parameters. Updates at the paper's learning rates are lost in the rounding of bfloat16.

  Raises:
    FileNotFoundError: there is no such checkpoint.
    ValueError: its architecture is not supported.
  """
  sizes = _CPU if jax.devices()[0].platform == "cpu" else _ACCELERATOR
  policy = pretrained.read_config(checkpoint, dtype=dtype or sizes.dtype, param_dtype=param_dtype)
  policy = dataclasses.replace(policy, remat=sizes.remat)
  longest = policy.max_position_embeddings
  lengths = (max_len,) if max_len else tuple(dict.fromkeys(min(length, longest) for length in sizes.lengths))
  meshes = (mesh,) if mesh else tuple(_meshes(jax.device_count()))
  slots = (num_slots,) if num_slots else tuple(n * jax.device_count() for n in sizes.slots)

  def make(length: int, count: int, over: MeshConfig) -> RunConfig:
    return _config(os.fspath(checkpoint), policy, sizes, env, max_turns, length, count, over)

  smallest = make(lengths[-1], slots[-1], meshes[-1])
  shapes = memory.Shapes.of(policy, smallest.learner)
  for length, count, over in itertools.product(lengths, slots, meshes):
    config = make(length, count, over)
    if _fits(config, shapes):
      return config
  return smallest


def _meshes(num_devices: int) -> Iterator[MeshConfig]:
  """Yields the ways to split all devices into `data` and `fsdp`, with the fewest shards of the parameters first."""
  for shards in range(1, num_devices + 1):
    if num_devices % shards == 0:
      yield MeshConfig(data=num_devices // shards, fsdp=shards)


def _fits(config: RunConfig, shapes: memory.Shapes) -> bool:
  mesh, _ = make_run_meshes(config.mesh, config.rollout_mesh)
  size = memory.available(mesh, total=True)
  try:
    needed = sum(memory.needs(config, mesh, mesh, shapes).values())
  except ValueError:  # the mesh cannot split a parameter
    return False
  return size is None or needed + memory.activations(config, mesh) <= SHARE * size


def _config(
  checkpoint: str, policy: ModelConfig, sizes: _Sizes, env: EnvConfig, max_turns: int, max_len: int, num_slots: int,
  mesh: MeshConfig,
) -> RunConfig:  # fmt: skip
  rows = mesh.sizes(jax.device_count()) if -1 in mesh.axes().values() else tuple(mesh.axes().values())
  return RunConfig(
    num_steps=200,
    batch_size=sizes.batch_size,
    eval_episodes=sizes.eval_episodes,
    policy=policy,
    policy_checkpoint=checkpoint,
    critic=CriticConfig(
      pretraining_trajectories=sizes.pretraining_trajectories, pretraining_epochs=1,
      pretraining_optimizer=_VALUE_OPTIMIZER,
    ),
    learner=learner_config(
      "sao",
      policy_optimizer=OptimizerConfig(learning_rate=1e-6),
      critic_optimizer=_VALUE_OPTIMIZER,
      eps_low=0.3,
      eps_high=5.0,
      row_length=max_len,
      rows_per_microbatch=rows[0] * rows[1] * rows[3],  # data, fsdp, expert
      logprob_chunk_size=min(max_len, 1_024),
    ),
    engine=EngineConfig(
      num_slots=num_slots, max_len=max_len, max_action_tokens=max_len, max_turns=max_turns,
      env_workers=num_slots,
    ),
    env=env,
    mesh=mesh,
    checkpoint=CheckpointConfig(every_steps=10),
  )  # fmt: skip
