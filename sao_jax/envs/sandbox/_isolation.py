"""Isolation of sessions from the host: namespaces, users, limits, Landlock and seccomp. Runs in the sandbox.

The isolation goes as far as the system allows. The first message to the host reports it.
- As root: private mount, network, IPC and UTS namespaces and a private root directory (unless bubblewrap made one).
  Each session has a pid and a mount namespace, an empty tmpfs of limited size on /tmp, and its own user id.
- As a normal user: the same in a user namespace. Each session has a nested user namespace, which counts its processes.
- Without namespaces: an empty directory per session. A session that outgrows it is killed; files that are open or
  mapped still count after they are removed. Landlock protects files. A seccomp filter forbids a session to make
  processes, to signal others and to read the host name. (The same filter applies if the limit of processes does not
  work.) Without Landlock, sessions can read all files of their user, including installed packages.
All cases have resource limits and a seccomp filter (see `_seccomp`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import posix
import resource
import shutil
import signal
import stat
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PIVOT_ROOT: Mapping[str, int] = {"x86_64": 155, "aarch64": 41}
_OWN_PID = b"\xf1\xff\xff\x7f"  # placeholder for the session's process id in the filter of `_seccomp`
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME, _PR_SET_SECCOMP = 1, 4, 15, 22
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_HOST_NAME = "sandbox"
MAX_SCRATCH_ENTRIES = 1024
_MAX_QUEUED_SIGNALS = 128
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_ALL = 0x1FFF  # the rights of its first version
_LANDLOCK_EXECUTE, _LANDLOCK_WRITE_FILE, _LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1, 2, 4, 8


@functools.cache
def _libc() -> ctypes.CDLL:
  return ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: Any) -> int:
  """Calls a function of the C library. Raises OSError if it fails."""
  function: Callable[..., int] = getattr(_libc(), name)
  result = function(*args)
  if result < 0:
    code = ctypes.get_errno()
    raise OSError(code, f"{name}: {os.strerror(code)}")
  return result


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
  words = [None if text is None else text.encode() for text in (source, target, kind, data)]
  call("mount", *words[:3], ctypes.c_ulong(flags), words[3])


def enter_namespaces(settings: dict[str, Any]) -> bool:
  """Moves the zygote into new namespaces. Returns False if the system refuses."""
  flags = NEWNS | NEWUTS if settings["inside_bubblewrap"] else NEWNS | NEWUTS | NEWNET | NEWIPC
  uid, gid = os.geteuid(), os.getegid()
  try:
    call("unshare", flags if uid == 0 else flags | NEWUSER | NEWPID)
  except OSError:
    return False
  if uid != 0:
    for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {uid} 1"), ("gid_map", f"1000 {gid} 1")):
      with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
  mount("none", "/", None, _MS_REC | _MS_PRIVATE)
  for name in ("sethostname", "setdomainname"):
    call(name, _HOST_NAME.encode(), ctypes.c_size_t(len(_HOST_NAME)))
  if uid != 0:
    _continue_in_child(settings["control_fd"])
  return True


def _continue_in_child(control_fd: int) -> None:
  """Continues in a child, the first process of the new pid namespace, which it must own to return to it later."""
  pid = os.fork()
  if pid != 0:
    os.close(control_fd)
    os.waitpid(pid, 0)
    os._exit(0)


def private_root(settings: dict[str, Any]) -> None:
  """Makes a root directory with only the interpreter, system libraries and devices."""
  root = settings["scratch"]
  mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
  os.mkdir(root + "/tmp")
  os.mkdir(root + "/proc")
  for target, source in settings["read_only"].items():
    if os.path.exists(source):
      target = root + target
      if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
      else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT))
      mount(source, target, None, _MS_BIND | _MS_REC)
      locked = os.statvfs(target).f_flag & (_MS_NOSUID | _MS_NODEV)  # a user namespace must keep these flags
      mount("none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | locked)
  for path, text in settings["links"].items():
    os.makedirs(os.path.dirname(root + path), exist_ok=True)
    os.symlink(text, root + path)
  os.chdir(root)
  call("syscall", ctypes.c_long(_PIVOT_ROOT[os.uname().machine]), b".", b".")
  call("umount2", b".", 2)  # MNT_DETACH
  os.chdir("/")
  mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def set_name(name: bytes) -> None:
  """Sets the name of this process and its children in process lists; at most 15 bytes."""
  call("prctl", _PR_SET_NAME, name, 0, 0, 0)


def mask(directories: list[str]) -> None:
  """Hides directories behind empty ones."""
  for path in filter(os.path.isdir, directories):
    mount("tmpfs", path, "tmpfs", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, "size=4k,mode=555")


def hide_processes() -> None:
  """Hides /proc, which shows other processes, behind an empty directory."""
  mount("tmpfs", "/proc", "tmpfs", _MS_RDONLY, "size=4k,mode=555")


def link_packages(folder: str, packages: dict[str, str]) -> None:
  """Fills a folder with links to packages, to import only these. For sessions without a private root directory."""
  for name, source in packages.items():
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    share(source, path)


def share_standard_library(path: str) -> None:
  """Makes modules of the standard library that sessions have yet to import readable under another path."""
  old = os.path.dirname(os.__file__)
  share(old, path)
  modules = [module for module in list(sys.modules.values()) if hasattr(module, "__path__")]
  for folders in (sys.path, *(module.__path__ for module in modules)):
    folders[:] = [path + folder[len(old) :] if f"{folder}/".startswith(f"{old}/") else folder for folder in folders]
  sys.path_importer_cache.clear()


def share(source: str, path: str) -> None:
  """Makes a file or folder readable under another path.

  If this process runs as root, sessions run as another user, who cannot pass through private folders such as /root. The
  files are then hard-linked, or copied from another file system.
  """
  if passable(source):
    os.symlink(source, path)
  elif os.path.isdir(source):
    shutil.copytree(source, path, copy_function=_link_or_copy, ignore=shutil.ignore_patterns("*-packages"))
  elif os.path.exists(source):  # Lists of installed files may name some that are gone.
    _link_or_copy(source, path)


def passable(path: str) -> bool:
  """Whether the user of sessions can pass through the folders above a path, links followed."""
  if os.geteuid() != 0:
    return True  # Sessions run as the present user.
  folder = os.path.dirname(os.path.realpath(path))
  while os.stat(folder).st_mode & stat.S_IXOTH:
    if folder == "/":
      return True
    folder = os.path.dirname(folder)
  return False


def _link_or_copy(source: str, path: str) -> None:
  try:
    os.link(os.path.realpath(source), path)
  except OSError:  # another file system
    shutil.copyfile(source, path)


def hide_host_name() -> None:
  """Replaces Python's `uname`, since the filter refuses it without a namespace. Hides only the host name."""
  known = os.uname()
  hidden = os.uname_result((known.sysname, _HOST_NAME, known.release, known.version, known.machine))
  os.uname = posix.uname = lambda: hidden


def adopt_orphans() -> None:
  """Makes orphaned processes of sessions children of this process, which kills them."""
  call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
  """Kills this process when its parent ends."""
  call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def is_larger(directory: str, max_bytes: int, max_entries: int) -> bool:
  """Whether a directory exceeds the limits of size and entries that a tmpfs would enforce."""
  size = count = 0
  folders = [directory]
  while folders:
    try:
      with os.scandir(folders.pop()) as entries:
        for entry in entries:
          count += 1
          size += entry.stat(follow_symlinks=False).st_blocks * 512
          if entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
          if size > max_bytes or count > max_entries:
            return True
    except OSError as error:  # It is gone, its owner cannot read it, or its path is too long.
      if error.errno == errno.ENAMETOOLONG:
        return True
  return False


def has_outgrown(pid: int, directory: str, max_bytes: int, max_entries: int) -> bool:
  """Whether a process and its directory exceed the limits. Removed files that are open or mapped count too."""
  entered = _has_entered_session(pid)  # before the next line, after which it may enter
  try:
    removed = _removed_bytes(pid, directory, max_bytes)
  except PermissionError:  # The code causes it, such as by running an unreadable program, unless it has not begun.
    return entered
  except (FileNotFoundError, ProcessLookupError):  # It has ended.
    return False
  return removed > max_bytes or is_larger(directory, max_bytes - removed, max_entries)


def _has_entered_session(pid: int) -> bool:
  """Whether a process has passed the part of `enter_session` in which it cannot be inspected."""
  try:
    with open(f"/proc/{pid}/status") as file:
      return "NoNewPrivs:\t1" in file.read()
  except (FileNotFoundError, ProcessLookupError):
    return False


def _removed_bytes(pid: int, directory: str, max_bytes: int) -> int:
  """Returns the size of removed files that a process still holds. A file that is mapped but not open exceeds any limit.

  Raises:
    PermissionError: the process cannot be inspected.
  """
  sizes: dict[int, int] = {}
  with _user_of(pid):
    for name in os.listdir(f"/proc/{pid}/fd"):
      with contextlib.suppress(FileNotFoundError):  # It was closed meanwhile.
        if _is_removed(os.readlink(f"/proc/{pid}/fd/{name}"), directory):
          found = os.stat(f"/proc/{pid}/fd/{name}")
          sizes[found.st_ino] = found.st_blocks * 512
    with open(f"/proc/{pid}/maps", errors="surrogateescape") as file:
      for line in file:
        fields = line.rstrip("\n").split(maxsplit=5)
        if len(fields) == 6 and _is_removed(fields[5], directory):
          sizes.setdefault(int(fields[4]), max_bytes + 1)
  return sum(sizes.values())


def _is_removed(link: str, directory: str) -> bool:
  return link.startswith(directory + "/") and link.endswith(" (deleted)")


@contextlib.contextmanager
def _user_of(pid: int) -> Iterator[None]:
  """Accesses files as the user of a process. In containers root cannot inspect processes of other users."""
  user = os.stat(f"/proc/{pid}")
  try:
    _libc().setfsgid(user.st_gid)
    _libc().setfsuid(user.st_uid)
    yield
  finally:
    _libc().setfsuid(os.geteuid())
    _libc().setfsgid(os.getegid())


def remove_tree(top: str) -> None:
  """Removes a directory of any depth that nothing else changes. Files that cannot be removed stay."""
  with contextlib.suppress(OSError):
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    try:
      way: list[str] = []  # path from `top` to `here`
      waiting = [_remove_files(here)]
      while waiting:
        if waiting[-1]:
          way.append(waiting[-1].pop())
          os.chmod(way[-1], 0o700, dir_fd=here)
          here = _change(here, way[-1])
          waiting.append(_remove_files(here))
        else:
          waiting.pop()
          if way:
            here = _change(here, "..")
            os.rmdir(way.pop(), dir_fd=here)
    finally:
      os.close(here)
    os.rmdir(top)


def _change(here: int, name: str) -> int:
  there = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
  os.close(here)
  return there


def _remove_files(here: int) -> list[str]:
  """Removes all files but directories; returns the names of the directories."""
  directories = []
  with os.scandir(here) as entries:
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        directories.append(entry.name)
      else:
        os.unlink(entry.name, dir_fd=here)
  return directories


def can_filter() -> bool:
  """Whether the kernel supports seccomp filters. If so, it fails to read the missing program."""
  _libc().prctl(_PR_SET_SECCOMP, 2, None, 0, 0)
  return ctypes.get_errno() == errno.EFAULT


def can_restrict_files() -> bool:
  """Whether Landlock is available. Asks for its version."""
  return int(_libc().syscall(ctypes.c_long(_LANDLOCK_CREATE), None, ctypes.c_long(0), ctypes.c_long(1))) > 0


def _install_filter(program: bytes) -> None:
  code = ctypes.create_string_buffer(program, len(program))
  call("prctl", _PR_SET_SECCOMP, 2, struct.pack("@HP", len(program) // 8, ctypes.addressof(code)), 0, 0)


def landlock_rights(read_only: list[str], masked: list[str]) -> dict[str, int]:
  """Returns the Landlock rights by path.

  Landlock has no exceptions below a path, so all folders beside a masked one are listed. Sessions can still read the
  names of masked folders.
  """
  rights = {}
  waiting = list(read_only)
  for path in waiting:  # grows during the loop
    if not os.path.isdir(path):
      is_device = os.path.exists(path) and stat.S_ISCHR(os.stat(path).st_mode)
      rights[path] = _LANDLOCK_READ_FILE | (_LANDLOCK_WRITE_FILE if is_device else _LANDLOCK_EXECUTE)
    elif any(folder.startswith(path + "/") for folder in masked):
      rights[path] = _LANDLOCK_READ_DIR
      waiting += [entry for entry in (f"{path}/{name}" for name in os.listdir(path)) if entry not in masked]
    else:
      rights[path] = _LANDLOCK_EXECUTE | _LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR
  return rights


def _restrict_files(rights: dict[str, int]) -> None:
  """Limits this process to the given Landlock rights on files and below folders, from now on."""
  rules = call("syscall", ctypes.c_long(_LANDLOCK_CREATE), struct.pack("<Q", _LANDLOCK_ALL), ctypes.c_long(8), 0)
  for path, allowed in rights.items():
    with contextlib.suppress(FileNotFoundError, PermissionError):  # Files that this user cannot access need no rule.
      beneath = os.open(path, os.O_PATH)
      call("syscall", ctypes.c_long(_LANDLOCK_ADD), rules, 1, struct.pack("<Qi", allowed, beneath), 0)
      os.close(beneath)
  call("syscall", ctypes.c_long(_LANDLOCK_RESTRICT), rules, 0)
  os.close(rules)


def enter_session(settings: dict[str, Any], session: int, report: dict[str, bool]) -> None:
  """Isolates this process, a new child of the zygote, for its lifetime, according to the report of the zygote."""
  directory = "/tmp"
  if report["namespaces"]:
    call("unshare", NEWNS)
    size = settings["scratch_bytes"]
    mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes={MAX_SCRATCH_ENTRIES},mode=1777")
  else:
    directory = f"{settings['scratch']}/{session}"
    os.mkdir(directory, 0o700)
  become_nobody(session, report["namespaces"], directory)
  os.chdir(directory)
  _limit(settings)
  die_with_parent()  # The change of user resets this and the next setting.
  if not report["namespaces"]:
    call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # so that its open files can be inspected
  call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # From here on it can be inspected: see `_has_entered_session`.
  if not report["namespaces"] and report["landlock"]:
    _restrict_files(settings["landlock_rights"] | {directory: _LANDLOCK_ALL})
  if report["seccomp"]:
    processes = report["namespaces"] and report["processes_counted"]
    if not processes:
      hide_host_name()
    program: bytes = settings["filters"]["processes" if processes else "one_process"]
    _install_filter(program.replace(_OWN_PID, struct.pack("<I", os.getpid())))


def become_nobody(session: int, namespaces: bool, directory: str | None = None) -> None:
  """Drops all privileges, such that the processes of this session are counted separately."""
  if os.geteuid() != 0:
    if namespaces:
      call("unshare", NEWUSER)  # It maps no ids. Processes are counted per user namespace.
      call("capset", struct.pack("<Ii", 0x20080522, 0), bytes(24))
    return
  for uid in (2_000_000_000 + session % 1_000_000, 65534):
    try:
      if directory is not None:
        os.chown(directory, uid, uid)
      os.setgroups([])
      os.setresgid(uid, uid, uid)
      os.setresuid(uid, uid, uid)
      return
    except OSError:
      continue  # a container may lack the first user id
  raise OSError("No user id to run the session as.")


def processes_counted(namespaces: bool) -> bool:
  """Whether the limit of processes works. It does not if the user of sessions is root of the host in disguise."""
  pid = os.fork()
  if pid == 0:
    status = 1
    try:
      become_nobody(0, namespaces)
      resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
      if os.fork() == 0:
        os._exit(0)
    except BlockingIOError:
      status = 0
    finally:
      os._exit(status)
  return os.waitpid(pid, 0)[1] == 0


def _limit(settings: dict[str, Any]) -> None:
  limits = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_NOFILE: 64,
    resource.RLIMIT_FSIZE: settings["scratch_bytes"],
    resource.RLIMIT_AS: settings["memory_bytes"],
    resource.RLIMIT_NPROC: settings["max_processes"],
    resource.RLIMIT_MEMLOCK: 0,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_SIGPENDING: _MAX_QUEUED_SIGNALS,
    resource.RLIMIT_CPU: settings["session_cpu_s"],
  }
  for kind, value in limits.items():
    resource.setrlimit(kind, (value, value))
