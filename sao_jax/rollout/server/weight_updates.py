"""Pauses and weight updates of a server's engine, one update at a time."""

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
"""Updates that wait for the one being loaded."""


class _ClientLeftError(Exception):
  """The client of an update has disconnected: nobody hears this."""


class WeightUpdates:
  """Pauses, resumes and updates an engine for the clients of a server.

  A thread that loads weights cannot be stopped. If the client that asked for them disconnects, the load goes on to its
  end, its result is dropped, and only then does the next one begin: there is never more than one new set of weights in
  memory. An update whose client disconnects before its turn is never begun.

  Args:
    completions: the engine.
    load: reads the parameters of a folder; ValueError or OSError if they are not those of this model.
  """

  def __init__(self, completions: Completions, load: Callable[[pathlib.Path], Params]):
    self._completions = completions
    self._load = load
    self._turn = asyncio.Lock()
    """Held from the start of a load to the end of its update, whether or not the client is still there."""
    self._waiting = 0
    self._swapping = False
    self._pause_wanted = False
    self._task: asyncio.Task[int] | None = None

  async def pause(self, *, abort: bool) -> None:
    """Holds new completions back until `resume`; returns when none runs, having aborted them or not."""
    self._pause_wanted = self._completions.paused = True
    if abort:
      self._completions.abort_all()
    while self._completions.running:
      await asyncio.sleep(_POLL_S)

  def resume(self) -> None:
    """Lets completions start again: at once, or at the end of the update that holds them back."""
    self._pause_wanted = False
    self._completions.paused = self._swapping

  async def rename(self, label: str) -> None:
    """Gives the weights another label, after the update that is going on."""
    async with self._turn:
      self._completions.label = label

  async def update(self, folder: pathlib.Path, field: str, label: str | None, *, abort: bool) -> int:
    """Loads weights while completions go on, then swaps when none runs; returns how many were aborted for it.

    Args:
      folder: where the weights are.
      field: of the request that named the folder, for messages.
      label: of the weights; None: as before.
      abort: end what runs instead of waiting for it.

    Raises:
      BadRequestError: the weights cannot be loaded (400), or too many updates wait already (503).
    """
    if self._waiting >= _MAX_WAITING:
      raise BadRequestError(f"{self._waiting} weight updates wait for another already; try again.", status=503)
    self._waiting += 1
    try:
      await self._turn.acquire()
    finally:
      self._waiting -= 1
    left = asyncio.Event()
    self._task = asyncio.create_task(self._update(folder, field, label, abort, left))
    self._task.add_done_callback(lambda task: self._ended(task, left))
    try:
      return await asyncio.shield(self._task)
    except asyncio.CancelledError:  # the client has disconnected
      left.set()
      raise

  async def close(self) -> None:
    """Waits for a load whose client has disconnected."""
    if self._task is not None:
      await asyncio.wait([self._task])

  async def _update(
    self, folder: pathlib.Path, field: str, label: str | None, abort: bool, left: asyncio.Event
  ) -> int:
    try:
      params = await asyncio.to_thread(self._load, folder)
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
      raise BadRequestError(f"{field} {folder} cannot be loaded: {error!r}", field=field) from error
    if left.is_set():
      raise _ClientLeftError(f"the weights in {folder} are dropped")
    self._swapping = self._completions.paused = True
    try:
      aborted = self._completions.abort_all() if abort else 0
      while self._completions.running:
        await asyncio.sleep(_POLL_S)
        if left.is_set():
          raise _ClientLeftError(f"the weights in {folder} are dropped")
      await asyncio.to_thread(self._completions.update, params, label or self._completions.label)
      return aborted
    finally:
      self._swapping = False
      self._completions.paused = self._pause_wanted  # someone may have asked for it meanwhile

  def _ended(self, task: asyncio.Task[int], left: asyncio.Event) -> None:
    self._turn.release()
    if left.is_set() and not task.cancelled() and task.exception() is not None:
      _log.warning("a client disconnected during its weight update: %s", task.exception())
