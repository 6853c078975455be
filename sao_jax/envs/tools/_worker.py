"""The program inside the sandbox: a zygote that forks one interpreter per session. Standard library only.

`python_tool` starts it as text (`python -I -S -c TEXT SETTINGS`), inside bubblewrap where that works; no file of the
library is visible to it. It is single-threaded, so forking is safe here, and it never runs code of a model itself: a
session is a forked child. What the host and a session say to each other is described in `python_tool`.

Isolation is taken step by step, as far as the system allows, and reported to the host in the first message:
- as root: private mount, network, IPC and UTS namespaces, a root directory of its own (unless bubblewrap made one); for
  each session a pid and a mount namespace, an empty tmpfs of limited size on /tmp, and a user id of its own;
- as a normal user: the same through a user namespace, and for each session a nested one, by which its processes are
  counted;
- where namespaces are refused: resource limits, a process group and an empty directory per session; orphans are killed.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import gc
import io
import json
import linecache
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

_SOCKET_FD, _OUTPUT_FD = 200, 201  # above what RLIMIT_NOFILE lets a session open
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> int:
  function: Callable[..., int] = getattr(_libc, name)
  result = function(*args)
  if result < 0:
    code = ctypes.get_errno()
    raise OSError(code, f"{name}: {os.strerror(code)}")
  return result


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
  words = [None if text is None else text.encode() for text in (source, target, kind, data)]
  _call("mount", *words[:3], ctypes.c_ulong(flags), words[3])


def _enter_namespaces(settings: dict[str, Any]) -> bool:
  """Moves the zygote into namespaces of its own; False where the system refuses."""
  flags = _NEWNS if settings["inside_bubblewrap"] else _NEWNS | _NEWNET | _NEWIPC | _NEWUTS
  uid, gid = os.geteuid(), os.getegid()
  try:
    _call("unshare", flags if uid == 0 else flags | _NEWUSER)
  except OSError:
    return False
  if uid != 0:
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
      with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
  _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
  return True


def _private_root(settings: dict[str, Any]) -> None:
  """Makes a root directory that holds the interpreter, system libraries and three devices, and nothing else."""
  root = settings["scratch"]
  _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
  os.mkdir(root + "/tmp")
  os.mkdir(root + "/proc")
  for source, target in settings["read_only"].items():
    if os.path.exists(source):
      target = root + target
      if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
      else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT))
      _mount(source, target, None, _MS_BIND | _MS_REC)
      locked = os.statvfs(target).f_flag & (_MS_NOSUID | _MS_NODEV)  # a user namespace must keep these
      _mount("none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | locked)
  os.chdir(root)
  _call("syscall", ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), b".", b".")
  _call("umount2", b".", 2)  # MNT_DETACH
  os.chdir("/")
  _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


class Zygote:
  """Forks sessions and kills them, as the host says."""

  def __init__(self, settings: dict[str, Any]):
    self._settings = settings
    self._control = socket.socket(fileno=settings["control_fd"])
    self._pids: dict[int, int] = {}  # session -> pid
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
      file.write("1000")  # the sandbox dies before the training does
    self._own_pid_namespace = os.pidfd_open(os.getpid())
    self._namespaces = _enter_namespaces(settings)
    own_root = self._namespaces or settings["inside_bubblewrap"]
    sys.path.extend(target if own_root else source for source, target in settings["python_path"].items())
    if self._namespaces:
      if not settings["inside_bubblewrap"]:
        _private_root(settings)
      _mount("tmpfs", "/proc", "tmpfs", _MS_RDONLY, "size=4k,mode=555")
    else:
      _call("prctl", 36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER

  def run(self) -> None:
    report = {"namespaces": self._namespaces}
    self._control.send(json.dumps(report).encode())
    poll = select.poll()
    poll.register(self._control, select.POLLIN)
    while True:
      if poll.poll(1000):
        message, fds, _, _ = socket.recv_fds(self._control, 9, 2, socket.MSG_CMSG_CLOEXEC)
        if not message:  # the host closed its end, or is gone
          break
        operation, session = struct.unpack("<cQ", message)
        if operation == b"F":
          self._fork(session, fds)
        elif session in self._pids:
          self._kill(self._pids[session])
      self._reap()
    for pid in self._pids.values():
      self._kill(pid)

  def _fork(self, session: int, fds: list[int]) -> None:
    if self._namespaces:
      _call("unshare", _NEWPID)
    pid = os.fork()
    if pid == 0:
      try:
        _Session(self._settings, session, self._namespaces, fds).serve()
      finally:
        os._exit(1)
    self._pids[session] = pid
    if self._namespaces:
      _call("setns", self._own_pid_namespace, _NEWPID)
    for fd in fds:
      os.close(fd)

  def _kill(self, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
      if not self._namespaces:
        os.killpg(pid, signal.SIGKILL)
      os.kill(pid, signal.SIGKILL)  # first process of its pid namespace: all others go with it

  def _reap(self) -> None:
    while True:
      try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
      except ChildProcessError:
        break
      if pid == 0:
        break
      for session, known in list(self._pids.items()):
        if known == pid:
          del self._pids[session]
          if not self._namespaces:
            with contextlib.suppress(ProcessLookupError):
              os.killpg(pid, signal.SIGKILL)
            shutil.rmtree(f"{self._settings['scratch']}/{session}", ignore_errors=True)
    if not self._namespaces:
      self._kill_orphans()

  def _kill_orphans(self) -> None:
    """Without pid namespaces, what a session leaves behind becomes a child of this process (the subreaper)."""
    try:
      with open(f"/proc/self/task/{os.getpid()}/children") as file:
        children = [int(word) for word in file.read().split()]
    except OSError:
      return
    known = set(self._pids.values())
    for pid in children:
      if pid not in known:
        self._kill(pid)


class _Session:
  """One interpreter: a forked child that runs cells of code for one episode."""

  def __init__(self, settings: dict[str, Any], session: int, namespaces: bool, fds: list[int]):
    self._settings = settings
    os.setsid()
    for source, target in zip(fds, (_SOCKET_FD, _OUTPUT_FD), strict=True):
      os.dup2(source, target, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for target in (0, 1, 2):
      os.dup2(null, target)
    os.closerange(3, _SOCKET_FD)
    self._enter(session, namespaces)
    self._limit()
    _call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG; after the change of user, which clears it
    self._pid = os.getpid()
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    self._globals = module.__dict__
    self._cells = 0

  def _enter(self, session: int, namespaces: bool) -> None:
    directory = "/tmp"
    root = os.geteuid() == 0
    if namespaces:
      _call("unshare", _NEWNS)
      size = self._settings["scratch_bytes"]
      _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes=1024,mode=1777")
    else:
      directory = f"{self._settings['scratch']}/{session}"
      os.mkdir(directory, 0o700)
    if root:
      self._drop_user(session, directory)
    elif namespaces:
      _call("unshare", _NEWUSER)  # processes are counted per user namespace; nothing is mapped in this one
      header = struct.pack("<Ii", 0x20080522, 0)
      _call("capset", header, bytes(24))
    os.chdir(directory)

  def _drop_user(self, session: int, directory: str) -> None:
    """A user id for this session only: its processes are counted apart, and it can signal nobody else."""
    for uid in (2_000_000_000 + session % 1_000_000, 65534):  # the first may not exist in a container
      try:
        if directory != "/tmp":
          os.chown(directory, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        return
      except OSError:
        continue
    raise OSError("No user id to run the session as.")

  def _limit(self) -> None:
    s = self._settings
    limits = {
      resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64, resource.RLIMIT_FSIZE: s["scratch_bytes"],
      resource.RLIMIT_AS: s["memory_bytes"], resource.RLIMIT_NPROC: s["max_processes"], resource.RLIMIT_MEMLOCK: 0,
      resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in limits.items():
      resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (s["session_cpu_s"], s["session_cpu_s"]))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)

  def serve(self) -> None:
    """Runs cells until the host closes its end. Any error here ends the process, which the host sees."""
    connection = socket.socket(fileno=_SOCKET_FD)
    while True:
      number, size = struct.unpack("<QI", _receive(connection, 12))
      code = _receive(connection, size).decode(errors="replace")
      os.ftruncate(_OUTPUT_FD, 0)
      os.lseek(_OUTPUT_FD, 0, os.SEEK_SET)
      self._run(code)
      if os.getpid() != self._pid:  # a child that the code forked and that came back here
        os._exit(0)
      signal.setitimer(signal.ITIMER_REAL, 0)
      self._end_children()
      threads = len(sys._current_frames()) > 1
      connection.sendall(struct.pack("<Qc", number, b"T" if threads else b"."))

  def _run(self, code: str) -> None:
    os.dup2(_OUTPUT_FD, 1)
    os.dup2(_OUTPUT_FD, 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (the code may have closed or replaced it)
    sys.stdout = output = io.TextIOWrapper(
      io.FileIO(1, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
    sys.stderr = output
    self._arm_cpu_limit()
    try:
      self._execute(code)
    except BaseException as error:  # noqa: BLE001 (whatever it is, the model reads it)
      self._print_error(error, output)
    with contextlib.suppress(OSError, ValueError):  # full, or closed by the code: the model gets what is there
      output.flush()

  def _execute(self, code: str) -> None:
    self._cells += 1
    name = f"<cell {self._cells}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    if tree.body:
      exec(compile(tree, name, "exec"), self._globals)  # noqa: S102
    if last is not None:  # as in a notebook: the value of a last expression is shown
      exec(compile(ast.Interactive([last]), name, "single"), self._globals)  # noqa: S102

  def _arm_cpu_limit(self) -> None:
    seconds = self._settings["cpu_s"]

    def over(signum: int, frame: Any) -> None:
      raise TimeoutError(f"CPU time limit of {seconds} s exceeded")

    signal.signal(signal.SIGXCPU, over)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = int(time.process_time() + 0.999) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (min(soft, hard), hard))

  def _print_error(self, error: BaseException, output: io.TextIOWrapper) -> None:
    frames = self._settings["traceback_frames"]
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == "<string>":  # frames of this program
      trace = trace.tb_next
    if trace is None or frames == 0:
      text = "".join(traceback.format_exception_only(type(error), error))
    else:
      text = "".join(traceback.format_exception(type(error), error, trace, limit=-frames, chain=False))
    try:
      output.write(text)
      output.flush()
    except (OSError, ValueError):  # full or closed: the last part of the output makes room
      data = text.encode(errors="backslashreplace")[-4096:]
      end = min(os.lseek(_OUTPUT_FD, 0, os.SEEK_END), self._settings["scratch_bytes"] - len(data))
      os.pwrite(_OUTPUT_FD, data, max(end, 0))

  def _end_children(self) -> None:
    """Processes do not outlive the cell that started them (only where this is the first of its pid namespace)."""
    if self._pid != 1:
      return
    try:
      os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
      return
    with contextlib.suppress(ChildProcessError):
      while True:
        os.wait()


def _receive(connection: socket.socket, size: int) -> bytes:
  data = b""
  while len(data) < size:
    part = connection.recv(size - len(data))
    if not part:
      os._exit(0)
    data += part
  return data


def main() -> None:
  settings = json.loads(sys.argv[1])
  sys.argv[:] = [""]
  zygote = Zygote(settings)
  for name in settings["preload"]:
    __import__(name)
  gc.collect()
  gc.freeze()  # or the first collection in each child would copy every page
  zygote.run()


if __name__ == "__main__":
  main()
