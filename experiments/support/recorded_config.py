"""The config that a run recorded in its workdir."""

from __future__ import annotations

import json
import pathlib

from experiments.support.config_flags import from_config_dict
from sao_jax.rollout.engine.config import REMOVED_FIELDS
from sao_jax.training.config import RunConfig


def read(workdir: pathlib.Path) -> RunConfig:
  """Reads the config that a run recorded in its workdir. Settings of the engine that are gone are left out.

  Raises:
    FileNotFoundError: the workdir holds no run.
    ValueError: a field is unknown.
  """
  path = workdir / "config.json"
  if not path.is_file():
    raise FileNotFoundError(f"--workdir must be the folder of a run; {str(workdir)!r} holds no config.json.")
  recorded = json.loads(path.read_bytes())
  for name in REMOVED_FIELDS:
    recorded["engine"].pop(name, None)
  return from_config_dict(RunConfig, recorded)
