"""Pauses and weight updates of a server's engine, serialized: one update at a time."""

from __future__ import annotations

import asyncio
import logging
import pathlib
from collections.abc import Callable

import safetensors

from sao_jax.rollout.server.completions import Completions
from sao_jax.rollout.server.request_fields import BadRequestError
from sao_jax.types import Params

_log = logging.getLogger(__name__)

_POLL_S = 0.01
_MAX_WAITING = 8
"""Maximum number of updates that wait for the current one."""


class _ClientDisconnectedError(Exception):
  """The client of an update has disconnected. The error is only logged."""


class WeightUpdates:
  """Pauses, resumes and weight updates of an engine, for the clients of a server.

  A thread that loads weights cannot be stopped. If the client of an update disconnects, its load still runs to the end
  and the result is dropped; only then does the next load start. So there is never more than one new set of weights in
  memory. An update whose client disconnects while it waits is not started.

  Args:
    completions: the engine.
    load: reads the parameters in a folder; raises ValueError or OSError if they do not fit this model.
  """

  def __init__(self, completions: Completions, load: Callable[[pathlib.Path], Params]):
    self._completions = completions
    self._load = load
    self._turn = asyncio.Lock()
    """Held from the start of a load to the end of its update, even if the client disconnects."""
    self._waiting = 0
    self._swapping = False
    self._pause_wanted = False
    self._task: asyncio.Task[int] | None = None

  async def pause(self, *, abort: bool) -> None:
    """Stops starting completions until `resume`, and waits until none runs.

    Args:
      abort: whether to abort waiting and running completions.
    """
    self._pause_wanted = self._completions.paused = True
    if abort:
      self._completions.abort_all()
    while self._completions.running:
      await asyncio.sleep(_POLL_S)

  def resume(self) -> None:
    """Lets completions start again: immediately, or at the end of the current weight swap."""
    self._pause_wanted = False
    self._completions.paused = self._swapping

  async def rename(self, label: str) -> None:
    """Gives the weights another label, after the current update."""
    async with self._turn:
      self._completions.label = label

  async def update(self, folder: pathlib.Path, field: str, label: str | None, *, abort: bool) -> int:
    """Loads weights while completions go on, then pauses and swaps the weights when no completion runs.

    Args:
      folder: folder of the weights.
      field: name of the request's field that holds the folder, for messages.
      label: new label of the weights; None: unchanged.
      abort: abort completions instead of waiting for them.

    Returns:
      Number of completions aborted.

    Raises:
      BadRequestError: the weights cannot be loaded (400), or too many updates wait already (503).
    """
    if self._waiting >= _MAX_WAITING:
      raise BadRequestError(f"{self._waiting} weight updates are waiting already; try again later.", status=503)
    self._waiting += 1
    try:
      await self._turn.acquire()
    finally:
      self._waiting -= 1
    disconnected = asyncio.Event()
    self._task = asyncio.create_task(self._update(folder, field, label, abort, disconnected))
    self._task.add_done_callback(lambda task: self._ended(task, disconnected))
    try:
      return await asyncio.shield(self._task)
    except asyncio.CancelledError:  # the client has disconnected
      disconnected.set()
      raise

  async def close(self) -> None:
    """Waits for a load whose client has disconnected."""
    if self._task is not None:
      await asyncio.wait([self._task])

  async def _update(
    self, folder: pathlib.Path, field: str, label: str | None, abort: bool, disconnected: asyncio.Event
  ) -> int:
    try:
      params = await asyncio.to_thread(self._load, folder)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
      raise BadRequestError(f"{field} {folder} cannot be loaded: {error!r}", field=field) from error
    if disconnected.is_set():
      raise _ClientDisconnectedError(f"the weights in {folder} are dropped")
    self._swapping = self._completions.paused = True
    try:
      aborted = self._completions.abort_all() if abort else 0
      while self._completions.running:
        await asyncio.sleep(_POLL_S)
        if disconnected.is_set():
          raise _ClientDisconnectedError(f"the weights in {folder} are dropped")
      await asyncio.to_thread(self._completions.set_weights, params, label or self._completions.label)
      return aborted
    finally:
      self._swapping = False
      self._completions.paused = self._pause_wanted  # a client may have paused during the swap

  def _ended(self, task: asyncio.Task[int], disconnected: asyncio.Event) -> None:
    self._turn.release()
    if disconnected.is_set() and not task.cancelled() and task.exception() is not None:
      _log.warning("a client disconnected during its weight update: %s", task.exception())
