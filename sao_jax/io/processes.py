"""What several processes that share a workdir must agree on; with one process nothing is exchanged."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_main() -> bool:
  """Whether this process writes what only one may write."""
  return jax.process_index() == 0


def barrier(name: str) -> None:
  """Waits until every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def from_main(step: int | None) -> int | None:
  """The main process's value, in all of them."""
  if jax.process_count() == 1:
    return step
  told = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step)))
  return None if told < 0 else told
