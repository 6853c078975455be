"""Batches whose update was skipped because something was not finite: kept in `<workdir>/bad_batches/` to be looked at.

Of learner step 12 there are `12.json` (what was not finite, and in which trajectories) and `12.safetensors` (the whole
trajectories). The newest `KEPT` stay. From Python:

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
"""Batches that stay, the newest."""


def write(
  workdir: str | os.PathLike[str], step: int, trajectories: Sequence[types.Trajectory], report: Mapping[str, Any]
) -> pathlib.Path:
  """Writes the batch of a learner step; returns the path of its report.

  Args:
    workdir: the run's folder.
    step: the learner step that was given the batch.
    trajectories: the batch.
    report: JSON values: what was found.
  """
  folder = _folder(workdir)
  folder.mkdir(exist_ok=True)
  trajectory_arrays.save(folder / f"{step}.safetensors", trajectory_arrays.to_arrays(trajectories))
  path = report_path(workdir, step)
  workdir_lib.atomic_write_json(path, {"step": step, **report})  # last: where it is, the batch is whole
  for old in steps(workdir)[:-KEPT]:
    (folder / f"{old}.json").unlink(missing_ok=True)
    (folder / f"{old}.safetensors").unlink(missing_ok=True)
  return path


def report_path(workdir: str | os.PathLike[str], step: int) -> pathlib.Path:
  """Where the report on a learner step's batch is, if there is one."""
  return _folder(workdir) / f"{step}.json"


def steps(workdir: str | os.PathLike[str]) -> list[int]:
  """Learner steps of which a batch is there, in increasing order."""
  return sorted(int(path.stem) for path in _folder(workdir).glob("*.json") if path.stem.isdecimal())


def read(workdir: str | os.PathLike[str], step: int) -> tuple[dict[str, Any], list[types.Trajectory]]:
  """Returns the report and the trajectories of a learner step's bad batch.

  Raises:
    FileNotFoundError: there is none.
    ValueError: a file is damaged; the message names it.
  """
  path = report_path(workdir, step)
  report = untrusted_files.read_object(path)
  return report, trajectory_arrays.read(path.with_suffix(".safetensors"))


def _folder(workdir: str | os.PathLike[str]) -> pathlib.Path:
  return pathlib.Path(workdir) / "bad_batches"
