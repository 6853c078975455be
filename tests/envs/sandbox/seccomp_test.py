"""The filter of system calls of both machines, run by a small interpreter without making calls."""

from __future__ import annotations

import struct

import pytest

from sao_jax.envs.sandbox import _seccomp

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
# The numbers of calls in the kernel's tables (unistd.h).
CALLS = {
  "x86_64": {
    "read": 0, "sendto": 44, "recvfrom": 45, "socketpair": 53, "socket": 41, "bind": 49, "connect": 42, "listen": 50,
    "accept": 43, "accept4": 288, "flock": 73, "fcntl": 72, "ioctl": 16, "modify_ldt": 154, "seccomp": 317, "uname": 63,
    "sendmsg": 46, "sendmmsg": 307, "prctl": 157, "clone": 56, "kill": 62,
  },
  "aarch64": {
    "read": 63, "sendto": 206, "recvfrom": 207, "socketpair": 199, "socket": 198, "bind": 200, "connect": 203,
    "listen": 201, "accept": 202, "accept4": 242, "flock": 32, "fcntl": 25, "ioctl": 29, "seccomp": 277, "uname": 160,
    "sendmsg": 211, "sendmmsg": 269, "prctl": 167, "clone": 220, "kill": 129,
  },
}  # fmt: skip
BOTH = [(machine, processes) for machine in ARCH for processes in (True, False)]


def verdict(machine: str, processes: bool, call: str | int, *arguments: int, arch: int | None = None) -> int:
  """Returns the result of the filter for a call, by interpreting the BPF instructions that the filter uses."""
  number = call if isinstance(call, int) else CALLS[machine][call]
  words = [*arguments, *[0] * (6 - len(arguments))]
  data = struct.pack("<IIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *words)
  code = _seccomp.program(machine, processes=processes)
  at = value = 0
  while True:
    operation, if_true, if_false, constant = struct.unpack_from("<HBBI", code, at * 8)
    at += 1
    if operation == 0x06:
      return constant
    if operation == 0x20:
      (value,) = struct.unpack_from("<I", data, constant)
    elif operation == 0x54:
      value &= constant
    else:
      true = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[operation]
      at += if_true if true else if_false


@pytest.mark.parametrize(("machine", "processes"), BOTH)
def test_only_pairs_of_unix_streams_are_sockets(machine: str, processes: bool) -> None:
  unix, stream, flags = 1, 1, (0, 0x80000, 0x800, 0x80800)  # SOCK_CLOEXEC, SOCK_NONBLOCK
  for flag in flags:
    assert verdict(machine, processes, "socketpair", unix, stream | flag) == ALLOW
    for kind in (2, 3, 4, 5, 6, 10):
      assert verdict(machine, processes, "socketpair", unix, kind | flag) == EPERM
    for family in (0, 2, 10, 16, 30):
      assert verdict(machine, processes, "socketpair", family, stream | flag) == EPERM
  assert verdict(machine, processes, "socketpair", unix | 1 << 32, stream | 1 << 40) == ALLOW  # ints: the lower half
  assert verdict(machine, processes, "socketpair", unix | 1 << 32, 2 | 1 << 40) == EPERM
  for call in ("socket", "bind", "connect", "listen", "accept", "accept4"):
    assert verdict(machine, processes, call, 1, 1) == EPERM
  for call in ("read", "sendto", "recvfrom"):
    assert verdict(machine, processes, call, 1, 1) == ALLOW


@pytest.mark.parametrize(("machine", "processes"), BOTH)
def test_locks_leases_watches_and_owners_of_files_are_refused(machine: str, processes: bool) -> None:
  assert verdict(machine, processes, "flock", 3, 1) == EPERM
  for command in (0, 1, 2, 3, 4, 1030, 1031, 1032):
    assert verdict(machine, processes, "fcntl", 3, command) == ALLOW
  # Locks and their tests, owners and their signals, locks of open files, leases, watches of directories, hints.
  for command in (5, 6, 7, 8, 10, 12, 13, 14, 15, 36, 37, 38, 1024, 1025, 1026, 1033, 1036, 1038, 1 << 31):
    assert verdict(machine, processes, "fcntl", 3, command) == EPERM
  for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451):
    assert verdict(machine, processes, "ioctl", 3, request) == ALLOW
  # Owners of sockets and of asynchronous files, typing into a terminal, attributes of files.
  for request in (0x8901, 0x8902, 0x5452, 0x5412, 0x40086602, 0x401C5820):
    assert verdict(machine, processes, "ioctl", 3, request) == EPERM


@pytest.mark.parametrize(("machine", "processes"), BOTH)
def test_what_else_is_refused(machine: str, processes: bool) -> None:
  assert verdict(machine, processes, "seccomp", 1, 8) == EPERM  # a filter with a listener
  assert verdict(machine, processes, "prctl", 1) == EPERM and verdict(machine, processes, "prctl", 4) == EPERM
  assert verdict(machine, processes, "prctl", 15) == ALLOW
  for call in ("uname", "sendmsg", "sendmmsg"):
    assert verdict(machine, processes, call) == (ALLOW if processes else EPERM)
  assert verdict(machine, processes, "clone", 17) == (ALLOW if processes else EPERM)
  assert verdict(machine, processes, "clone", 17 | 0x10000000) == EPERM  # a user namespace
  assert verdict(machine, processes, 435) == ENOSYS and verdict(machine, processes, 1 << 30) == ENOSYS
  assert verdict(machine, processes, "read", arch=0x40000003) == KILL
  if machine == "x86_64":
    assert verdict(machine, processes, "modify_ldt", 1) == EPERM


def test_a_single_process_signals_itself_alone() -> None:
  for machine in ARCH:
    assert verdict(machine, False, "kill", _seccomp.OWN_PID, 9) == ALLOW
    assert verdict(machine, False, "kill", 1, 9) == EPERM and verdict(machine, False, "kill", 0, 9) == EPERM
    assert verdict(machine, True, "kill", 1, 9) == ALLOW


def test_other_machines_have_no_filter() -> None:
  assert _seccomp.program("riscv64", processes=True) == b""
