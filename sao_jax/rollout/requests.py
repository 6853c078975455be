"""Which episode comes next: a pure function of its number, so that a resumed run neither skips nor repeats a task."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sao_jax.rollout.episodes import EpisodeRequest


class RequestStream:
  """Hands out episodes 0, 1, 2, ...; thread-safe.

  Episode n belongs to group n // group_size, and group g runs task g of a shuffled pass over the tasks (every pass has
  its own permutation).

  Args:
    num_tasks: size of the task set; passes follow one another without end.
    group_size: episodes per task, in a row.
    seed: decides the order of the tasks.
    part: `(index, count)`: of every `count` groups only number `index` is handed out here; the others run elsewhere.
  """

  def __init__(self, *, num_tasks: int, group_size: int, seed: int, part: tuple[int, int] = (0, 1)):
    if num_tasks < 1 or group_size < 1:
      raise ValueError(f"num_tasks and group_size must be >= 1; received {num_tasks}, {group_size}.")
    self._num_tasks = num_tasks
    self._group_size = group_size
    self._seed = seed
    self._part = part
    self._cursor = 0
    self._again: list[int] = []
    self._permutation: tuple[int, np.ndarray] | None = None
    self._lock = threading.Lock()

  def next(self) -> EpisodeRequest:
    """The next episode."""
    with self._lock:
      if self._again:
        return self._request(self._again.pop(0))
      index, count = self._part
      while self._cursor // self._group_size % count != index:
        self._cursor += 1
      self._cursor += 1
      return self._request(self._cursor - 1)

  def state(self, running: Iterable[int] = ()) -> dict[str, Any]:
    """JSON-able: where the stream stands, and the episodes that a resumed run has to start again.

    Args:
      running: numbers of the episodes that were handed out and have not ended.
    """
    with self._lock:
      return {"cursor": self._cursor, "again": sorted({*self._again, *running})}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from `state`: first the episodes that were running then, under their old numbers."""
    with self._lock:
      self._cursor = int(state["cursor"])
      self._again = [int(x) for x in state["again"]]

  def _request(self, episode: int) -> EpisodeRequest:
    group = episode // self._group_size
    epoch, place = divmod(group, self._num_tasks)
    if self._permutation is None or self._permutation[0] != epoch:
      self._permutation = epoch, np.random.default_rng((self._seed, epoch)).permutation(self._num_tasks)
    group_id = episode if self._group_size == 1 else group
    return EpisodeRequest(task_index=int(self._permutation[1][place]), episode_id=episode, group_id=group_id)
