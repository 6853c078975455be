"""A sandboxed Python interpreter for policies: one per episode, from a warm pool.

Who talks to whom:
- The host (this module) starts one zygote process (`_worker.py`), inside bubblewrap where that works. It asks the
  zygote over a control socket to fork sessions ("F") and to kill them ("K"). The host itself never forks: it has
  threads (JAX).
- For each session the host makes a socket pair and an anonymous file, and hands one end and the file to the fork. A
  request is `number (8 bytes), length (4 bytes), code`; the answer is `number, status`: 9 bytes. What the code prints
  goes to the file, of which the host reads at most `max_output_bytes`.

Nothing that comes from a session is trusted: reads are bounded in size and time, the number of an answer must be the
random one of the request, and whatever goes wrong kills the session (its whole pid namespace) and becomes a sentence
to the model.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import Any, Literal

_LOG = logging.getLogger(__name__)
_START_TIMEOUT_S = 20.0
_UNTOUCHED = b"\0"
_RETRIES = 20
_MAX_CODE_BYTES = 1 << 20
_PRELOAD = (
  "math", "cmath", "random", "re", "json", "itertools", "functools", "collections", "fractions", "decimal",
  "statistics", "string", "operator", "heapq", "bisect", "datetime", "time", "copy", "typing", "dataclasses", "enum",
  "inspect", "textwrap", "numbers",
)
_SYSTEM_PATHS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonToolConfig:
  """Limits of the interpreter. All are per session unless they say otherwise."""

  backend: Literal["auto", "bubblewrap", "subprocess"] = "auto"
  """`auto`: bubblewrap where it works, else the plain subprocess, with a warning that says so."""
  wall_s: float = 10.0
  """Wall-clock seconds per call; past it the interpreter is killed."""
  cpu_s: int = 5
  """CPU seconds per call; past it the code gets a TimeoutError, and the interpreter lives on."""
  session_cpu_s: int = 60
  """CPU seconds of one process over all calls; past it the process is killed."""
  memory_mb: int = 512
  """Address space of one process."""
  max_processes: int = 16
  """Processes and threads."""
  scratch_mb: int = 16
  """Size of the temporary directory, and of any one file."""
  max_output_bytes: int = 4096
  """Output returned per call; the middle of a longer one is cut out."""
  traceback_frames: int = 4
  """Innermost frames of a traceback that are shown; 0 shows only its last line."""
  pool_size: int = 4
  """Interpreters kept ready."""
  persistent: bool = True
  """Whether variables survive from call to call of one session."""
  python_path: tuple[str, ...] = ()
  """Directories that the code may import from besides the standard library (readable by it in full)."""
  preload: tuple[str, ...] = _PRELOAD
  """Modules imported before sessions are forked, so that importing them costs a session nothing."""

  def __post_init__(self) -> None:
    if self.backend not in ("auto", "bubblewrap", "subprocess"):
      raise ValueError(f"backend must be 'auto', 'bubblewrap' or 'subprocess'; received {self.backend!r}.")
    for name in ("cpu_s", "session_cpu_s", "memory_mb", "max_processes", "scratch_mb", "max_output_bytes", "pool_size"):
      value = getattr(self, name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1; received {value!r}.")
    if not self.wall_s > 0:
      raise ValueError(f"wall_s must be > 0; received {self.wall_s!r}.")
    if self.traceback_frames < 0:
      raise ValueError(f"traceback_frames must be >= 0; received {self.traceback_frames!r}.")


class _Interpreter:
  """The host's end of one forked interpreter."""

  def __init__(self, number: int, zygote: _Zygote, connection: socket.socket, output: int):
    self.number = number
    self._zygote = zygote
    self._connection = connection
    self._output = output

  def call(self, code: bytes, wall_s: float) -> str:
    """Runs code; returns '' when it ended by itself, else what went wrong ('died', 'timeout', 'threads', 'breach')."""
    nonce = secrets.token_bytes(8)
    deadline = time.monotonic() + wall_s
    answer = b""
    try:
      self._connection.settimeout(wall_s)
      self._connection.sendall(nonce + struct.pack("<I", len(code)) + code)
      while len(answer) < 9:
        self._connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        part = self._connection.recv(9 - len(answer))
        if not part:
          return "died"
        answer += part
    except TimeoutError:
      return "timeout"
    except OSError:
      return "died"
    if answer[:8] != nonce or answer[8:] not in (b".", b"T"):
      return "breach"
    return "threads" if answer[8:] == b"T" else ""

  @property
  def untouched(self) -> bool:
    """Whether it has taken no request yet: the first thing it does then is to empty the output."""
    return os.pread(self._output, 2, 0) == _UNTOUCHED

  def output(self, limit: int) -> str:
    """What the last call printed, the middle cut out of it if it is longer than `limit` bytes."""
    size = os.fstat(self._output).st_size
    if size <= limit:
      return os.pread(self._output, limit, 0).decode(errors="replace")
    tail = limit // 3
    first = os.pread(self._output, limit - tail, 0).decode(errors="replace")
    last = os.pread(self._output, tail, size - tail).decode(errors="replace")
    return f"{first}\n[... output cut: {size} bytes, limit {limit} ...]\n{last}"

  def kill(self) -> None:
    self._connection.close()
    os.close(self._output)
    self._zygote.kill(self.number)


class _Zygote:
  """The running zygote process. Methods may be called from any thread."""

  def __init__(self, config: PythonToolConfig, bubblewrap: bool):
    self._lock = threading.Lock()
    self._scratch = tempfile.mkdtemp(prefix="sao_jax_tool_")
    os.chmod(self._scratch, 0o711)  # sessions with a user id of their own pass through, and cannot list it
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self._control = ours
    try:
      with theirs, tempfile.TemporaryFile() as errors:
        self._process = subprocess.Popen(
          _command(config, bubblewrap, self._scratch, theirs.fileno()),
          stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env={"LANG": "C.UTF-8"},
          pass_fds=(theirs.fileno(),), start_new_session=True, cwd="/",
        )
        theirs.close()
        self.isolation = self._handshake(errors)
    except BaseException:
      shutil.rmtree(self._scratch, ignore_errors=True)
      ours.close()
      raise

  @property
  def pid(self) -> int:
    return self._process.pid

  def _handshake(self, errors: Any) -> dict[str, Any]:
    self._control.settimeout(_START_TIMEOUT_S)
    try:
      message = self._control.recv(4096)
    except OSError:
      message = b""
    if not message:
      self._process.kill()
      self._process.wait()
      errors.seek(0)
      text = errors.read(2000).decode(errors="replace").strip()
      raise RuntimeError(f"The tool's process did not start: {text or 'no message'}")
    return dict(json.loads(message))

  def fork(self, number: int) -> _Interpreter:
    """Asks for a session; returns at once. OSError when the zygote is gone."""
    ours, theirs = socket.socketpair()
    output = os.memfd_create("output", os.MFD_CLOEXEC)
    os.write(output, _UNTOUCHED)
    try:
      with theirs, self._lock:
        socket.send_fds(self._control, [struct.pack("<cQ", b"F", number)], [theirs.fileno(), output])
    except OSError:
      ours.close()
      os.close(output)
      raise
    return _Interpreter(number, self, ours, output)

  def kill(self, number: int) -> None:
    with contextlib.suppress(OSError), self._lock:  # a zygote that is gone has taken its sessions with it
      self._control.send(struct.pack("<cQ", b"K", number))

  def close(self) -> None:
    self._control.close()  # the zygote kills its sessions and exits
    try:
      self._process.wait(5)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    shutil.rmtree(self._scratch, ignore_errors=True)


def _command(config: PythonToolConfig, bubblewrap: bool, scratch: str, control_fd: int) -> list[str]:
  interpreter = os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)
  site = {source: f"/site/{index}" for index, source in enumerate(config.python_path)}
  read_only = {path: path for path in (*_SYSTEM_PATHS, sys.base_prefix)} | site
  settings = {
    "inside_bubblewrap": bubblewrap, "scratch": scratch, "control_fd": control_fd,
    "read_only": read_only | {path: path for path in _DEVICES}, "python_path": site,
    "scratch_bytes": config.scratch_mb << 20, "memory_bytes": config.memory_mb << 20,
    "max_processes": config.max_processes, "cpu_s": config.cpu_s, "session_cpu_s": config.session_cpu_s,
    "traceback_frames": config.traceback_frames, "preload": config.preload,
  }
  worker = pathlib.Path(__file__).with_name("_worker.py").read_text(encoding="utf-8")
  python = [interpreter, "-I", "-S", "-c", worker, json.dumps(settings)]
  if not bubblewrap:
    return python
  # Directories on the way to what is bound: bubblewrap would make them for its own user only.
  parents = ["/site", *(str(path) for path in reversed(pathlib.PurePath(sys.base_prefix).parents) if path.name)]
  parents = [path for path in parents if not path.startswith("/usr")]
  # Root needs no user namespace: the worker takes another user id for each session, which drops the capabilities.
  user = ["--unshare-all"] if os.geteuid() else [
    "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-add", "ALL",
  ]
  return [
    "bwrap", *user, "--new-session",
    *(word for path in parents for word in ("--perms", "0755", "--dir", path)),
    *(word for source, target in read_only.items() for word in ("--ro-bind-try", source, target)),
    "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--chdir", "/tmp",
    "--clearenv", "--setenv", "LANG", "C.UTF-8", *python,
  ]


class PythonSession:
  """One episode's interpreter. Used by one thread at a time."""

  def __init__(self, tool: PythonTool):
    self._tool = tool
    self._interpreter: _Interpreter | None = None

  def run(self, code: str) -> str:
    """Runs code and returns what the model reads: output, the end of a traceback, or the limit that was hit."""
    config = self._tool.config
    data = code.encode(errors="replace")
    if len(data) > _MAX_CODE_BYTES:
      return f"[code too long: {len(data)} bytes, limit {_MAX_CODE_BYTES}]\n"
    try:
      failure, text = self._call(data, config)
    except OSError as error:  # out of descriptors, or the zygote cannot be started again
      _LOG.warning("Python tool: %s", error)
      return "[the interpreter could not be started]\n"
    if failure or not config.persistent:
      self.close()
    if not failure:
      return text
    reason = {
      "died": "the interpreter ended", "timeout": f"time limit of {config.wall_s:g} s exceeded",
      "threads": "threads were still running", "breach": "the interpreter's state was damaged",
    }[failure]
    separator = "" if not text or text.endswith("\n") else "\n"
    return f"{text}{separator}[{reason}; variables are lost]\n"

  def _call(self, data: bytes, config: PythonToolConfig) -> tuple[str, str]:
    for _ in range(_RETRIES):
      if self._interpreter is None:
        self._interpreter = self._tool._take()
      failure = self._interpreter.call(data, config.wall_s)
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
    self._ready: collections.deque[_Interpreter] = collections.deque()
    self._count = 0
    self._closed = False
    self.backend: str = config.backend
    self._zygote = self._start()
    with self._lock:
      self._fill()

  @property
  def isolation(self) -> dict[str, Any]:
    """What the system granted, e.g. `{"backend": "bubblewrap", "pid": 1234, "namespaces": True}`."""
    return {"backend": self.backend, "pid": self._zygote.pid, **self._zygote.isolation}

  def _start(self) -> _Zygote:
    if self.backend != "subprocess":
      try:
        if shutil.which("bwrap") is None:
          raise FileNotFoundError("bwrap is not installed")
        zygote = _Zygote(self.config, bubblewrap=True)
        if not zygote.isolation["namespaces"]:
          zygote.close()
          raise RuntimeError("it gives no namespaces for single sessions here")
        self.backend = "bubblewrap"
        return zygote
      except (OSError, RuntimeError) as error:
        if self.backend == "bubblewrap":
          raise RuntimeError(f"bubblewrap does not work here: {error}") from error
        self.backend = "subprocess"
        _LOG.warning("Python tool: bubblewrap does not work here (%s); using resource-limited subprocesses.", error)
    zygote = _Zygote(self.config, bubblewrap=False)
    if not zygote.isolation["namespaces"]:
      _LOG.warning("Python tool: no namespaces here; code of the model can read files of the host and open sockets.")
    return zygote

  def session(self) -> PythonSession:
    """A new interpreter for one episode; use it in a `with` block, or close it."""
    return PythonSession(self)

  def _take(self) -> _Interpreter:
    with self._lock:
      if self._closed:
        raise RuntimeError("This PythonTool is closed.")
      try:
        self._fill()
      except OSError:  # the zygote is gone, and its sessions with it
        _LOG.warning("Python tool: its process died; starting it again.")
        self._drop()
        self._zygote = self._start()
        self._fill()
      return self._ready.popleft()

  def _fill(self) -> None:
    while len(self._ready) <= self.config.pool_size:
      self._count += 1
      self._ready.append(self._zygote.fork(self._count))

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
