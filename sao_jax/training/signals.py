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
_PATIENCE_S = 10.0
"""How long the main thread may take to leave a block that may be given up; with what follows, a signal must have ended
the run within 30 s."""
_LOOK_S = 0.2
_AGAIN_S = 2.0
"""What a handler raises is lost where Python cannot pass it on (in a callback of the garbage collector, say: JAX has
one). Where a signal should have ended a block, it is sent again after so long."""


def _nothing() -> None:
  """There is nothing to save."""


class Interrupted(KeyboardInterrupt):
  """A signal asked the run to save and end. Not an `Exception`: a user's code that catches those must not stop it, and
  what calls such code lets a `KeyboardInterrupt` of the main thread pass."""


class NotNow(Exception):
  """A rescue cannot save at this moment; it is asked again, unless the main thread comes back first."""


class Interrupts:
  """SIGINT and SIGTERM ask for an end: `check` raises `Interrupted`, and inside `at_once` the signal itself does.

  After the first signal a second SIGINT ends the process at once, whatever it does. Outside the main thread signals
  cannot be handled: nothing is changed there, and `requested` stays False.

  Python runs a signal's handler in the main thread, between two instructions: not while that is in a compiler for a
  minute. Hence a thread that hears of signals meanwhile; it ends the process where the main thread may be given up.
  """

  def __init__(self) -> None:
    self.requested = False
    self._placement: Placement | None = None
    self._raise = False
    self._rescue: Callable[[], None] | None = None
    """What saves if the main thread does not come back; None: it must be waited for."""
    self._turn = threading.Lock()
    """Held while `_rescue` is changed, and from the beginning of a rescue to the end of the process."""
    self._previous: dict[signal.Signals, Any] = {}
    self._previous_wakeup = -1
    self._wakeup: tuple[socket.socket, socket.socket] | None = None
    self._watcher: threading.Thread | None = None
    self._main = threading.main_thread().ident or 0

  def share(self, placement: Placement) -> None:
    """From here on a signal to one process is a signal to all."""
    self._placement = placement

  def anywhere(self) -> bool:
    """Whether a signal has come, to any process: all of them must ask."""
    return self.requested if self._placement is None else any(self._placement.exchange(self.requested))

  def check(self) -> None:
    """Raises `Interrupted` if a signal has come, to any process: all of them must call it."""
    if self.anywhere():
      raise Interrupted

  def check_alone(self) -> None:
    """As `check`, where no other process can be asked: with several it does nothing."""
    if self.requested and jax.process_count() == 1:
      raise Interrupted

  @contextlib.contextmanager
  def at_once(self, enabled: bool = True, *, rescue: Callable[[], None] = _nothing) -> Iterator[None]:
    """Inside, a signal raises `Interrupted` wherever the main thread stands: in a tool that takes minutes, say.

    Only around what may end at any point, leaving nothing behind that is used later; it may be given up, too (see
    `may_be_given_up`). With several processes a signal waits for the next `check`: they end together.
    """
    with self.may_be_given_up(rescue) if enabled else contextlib.nullcontext():
      try:
        self._raise = enabled and jax.process_count() == 1
        self.check_alone()
        yield
      finally:
        self._raise = False

  @contextlib.contextmanager
  def may_be_given_up(self, rescue: Callable[[], None] = _nothing) -> Iterator[None]:
    """Inside, a signal ends the process with code 0 if the main thread is still there `_PATIENCE_S` later.

    Args:
      rescue: saves what would be lost with the block; called on another thread, while the main thread may be anywhere
        in the block; it may raise `NotNow`. The default: there is nothing to save.
    """
    before = self._rescue
    try:
      with self._turn:
        self._rescue = rescue if jax.process_count() == 1 else None
      yield
    finally:
      with self._turn:
        self._rescue = before

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
    """Reads the numbers of signals as they come, until the other end is closed."""
    first: float | None = None
    again = math.inf
    while True:
      ready = select.select([wakeup], [], [], None if first is None else _LOOK_S)[0]
      heard = wakeup.recv(64) if ready else b""
      if ready and not heard:
        return
      for number in heard:
        if number == signal.SIGINT and first is not None:  # the first one's handler has not run yet
          _end(128 + number)
        if number in _SIGNALS and first is None:
          first = time.monotonic()
          again = first + _AGAIN_S
      if self._raise and time.monotonic() > again:
        again = time.monotonic() + _AGAIN_S
        signal.pthread_kill(self._main, signal.SIGTERM)
      if first is not None and time.monotonic() - first > _PATIENCE_S:
        self._give_up()

  def _give_up(self) -> None:
    with self._turn:  # whoever leaves the block now waits for the end
      if self._rescue is None:
        return
      try:
        self._rescue()
      except NotNow:
        return
      except BaseException as error:  # noqa: BLE001 (the end of the process)
        traceback.print_exception(error)
        _end(1)
      with contextlib.suppress(OSError):
        os.write(_STDERR, b"What could not be interrupted (compiling, say) was given up.\n")
      _end(0)

  def _forget(self) -> None:
    """In a forked child: signals are its own affair."""
    for number in self._previous:
      signal.signal(number, signal.SIG_DFL)
    if self._wakeup is not None:
      signal.set_wakeup_fd(-1)

  def __enter__(self) -> Interrupts:
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


def _forget(me: weakref.ref[Interrupts]) -> None:
  interrupts = me()
  if interrupts is not None:
    interrupts._forget()


def _end(code: int) -> NoReturn:
  """Ends the process from another thread than the main one: nothing else does while that is in a call."""
  with contextlib.suppress(OSError, ValueError):  # closed, say
    sys.stdout.flush()
  if os.isatty(_STDOUT):
    os.write(_STDOUT, b"\x1b[?25h")  # the cursor, which a progress bar hides
  os._exit(code)
