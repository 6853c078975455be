"""The folder of a run: one run at a time, its configuration, its summary, and writes that a kill cannot halve."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from types import TracebackType
from typing import Any

from sao_jax.utils import untrusted_files

SUMMARY_KEYS = (
  "success_before", "success_after", "n", "seconds_total", "seconds_by_stage", "num_steps", "dropped_stale",
  "failed_episodes", "device",
)  # fmt: skip


_DISK_ERRORS = frozenset({
  errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR,
  errno.EISDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG, errno.ESTALE, errno.ENOLCK, errno.EOPNOTSUPP,
})  # fmt: skip
"""Of a full, read-only or broken disk, of one without locks, and of files where folders should be."""


_TEMPORARY = ".tmp"
_DELETE_TIMEOUT_S = 5.0
_MOST_DIFFERENCES = 100


class WorkdirError(RuntimeError):
  """A run's folder cannot be written to, or is another run's; the run stops."""


@contextlib.contextmanager
def writing(workdir: str | os.PathLike[str]) -> Iterator[None]:
  """Turns what a full or read-only disk raises under `workdir` into a `WorkdirError` that says what to do."""
  try:
    yield
  except OSError as error:
    path = error.filename
    folder = pathlib.Path(workdir).absolute()
    inside = isinstance(path, str | os.PathLike) and pathlib.Path(path).absolute().is_relative_to(folder)
    if error.errno not in _DISK_ERRORS or not inside:
      raise
    raise WorkdirError(
      f"Cannot write to workdir {workdir}: {error}. What was saved before is whole: make room, or make it writable, "
      "and the same command goes on from the last checkpoint."
    ) from error


@contextlib.contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
  """Gives an `OSError` the name of the file that was being written, which a write to an open file lacks."""
  try:
    yield
  except OSError as error:
    if error.filename is None:
      error.filename = os.fspath(path)
    raise


class WorkdirLock:
  """Holds a workdir for this process, as a context manager; a second run in it is refused.

  The lock is the kernel's (`flock` on `<workdir>/.lock`): it ends with the process, however that dies, so that nothing
  is ever stale. The file's content (the owner's pid) only serves the message.
  """

  def __init__(self, workdir: str | os.PathLike[str]) -> None:
    """Makes the folder if needed and takes the lock.

    Raises:
      WorkdirError: another run holds it.
    """
    folder = pathlib.Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    self._file = open(path, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed by `close`)
    try:
      with named_errors(path):
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      self._file.seek(0)
      owner = self._file.read(32).strip() or "unknown"
      self._file.close()
      raise WorkdirError(
        f"Workdir {folder} is in use by another run (process {owner}); wait for it to end, or choose another --workdir."
      ) from error
    with named_errors(path):
      self._file.truncate(0)
      self._file.write(f"{os.getpid()}\n")
      self._file.flush()
    for rest in folder.glob(f".*{_TEMPORARY}"):  # of `atomic_write`s that were killed
      rest.unlink()

  def close(self) -> None:
    """Gives the workdir back. The file stays: removing it would let two runs lock two files of one name."""
    self._file.close()

  def __enter__(self) -> WorkdirLock:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


def atomic_write(path: str | os.PathLike[str], content: bytes) -> None:
  """Replaces a file in one step: readers and a kill see the old content or the new, never a part."""
  path = pathlib.Path(path)
  descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
  try:
    with named_errors(path), os.fdopen(descriptor, "wb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.chmod(name, 0o644)
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise


def atomic_write_json(path: str | os.PathLike[str], value: Any) -> None:
  """Writes readable, strict JSON atomically (see `atomic_write`)."""
  atomic_write(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("utf-8"))


def config_differences(
  recorded: Mapping[str, Any],
  current: Mapping[str, Any],
  *,
  may_differ: Collection[str] = (),
  may_be_missing: Collection[str] = (),
) -> list[str]:
  """Lists the fields in which two nested configurations differ, one line each; tuples count as lists, as JSON has it.

  Args:
    recorded: what was written earlier.
    current: what runs now.
    may_differ: dotted names that are not compared, a sub-config's name included.
    may_be_missing: dotted names that are not compared if `recorded` lacks them.

  >>> config_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": None})
  ['a.c: recorded 2, now 3', 'd: recorded nothing, now null']
  """
  before, now = json.loads(json.dumps(recorded)), json.loads(json.dumps(current))
  return _differences("", before, now, frozenset(may_differ), frozenset(may_be_missing))


def write_or_check_config(
  workdir: str | os.PathLike[str],
  config: Mapping[str, Any],
  *,
  may_differ: Collection[str] = (),
  may_be_missing: Collection[str] = (),
) -> None:
  """Writes `config.json` into a new workdir; in one that has it, checks that this run's configuration is the same.

  Args:
    workdir: the run's folder.
    config: the nested configuration, JSON values only.
    may_differ: dotted names of fields that may change between a run and its resumption.
    may_be_missing: dotted names of fields that the record may lack.

  Raises:
    ValueError: the workdir holds another configuration; the message lists the fields.
  """
  path = pathlib.Path(workdir) / "config.json"
  if path.exists():
    try:
      recorded = untrusted_files.read_object(path)
    except ValueError as error:
      raise ValueError(f"{error} Choose another --workdir, or remove it.") from error
    if lines := config_differences(recorded, config, may_differ=may_differ, may_be_missing=may_be_missing):
      more = [f"... and {len(lines) - _MOST_DIFFERENCES} more"] if len(lines) > _MOST_DIFFERENCES else []
      listing = "\n  ".join(lines[:_MOST_DIFFERENCES] + more)
      raise ValueError(
        f"Workdir {workdir} holds a run of a different config; choose another --workdir, or run with these as recorded:"
        f"\n  {listing}"
      )
  atomic_write_json(path, config)


def write_summary(workdir: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
  """Writes `summary.json`: `SUMMARY_KEYS` and whatever else the run has to say.

  Raises:
    ValueError: a key is missing.
  """
  if missing := [key for key in SUMMARY_KEYS if key not in summary]:
    raise ValueError(f"summary.json needs {list(SUMMARY_KEYS)}; missing: {missing}.")
  atomic_write_json(pathlib.Path(workdir) / "summary.json", summary)


def _differences(
  prefix: str, recorded: Any, current: Any, may_differ: frozenset[str], may_be_missing: frozenset[str]
) -> list[str]:
  if prefix in may_differ:
    return []
  if isinstance(recorded, dict) and isinstance(current, dict):
    lines = []
    for key in sorted(recorded.keys() | current.keys()):
      name = f"{prefix}.{key}" if prefix else key
      if key in recorded and key in current:
        lines += _differences(name, recorded[key], current[key], may_differ, may_be_missing)
      elif name not in may_differ and (key in recorded or name not in may_be_missing):
        before = json.dumps(recorded[key]) if key in recorded else "nothing"
        now = json.dumps(current[key]) if key in current else "nothing"
        lines.append(f"{name}: recorded {before}, now {now}")
    return lines
  if recorded == current and isinstance(recorded, bool) == isinstance(current, bool):
    return []
  return [f"{prefix or 'config'}: recorded {json.dumps(recorded)}, now {json.dumps(current)}"]


def delete(path: pathlib.Path) -> None:
  """Deletes whatever is there: a folder, a file, a link (not what it points to).

  A folder that others still write into, as Orbax's threads do when one of them has failed, is tried again for
  `_DELETE_TIMEOUT_S`.
  """
  if not path.is_dir() or path.is_symlink():
    path.unlink(missing_ok=True)
    return
  deadline = time.monotonic() + _DELETE_TIMEOUT_S
  while path.exists():
    try:
      shutil.rmtree(path)
    except OSError as error:
      # ENOENT: its writer has deleted or renamed something itself.
      if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > deadline:
        raise
      time.sleep(0.02)
