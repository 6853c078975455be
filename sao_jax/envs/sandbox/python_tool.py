"""A sandboxed Python interpreter for policies: one per episode, from a warm pool.

Processes and messages:
- The host (this module) starts one zygote process (`_worker.py`), inside bubblewrap where that works. Over a control
  socket it asks the zygote to fork sessions ("F") and to kill them ("K"). The host itself never forks, because JAX has
  threads.
- For each session the host makes a socket pair and an anonymous file, and passes one end and the file to the fork. A
  request is `number (8 bytes), length (4 bytes), code`. The session replies `number, "S"` before it runs the code and
  `number, status` after it. The output of the code goes to the file, and the host reads at most `max_output_bytes` of
  it. If the host has a listener, the code may send messages in between with `sao_host.ask(bytes) -> bytes`. Such a
  message is `number, "Q", length, message`, and its reply is `length, reply`.

The host trusts no session. Reads have limits of size and time, and a reply must repeat the random number of its
request. Any error kills the session (its whole pid namespace) and becomes a sentence for the model.
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
  """The interpreter of one episode. One thread at a time may use it."""

  def __init__(self, tool: PythonTool):
    self._tool = tool
    self._interpreter: Interpreter | None = None

  def run(self, code: str, *, listener: Listener | None = None) -> str:
    """Runs code and returns the text for the model: output, the end of a traceback, or the exceeded limit.

    `exit()`, `quit()`, `sys.exit()` and `SystemExit` end the call but not the session, so variables stay. Their message
    is printed, and an exit code other than 0 is reported as `[exit code 3]`. `os._exit()` ends the interpreter, and its
    variables are lost.

    Args:
      code: the program, or the next piece of it.
      listener: replies to `sao_host.ask` of the code, on this thread and within the wall-clock limit. Without a
        listener such a message ends the interpreter.
    """
    config = self._tool.config
    data = code.encode(errors="replace")
    if len(data) > _MAX_CODE_BYTES:
      return f"[code too long: {len(data)} bytes, limit {_MAX_CODE_BYTES}]\n"
    try:
      failure, text = self._call(data, config, listener)
    except OSError as error:  # out of descriptors, or the zygote does not start again
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
      self.close()  # It died in the pool, maybe with its zygote. The code has not run.
      time.sleep(0.05)
    raise OSError("new interpreters keep dying before they run anything")

  def close(self) -> None:
    """Kills the interpreter and all processes that it started."""
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
  """A pool of sandboxed interpreters, shared by all environments of a process. Thread-safe.

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
    """The isolation that the system allows, such as `{"backend": "bubblewrap", "pid": 1234, "namespaces": True}`."""
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
    """Returns an interpreter for one episode. Use it in a `with` block, or close it."""
    return PythonSession(self)

  def _take(self) -> Interpreter:
    with self._lock:
      if self._closed:
        raise RuntimeError("This PythonTool is closed.")
      try:
        self._fill()
      except OSError:  # The zygote has ended, and its sessions with it.
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
    """Ends the zygote and all interpreters, including those in use."""
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
