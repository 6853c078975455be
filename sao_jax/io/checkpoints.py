"""Checkpoints: arrays through Orbax and host state as JSON, in one folder per step that is complete or absent.

Retention, background saves and the final rename are written here because `orbax.checkpoint.CheckpointManager` reads the
metrics of every checkpoint when it opens a folder, so one damaged metrics file would prevent the fallback to an intact
checkpoint. It also leaves partly written and outdated checkpoints behind after a failed save, deletes folders in place,
and holds the learner up ten times as long (121 ms instead of 13 ms in `experiments.benchmarks.checkpointing`).
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from sao_jax import types, version
from sao_jax.io import checksums, trajectory_arrays
from sao_jax.io import workdir as workdir_lib
from sao_jax.parallel import copies, distributed

_FORMAT = 1
"""Version of the folder's layout and contents; increased when older checkpoints can no longer be read."""
_LISTING = checksums.LISTING
_HOST_ARRAYS = "host.safetensors"
_STEP = re.compile("0|[1-9][0-9]{0,17}")
_PARTIAL = ".partial"
_DELETED = ".deleted"
_DAMAGED = ".damaged"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors raised by reading a damaged listing or a missing file."""
_BODY = frozenset({"format", "library_version", "jax_version", "config", "leaves", "host"})
"""Keys of the JSON that is written beside the arrays."""


class CheckpointError(Exception):
  """A checkpoint cannot be used or written.

  It belongs to another config, library version or model, or all checkpoints are damaged, or a save failed.
  """


class Restored(NamedTuple):
  """A restored checkpoint."""

  step: int
  state: types.Params
  """The saved arrays in the template's structure, placed like the template's arrays."""
  host: dict[str, Any]
  """The JSON host state that was passed to `save`."""
  host_arrays: dict[str, np.ndarray]
  """The host arrays that were passed to `save`."""


class Checkpointer:
  """Saves and restores one pytree and one JSON object per step, in `<workdir>/checkpoints/<step>/`.

  `save` copies the arrays to the host and returns, so that the learner may donate its own; a background thread writes
  the copies. A folder gets its final name when it is complete, so a kill at any moment leaves earlier checkpoints
  intact. Its `files.json` lists the size and checksum of every file, which `restore` verifies. Nothing is pickled.

  Several processes share the folder and must make the same calls. Each writes its own shards, and `save` returns when
  all are written: its barriers are programs on the devices, which every process must run in the same order.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    *,
    config: Mapping[str, Any],
    keep: int = 2,
    keep_best: int = 1,
    may_differ: Collection[str] = (),
    may_be_missing: Collection[str] = (),
    read_only: bool = False,
  ) -> None:
    """Opens the folder and removes partly written checkpoints of a killed run, with a warning for each.

    Args:
      workdir: the run's folder.
      config: the run's nested configuration (JSON values); recorded by `save` and compared by `restore`.
      keep: number of newest checkpoints to keep, at least 1.
      keep_best: number of checkpoints with the highest `metric` to keep in addition.
      may_differ: dotted names of config fields that `restore` does not compare.
      may_be_missing: dotted names of config fields that a checkpoint may lack.
      read_only: never remove, move or save anything; for readers beside a running job.

    Raises:
      ValueError: `keep` or `keep_best` is out of range.
    """
    if keep < 1 or keep_best < 0:
      raise ValueError(f"keep must be >= 1 and keep_best >= 0; received {keep} and {keep_best}.")
    self._folder = pathlib.Path(workdir).absolute() / "checkpoints"
    self._config = json.loads(json.dumps(config))
    self._keep = keep
    self._keep_best = keep_best
    self._may_differ = may_differ
    self._may_be_missing = may_be_missing
    self._read_only = read_only
    self._orbax = ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    self._pending: concurrent.futures.Future[None] | None = None
    if not read_only and distributed.is_main_process():
      self._folder.mkdir(parents=True, exist_ok=True)
      self._remove_leftovers()
    if not read_only:
      distributed.barrier("checkpoints opened")

  def steps(self) -> list[int]:
    """Returns the steps that have a complete checkpoint folder, intact or damaged, in increasing order."""
    names = [path.name for path in self._folder.glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if _STEP.fullmatch(name))

  def path(self, step: int) -> pathlib.Path:
    """Returns the folder of a step's checkpoint."""
    return self._folder / str(step)

  def host_state(self, step: int) -> dict[str, Any]:
    """Returns the JSON host state of a step's checkpoint, without its arrays.

    Raises:
      CheckpointError: the checkpoint is missing or damaged.
    """
    self._require_intact(step)
    return dict(self._read_body(step)["host"])

  def arrays(self, step: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a step's checkpoint by path, as saved. Needs no template.

    Raises:
      CheckpointError: the checkpoint is missing or damaged.
    """
    self._require_intact(step)
    leaves = self._read_body(step)["leaves"]
    empty = {name: np.empty(leaf["shape"], jnp.dtype(leaf["dtype"])) for name, leaf in leaves.items()}
    return {name: np.asarray(array) for name, array in self._read_arrays(step, empty).items()}

  def save(
    self,
    step: int,
    state: types.Params,
    host: Mapping[str, Any],
    *,
    host_arrays: Mapping[str, np.ndarray] | None = None,
    metric: float | None = None,
  ) -> None:
    """Starts a save and returns when the arrays are copied. Waits for the previous save first.

    Args:
      step: the learner step; must not have a checkpoint yet.
      state: a pytree of jax or NumPy arrays (policy, critic, optimizer states, ...), including typed PRNG keys.
      host: the rest of the state needed to resume (counters, cursors, generator states); JSON values only.
      host_arrays: arrays whose shapes change from save to save, so that no template can describe them. The caller must
        not write to them afterwards.
      metric: used by `keep_best`; higher is better. None, NaN and infinities never count as best.

    Raises:
      TypeError: `host` is not JSON.
      ValueError: a leaf of `state` is not an array, or the step has a checkpoint.
      CheckpointError: the previous save failed, for example because the disk is full.
    """
    if self._read_only:
      raise ValueError("Cannot save: this Checkpointer was opened with read_only=True.")
    self.wait()
    if self.path(step).exists():
      raise ValueError(f"Checkpoint {self.path(step)} already exists.")
    arrays = copies.host_copies(_named_leaves(state))
    body = {
      "format": _FORMAT,
      "library_version": version.__version__,
      "jax_version": jax.__version__,
      "config": self._config,
      "leaves": {name: _describe(leaf) for name, leaf in arrays.items()},
      "host": json.loads(json.dumps(dict(host))),
    }
    metric = None if metric is None or not math.isfinite(metric) else float(metric)  # NaN would break the ranking
    if jax.process_count() > 1:
      self._write(step, arrays, body, dict(host_arrays or {}), metric)
    else:
      self._pending = self._thread.submit(self._write, step, arrays, body, dict(host_arrays or {}), metric)

  def wait(self) -> None:
    """Blocks until the pending save is complete.

    Raises:
      CheckpointError: the save failed.
    """
    pending, self._pending = self._pending, None
    if pending is None:
      return
    try:
      pending.result()
    except Exception as error:
      try:
        self._remove_leftovers(warn=False)  # makes room on a full disk
      except OSError as rest:
        logging.warning("A partly written checkpoint could not be removed; it stays until the next start: %s", rest)
      raise CheckpointError(
        f"A checkpoint could not be written to {self._folder}: {error}. Earlier checkpoints: steps {self.steps()}."
      ) from error

  def restore(self, template: types.Params, *, step: int | None = None, whole: bool = True) -> Restored | None:
    """Restores the newest intact checkpoint, or that of a given step.

    A damaged checkpoint is reported in a warning and renamed to `<step>.damaged`; the next older one is tried.

    Args:
      template: a pytree of arrays or `jax.ShapeDtypeStruct`s that gives structure, shapes, dtypes and sharding.
      step: the step to restore; None: the newest.
      whole: False restores the template's arrays only, and does not compare the config.

    Returns:
      The checkpoint, or None if the folder has no checkpoints.

    Raises:
      CheckpointError: the checkpoint belongs to another config, library version or model (the message lists the
        fields that differ), that of `step` is missing or damaged, or all are damaged (they keep their names).
    """
    self.wait()
    if step is not None:
      self._require_intact(step)
    else:
      step = distributed.broadcast_from_main(self._newest_intact() if distributed.is_main_process() else None)
    if step is None:
      return None
    body = self._read_body(step)
    self._check_schema(step, body, template, whole=whole)
    host_arrays = trajectory_arrays.load(self.path(step) / _HOST_ARRAYS)
    return Restored(step, self._read_state(step, template), body["host"], host_arrays)

  def _newest_intact(self) -> int | None:
    """Returns the newest intact step, or None without checkpoints; renames newer, damaged ones."""
    steps = self.steps()
    damaged = []
    for step in reversed(steps):
      try:
        self._verify(step)
      except _DAMAGE as error:
        logging.warning("Checkpoint %s is damaged and is skipped: %s", self.path(step), error)
        damaged.append(step)
        continue
      if not self._read_only:
        for newer in damaged:
          self._remove(newer, _DAMAGED)
      return step
    if steps:
      raise CheckpointError(f"All checkpoints in {self._folder} are damaged (steps {steps}); see the warnings above.")
    return None

  def close(self) -> None:
    """Waits for the pending save and stops the background thread."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      self._orbax.close()

  def __enter__(self) -> Checkpointer:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()

  def _write(
    self,
    step: int,
    arrays: dict[str, Any],
    body: dict[str, Any],
    host_arrays: dict[str, np.ndarray],
    metric: float | None,
  ) -> None:
    """Writes `<step>.partial` through Orbax, adds the checksums of all files, and commits by renaming the folder."""
    partial = self.path(step).with_name(f"{step}{_PARTIAL}")
    tree = ocp.tree.from_flat_dict(arrays, sep="/")
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(tree), host=ocp.args.JsonSave(body))
    self._orbax.save(partial, args=items, force=True)
    if distributed.is_main_process():
      trajectory_arrays.save(partial / _HOST_ARRAYS, host_arrays)
      self._commit(step, partial, metric)
    distributed.barrier("checkpoint saved")

  def _commit(self, step: int, partial: pathlib.Path, metric: float | None) -> None:
    checksums.write_listing(partial, {"step": step, "metric": metric})
    partial.rename(self.path(step))
    self._retain()

  def _verify(self, step: int) -> None:
    """Checks a checkpoint's files against its listing; raises one of `_DAMAGE` if any is missing or differs."""
    listing = checksums.verify(self.path(step))
    if listing.get("step", step) != step:  # older listings lack it
      raise ValueError(f"its {_LISTING} is that of step {listing['step']}, under another name")

  def _require_intact(self, step: int) -> None:
    self.wait()
    if step not in self.steps():
      folder = self.path(step).parent
      raise CheckpointError(f"there is no checkpoint of step {step} in {folder}; there are steps {self.steps()}.")
    try:
      self._verify(step)
    except _DAMAGE as error:
      there = f"There are steps {self.steps()}."
      raise CheckpointError(f"Checkpoint {self.path(step)} is missing or damaged: {error}. {there}") from error

  def _retain(self) -> None:
    steps = self.steps()
    metrics = {}
    for step in steps:
      try:
        metrics[step] = _finite(checksums.read_listing(self.path(step))["metric"])
      except _DAMAGE as error:
        logging.warning("Checkpoint %s is damaged: %s", self.path(step), error)
    ranked = sorted((metric, step) for step, metric in metrics.items() if metric is not None)
    best = {step for _, step in ranked[len(ranked) - self._keep_best :]} if self._keep_best else set()
    for step in steps[: -self._keep]:
      if step not in best:
        self._remove(step, _DELETED)

  def _remove(self, step: int, suffix: str) -> None:
    """Renames a checkpoint, so that a kill leaves none partly deleted, and then deletes it unless it is damaged."""
    aside = self.path(step).with_name(f"{step}{suffix}")
    workdir_lib.delete(aside)
    self.path(step).rename(aside)
    if suffix == _DELETED:
      workdir_lib.delete(aside)

  def _remove_leftovers(self, *, warn: bool = True) -> None:
    for path in self._folder.iterdir():
      if warn and _PARTIAL in path.name:
        logging.warning("Checkpoint %s was being written when its run ended. Removing it.", path)
      if _PARTIAL in path.name or path.name.endswith(_DELETED):
        workdir_lib.delete(path)

  def _read_body(self, step: int) -> dict[str, Any]:
    restored = self._orbax.restore(self.path(step), args=ocp.args.Composite(host=ocp.args.JsonRestore()))
    body: dict[str, Any] = restored["host"]
    if missing := sorted(_BODY - body.keys()):
      raise CheckpointError(
        f"Checkpoint {self.path(step)} was written by another version of the library: it lacks {missing}."
      )
    return body

  def _check_schema(self, step: int, body: Mapping[str, Any], template: types.Params, *, whole: bool) -> None:
    """Raises `CheckpointError` with a list of differences; warns about versions that may change the last bits."""
    lines = []
    if body["format"] != _FORMAT:
      lines.append(f"format: recorded {body['format']}, now {_FORMAT}")
    if _series(str(body["library_version"])) != _series(version.__version__):
      lines.append(f"library_version: recorded {body['library_version']}, now {version.__version__}")
    differences = workdir_lib.config_differences(
      body["config"], self._config, may_differ=self._may_differ, may_be_missing=self._may_be_missing
    )
    for line in differences if whole else ():
      lines.append(f"config.{line}")
    recorded = body["leaves"]
    current = {name: _describe(leaf) for name, leaf in _named_leaves(template).items()}
    for name in sorted(recorded.keys() | current.keys() if whole else current):
      if recorded.get(name) != current.get(name):
        lines.append(f"array {name}: recorded {_show(recorded.get(name))}, now {_show(current.get(name))}")
    if lines:
      listing = "\n  ".join(lines)
      raise CheckpointError(f"Checkpoint {self.path(step)} does not match this run. Differences:\n  {listing}")
    for name, now in (("library_version", version.__version__), ("jax_version", jax.__version__)):
      if body[name] != now:
        message = "Checkpoint %s: %s is %s now and was %s; results may differ in their last bits from here on."
        logging.warning(message, self.path(step), name, now, body[name])

  def _read_state(self, step: int, template: types.Params) -> types.Params:
    leaves = _named_leaves(template)
    arrays = self._read_arrays(step, {name: _abstract(leaf) for name, leaf in leaves.items()})
    restored = {name: _like(leaf, arrays[name]) for name, leaf in leaves.items()}
    return ocp.tree.from_flat_dict(restored, target=template, sep="/")

  def _read_arrays(self, step: int, templates: Mapping[str, Any]) -> dict[str, Any]:
    """Reads arrays by path; `templates` are NumPy arrays or `jax.ShapeDtypeStruct`s."""
    tree = ocp.tree.from_flat_dict(templates, sep="/")
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
    args = ocp.args.PyTreeRestore(item=tree, restore_args=restore_args, partial_restore=True)
    restored = self._orbax.restore(self.path(step), args=ocp.args.Composite(state=args))
    return ocp.tree.to_flat_dict(restored["state"], sep="/")


def _finite(metric: Any) -> float | None:
  if metric is not None and not (type(metric) in (int, float) and math.isfinite(metric)):
    raise ValueError(f"metric must be a finite number or null; received {metric!r:.200}")
  return metric


def _series(release: str) -> tuple[str, ...]:
  """Returns the part of a version that decides whether checkpoints can be read; bug-fix releases keep it.

  >>> _series("0.3.1"), _series("1.4.2")
  (('0', '3'), ('1',))
  """
  parts = release.split(".")
  return tuple(parts[:2]) if parts[0] == "0" else (parts[0],)


def _named_leaves(tree: types.Params) -> dict[str, Any]:
  """Maps paths such as `policy/layers_0/attention/q_proj/kernel` to leaves, in the tree's order."""
  named: dict[str, Any] = ocp.tree.to_flat_dict(tree, sep="/")
  if len(named) != len(jax.tree.leaves(tree)):
    raise ValueError("Two leaves of the state have the same path; dictionary keys must not contain '/'.")
  return named


def _key_data(leaf: Any) -> Any:
  """Returns the shape of a typed PRNG key's data, and any other leaf as it is."""
  return jax.eval_shape(jax.random.key_data, leaf) if copies.is_key(leaf) else leaf


def _describe(leaf: Any) -> dict[str, Any]:
  leaf = _key_data(leaf)
  return {"shape": list(leaf.shape), "dtype": np.dtype(leaf.dtype).name}


def _show(description: Mapping[str, Any] | None) -> str:
  return "nothing" if description is None else f"{description['dtype']}{description['shape']}"


def _abstract(leaf: Any) -> Any:
  """Returns the template that Orbax restores a leaf into: a placed array for jax leaves, NumPy otherwise."""
  leaf = _key_data(leaf)
  if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype):
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
  return np.empty(leaf.shape, leaf.dtype)


def _like(leaf: Any, array: Any) -> Any:
  """Turns restored key data back into a typed PRNG key if `leaf` is one."""
  if not copies.is_key(leaf):
    return array
  implementation: list[Any] = []  # found by tracing: `key_impl` takes keys only, and the leaf may be a mere shape
  jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), leaf)
  return jax.random.wrap_key_data(array, impl=implementation[0])
