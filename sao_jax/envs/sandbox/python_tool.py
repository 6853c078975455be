"""A sandboxed Python interpreter for policies: one per episode, from a warm pool.

Who talks to whom:
- The host (this module) starts one zygote process (`_worker.py`), inside bubblewrap where that works. It asks the
  zygote over a control socket to fork sessions ("F") and to kill them ("K"). The host itself never forks: it has
  threads (JAX).
- For each session the host makes a socket pair and an anonymous file, and hands one end and the file to the fork. A
  request is `number (8 bytes), length (4 bytes), code`; the session says `number, "S"` before it runs the code and
  `number, status` after it. What the code prints goes to the file, of which the host reads at most
  `max_output_bytes`. Where the host gave a listener, the code may send messages in between, by
  `sao_host.ask(bytes) -> bytes`: `number, "Q", length, message`, answered by `length, reply`.

Nothing that comes from a session is trusted: reads are bounded in size and time, the number of an answer must be the
random one of the request, and whatever goes wrong kills the session (its whole pid namespace) and becomes a sentence
to the model.
"""

from __future__ import annotations

import collections
import logging
import shutil
import threading
import time
from types import TracebackType
from typing import Any

from sao_jax.envs.sandbox._zygote import Interpreter, Listener, Zygote
from sao_jax.envs.sandbox.python_tool_config import PythonToolConfig

_LOG = logging.getLogger(__name__)
_RETRIES = 20
_MAX_CODE_BYTES = 1 << 20


class PythonSession:
  """One episode's interpreter. Used by one thread at a time."""

  def __init__(self, tool: PythonTool):
    self._tool = tool
    self._interpreter: Interpreter | None = None

  def run(self, code: str, *, listener: Listener | None = None) -> str:
    """Runs code and returns what the model reads: output, the end of a traceback, or the limit that was hit.

    `exit()`, `quit()`, `sys.exit()` and `SystemExit` end the call, not the session: variables stay. A message is
    printed, an exit code other than 0 reported as `[exit code 3]`. `os._exit()` ends the interpreter, and its variables
    are lost.

    Args:
      code: the program, or the next piece of it.
      listener: answers what the code sends by `sao_host.ask`, on this thread and within the wall-clock limit. Without
        it such a message ends the interpreter.
    """
    config = self._tool.config
    data = code.encode(errors="replace")
    if len(data) > _MAX_CODE_BYTES:
      return f"[code too long: {len(data)} bytes, limit {_MAX_CODE_BYTES}]\n"
    try:
      failure, text = self._call(data, config, listener)
    except OSError as error:  # out of descriptors, or the zygote cannot be started again
      _LOG.warning("Python tool: %s", error)
      return "[the interpreter could not be started]\n"
    if failure or not config.persistent:
      self.close()
    if not failure:
      return text
    reason = {
      "died": "the interpreter ended",
      "timeout": f"time limit of {config.wall_s:g} s exceeded",
      "threads": "threads were still running",
      "breach": "the interpreter's state was damaged",
    }[failure]
    separator = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{separator}[{reason}; variables are lost]\n"

  def _call(self, data: bytes, config: PythonToolConfig, listener: Listener | None) -> tuple[str, str]:
    for _ in range(_RETRIES):
      if self._interpreter is None:
        self._interpreter = self._tool._take()
      failure = self._interpreter.call(data, config.wall_s, listener)
      if failure != "died" or not self._interpreter.untouched:
        return failure, self._interpreter.output(config.max_output_bytes)
      self.close()  # it died while it waited in the pool, maybe with its zygote; the code has not run
      time.sleep(0.05)
    raise OSError("new interpreters keep dying before they run anything")

  def close(self) -> None:
    """Kills the interpreter and all that it started."""
    if self._interpreter is not None:
      self._interpreter.kill()
      self._interpreter = None

  def __enter__(self) -> PythonSession:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


class PythonTool:
  """A pool of sandboxed interpreters, shared by all environments of a process; thread-safe.

  >>> tool = PythonTool(PythonToolConfig(backend="subprocess"))
  >>> with tool.session() as session:
  ...   session.run("x = 6"), session.run("x * 7")
  ('', '42\\n')
  >>> tool.close()
  """

  def __init__(self, config: PythonToolConfig):
    self.config = config
    self._lock = threading.Lock()
    self._ready: collections.deque[Interpreter] = collections.deque()
    self._closed = False
    self.backend: str = config.backend
    self._zygote = self._start()
    with self._lock:
      self._fill()

  @property
  def isolation(self) -> dict[str, Any]:
    """What the system granted, e.g. `{"backend": "bubblewrap", "pid": 1234, "namespaces": True}`."""
    return {"backend": self.backend, "pid": self._zygote.pid, **self._zygote.isolation}

  def _start(self) -> Zygote:
    if self.backend != "subprocess":
      try:
        if shutil.which("bwrap") is None:
          raise FileNotFoundError("bwrap is not installed")
        zygote = Zygote(self.config, bubblewrap=True)
        if not zygote.isolation["namespaces"]:
          zygote.close()
          raise RuntimeError("it gives no namespaces for single sessions here")
        self.backend = "bubblewrap"
        self._warn_of_gaps(zygote.isolation)
        return zygote
      except (OSError, RuntimeError) as error:
        if self.backend == "bubblewrap":
          raise RuntimeError(f"bubblewrap does not work here: {error}") from error
        self.backend = "subprocess"
        _LOG.warning("Python tool: bubblewrap does not work here (%s); using resource-limited subprocesses.", error)
    zygote = Zygote(self.config, bubblewrap=False)
    self._warn_of_gaps(zygote.isolation)
    return zygote

  def _warn_of_gaps(self, isolation: dict[str, Any]) -> None:
    if isolation["namespaces"] and isolation["processes_counted"]:
      return
    if not isolation["seccomp"]:
      _LOG.warning("Python tool: neither namespaces nor seccomp here: this is NOT a sandbox; run trusted code only.")
    else:
      _LOG.warning("Python tool: no separate process limits here; code of the model cannot start processes or threads.")
    if not isolation["namespaces"] and not isolation["landlock"]:
      _LOG.warning(
        "Python tool: neither namespaces nor Landlock here; code of the model can read this user's files, installed "
        "packages and the data in them included."
      )

  def session(self) -> PythonSession:
    """A new interpreter for one episode; use it in a `with` block, or close it."""
    return PythonSession(self)

  def _take(self) -> Interpreter:
    with self._lock:
      if self._closed:
        raise RuntimeError("This PythonTool is closed.")
      try:
        self._fill()
      except OSError:  # the zygote is gone, and its sessions with it
        _LOG.warning("Python tool: its process died (%s); starting it again.", self._zygote.last_words())
        self._drop()
        self._zygote = self._start()
        self._fill()
      return self._ready.popleft()

  def _fill(self) -> None:
    while len(self._ready) <= self.config.pool_size:
      self._ready.append(self._zygote.fork())

  def _drop(self) -> None:
    while self._ready:
      self._ready.popleft().kill()
    self._zygote.close()

  def close(self) -> None:
    """Ends all interpreters, also those in use, and the zygote."""
    with self._lock:
      if not self._closed:
        self._closed = True
        self._drop()

  def __enter__(self) -> PythonTool:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()
