"""Checkpoints: arrays through Orbax and the host's state as JSON, in one folder per step, there whole or not at all."""

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
from sao_jax.utils import untrusted_files

_FORMAT = 1
"""Of the folder's layout and of what a run writes into it; raised when older ones can no longer be read."""
_LISTING = "files.json"
_HOST_ARRAYS = "host.safetensors"
_STEP = re.compile("0|[1-9][0-9]{0,17}")
_PARTIAL = ".partial"
_DELETED = ".deleted"
_DAMAGED = ".damaged"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading a damaged listing or a missing file can raise."""
_BODY = frozenset({"format", "library_version", "jax_version", "config", "leaves", "host"})
"""What is written beside the arrays."""


class CheckpointError(Exception):
  """A checkpoint cannot be used (of another config, library version or model, or all of them are damaged), or it could
  not be written."""


class Restored(NamedTuple):
  """What `Checkpointer.restore` gives back."""

  step: int
  state: types.Params
  """The template's structure, with the saved arrays placed as the template's are."""
  host: dict[str, Any]
  """The JSON host state as it was given to `save`."""
  host_arrays: dict[str, np.ndarray]
  """The host arrays as they were given to `save`."""


class Checkpointer:
  """Saves and restores one pytree and one JSON object per step, in `<workdir>/checkpoints/<step>/`.

  `save` copies the arrays to the host (the learner may donate its own right after) and returns; one background thread
  writes them. The folder gets its name only when all is in it, so a kill at any moment leaves the earlier checkpoints
  whole. `files.json` in it holds the size and checksum of every file, which `restore` verifies. Nothing is pickled.

  With several processes, which share the folder and must all make the same calls, each writes its own shards, and
  `save` returns when all are written: its barriers are programs on the devices, whose place among the learner's must be
  the same everywhere.
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
    """Opens the folder; what a killed run left half-written is removed with a warning that names it.

    Args:
      workdir: the run's folder.
      config: the run's nested configuration (JSON values); recorded, and compared on `restore`.
      keep: how many of the newest checkpoints stay, at least 1.
      keep_best: how many of those with the highest `metric` stay besides.
      may_differ: dotted names of config fields that a restore does not compare.
      may_be_missing: dotted names of config fields that a checkpoint may lack.
      read_only: for a reader beside a live run: nothing is removed, moved or saved.
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
    """Steps of which a whole checkpoint folder is there (intact or not), in increasing order."""
    names = [path.name for path in self._folder.glob("*") if path.is_dir()]
    return sorted(int(name) for name in names if _STEP.fullmatch(name))

  def path(self, step: int) -> pathlib.Path:
    """The folder of a step's checkpoint."""
    return self._folder / str(step)

  def host_state(self, step: int) -> dict[str, Any]:
    """The JSON host state of a step's checkpoint, without its arrays.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    self._require_intact(step)
    return dict(self._read_body(step)["host"])

  def arrays(self, step: int) -> dict[str, np.ndarray]:
    """The arrays of a step's checkpoint by path, as they were saved, for inspection: no template is needed.

    Raises:
      CheckpointError: there is no such checkpoint, or it is damaged.
    """
    self._require_intact(step)
    leaves = self._read_body(step)["leaves"]
    empty = {name: np.empty(leaf["shape"], jnp.dtype(leaf["dtype"])) for name, leaf in leaves.items()}
    tree = self._read_tree(step, _nest(empty))
    return {name: np.asarray(_unnest(tree, name)) for name in leaves}

  def save(
    self,
    step: int,
    state: types.Params,
    host: Mapping[str, Any],
    *,
    host_arrays: Mapping[str, np.ndarray] | None = None,
    metric: float | None = None,
  ) -> None:
    """Starts to save; returns when the arrays are copied. Waits first for a save that is still under way.

    Args:
      step: the learner step; not saved before.
      state: a pytree of jax or NumPy arrays (policy, critic, optimizer states, ...), typed PRNG keys included.
      host: what else it takes to resume (counters, cursors, generator states): JSON values only.
      host_arrays: arrays whose shapes change from save to save, so that no template can have them; not written to
        any more by the caller.
      metric: the higher the better, for `keep_best`; None and what is not finite never count as best.

    Raises:
      ValueError: a leaf that is no array, a host state that is no JSON, a step that is already there.
      CheckpointError: the previous save failed (a full disk, say).
    """
    if self._read_only:
      raise ValueError("This Checkpointer was opened with read_only=True; it cannot save.")
    self.wait()
    if self.path(step).exists():
      raise ValueError(f"Checkpoint {self.path(step)} is already there.")
    arrays = copies.host_copies(_named_leaves(state))
    body = {
      "format": _FORMAT,
      "library_version": version.__version__,
      "jax_version": jax.__version__,
      "config": self._config,
      "leaves": {name: _describe(leaf) for name, leaf in arrays.items()},
      "host": json.loads(json.dumps(dict(host))),
    }
    metric = None if metric is None or not math.isfinite(metric) else float(metric)  # NaN would upset the ranking
    if jax.process_count() > 1:
      self._write(step, arrays, body, dict(host_arrays or {}), metric)
    else:
      self._pending = self._thread.submit(self._write, step, arrays, body, dict(host_arrays or {}), metric)

  def wait(self) -> None:
    """Blocks until the save under way is complete; raises what it failed with, as a `CheckpointError`."""
    pending, self._pending = self._pending, None
    if pending is None:
      return
    try:
      pending.result()
    except Exception as error:
      try:
        self._remove_leftovers(warn=False)  # what of it was written takes the room that other files may need
      except OSError as rest:
        logging.warning("What is left of a checkpoint that could not be written stays until the next start: %s", rest)
      raise CheckpointError(
        f"A checkpoint could not be written to {self._folder}: {error}. Those of steps {self.steps()} are whole."
      ) from error

  def restore(self, template: types.Params) -> Restored | None:
    """Restores the newest intact checkpoint.

    Args:
      template: a pytree of arrays or `jax.ShapeDtypeStruct`s: structure, shapes, dtypes, and placement (sharding).

    Returns:
      The checkpoint, or None where there is none at all. A damaged one is named in a warning and put aside as
      `<step>.damaged`, and the one before it is used.

    Raises:
      CheckpointError: the checkpoint is of another config, library version or model (the differing fields are listed),
        or there are checkpoints and none is intact (they stay where they are).
    """
    self.wait()
    step = distributed.broadcast_from_main(self._newest_intact() if distributed.is_main_process() else None)
    if step is None:
      return None
    body = self._read_body(step)
    self._check_schema(step, body, template)
    host_arrays = trajectory_arrays.load(self.path(step) / _HOST_ARRAYS)
    return Restored(step, self._read_state(step, template), body["host"], host_arrays)

  def _newest_intact(self) -> int | None:
    """The newest intact step, None where there is no checkpoint; newer ones are put aside."""
    steps = self.steps()
    damaged = []
    for step in reversed(steps):
      try:
        self._verify(step)
      except _DAMAGE as error:
        logging.warning("Checkpoint %s is damaged and not used: %s", self.path(step), error)
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
    """Completes the save under way and ends the thread."""
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
    """Lets Orbax write into `<step>.partial`, adds the checksums of all files, and commits by renaming the folder."""
    partial = self.path(step).with_name(f"{step}{_PARTIAL}")
    items = ocp.args.Composite(state=ocp.args.PyTreeSave(_nest(arrays)), host=ocp.args.JsonSave(body))
    self._orbax.save(partial, args=items, force=True)
    if distributed.is_main_process():
      trajectory_arrays.save(partial / _HOST_ARRAYS, host_arrays)
      self._commit(step, partial, metric)
    distributed.barrier("checkpoint saved")

  def _commit(self, step: int, partial: pathlib.Path, metric: float | None) -> None:
    files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
    sums = {path.relative_to(partial).as_posix(): checksums.of_file(path) for path in files}
    listing = {"step": step, "metric": metric, "files": sums}
    workdir_lib.atomic_write_json(partial / _LISTING, listing | {"crc32": checksums.of_json(listing)})
    partial.rename(self.path(step))
    self._retain()

  def _verify(self, step: int) -> dict[str, Any]:
    """Checks every file against the listing; raises one of several errors at the first that is missing or differs."""
    listing = untrusted_files.read_object(self.path(step) / _LISTING)
    if listing.pop("crc32", None) != checksums.of_json(listing):
      raise ValueError(f"the checksum of {_LISTING} itself is wrong")
    if listing.get("step", step) != step:  # older ones do not say
      raise ValueError(f"it is that of step {listing['step']}, under another name")
    if not isinstance(listing["files"], dict):
      raise ValueError(f"'files' of {_LISTING} must be an object; received {listing['files']!r:.200}")
    paths = {name: untrusted_files.check_inside(self.path(step), name) for name in listing["files"]}
    untrusted_files.check_folder(self.path(step))  # all of it before anything is read; Orbax opens files by itself
    for name, recorded in listing["files"].items():
      # A file of another size is not read: it may be far larger.
      if [paths[name].stat().st_size] != recorded[:1] or checksums.of_file(paths[name]) != recorded:
        raise ValueError(f"size or checksum of {name} is wrong")
    return listing

  def _require_intact(self, step: int) -> None:
    self.wait()
    try:
      self._verify(step)
    except _DAMAGE as error:
      raise CheckpointError(f"Checkpoint {self.path(step)} is missing or damaged: {error}") from error

  def _retain(self) -> None:
    steps = self.steps()
    metrics = {}
    for step in steps:
      try:
        metrics[step] = _finite(untrusted_files.read_object(self.path(step) / _LISTING)["metric"])
      except _DAMAGE as error:
        logging.warning("Checkpoint %s is damaged: %s", self.path(step), error)
    ranked = sorted((metric, step) for step, metric in metrics.items() if metric is not None)
    best = {step for _, step in ranked[len(ranked) - self._keep_best :]} if self._keep_best else set()
    for step in steps[: -self._keep]:
      if step not in best:
        self._remove(step, _DELETED)

  def _remove(self, step: int, suffix: str) -> None:
    """Puts a checkpoint aside in one rename (a kill leaves no half-deleted one); then deletes it unless damaged."""
    aside = self.path(step).with_name(f"{step}{suffix}")
    workdir_lib.delete(aside)
    self.path(step).rename(aside)
    if suffix == _DELETED:
      workdir_lib.delete(aside)

  def _remove_leftovers(self, *, warn: bool = True) -> None:
    for path in self._folder.iterdir():
      if warn and _PARTIAL in path.name:
        logging.warning("Checkpoint %s was being written when its run ended; it is removed.", path)
      if _PARTIAL in path.name or path.name.endswith(_DELETED):
        workdir_lib.delete(path)

  def _read_body(self, step: int) -> dict[str, Any]:
    restored = self._orbax.restore(self.path(step), args=ocp.args.Composite(host=ocp.args.JsonRestore()))
    body: dict[str, Any] = restored["host"]
    if missing := sorted(_BODY - body.keys()):
      raise CheckpointError(f"Checkpoint {self.path(step)} is of another version of the library: it lacks {missing}.")
    return body

  def _check_schema(self, step: int, body: Mapping[str, Any], template: types.Params) -> None:
    lines = []
    if body["format"] != _FORMAT:
      lines.append(f"format: recorded {body['format']}, now {_FORMAT}")
    if _series(str(body["library_version"])) != _series(version.__version__):
      lines.append(f"library_version: recorded {body['library_version']}, now {version.__version__}")
    differences = workdir_lib.config_differences(
      body["config"], self._config, may_differ=self._may_differ, may_be_missing=self._may_be_missing
    )
    for line in differences:
      lines.append(f"config.{line}")
    recorded = body["leaves"]
    current = {name: _describe(leaf) for name, leaf in _named_leaves(template).items()}
    for name in sorted(recorded.keys() | current.keys()):
      if recorded.get(name) != current.get(name):
        lines.append(f"array {name}: recorded {_show(recorded.get(name))}, now {_show(current.get(name))}")
    if lines:
      listing = "\n  ".join(lines)
      raise CheckpointError(f"Checkpoint {self.path(step)} does not fit this run; it differs in:\n  {listing}")
    for name, now in (("library_version", version.__version__), ("jax_version", jax.__version__)):
      if body[name] != now:
        message = "Checkpoint %s: %s is %s now and was %s; results may differ in their last bits from here on."
        logging.warning(message, self.path(step), name, now, body[name])

  def _read_state(self, step: int, template: types.Params) -> types.Params:
    leaves = _named_leaves(template)
    tree = self._read_tree(step, _nest({name: _abstract(leaf) for name, leaf in leaves.items()}))
    restored = [_like(leaf, _unnest(tree, name)) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(template), restored)

  def _read_tree(self, step: int, nested: dict[str, Any]) -> dict[str, Any]:
    args = ocp.args.PyTreeRestore(item=nested, restore_args=ocp.checkpoint_utils.construct_restore_args(nested))
    tree: dict[str, Any] = self._orbax.restore(self.path(step), args=ocp.args.Composite(state=args))["state"]
    return tree


def _finite(metric: Any) -> float | None:
  if metric is not None and not (type(metric) in (int, float) and math.isfinite(metric)):
    raise ValueError(f"metric must be a finite number or null; received {metric!r:.200}")
  return metric


def _series(release: str) -> tuple[str, ...]:
  """What of a version says whether checkpoints are understood: releases that only mend leave it alone.

  >>> _series("0.3.1"), _series("1.4.2")
  (('0', '3'), ('1',))
  """
  parts = release.split(".")
  return tuple(parts[:2]) if parts[0] == "0" else (parts[0],)


def _named_leaves(tree: types.Params) -> dict[str, Any]:
  """Maps paths such as `policy/layers_0/attention/q_proj/kernel` to leaves, in the tree's order."""
  pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
  named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in pairs}
  if len(named) != len(pairs):
    raise ValueError("Two leaves of the state have the same path; dictionary keys must not contain '/'.")
  return named


def _nest(named: Mapping[str, Any]) -> dict[str, Any]:
  tree: dict[str, Any] = {}
  for name, leaf in named.items():
    *parents, last = name.split("/")
    node = tree
    for part in parents:
      node = node.setdefault(part, {})
    node[last] = leaf
  return tree


def _unnest(tree: Mapping[str, Any], name: str) -> Any:
  node: Any = tree
  for part in name.split("/"):
    node = node[part]
  return node


def _describe(leaf: Any) -> dict[str, Any]:
  if copies.is_key(leaf):
    leaf = jax.eval_shape(jax.random.key_data, leaf)
  return {"shape": list(leaf.shape), "dtype": np.dtype(leaf.dtype).name}


def _show(description: Mapping[str, Any] | None) -> str:
  return "nothing" if description is None else f"{description['dtype']}{description['shape']}"


def _abstract(leaf: Any) -> Any:
  """What Orbax restores a leaf into: a placed array for jax leaves, NumPy otherwise."""
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  if copies.is_key(leaf):
    raw = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(raw.shape, raw.dtype, sharding=device)
  if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and leaf.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or device)
  return np.empty(leaf.shape, leaf.dtype)


def _like(leaf: Any, array: Any) -> Any:
  if not copies.is_key(leaf):
    return array
  implementation: list[Any] = []  # traced, because `key_impl` takes keys only, and the leaf may be a mere shape
  jax.eval_shape(lambda key: implementation.append(jax.random.key_impl(key)), leaf)
  return jax.random.wrap_key_data(array, impl=implementation[0])
