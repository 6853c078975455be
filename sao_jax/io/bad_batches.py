"""Batches whose update was skipped because of non-finite numbers, kept in `<workdir>/bad_batches/` for inspection.

Learner step 12 leaves `12.json` (the report: which numbers were not finite, in which trajectories) and
`12.safetensors` (the trajectories). The newest `KEPT` batches stay. From Python:

    report, trajectories = bad_batches.read(workdir, 12)
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from sao_jax import types
from sao_jax.io import trajectory_arrays
from sao_jax.io import workdir as workdir_lib
from sao_jax.utils import untrusted_files

KEPT = 16
"""Number of newest batches that stay."""


def write(
  workdir: str | os.PathLike[str], step: int, trajectories: Sequence[types.Trajectory], report: Mapping[str, Any]
) -> pathlib.Path:
  """Writes the batch of a learner step; returns the path of its report.

  Args:
    workdir: the run's folder.
    step: the learner step that received the batch.
    trajectories: the batch.
    report: the findings, as JSON values.
  """
  folder = _folder(workdir)
  folder.mkdir(exist_ok=True)
  trajectory_arrays.save(folder / f"{step}.safetensors", trajectory_arrays.to_arrays(trajectories))
  path = report_path(workdir, step)
  workdir_lib.atomic_write_json(path, {"step": step, **report})  # last: a report implies a complete batch
  for old in steps(workdir)[:-KEPT]:
    (folder / f"{old}.json").unlink(missing_ok=True)
    (folder / f"{old}.safetensors").unlink(missing_ok=True)
  return path


def report_path(workdir: str | os.PathLike[str], step: int) -> pathlib.Path:
  """Returns the path of the report on a learner step's batch; the file may not exist."""
  return _folder(workdir) / f"{step}.json"


def steps(workdir: str | os.PathLike[str]) -> list[int]:
  """Returns the learner steps that have a batch, in increasing order."""
  return sorted(int(path.stem) for path in _folder(workdir).glob("*.json") if path.stem.isdecimal())


def read(workdir: str | os.PathLike[str], step: int) -> tuple[dict[str, Any], list[types.Trajectory]]:
  """Returns the report and the trajectories of a learner step's bad batch.

  Raises:
    FileNotFoundError: the step has no batch.
    ValueError: a file is damaged; the message names it.
  """
  path = report_path(workdir, step)
  report = untrusted_files.read_object(path)
  return report, trajectory_arrays.read(path.with_suffix(".safetensors"))


def _folder(workdir: str | os.PathLike[str]) -> pathlib.Path:
  return pathlib.Path(workdir) / "bad_batches"
