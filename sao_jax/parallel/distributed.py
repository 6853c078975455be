"""Runs of several processes: start-up from the launcher's environment, barriers and broadcasts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "SAO_COORDINATOR", "SAO_NUM_PROCESSES", "SAO_PROCESS_ID"
"""Environment variables of a launcher: `host:port` of process 0, number of processes, index of this one from 0."""
AUTODETECT = "SAO_AUTODETECT"
"""Environment variable: `1` lets JAX find all three (TPU pods, Slurm, Open MPI, Kubernetes)."""


class Launch(NamedTuple):
  """Coordinator, number of processes, and index of this process."""

  coordinator: str
  num_processes: int
  process_id: int


def launch_from_environment(environment: Mapping[str, str]) -> Launch | None:
  """Reads the launcher's variables; None if none of them is set.

  Raises:
    ValueError: only some are set, or a value is invalid; the message names the variables.
  """
  values = {name: environment.get(name, "") for name in (COORDINATOR, NUM_PROCESSES, PROCESS_ID)}
  missing = [name for name, value in values.items() if not value]
  if len(missing) == len(values):
    return None
  if missing:
    there = ", ".join(f"{name}={value!r}" for name, value in values.items() if value)
    raise ValueError(f"a launch needs {', '.join(values)}; received {there}, but not {', '.join(missing)}.")
  count, index = (_integer(name, values[name]) for name in (NUM_PROCESSES, PROCESS_ID))
  host, _, port = values[COORDINATOR].rpartition(":")
  if not host or not port.isdigit():
    raise ValueError(f"{COORDINATOR} must be host:port; received {values[COORDINATOR]!r}.")
  if count < 1 or not 0 <= index < count:
    raise ValueError(f"{PROCESS_ID} must be in 0 .. {NUM_PROCESSES} - 1; received {index} of {count} processes.")
  return Launch(values[COORDINATOR], count, index)


def initialize_from_environment(environment: Mapping[str, str] | None = None) -> Launch | None:
  """Connects this process to the others if a launcher started it. Call it before any use of a device.

  Returns:
    The launch read from the environment; None for a single process, or if JAX detects the others itself.

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
  """Whether this is the process that writes metrics, samples and plots."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Waits until every process has called it. A single process does not wait."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def broadcast_from_main(step: int | None) -> int | None:
  """Returns the main process's value (a step number >= 0, or None) in all processes."""
  if jax.process_count() == 1:
    return step
  received = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step)))
  return None if received < 0 else received


def _integer(name: str, text: str) -> int:
  try:
    return int(text)
  except ValueError as error:
    raise ValueError(f"{name} must be an integer; received {text!r}.") from error
