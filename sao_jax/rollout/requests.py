"""The order of episodes: a pure function of their number, so that a resumed run neither skips nor repeats a task."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sao_jax.rollout.episodes import EpisodeRequest


class RequestStream:
  """Requests for episodes 0, 1, 2, ... without end; thread-safe.

  Episode n belongs to group n // group_size. All episodes of a group run the same task. The tasks come in shuffled
  passes, each with its own permutation.

  >>> stream = RequestStream(num_tasks=3, group_size=2, seed=0)
  >>> [stream.next().group_id for _ in range(6)]
  [0, 0, 1, 1, 2, 2]
  >>> resumed = RequestStream(num_tasks=3, group_size=2, seed=0)
  >>> resumed.restore(stream.state(running=[4]))  # episode 4 had not ended
  >>> resumed.next().episode_id, resumed.next().episode_id
  (4, 6)

  Args:
    num_tasks: size of the task set, >= 1.
    group_size: consecutive episodes per task, >= 1.
    seed: seed of the permutations, >= 0.
    part: `(index, count)`: this stream returns only every `count`-th group, starting with group `index`. Streams in
      other processes return the rest.

  Raises:
    ValueError: `num_tasks` or `group_size` is below 1.
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
    """Episodes that were running when the state was saved; they come first."""
    self._permutation: tuple[int, np.ndarray] | None = None
    self._lock = threading.Lock()

  def next(self) -> EpisodeRequest:
    """Returns the request for the next episode."""
    with self._lock:
      if self._again:
        return self._request(self._again.pop(0))
      index, count = self._part
      while self._cursor // self._group_size % count != index:
        self._cursor += 1
      self._cursor += 1
      return self._request(self._cursor - 1)

  def state(self, running: Iterable[int] = ()) -> dict[str, Any]:
    """Returns the position in the stream as JSON values.

    Args:
      running: numbers of the episodes that were started and have not ended. A resumed run starts them again.
    """
    with self._lock:
      return {"cursor": self._cursor, "again": sorted({*self._again, *running})}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues from `state()`. Episodes that were running then come first, under their old numbers."""
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
