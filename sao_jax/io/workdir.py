"""The folder of a run: a lock, the recorded configuration, the summary, and atomic writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
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
"""Error codes of a full, read-only or broken disk, of a file system without locks, and of files in place of folders."""


_TEMPORARY = ".tmp"
_DELETE_TIMEOUT_S = 5.0
_MOST_DIFFERENCES = 100


class WorkdirError(RuntimeError):
  """A run's folder cannot be written to, or another run is using it."""


@contextlib.contextmanager
def writing(workdir: str | os.PathLike[str]) -> Iterator[None]:
  """Turns errors of a full or read-only disk under `workdir` into a `WorkdirError` that says what to do."""
  try:
    yield
  except OSError as error:
    path = error.filename
    folder = pathlib.Path(workdir).absolute()
    inside = isinstance(path, str | os.PathLike) and pathlib.Path(path).absolute().is_relative_to(folder)
    if error.errno not in _DISK_ERRORS or not inside:
      raise
    raise WorkdirError(
      f"Cannot write to workdir {workdir}: {error}. Earlier files are intact: make room, or make the folder writable, "
      "and run the same command again to continue from the last checkpoint."
    ) from error


@contextlib.contextmanager
def named_errors(path: str | os.PathLike[str]) -> Iterator[None]:
  """Adds the name of the file to an `OSError`, which one from a write to an open file lacks."""
  try:
    yield
  except OSError as error:
    if error.filename is None:
      error.filename = os.fspath(path)
    raise


class WorkdirLock:
  """Locks a workdir for this process, so that a second run in it is refused; a context manager.

  The lock is the kernel's (`flock` on `<workdir>/.lock`). It ends with the process, even a killed one, so it is never
  stale. The file holds the owner's process id, for the error message only.
  """

  def __init__(self, workdir: str | os.PathLike[str]) -> None:
    """Creates the folder if needed and takes the lock.

    Raises:
      WorkdirError: the folder cannot be made, or another run holds the lock.
    """
    folder = pathlib.Path(workdir)
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
      found = "a file" if folder.is_file() else "a link that leads nowhere"
      raise WorkdirError(f"workdir must be a folder; {str(folder)!r} is {found}.") from error
    except OSError as error:
      raise WorkdirError(f"cannot make the folder {folder}: {error.strerror}; choose another workdir.") from error
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
    for rest in folder.glob(f".*{_TEMPORARY}"):  # left by a killed `atomic_write`
      rest.unlink()

  def close(self) -> None:
    """Releases the lock. The file stays: if it were removed, two runs could lock two files of the same name."""
    self._file.close()

  def __enter__(self) -> WorkdirLock:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


def atomic_write(path: str | os.PathLike[str], content: bytes) -> None:
  """Replaces a file in one step, so that readers, also after a kill, see the old content or the new, never a part."""
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
  """Writes indented, strict JSON with `atomic_write`."""
  atomic_write(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("utf-8"))


def config_differences(
  recorded: Mapping[str, Any],
  current: Mapping[str, Any],
  *,
  may_differ: Collection[str] = (),
  may_be_missing: Collection[str] = (),
) -> list[str]:
  """Lists the fields in which two nested configurations differ, one line each. Tuples equal lists, as in JSON.

  Args:
    recorded: the configuration that was written earlier.
    current: the configuration of this run.
    may_differ: dotted names of fields or sub-configs that are not compared.
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
  reported: Collection[str] = (),
) -> list[str]:
  """Writes `config.json` into a new workdir, or checks that an existing one holds the same configuration.

  Args:
    workdir: the run's folder.
    config: the nested configuration; JSON values only.
    may_differ: dotted names of fields that may change when a run is resumed.
    may_be_missing: dotted names of fields that an existing file may lack.
    reported: fields out of `may_differ` whose changes are returned, and appended to `changes.jsonl`.

  Returns:
    A line for each field of `reported` that differs from the existing file.

  Raises:
    ValueError: the workdir holds another configuration; the message lists the fields that differ.
  """
  path = pathlib.Path(workdir) / "config.json"
  changes: list[str] = []
  if path.exists():
    try:
      recorded = untrusted_files.read_object(path)
    except ValueError as error:
      raise ValueError(f"{error} Choose another --workdir, or remove the file.") from error
    if lines := config_differences(recorded, config, may_differ=may_differ, may_be_missing=may_be_missing):
      more = [f"... and {len(lines) - _MOST_DIFFERENCES} more"] if len(lines) > _MOST_DIFFERENCES else []
      listing = "\n  ".join(lines[:_MOST_DIFFERENCES] + more)
      raise ValueError(
        f"Workdir {workdir} holds a run of a different config. Choose another --workdir, or use the recorded values:"
        f"\n  {listing}"
      )
    kept = frozenset(may_differ) - frozenset(reported)
    changes = config_differences(recorded, config, may_differ=kept, may_be_missing=may_be_missing)
  if changes:
    with open(path.with_name("changes.jsonl"), "a", encoding="utf-8") as file:
      file.write(json.dumps({"time": time.time(), "changes": changes}) + "\n")
  atomic_write_json(path, config)
  return changes


def write_or_check_files(workdir: str | os.PathLike[str], files: Collection[str]) -> None:
  """Writes the checksums of a task's files into a new workdir (`files.json`), or checks that they are the same.

  Raises:
    FileNotFoundError: a file does not exist.
    ValueError: a file has changed since; the message names it.
  """
  path = pathlib.Path(workdir) / "files.json"
  found = {}
  for name in files:
    with open(name, "rb") as file:
      found[name] = hashlib.file_digest(file, "sha256").hexdigest()
  recorded = untrusted_files.read_object_if_there(path)
  if changed := [name for name, checksum in found.items() if recorded.get(name, checksum) != checksum]:
    raise ValueError(
      f"{', '.join(changed)}: the contents have changed since the run in {workdir} began, so it cannot be continued. "
      "Restore the file, or start a new run from this one's policy: another --workdir, with policy_checkpoint set to "
      "this one."
    )
  if found != recorded and found:
    atomic_write_json(path, recorded | found)


def write_summary(workdir: str | os.PathLike[str], summary: Mapping[str, Any]) -> None:
  """Writes `summary.json`, with `SUMMARY_KEYS` and any further keys.

  Raises:
    ValueError: a key is missing.
  """
  if missing := [key for key in SUMMARY_KEYS if key not in summary]:
    raise ValueError(f"summary.json must have the keys {list(SUMMARY_KEYS)}; missing: {missing}.")
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
  """Deletes a folder, a file or a link (but not its target); does nothing if the path does not exist.

  Retries for `_DELETE_TIMEOUT_S` if other threads still write into the folder, as Orbax's do after one has failed.
  """
  if not path.is_dir() or path.is_symlink():
    path.unlink(missing_ok=True)
    return
  deadline = time.monotonic() + _DELETE_TIMEOUT_S
  while path.exists():
    try:
      shutil.rmtree(path)
    except OSError as error:
      # ENOENT: the other writer deleted or renamed a file itself.
      if error.errno not in (errno.ENOTEMPTY, errno.ENOENT) or time.monotonic() > deadline:
        raise
      time.sleep(0.02)
