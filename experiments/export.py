"""Exports a run's policy as a checkpoint for transformers, vLLM and this library.

    python -m experiments.export --workdir=RUN --out=DIR

The folder gets the weights, `config.json`, the tokenizer, the chat template and the generation config. The tokenizer
and the template are those of the checkpoint that the run started from. A policy with a tokenizer of this library, which
has no files, is exported without one. Adapters (`lora.rank`) are merged into the weights; the folder `adapter` gets
them in the format of PEFT as well.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

import jax
from absl import app, flags, logging

from experiments.support import command, recorded_config
from sao_jax.models import lora
from sao_jax.models.config import DTYPES
from sao_jax.parallel import MeshConfig
from sao_jax.parallel.mesh import RolloutMeshConfig
from sao_jax.training import export, pretrained
from sao_jax.training.config import RunConfig
from sao_jax.training.placement import Placement
from sao_jax.training.trainer import tokenizer_source
from sao_jax.types import Params


def define_flags() -> None:
  flags.DEFINE_string("workdir", None, "The folder of the run.")
  flags.DEFINE_string("out", None, "The folder to write. Files that it holds already are replaced.")
  flags.DEFINE_integer("step", None, "The learner step of the checkpoint. Defaults to the newest.", lower_bound=0)
  flags.DEFINE_enum("dtype", None, DTYPES, "The dtype of the weights. Defaults to that of the run's parameters.")


def main(argv: Sequence[str]) -> None:
  del argv
  logging.set_verbosity(logging.WARNING)
  options = flags.FLAGS
  if options.workdir is None or options.out is None:
    raise app.UsageError("--workdir and --out are required.")
  step, names, source = export_run(pathlib.Path(options.workdir), options.out, options.step, options.dtype)
  if source is None:
    print("The policy's tokenizer has no files; weights and config are exported without it.")
  print(f"exported the policy of step {step} to {options.out}: {', '.join(names)}")


def export_run(
  workdir: pathlib.Path, out: str, step: int | None = None, dtype: str | None = None
) -> tuple[int, list[str], str | None]:
  """Exports the policy of a run.

  Args:
    workdir: the run's folder.
    out: the folder to write.
    step: of the checkpoint; None: the newest.
    dtype: dtype of the weights; None: that of the run's parameters.

  Returns:
    The step, the names of the files, and the checkpoint that the tokenizer comes from.

  Raises:
    FileNotFoundError: there is no run in the folder.
    ValueError: the run holds no checkpoint.
    CheckpointError: there is no intact checkpoint of this step.
  """
  config = recorded_config.read(workdir)
  source, adapted = tokenizer_source(config), config.lora.enabled
  shapes = jax.eval_shape(lambda: lora.init_trained(config.policy, config.lora, jax.random.key(0)))
  step, trained = pretrained.restore_policy(workdir, shapes, step=step)
  params = _merged(config, trained) if adapted else trained
  names = export.export(out, config.policy, params, source=source, dtype=dtype)
  return step, names + (export.export_adapters(out, config, trained) if adapted else []), source


def _merged(config: RunConfig, adapters: Params) -> Params:
  """Returns the whole policy of a run with adapters, on one device."""
  placement = Placement(dataclasses.replace(config, mesh=MeshConfig(data=1), rollout_mesh=RolloutMeshConfig()))
  base = pretrained.initial(config.policy_checkpoint, config.policy, config.seed, placement)
  return lora.merge_all(config.lora, base, adapters)


if __name__ == "__main__":
  define_flags()
  command.run(main)
