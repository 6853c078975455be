"""The host's side of the zygote process (`_worker.py`) and its sessions; see `python_tool` for their messages."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pathlib
import secrets
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from sao_jax.envs.sandbox import _isolation, _readable, _seccomp
from sao_jax.envs.sandbox.python_tool_config import PythonToolConfig

Listener: TypeAlias = Callable[[bytes], bytes | None]
"""Returns the reply to a message of running code; None ends the interpreter."""

MAX_MESSAGE_BYTES = 1 << 20
_START_TIMEOUT_S = 120.0
"""Time for the process and its first sessions to start, including the import of packages, on a busy machine."""
_TAKE_TIMEOUT_S = 20.0
"""Time for a session to take its first code, and for the process to take a request."""
_BOOT = """
import json, sys, types
settings = json.loads(sys.argv[1])
package = types.ModuleType("sao_jax.envs.sandbox")
sys.modules[package.__name__] = package
for name, text in settings.pop("modules").items():
  module = types.ModuleType(f"{package.__name__}.{name}")
  setattr(package, name, module)
  exec(compile(text, "<tool>", "exec", dont_inherit=True), module.__dict__)
module.main(settings)
"""
_ENVIRONMENT: Mapping[str, str] = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
"""Environment variables of sessions. With a fixed hash seed, sets of strings have the same order in every process."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


class Interpreter:
  """The host's end of one forked interpreter."""

  def __init__(self, number: int, zygote: Zygote, connection: socket.socket, output: int):
    self.number = number
    self._zygote = zygote
    self._connection = connection
    self._output = output
    self._deadline = 0.0
    self._used = False

  def call(self, code: bytes, wall_s: float, listener: Listener | None = None) -> str:
    """Runs code. Returns '' if it ends normally, else the failure ('died', 'timeout', 'threads' or 'breach')."""
    nonce = secrets.token_bytes(8)
    start = time.monotonic()
    self._deadline = start + wall_s
    taken = False
    try:
      self._connection.settimeout(wall_s if self._used else max(wall_s, _TAKE_TIMEOUT_S))
      self._connection.sendall(nonce + struct.pack("<I", len(code)) + code)
      while True:
        answer = self._receive(9, start, wall_s)
        if answer[:8] != nonce:
          return "breach"
        if answer[8:] == b"S" and not taken:
          taken = self._used = True
          self._deadline = time.monotonic() + wall_s
          continue
        if answer[8:] in (b".", b"T"):
          return "threads" if answer[8:] == b"T" else ""
        if answer[8:] != b"Q" or listener is None or not self._serve(listener, start, wall_s):
          return "breach"
        if time.monotonic() > self._deadline:  # The code may send messages for ever.
          return "timeout"
    except TimeoutError:
      return "timeout"
    except OSError:
      return "died"

  def _serve(self, listener: Listener, start: float, wall_s: float) -> bool:
    """Replies to a message of the code. Returns False if the message is too long or the listener refuses it."""
    (size,) = struct.unpack("<I", self._receive(4, start, wall_s))
    reply = listener(self._receive(size, start, wall_s)) if size <= MAX_MESSAGE_BYTES else None
    if reply is None:
      return False
    self._connection.settimeout(max(self._deadline - time.monotonic(), 1e-3))
    self._connection.sendall(struct.pack("<I", len(reply)) + reply)
    return True

  def _receive(self, size: int, start: float, wall_s: float) -> bytes:
    """Reads exactly `size` bytes. Raises TimeoutError at the deadline, and ConnectionError if the session has ended."""
    data = bytearray()
    while len(data) < size:
      self._connection.settimeout(max(self._deadline - time.monotonic(), 1e-3))
      try:
        part = self._connection.recv(size - len(data))
      except TimeoutError:
        if self._used or time.monotonic() > start + _TAKE_TIMEOUT_S:
          raise
        # A busy machine has not started the code yet, so its time has not begun.
        self._deadline = time.monotonic() + wall_s
        continue
      if not part:
        raise ConnectionError("the interpreter ended")
      data += part
    return bytes(data)

  @property
  def untouched(self) -> bool:
    """Whether the interpreter has accepted no request yet, so that no code has run in it."""
    return not self._used

  def start_error(self) -> str:
    """Returns why it died before it accepted a request."""
    return os.pread(self._output, 2000, 0).decode(errors="replace").strip()

  def output(self, limit: int) -> str:
    """Returns the output of the last call. The middle of output longer than `limit` bytes is cut."""
    if self.untouched:
      return ""
    size = os.fstat(self._output).st_size
    if size <= limit:
      return os.pread(self._output, limit, 0).decode(errors="replace")
    tail = limit // 3
    first = os.pread(self._output, limit - tail, 0).decode(errors="replace")
    last = os.pread(self._output, tail, size - tail).decode(errors="replace")
    return f"{first}\n[... output cut: {size} bytes, limit {limit} ...]\n{last}"

  def kill(self) -> None:
    """Ends the session."""
    self._connection.close()
    os.close(self._output)
    self._zygote.kill(self.number)


class Zygote:
  """The running zygote process. Methods may be called from any thread."""

  def __init__(self, config: PythonToolConfig, bubblewrap: bool):
    self._lock = threading.Lock()
    self._owner = os.getpid()
    self._count = 0
    files = _readable.find(config)
    self._scratch = tempfile.mkdtemp(prefix="sao_jax_tool_")
    os.chmod(self._scratch, 0o711)  # Sessions with other user ids can enter the folder but not list it.
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self._control = ours
    self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
    with theirs:
      self._process = subprocess.Popen(
        _command(config, files, bubblewrap, self._scratch, theirs.fileno()),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=self._errors,
        env=dict(_ENVIRONMENT),
        pass_fds=(theirs.fileno(),),
        start_new_session=True,
        cwd="/",
      )
    try:
      self.isolation = self._handshake()
      if self.isolation["namespaces"]:  # The zygote has its private root by now.
        os.rmdir(self._scratch)
      self._probe()
    except BaseException:
      self.close()
      raise

  @property
  def pid(self) -> int:
    return self._process.pid

  def last_words(self) -> str:
    """Returns the standard error of the zygote, which tells why it died."""
    self._errors.seek(0)
    return self._errors.read(2000).decode(errors="replace").strip() or "no message"

  def _handshake(self) -> dict[str, Any]:
    self._control.settimeout(_START_TIMEOUT_S)
    try:
      message = self._control.recv(4096)
    except OSError:
      message = b""
    if not message:
      raise RuntimeError(f"The tool's process did not start: {self.last_words()}")
    self._control.settimeout(_TAKE_TIMEOUT_S)
    return dict(json.loads(message))

  def _probe(self) -> None:
    """Runs two sessions to check that they work."""
    for _ in range(2):
      try:
        interpreter = self.fork()
      except OSError as error:
        raise RuntimeError(f"The tool's process died at once: {self.last_words()}") from error
      failure = interpreter.call(b"print(1)", _START_TIMEOUT_S)
      reason = interpreter.start_error() if failure else ""
      interpreter.kill()
      if failure:
        raise RuntimeError(f"A session of the tool did not start: {reason or self.last_words()}")

  def fork(self) -> Interpreter:
    """Requests a session and returns at once. Raises OSError if the zygote has ended."""
    if os.getpid() != self._owner:  # Two processes would use the same number for different sessions.
      raise RuntimeError("This PythonTool belongs to the process that made it. Make another one in the forked process.")
    ours, theirs = socket.socketpair()
    output = os.memfd_create("output", os.MFD_CLOEXEC)
    try:
      with theirs, self._lock:
        self._count += 1
        number = self._count
        socket.send_fds(self._control, [struct.pack("<cQ", b"F", number)], [theirs.fileno(), output])
    except OSError:
      ours.close()
      os.close(output)
      raise
    return Interpreter(number, self, ours, output)

  def kill(self, number: int) -> None:
    """Ends a session by its number."""
    if os.getpid() != self._owner:
      return
    with contextlib.suppress(OSError), self._lock:  # If the zygote has ended, so have its sessions.
      self._control.send(struct.pack("<cQ", b"K", number))

  def close(self) -> None:
    """Ends all sessions and the process."""
    self._control.close()  # The zygote kills its sessions and exits.
    if os.getpid() != self._owner:
      return
    try:
      self._process.wait(5)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    self._errors.close()
    _isolation.remove_tree(self._scratch)


def _filters() -> dict[str, str]:
  machine = os.uname().machine
  return {
    name: base64.b64encode(_seccomp.program(machine, processes=several)).decode()
    for name, several in (("processes", True), ("one_process", False))
  }


def _command(
  config: PythonToolConfig, files: _readable.ReadableFiles, bubblewrap: bool, scratch: str, control_fd: int
) -> list[str]:
  settings = {
    "inside_bubblewrap": bubblewrap,
    "filters": _filters(),
    "scratch": scratch,
    "control_fd": control_fd,
    "read_only": files.bound | {path: path for path in _DEVICES},
    "masked": files.masked,
    "links": files.links,
    "packages": files.packages,
    "python_path": {f"/site/{index}": source for index, source in enumerate(config.python_path)},
    "packages_folder": _readable.PACKAGES,
    "scratch_bytes": config.scratch_mb << 20,
    "memory_bytes": config.memory_mb << 20,
    "max_processes": config.max_processes,
    "cpu_s": config.cpu_s,
    "session_cpu_s": config.session_cpu_s,
    "traceback_frames": config.traceback_frames,
    "preload": [*config.preload, *files.modules],
  }
  folder = pathlib.Path(__file__).parent
  names = ("_isolation", "_worker")
  settings["modules"] = {name: (folder / f"{name}.py").read_text(encoding="utf-8") for name in names}
  # Like -I, but with PYTHONHASHSEED.
  python = [_readable.interpreter(), "-s", "-P", "-S", "-c", _BOOT, json.dumps(settings)]
  return [*_bubblewrap(files), *python] if bubblewrap else python


def _bubblewrap(files: _readable.ReadableFiles) -> list[str]:
  targets = [*files.bound, *files.links, "/dev/null"]
  # Parents of bound paths. bubblewrap would make them for its own user only.
  parents = {str(path) for target in targets for path in pathlib.PurePath(target).parents if path.name}
  parents -= {path for path in parents for top in files.bound if f"{path}/".startswith(f"{top}/")}
  # Root needs no user namespace: the worker changes the user id for each session, which drops the capabilities.
  user = (
    ["--unshare-all"]
    if os.geteuid()
    else [
      "--unshare-pid",
      "--unshare-net",
      "--unshare-ipc",
      "--unshare-uts",
      "--unshare-cgroup-try",
      "--cap-add",
      "ALL",
    ]
  )
  return [
    "bwrap",
    *user,
    "--new-session",
    *(word for path in sorted(parents) for word in ("--perms", "0755", "--dir", path)),
    *(word for target, source in files.bound.items() for word in ("--ro-bind-try", source, target)),
    *(word for path, text in files.links.items() for word in ("--symlink", text, path)),
    "--proc",
    "/proc",
    *(word for path in _DEVICES for word in ("--dev-bind", path, path)),
    "--tmpfs",
    "/tmp",
    "--chdir",
    "/tmp",
    "--remount-ro",
    "/",
    "--clearenv",
    *(word for name, value in _ENVIRONMENT.items() for word in ("--setenv", name, value)),
  ]
