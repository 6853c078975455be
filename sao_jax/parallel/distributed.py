"""Several processes with devices of their own: start-up from the launcher's environment, batches out of local parts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from sao_jax.parallel.rules import batch_shardings
from sao_jax.types import TokenBatch

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "SAO_COORDINATOR", "SAO_NUM_PROCESSES", "SAO_PROCESS_ID"
"""Variables of a launcher: `host:port` of process 0, the number of processes, and the number of this one from 0."""
AUTODETECT = "SAO_AUTODETECT"
"""`1`: let JAX find all three (TPU pods, Slurm, Open MPI, Kubernetes)."""


class Launch(NamedTuple):
  """Where this process stands among all."""

  coordinator: str
  num_processes: int
  process_id: int


def launch_from_environment(environment: Mapping[str, str]) -> Launch | None:
  """Reads the launcher's variables; None if none of them is set.

  Raises:
    ValueError: some are set and others not, or a value makes no sense; the message names the variables.
  """
  values = {name: environment.get(name, "") for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)}
  missing = [name for name, value in values.items() if not value]
  if len(missing) == len(values):
    return None
  if missing:
    there = ", ".join(f"{name}={value!r}" for name, value in values.items() if value)
    raise ValueError(f"a launch needs {', '.join(values)}; {there} set, but {', '.join(missing)} missing.")
  count, index = (_integer(name, values[name]) for name in (NUM_PROCESSES, PROCESS_ID))
  host, _, port = values[COORDINATOR].rpartition(":")
  if not host or not port.isdigit():
    raise ValueError(f"{COORDINATOR} must be host:port; received {values[COORDINATOR]!r}.")
  if count < 1 or not 0 <= index < count:
    raise ValueError(f"{PROCESS_ID} must be in 0 .. {NUM_PROCESSES} - 1; received {index} of {count}.")
  return Launch(values[COORDINATOR], count, index)


def initialize_from_environment(environment: Mapping[str, str] | None = None) -> Launch | None:
  """Connects this process to the others if a launcher started it; call it before anything touches a device.

  Returns:
    What the environment said, or None for a process on its own (and where JAX was left to detect its neighbours).

  Raises:
    ValueError: see `launch_from_environment`.
  """
  environment = os.environ if environment is None else environment
  launch = launch_from_environment(environment)
  if launch is not None:
    jax.distributed.initialize(launch.coordinator, launch.num_processes, launch.process_id)
  elif environment.get(AUTODETECT) == "1":
    jax.distributed.initialize()
  return launch


def is_main_process() -> bool:
  """Whether this process writes what only one may write: metrics, samples, plots."""
  return jax.process_index() == 0


def local_rows(num_rows: int, mesh: Mesh) -> slice:
  """Which rows of a batch this process provides: those that its devices hold.

  Raises:
    ValueError: they are not one run of rows (the mesh's devices are not ordered by process).
  """
  probe = {"rows": jax.ShapeDtypeStruct((num_rows, mesh.shape["context"]), np.int32)}
  indices = batch_shardings(probe, mesh)["rows"].addressable_devices_indices_map(probe["rows"].shape)
  held = sorted({index[0].indices(num_rows)[:2] for index in indices.values()})
  if any(left[1] != right[0] for left, right in itertools.pairwise(held)):
    raise ValueError(f"the rows of process {jax.process_index()} are not one run: {held}; order the mesh by process.")
  return slice(held[0][0], held[-1][1])


def global_batch(local: TokenBatch, mesh: Mesh, *, num_rows: int) -> TokenBatch:
  """One batch for all processes, each of which brings the rows of its own devices.

  Args:
    local: `[M, b, T]` or `[b, T]` NumPy leaves: the rows `local_rows(num_rows, mesh)` of the batch. `M` is the same
      everywhere.
    mesh: from `make_mesh`, over the devices of all processes.
    num_rows: `B`, rows of the whole batch (per microbatch).

  Returns:
    The same batch with global `[M, B, T]` arrays; nothing crosses the network.
  """
  rows = local_rows(num_rows, mesh)
  wanted = rows.stop - rows.start
  if local.tokens.shape[-2] != wanted:
    process, shape = jax.process_index(), local.tokens.shape
    raise ValueError(f"process {process} must bring {wanted} of the {num_rows} rows; received shape {shape}.")

  def shape_of(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*leaf.shape[:-2], num_rows, leaf.shape[-1]), leaf.dtype)

  shapes = jax.tree.map(shape_of, local)
  batch: TokenBatch = jax.tree.map(
    lambda leaf, shape, sharding: jax.make_array_from_process_local_data(sharding, leaf, shape.shape),
    local, shapes, batch_shardings(shapes, mesh),
  )  # fmt: skip
  return batch


def _integer(name: str, text: str) -> int:
  try:
    return int(text)
  except ValueError as error:
    raise ValueError(f"{name} must be an integer; received {text!r}.") from error
