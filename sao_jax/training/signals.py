"""SIGINT and SIGTERM ask a run to save and end, wherever its main thread stands."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

import jax

from sao_jax.training.placement import Placement

_STDOUT, _STDERR = 1, 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ABORT_AFTER_S = 10.0
"""Seconds that the main thread has to leave an abortable block. With what follows, a signal must end the run within
30 s."""
_POLL_S = 0.2
_RESEND_S = 2.0
"""Seconds after which a signal that should have ended a block is sent again. Python loses what a handler raises where
it cannot pass it on, for example in a callback of the garbage collector (JAX has one)."""


def _save_nothing() -> None:
  """The emergency checkpoint of a block in which nothing would be lost."""


class Interrupted(KeyboardInterrupt):
  """A signal asked the run to save and end.

  Not an `Exception`: user code that catches those must not stop it, and what calls such code lets a `KeyboardInterrupt`
  of the main thread pass.
  """


class RetryLater(Exception):
  """An emergency checkpoint cannot be written now. It is tried again unless the main thread returns first."""


class StopSignals:
  """SIGINT and SIGTERM ask the run to save and end. A context manager.

  `check` raises `Interrupted` after a signal. Inside `interruptible` the signal itself raises it.

  After the first signal a second SIGINT ends the process at once. Outside the main thread signals cannot be handled:
  nothing is changed there, and `requested` stays False.

  Python runs a signal's handler in the main thread, between two instructions: not while that thread is in a compiler
  for a minute. Hence a second thread that receives signals meanwhile. It ends the process where the main thread is in
  an `abortable` block.
  """

  def __init__(self) -> None:
    self.requested = False
    self._placement: Placement | None = None
    self._raise = False
    self._emergency_checkpoint: Callable[[], None] | None = None
    """Saves what would be lost if the main thread does not return; None: it must be waited for."""
    self._turn = threading.Lock()
    """Held while `_emergency_checkpoint` changes, and from the start of an abort to the end of the process."""
    self._previous: dict[signal.Signals, Any] = {}
    self._previous_wakeup = -1
    self._wakeup: tuple[socket.socket, socket.socket] | None = None
    self._watcher: threading.Thread | None = None
    self._main = threading.main_thread().ident or 0

  def share(self, placement: Placement) -> None:
    """From here on a signal to one process is a signal to all."""
    self._placement = placement

  def requested_anywhere(self) -> bool:
    """Whether a signal has come to any process. Every process must call it."""
    return self.requested if self._placement is None else any(self._placement.exchange(self.requested))

  def check(self) -> None:
    """Raises `Interrupted` if a signal has come to any process. Every process must call it."""
    if self.requested_anywhere():
      raise Interrupted

  def check_local(self) -> None:
    """Raises `Interrupted` if a signal has come; does nothing where there are several processes."""
    if self.requested and jax.process_count() == 1:
      raise Interrupted

  @contextlib.contextmanager
  def interruptible(
    self, enabled: bool = True, *, emergency_checkpoint: Callable[[], None] = _save_nothing
  ) -> Iterator[None]:
    """Inside, a signal raises `Interrupted` wherever the main thread is, in a tool that takes minutes for example.

    For blocks that may end at any point and leave nothing behind that is used later. They are `abortable`, too. With
    several processes a signal waits for the next `check`, so that they end together.
    """
    with self.abortable(emergency_checkpoint) if enabled else contextlib.nullcontext():
      try:
        self._raise = enabled and jax.process_count() == 1
        self.check_local()
        yield
      finally:
        self._raise = False

  @contextlib.contextmanager
  def abortable(self, emergency_checkpoint: Callable[[], None] = _save_nothing) -> Iterator[None]:
    """Inside, a signal ends the process with exit code 0 if the main thread is still there `_ABORT_AFTER_S` later.

    Args:
      emergency_checkpoint: saves what would be lost with the block. It runs on another thread, while the main thread
        may be anywhere in the block, and may raise `RetryLater`. The default saves nothing.
    """
    before = self._emergency_checkpoint
    try:
      with self._turn:
        self._emergency_checkpoint = emergency_checkpoint if jax.process_count() == 1 else None
      yield
    finally:
      with self._turn:
        self._emergency_checkpoint = before

  def _handle(self, number: int, frame: FrameType | None) -> None:
    if not self.requested:
      self.requested = True
      signal.signal(signal.SIGINT, signal.SIG_DFL)
      with contextlib.suppress(OSError):  # nobody may be listening
        # Not `print`: the signal may have come in the middle of one.
        os.write(_STDERR, b"Saving; then the run ends. Ctrl-C ends it at once.\n")
    if self._raise:
      raise Interrupted

  def _watch(self, wakeup: socket.socket) -> None:
    """Reads the numbers of signals as they arrive, until the other end is closed."""
    first: float | None = None
    resend_at = math.inf
    while True:
      ready = select.select([wakeup], [], [], None if first is None else _POLL_S)[0]
      heard = wakeup.recv(64) if ready else b""
      if ready and not heard:
        return
      for number in heard:
        if number == signal.SIGINT and first is not None:  # the first one's handler has not run yet
          _end(128 + number)
        if number in _SIGNALS and first is None:
          first = time.monotonic()
          resend_at = first + _RESEND_S
      if self._raise and time.monotonic() > resend_at:
        resend_at = time.monotonic() + _RESEND_S
        signal.pthread_kill(self._main, signal.SIGTERM)
      if first is not None and time.monotonic() - first > _ABORT_AFTER_S:
        self._abort()

  def _abort(self) -> None:
    """Ends the process after an emergency checkpoint, if the main thread is in an abortable block."""
    with self._turn:  # whoever leaves the block now waits for the end
      if self._emergency_checkpoint is None:
        return
      try:
        self._emergency_checkpoint()
      except RetryLater:
        return
      except BaseException as error:  # noqa: BLE001 (the end of the process)
        traceback.print_exception(error)
        _end(1)
      with contextlib.suppress(OSError):
        os.write(_STDERR, b"Aborted a call that cannot be interrupted, such as compiling. Finished work is saved.\n")
      _end(0)

  def _forget(self) -> None:
    """Gives a forked child its default handlers back."""
    for number in self._previous:
      signal.signal(number, signal.SIG_DFL)
    if self._wakeup is not None:
      signal.set_wakeup_fd(-1)

  def __enter__(self) -> StopSignals:
    if threading.current_thread() is not threading.main_thread():
      return self
    self._wakeup = reader, writer = socket.socketpair()
    writer.setblocking(False)
    self._watcher = threading.Thread(target=self._watch, args=(reader,), name="sao_jax-signals", daemon=True)
    self._watcher.start()
    self._previous_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in _SIGNALS:
      self._previous[number] = signal.signal(number, self._handle)
    me = weakref.ref(self)
    os.register_at_fork(after_in_child=lambda: _forget(me))
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)
    self._previous.clear()
    if self._wakeup is not None and self._watcher is not None:
      signal.set_wakeup_fd(self._previous_wakeup)
      reader, writer = self._wakeup
      writer.shutdown(socket.SHUT_WR)  # whatever forked children still hold it
      self._watcher.join()
      writer.close()
      reader.close()
      self._wakeup = None


def _forget(me: weakref.ref[StopSignals]) -> None:
  signals = me()
  if signals is not None:
    signals._forget()


def _end(code: int) -> NoReturn:
  """Ends the process from a thread other than the main one, which may be inside a call that does not return."""
  with contextlib.suppress(OSError, ValueError):  # the stream may be closed
    sys.stdout.flush()
  if os.isatty(_STDOUT):
    os.write(_STDOUT, b"\x1b[?25h")  # the cursor, which a progress bar hides
  os._exit(code)
