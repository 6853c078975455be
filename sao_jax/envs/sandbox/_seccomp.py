"""The seccomp filter of sessions: a classic BPF program, as bytes, for x86-64 and aarch64.

It is a second line of defence, since namespaces and dropped capabilities already make most of these calls fail. The
filter forbids:
- calls that are attack surface of the kernel (BPF, io_uring, keyrings, user namespaces, ...);
- every socket but pairs of streams, which have no address;
- memory that no limit counts (memfd, System V shared memory, watches of files);
- locks and leases: on files that others read, they are a channel between sessions and can stall the host;
- ways to survive the end of the zygote.

A stricter filter is for sessions without a pid namespace, and for systems where the limit of processes does not work.
It also forbids new processes and threads, and signals to other processes, so there is exactly one process to end. It
keeps open files in the table of that process, where they are counted, and hides the host name.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

OWN_PID = 0x7FFF_FFF1
"""Placeholder for the process id of the session, which the worker fills in."""

_EPERM, _ENOSYS = 1, 38
_ALLOW, _KILL_PROCESS, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_LOAD, _AND, _JUMP_EQ, _JUMP_GE, _JUMP_SET, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_AUDIT_ARCH: Mapping[str, int] = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_NEW_NAMESPACE_FLAGS = 0x7E02_0080

# Numbers of the calls on x86-64 and aarch64 (-1 if the call does not exist). From 424 on they are the same.
_DENIED: Mapping[str, tuple[int, int]] = {
  "ptrace": (101, 117),
  "process_vm_readv": (310, 270),
  "process_vm_writev": (311, 271),
  "kcmp": (312, 272),
  "mount": (165, 40),
  "umount2": (166, 39),
  "pivot_root": (155, 41),
  "chroot": (161, 51),
  "unshare": (272, 97),
  "setns": (308, 268),
  "open_by_handle_at": (304, 265),
  "name_to_handle_at": (303, 264),
  "quotactl": (179, 60),
  "keyctl": (250, 219),
  "add_key": (248, 217),
  "request_key": (249, 218),
  "bpf": (321, 280),
  "userfaultfd": (323, 282),
  "perf_event_open": (298, 241),
  "personality": (135, 92),
  "kexec_load": (246, 104),
  "init_module": (175, 105),
  "finit_module": (313, 273),
  "delete_module": (176, 106),
  "swapon": (167, 224),
  "swapoff": (168, 225),
  "reboot": (169, 142),
  "acct": (163, 89),
  "settimeofday": (164, 170),
  "clock_settime": (227, 112),
  "adjtimex": (159, 171),
  "clock_adjtime": (305, 266),
  "iopl": (172, -1),
  "ioperm": (173, -1),
  "syslog": (103, 116),
  "modify_ldt": (154, -1),
  "seccomp": (317, 277),
  "migrate_pages": (256, 238),
  "move_pages": (279, 239),
  "socket": (41, 198),
  "connect": (42, 203),
  "accept": (43, 202),
  "bind": (49, 200),
  "listen": (50, 201),
  "accept4": (288, 242),
  "flock": (73, 32),
  "shmget": (29, 194),
  "semget": (64, 190),
  "msgget": (68, 186),
  "mq_open": (240, 180),
  "memfd_create": (319, 279),
  "inotify_init": (253, -1),
  "inotify_init1": (294, 26),
  "fanotify_init": (300, 262),
  "io_uring_setup": (425, 425),
  "io_uring_enter": (426, 426),
  "io_uring_register": (427, 427),
  "open_tree": (428, 428),
  "move_mount": (429, 429),
  "fsopen": (430, 430),
  "fsconfig": (431, 431),
  "fsmount": (432, 432),
  "fspick": (433, 433),
  "pidfd_getfd": (438, 438),
  "mount_setattr": (442, 442),
  "memfd_secret": (447, 447),
}
_DENIED_TO_ONE_PROCESS: Mapping[str, tuple[int, int]] = {
  "fork": (57, -1),
  "vfork": (58, -1),
  "tkill": (200, 130),
  "rt_sigqueueinfo": (129, 138),
  "rt_tgsigqueueinfo": (297, 240),
  "pidfd_send_signal": (424, 424),
  "setpriority": (141, 140),
  "ioprio_set": (251, 30),
  "process_madvise": (440, 440),
  "uname": (63, 160),
  # A file sent through a socket stays open until it is received.
  "sendmsg": (46, 211),
  "sendmmsg": (307, 269),
  # Landlock protects only the contents of visible files.
  "chmod": (90, -1),
  "fchmod": (91, 52),
  "fchmodat": (268, 53),
  "fchmodat2": (452, 452),
  "chown": (92, -1),
  "fchown": (93, 55),
  "lchown": (94, -1),
  "fchownat": (260, 54),
  "setxattr": (188, 5),
  "lsetxattr": (189, 6),
  "fsetxattr": (190, 7),
  "removexattr": (197, 14),
  "lremovexattr": (198, 15),
  "fremovexattr": (199, 16),
  "setxattrat": (463, 463),
  "removexattrat": (466, 466),
  "utime": (132, -1),
  "utimes": (235, -1),
  "futimesat": (261, -1),
  "utimensat": (280, 88),
}
_FIRST, _SECOND = 16, 24  # offsets of the lower halves of arguments
_OWN_PROCESS_ONLY: Mapping[str, tuple[int, int]] = {  # the first argument is a process id
  "kill": (62, 129),
  "tgkill": (234, 131),
  "prlimit64": (302, 261),
  "sched_setaffinity": (203, 122),
  "sched_setscheduler": (144, 119),
  "sched_setparam": (142, 118),
  "sched_setattr": (314, 274),
}
_ALLOWED_COMMANDS: Mapping[str, tuple[tuple[int, int], tuple[int, ...]]] = {  # allowed values of the second argument
  # Descriptors, flags and sizes of pipes. No locks, leases, watches, or signals to the owner of a file.
  "fcntl": ((72, 25), (0, 1, 2, 3, 4, 1030, 1031, 1032)),
  # Flags of descriptors, available bytes, and settings and sizes of terminals (to find that there is none).
  "ioctl": ((16, 29), (0x5450, 0x5451, 0x5421, 0x541B, 0x5401, 0x5413)),
}
_CLONE, _CLONE3, _PRCTL, _SOCKETPAIR = (56, 220), 435, (157, 167), (53, 199)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE_MASK = 1, 1, 0xF


def _statement(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
  return struct.pack("<HBBI", code, if_true, if_false, value)


def _error(number: int) -> bytes:
  return _statement(_RETURN, _ERRNO | number)


def _jump_over(call: int, block: list[bytes]) -> list[bytes]:
  """Returns instructions for one call. The block starts with the number of the call loaded and ends with returns."""
  return [_statement(_JUMP_EQ, call, 0, len(block)), *block]


def _only(argument: int, *values: int) -> list[bytes]:
  code = [_statement(_LOAD, argument)]
  for value in values:
    code += [_statement(_JUMP_EQ, value, 0, 1), _statement(_RETURN, _ALLOW)]
  return [*code, _error(_EPERM)]


def _all_but(argument: int, *values: int) -> list[bytes]:
  code = [_statement(_LOAD, argument)]
  for value in values:
    code += [_statement(_JUMP_EQ, value, 0, 1), _error(_EPERM)]
  return [*code, _statement(_RETURN, _ALLOW)]


def _stream_pairs() -> list[bytes]:
  return [
    _statement(_LOAD, _FIRST),
    _statement(_JUMP_EQ, _AF_UNIX, 1, 0),
    _error(_EPERM),
    _statement(_LOAD, _SECOND),
    _statement(_AND, _SOCK_TYPE_MASK),
    _statement(_JUMP_EQ, _SOCK_STREAM, 1, 0),
    _error(_EPERM),
    _statement(_RETURN, _ALLOW),
  ]


def program(machine: str, *, processes: bool) -> bytes:
  """Returns the instructions of the filter for a machine; empty if the call numbers of the machine are unknown.

  Args:
    machine: name of the machine in `os.uname`; there is a filter for `x86_64` and `aarch64`.
    processes: whether the session may make processes and threads.
  """
  if machine not in _AUDIT_ARCH:
    return b""
  column = list(_AUDIT_ARCH).index(machine)
  load_number, load_argument = _statement(_LOAD, 0), _statement(_LOAD, _FIRST)
  code = [
    _statement(_LOAD, 4),
    _statement(_JUMP_EQ, _AUDIT_ARCH[machine], 1, 0),
    _statement(_RETURN, _KILL_PROCESS),
    load_number,
    _statement(_JUMP_GE, 0x4000_0000, 0, 1),
    _error(_ENOSYS),  # x32 calls
    _statement(_JUMP_EQ, _CLONE3, 0, 1),
    _error(_ENOSYS),  # The filter cannot read its flags. Libraries fall back to clone.
  ]
  denied = dict(_DENIED) if processes else {**_DENIED, **_DENIED_TO_ONE_PROCESS}
  for numbers in denied.values():
    if numbers[column] >= 0:
      code += [_statement(_JUMP_EQ, numbers[column], 0, 1), _error(_EPERM)]
  for call, commands in _ALLOWED_COMMANDS.values():
    code += _jump_over(call[column], _only(_SECOND, *commands))
  code += _jump_over(_SOCKETPAIR[column], _stream_pairs())
  code += _jump_over(_PRCTL[column], _all_but(_FIRST, _PR_SET_PDEATHSIG, _PR_SET_DUMPABLE))
  clone = [_error(_EPERM)]
  if processes:
    clone = [load_argument, _statement(_JUMP_SET, _NEW_NAMESPACE_FLAGS, 0, 1), *clone, _statement(_RETURN, _ALLOW)]
  code += [_statement(_JUMP_EQ, _CLONE[column], 0, len(clone)), *clone]
  if not processes:
    for name, numbers in _OWN_PROCESS_ONLY.items():
      own = [load_argument, _statement(_JUMP_EQ, OWN_PID, 1, 0)]
      # 0 is the caller itself, except in kill, where it is the process group of the caller.
      own += [_error(_EPERM)] if name == "kill" else [_statement(_JUMP_EQ, 0, 0, 1)]
      own += [_statement(_RETURN, _ALLOW)] if name == "kill" else [_statement(_RETURN, _ALLOW), _error(_EPERM)]
      code += [_statement(_JUMP_EQ, numbers[column], 0, len(own)), *own]
  return b"".join([*code, _statement(_RETURN, _ALLOW)])
