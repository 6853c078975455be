"""The program inside the sandbox: a zygote that forks one interpreter per session. Standard library only.

`_zygote` starts it as text (`python -s -P -S -c`), inside bubblewrap where that works, and it can see no file of the
library. It is single-threaded, so forking is safe. It never runs code of a model itself: each session is a forked
child. `python_tool` describes the messages between the host and a session.

The code of a model runs as in a plain interpreter. It cannot see this program through `compile`, `__main__` or
`sys.modules`.
"""

from __future__ import annotations
import __future__

import ast
import base64
import contextlib
import gc
import io
import json
import linecache
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
import traceback
import types
from typing import Any

from sao_jax.envs.sandbox import _isolation

_SOCKET_FD, _OUTPUT_FD, _NULL_FD = 200, 201, 202  # above the numbers that RLIMIT_NOFILE allows
_WATCH_MS = 200
_FILE = (lambda: None).__code__.co_filename  # of frames that are hidden in tracebacks
_OWN_FRAMES = 4  # at most, at each end of a traceback
_COMPILE: Any = compile  # Kept, since the code may replace these three.
_EXEC: Any = exec
_SOURCES: Any = linecache.cache


class Zygote:
  """Forks and kills sessions on request of the host."""

  def __init__(self, settings: dict[str, Any]):
    self._settings = settings
    self._control = socket.socket(fileno=settings["control_fd"])
    self._pids: dict[int, int] = {}  # session -> pid
    self._cleaners: set[int] = set()  # children that remove directories of ended sessions
    self._next_watch = 0.0
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
      file.write("1000")  # The system kills the sandbox before the training.
    self._namespaces = _isolation.enter_namespaces(settings)
    self._own_pid_namespace = os.pidfd_open(os.getpid())
    own_root = self._namespaces or settings["inside_bubblewrap"]
    sys.path.extend(target if own_root else source for target, source in settings["python_path"].items())
    packages = settings["packages_folder"] if own_root else f"{settings['scratch']}/packages"
    if settings["packages"]:
      sys.path.append(packages)
    if self._namespaces:
      if not settings["inside_bubblewrap"]:
        _isolation.private_root(settings)
      _isolation.mask([*settings["masked"]])
      _isolation.hide_processes()
    else:
      _isolation.adopt_orphans()
      _isolation.link_packages(packages, settings["packages"])
      readable = [*settings["read_only"].values(), packages]
      if not _isolation.passable(os.__file__):
        readable.append(f"{settings['scratch']}/python")
        _isolation.share_standard_library(readable[-1])
      settings["landlock_rights"] = _isolation.landlock_rights(readable, [*settings["masked"].values()])
    settings["filters"] = {name: base64.b64decode(text) for name, text in settings["filters"].items()}
    self._report = {
      "namespaces": self._namespaces,
      "seccomp": _isolation.can_filter() and bool(settings["filters"]["processes"]),
      "landlock": _isolation.can_restrict_files(),
      "processes_counted": self._namespaces and _isolation.processes_counted(self._namespaces),
    }

  def run(self) -> None:
    self._control.send(json.dumps(self._report).encode())
    poll = select.poll()
    poll.register(self._control, select.POLLIN)
    while True:
      if poll.poll(1000 if self._namespaces else _WATCH_MS):
        message, fds, _, _ = socket.recv_fds(self._control, 9, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:  # The host closed its end, or has ended.
          break
        operation, session = struct.unpack("<cQ", message)
        if operation == b"F":
          self._fork(session, fds)
        elif session in self._pids:
          self._kill(self._pids[session])
      self._reap()
      if not self._namespaces:
        self._kill_hoarders()
    for pid in self._pids.values():
      self._kill(pid)
    if not self._namespaces:  # The host may have ended.
      for pid in self._cleaners.union(self._pids.values()):
        os.waitpid(pid, 0)
      _isolation.remove_tree(self._settings["scratch"])

  def _fork(self, session: int, fds: list[int]) -> None:
    if self._namespaces:
      _isolation.call("unshare", _isolation.NEWPID)
    pid = os.fork()
    if pid == 0:
      try:
        self._serve(session, fds)
      finally:
        os._exit(1)
    self._pids[session] = pid
    if self._namespaces:
      _isolation.call("setns", self._own_pid_namespace, _isolation.NEWPID)
    for fd in fds:
      os.close(fd)

  def _serve(self, session: int, fds: list[int]) -> None:
    try:
      child = _Session(self._settings, session, self._report, fds)
    except BaseException as error:  # The host reads the reason from the output.
      os.write(_OUTPUT_FD, "".join(traceback.format_exception(error)).encode(errors="replace"))
      raise
    child.serve()

  def _kill(self, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      if not self._namespaces:
        os.killpg(pid, signal.SIGKILL)
      os.kill(pid, signal.SIGKILL)  # the first process of its pid namespace: all others end too

  def _reap(self) -> None:
    while True:
      try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
      except ChildProcessError:
        break
      if pid == 0:
        break
      self._cleaners.discard(pid)
      for session, known in list(self._pids.items()):
        if known == pid:
          del self._pids[session]
          if not self._namespaces:
            self._clean(session)
    if not self._namespaces:
      self._kill_orphans()

  def _clean(self, session: int) -> None:
    """Removes a directory in a child process, since it may hold a great many files."""
    pid = os.fork()
    if pid == 0:
      try:
        _isolation.die_with_parent()  # The host removes the rest.
        _isolation.remove_tree(f"{self._settings['scratch']}/{session}")
      finally:
        os._exit(0)
    self._cleaners.add(pid)

  def _kill_hoarders(self) -> None:
    """Kills sessions whose directories exceed the limit. The check is periodic, so it may be a little late."""
    if time.monotonic() < self._next_watch:
      return
    began = time.monotonic()
    for session, pid in self._pids.items():
      directory = f"{self._settings['scratch']}/{session}"
      if _isolation.has_outgrown(pid, directory, self._settings["scratch_bytes"], _isolation.MAX_SCRATCH_ENTRIES):
        self._kill(pid)
    now = time.monotonic()
    self._next_watch = now + max(_WATCH_MS / 1e3, 4 * (now - began))  # at most a fifth of the time

  def _kill_orphans(self) -> None:
    """Kills orphans. Without pid namespaces they become children of this process (the subreaper)."""
    try:
      with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = [int(word) for word in file.read().split()]
    except OSError:
      return
    known = self._cleaners.union(self._pids.values())
    for pid in children:
      if pid not in known:
        self._kill(pid)


class _Session:
  """An interpreter: a forked child that runs cells of code for one episode."""

  def __init__(self, settings: dict[str, Any], session: int, report: dict[str, bool], fds: list[int]):
    self._settings = settings
    os.setsid()
    for source, target in zip(fds, (_SOCKET_FD, _OUTPUT_FD), strict=True):
      os.dup2(source, target, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for target in (0, 1, 2, _NULL_FD):
      os.dup2(null, target, inheritable=target != _NULL_FD)
    os.closerange(3, _SOCKET_FD)
    _isolation.enter_session(settings, session, report)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    self._pid = os.getpid()
    module = types.ModuleType("__main__")
    boot = vars(sys.modules["__main__"])
    vars(module).update({name: value for name, value in boot.items() if name.startswith("__")})  # attributes of Python
    sys.modules["__main__"] = module
    self._globals = module.__dict__
    host = types.ModuleType("sao_host")
    host.__dict__["ask"] = self._ask
    sys.modules["sao_host"] = host
    self._cells = 0
    self._features = 0  # Imports from `__future__` stay in effect, as at a prompt.
    self._number = 0

  def serve(self) -> None:
    """Runs cells until the host closes its end. An error here ends the process, and the host notices."""
    self._connection = connection = socket.socket(fileno=_SOCKET_FD)
    while True:
      self._number, size = struct.unpack("<QI", _receive(connection, 12))
      code = _receive(connection, size).decode(errors="replace")
      os.ftruncate(_OUTPUT_FD, 0)
      os.lseek(_OUTPUT_FD, 0, os.SEEK_SET)
      connection.sendall(struct.pack("<Qc", self._number, b"S"))
      status = self._run(code)
      if os.getpid() != self._pid:  # a child forked by the code that returned here
        os._exit(status)
      signal.setitimer(signal.ITIMER_REAL, 0)
      self._end_children()
      threads = len(sys._current_frames()) > 1
      connection.sendall(struct.pack("<Qc", self._number, b"T" if threads else b"."))

  def _ask(self, message: bytes) -> bytes:
    """Sends a message of the code to the listener of the host and returns its reply (`sao_host.ask`)."""
    self._connection.sendall(struct.pack("<QcI", self._number, b"Q", len(message)) + message)
    (size,) = struct.unpack("<I", _receive(self._connection, 4))
    return _receive(self._connection, size)

  def _run(self, code: str) -> int:
    """Runs a cell and returns the exit status of a program that ends like it."""
    for source, target in ((_NULL_FD, 0), (_OUTPUT_FD, 1), (_OUTPUT_FD, 2)):  # Earlier code may have closed them.
      os.dup2(source, target)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    descriptor = io.BufferedWriter(io.FileIO(1, "wb", closefd=False))
    sys.stdout = output = io.TextIOWrapper(descriptor, encoding="utf-8", errors="backslashreplace", line_buffering=True)
    sys.stderr = output
    self._arm_cpu_limit()
    status = 0
    try:
      self._execute(code)
    except BaseException as error:  # noqa: BLE001 (the model reads it)
      status, text = self._ending(error)
      self._write(text, output)
      if status and not text and os.getpid() == self._pid:
        self._write(f"{_line_break()}[exit code {status}]\n", output)
    with contextlib.suppress(OSError, ValueError):  # Full or closed: the model gets the output so far.
      output.flush()
    return status

  def _execute(self, code: str) -> None:
    self._cells += 1
    name = f"<cell {self._cells}>"
    _SOURCES[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = _COMPILE(code, name, "exec", ast.PyCF_ONLY_AST | self._features, dont_inherit=True)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    program = _COMPILE(tree, name, "exec", self._features, dont_inherit=True)
    self._features |= _features(program)
    programs = [program]
    if last is not None:  # The value of a final expression is shown, as in a notebook.
      programs.append(_COMPILE(ast.Interactive([last]), name, "single", self._features, dont_inherit=True))
    for program in programs:
      _EXEC(program, self._globals)

  def _arm_cpu_limit(self) -> None:
    seconds = self._settings["cpu_s"]

    def over(signum: int, frame: Any) -> None:
      raise TimeoutError(f"CPU time limit of {seconds} s exceeded")

    signal.signal(signal.SIGXCPU, over)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = round(time.process_time()) + seconds  # The system counts whole seconds.
    resource.setrlimit(resource.RLIMIT_CPU, (min(soft, hard), hard))

  def _ending(self, error: BaseException) -> tuple[int, str]:
    """Returns the exit status of a program that ends with this error, and what Python prints."""
    if issubclass(type(error), SystemExit):
      try:
        return _exit_status(error.code)  # type: ignore[attr-defined]
      except BaseException as fault:  # noqa: BLE001 (str() of the exit code may raise)
        error = fault
    frames = self._settings["traceback_frames"]
    shown = traceback.TracebackException(
      type(error), error, error.__traceback__, limit=-(frames + _OWN_FRAMES), compact=True
    )
    shown.stack[:] = [frame for frame in shown.stack if frame.filename != _FILE][-frames:] if frames else []
    return 1, "".join(shown.format(chain=False) if shown.stack else shown.format_exception_only())

  def _write(self, text: str, output: io.TextIOWrapper) -> None:
    try:
      output.write(text)
      output.flush()
    except (OSError, ValueError):  # Full or closed: overwrite the end of the output.
      data = text.encode(errors="backslashreplace")[-4096:]
      end = min(os.lseek(_OUTPUT_FD, 0, os.SEEK_END), self._settings["scratch_bytes"] - len(data))
      os.pwrite(_OUTPUT_FD, data, max(end, 0))

  def _end_children(self) -> None:
    """Kills all processes that the cell started."""
    if self._pid != 1:  # Only the first process of a pid namespace may kill all others.
      return
    try:
      os.kill(-1, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # There is no other, or the filter allows none.
      return
    with contextlib.suppress(ChildProcessError):
      while True:
        os.wait()


def _features(program: types.CodeType) -> int:
  """Returns the compiler flags of a program's imports from `__future__`."""
  flags = [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
  return sum(flag for flag in flags if program.co_flags & flag)


def _exit_status(code: object) -> tuple[int, str]:
  """Returns the exit status of a program that calls `sys.exit(code)`, and what Python prints."""
  if code is None:
    return 0, ""
  return (code & 0xFF, "") if isinstance(code, int) else (1, f"{code}\n")


def _line_break() -> str:
  """Returns a line break if the output does not end with one, else nothing."""
  end = os.lseek(_OUTPUT_FD, 0, os.SEEK_END)
  return "" if os.pread(_OUTPUT_FD, 1, max(end - 1, 0)) in (b"", b"\n") else "\n"


def _receive(connection: socket.socket, size: int) -> bytes:
  data = b""
  while len(data) < size:
    part = connection.recv(size - len(data))
    if not part:
      os._exit(0)
    data += part
  return data


def _forget_this_program() -> None:
  """Hides this program from the code of sessions, and adds the names of `site`, as in a plain interpreter."""
  sys.argv[:] = [""]
  sys.orig_argv[:] = [sys.executable]
  package = __name__.partition(".")[0]
  for name in [name for name in sys.modules if name.partition(".")[0] == package]:
    del sys.modules[name]
  site.setquit()
  site.setcopyright()
  site.sethelper()


def main(settings: dict[str, Any]) -> None:
  """Runs the zygote until the host closes the control socket."""
  _isolation.set_name(b"sao_jax_tool")
  zygote = Zygote(settings)
  one_thread = dict.fromkeys(("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
  os.environ.update(one_thread)  # Numeric libraries read it when loaded. Forking with threads is not safe.
  for name in settings["preload"]:
    __import__(name)
  for name in one_thread:
    del os.environ[name]
  _forget_this_program()
  gc.collect()
  gc.freeze()  # Else the first collection in each child would copy every page.
  zygote.run()
