"""Hostile programs. Each must end with a text within the limits, leave nothing running and not disturb others."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import os
import pathlib
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator

import pytest

from sao_jax.envs.sandbox import PythonSession, PythonTool, PythonToolConfig, _isolation, _zygote
from tests.envs.sandbox import hostile_programs, processes
from tests.waiting import LONG_S

WALL_S = 1.0
MAX_OUTPUT = 2000
MARKER = hostile_programs.MARKER
PROGRAMS = hostile_programs.PROGRAMS


WAYS = ("subprocess", "bubblewrap", "no namespaces")
NO_NAMESPACES = "package._isolation.enter_namespaces = lambda settings: False\nmodule.main(settings)"
BARE_BOOT = _zygote._BOOT.replace("module.main(settings)", NO_NAMESPACES)


@pytest.fixture(scope="module", params=WAYS)
def tool(request: pytest.FixtureRequest) -> Iterator[PythonTool]:
  """Settings for programs that hit the wall-clock limit."""
  yield from make_tool(request, WALL_S)


@pytest.fixture(scope="module", params=WAYS)
def patient_tool(request: pytest.FixtureRequest) -> Iterator[PythonTool]:
  """Settings for programs that end by themselves, even on a busy machine."""
  yield from make_tool(request, 60.0)


def make_tool(request: pytest.FixtureRequest, wall_s: float) -> Iterator[PythonTool]:
  bare = request.param == "no namespaces"
  config = PythonToolConfig(
    backend="subprocess" if bare else request.param,
    wall_s=wall_s,
    cpu_s=1,
    memory_mb=256,
    max_processes=8,
    scratch_mb=4,
    pool_size=2,
    max_output_bytes=MAX_OUTPUT,
  )
  try:
    with pytest.MonkeyPatch.context() as patch:
      if bare:  # like a system that refuses them
        patch.setattr(_zygote, "_BOOT", BARE_BOOT)
      tool = PythonTool(config)
  except RuntimeError as error:
    pytest.skip(f"{request.param}: {error}")
  with tool:
    assert not (bare and tool.isolation["namespaces"])
    assert tool.isolation["processes_counted"] or tool.isolation["seccomp"], "a fork bomb would take this system down"
    yield tool


def same_way(tool: PythonTool, config: PythonToolConfig) -> PythonTool:
  """Makes a tool with its own config. If sessions cannot read the library, the modules are preloaded."""
  with pytest.MonkeyPatch.context() as patch:
    if not tool.isolation["namespaces"]:
      patch.setattr(_zygote, "_BOOT", BARE_BOOT)
    return PythonTool(config)


def test_each_ends_as_text_within_the_limits(tool: PythonTool) -> None:
  gc.collect()
  host_files = len(os.listdir("/proc/self/fd"))
  with concurrent.futures.ThreadPoolExecutor(12) as pool:
    faults = [fault for fault in pool.map(lambda name: fault_of(tool, name), PROGRAMS) if fault]
  assert not faults
  processes.wait_until(lambda: not left_running(tool))
  processes.wait_until(lambda: len(os.listdir("/proc/self/fd")) <= host_files + 2)


STAY_BROKEN = {"replacing sys.stdout"}
"""Programs that may remove all modules of an interpreter, which then cannot import any if its library is closed."""


def fault_of(tool: PythonTool, name: str) -> str:
  """Runs a program beside an innocent session; returns what went wrong, or nothing."""
  with tool.session() as bystander, tool.session() as session:
    processes.wait_until(lambda: bystander.run("x = 1") == "")  # a second may not be enough on a busy machine
    start = time.monotonic()
    text = session.run("import os, signal, sys, time\n" + PROGRAMS[name])
    elapsed = time.monotonic() - start
    working = works(session)
    if name in STAY_BROKEN:
      session.close()
      working = works(session)
    left = bystander.run("x")
    undisturbed = left == "1\n" or "time limit" in left
  # The shortest endless one takes 30 s.
  good = len(text) < MAX_OUTPUT + 200 and elapsed < 29 and working and undisturbed
  return "" if good else f"{name}: {elapsed:.2f} s, works {working}, undisturbed {undisturbed}, {text!r}"


def works(session: PythonSession) -> bool:
  """Whether the session still computes. The program may break its interpreter, and the call after the next has a new
  one. On a busy machine the time limit may end any call."""
  texts: list[str] = []
  while sum("time limit" not in text for text in texts) < 4 and len(texts) < 30:
    texts.append(session.run("6 * 7"))
    if texts[-1] == "42\n":
      return True
  return False


def left_running(tool: PythonTool) -> set[int]:
  """Lists processes beyond the zygote (up to four with bubblewrap) and the pool, and all that carry the marker."""
  extra = processes.descendants(tool.isolation["pid"])
  most = 2 + (2 if tool.backend == "bubblewrap" else 0) + tool.config.pool_size + 1
  return processes.with_marker(MARKER) | (extra if len(extra) > most else set())


def test_environment_and_host_files_are_out_of_reach(patient_tool: PythonTool, tmp_path: pathlib.Path) -> None:
  os.environ["SAO_JAX_SECRET"] = "token-in-the-environment"
  secret = tmp_path / "secret.txt"
  secret.write_text("content-of-the-file")
  bashrc = os.path.expanduser("~/.bashrc")
  code = f"""
import glob, os
print(dict(os.environ))
for path in ['{secret}', '/etc/passwd', '/etc/shadow', '/etc/hostname', '{bashrc}', '{os.path.abspath(__file__)}']:
  try: print('READ', path, open(path).read())
  except OSError as error: print(path, error.strerror)
for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/*/cmdline'):
  try: print('READ', path, open(path, 'rb').read())
  except OSError: pass
"""
  try:
    with patient_tool.session() as session:
      text = session.run(code)
  finally:
    del os.environ["SAO_JAX_SECRET"]
  assert "token-in-the-environment" not in text and "content-of-the-file" not in text and "READ" not in text


def test_nothing_outside_its_directory_can_be_written(patient_tool: PythonTool) -> None:
  code = """
import os, sys
library = os.path.dirname(os.__file__)
for place in ['/', '/usr', '/usr/bin', '/lib', '/etc', '/dev', '/dev/shm', '/proc', '/root', '/site', library]:
  try: open(os.path.join(place, 'mine'), 'w'); print('WROTE', place)
  except OSError: pass
  try: os.mkdir(os.path.join(place, 'mine')); print('MADE', place)
  except OSError: pass
  try: os.chmod(place, os.stat(place).st_mode); print('CHANGED', place)
  except OSError: pass
open('mine', 'w').write('x')
print('end')
"""
  with patient_tool.session() as session:
    assert session.run(code) == "end\n"


def test_no_sockets_and_no_network(patient_tool: PythonTool) -> None:
  code = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, 16, 17, 38, 40):
  for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
    try:
      socket.socket(family, kind); print('OPENED', family, kind)
    except OSError: pass
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_RAW, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC):
  try: socket.socketpair(socket.AF_UNIX, kind); print('PAIR', kind)
  except OSError: pass
a, b = socket.socketpair()
for name, arguments in {'bind': ('mine',), 'connect': ('mine',), 'listen': (), 'accept': ()}.items():
  try: getattr(a, name)(*arguments); print('ALLOWED', name)
  except OSError as error: assert error.errno == 1, (name, error)
a.send(b'pairs work'); print(b.recv(10).decode())
"""
  with patient_tool.session() as session:
    assert session.run(code) == "pairs work\n"


def test_system_calls_through_ctypes_are_refused(patient_tool: PythonTool) -> None:
  code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
tries = {
  'mount': (b'none', b'/tmp', b'tmpfs', 0, None), 'umount2': (b'/tmp', 2), 'umount': (b'/proc',), 'chroot': (b'/tmp',),
  'unshare': (0x10000000,), 'setuid': (0,), 'setgid': (0,), 'setresuid': (0, 0, 0), 'ptrace': (16, 1, 0, 0),
  'sethostname': (b'x', 1), 'personality': (0x0040000,), 'setns': (3, 0), 'mknod': (b'/tmp/sda', 0o060666, 0x800),
  'inotify_init': (), 'inotify_init1': (0,), 'fanotify_init': (0x200, 0), 'posix_openpt': (2,),
  'prctl': (1, 0, 0, 0, 0),  # so that it does not end with its parent
}
for name, arguments in tries.items():
  if getattr(libc, name)(*arguments) >= 0: print('ALLOWED', name)
for number in (321, 298, 323, 425, 250, 310, 311, 175, 319, 29, 435) if os.uname().machine == 'x86_64' else (280, 425):
  if libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0) >= 0: print('ALLOWED', number)
clone = ctypes.c_long(56 if os.uname().machine == 'x86_64' else 220)
if libc.syscall(clone, 0x10000011, 0, 0, 0, 0) >= 0: print('ALLOWED clone')
print('end')
"""
  with patient_tool.session() as session:
    assert session.run(code) == "end\n"


def test_files_that_others_read_too_are_no_channel(patient_tool: PythonTool) -> None:
  """Locks, leases and watches, and signals to the owner of a file."""
  code = """
import ctypes, os, socket, struct
import fcntl
libc = ctypes.CDLL(None, use_errno=True)
shared, own = os.open('/dev/zero', os.O_RDONLY), os.open('own', os.O_RDWR | os.O_CREAT)
lock = ctypes.create_string_buffer(struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 0, 0, 0))
for fd in (shared, own, os.open('.', os.O_RDONLY)):
  for operation in (fcntl.LOCK_SH, fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN):
    if libc.flock(fd, operation) == 0: print('LOCKED', fd, operation)
  for command in (fcntl.F_GETLK, fcntl.F_SETLK, fcntl.F_SETLKW, 36, 37, 38):
    if libc.fcntl(fd, command, lock) == 0: print('LOCKED', fd, command)
  for command, value in ((fcntl.F_SETLEASE, fcntl.F_RDLCK), (fcntl.F_NOTIFY, fcntl.DN_ACCESS | fcntl.DN_CREATE)):
    if libc.fcntl(fd, command, value) == 0: print('WATCHED', fd, command)
a, b = socket.socketpair()
for command, value in ((fcntl.F_SETOWN, os.getpid()), (fcntl.F_SETSIG, 9)):
  if libc.fcntl(a.fileno(), command, value) == 0: print('OWNED', command)
for request in (0x8901, 0x8902):
  if libc.ioctl(a.fileno(), request, ctypes.byref(ctypes.c_int(os.getpid()))) == 0: print('OWNED', request)
print(os.isatty(0), fcntl.fcntl(own, fcntl.F_GETFL) & os.O_RDWR, len(os.pipe()), os.get_inheritable(os.dup(own)))
"""
  config = dataclasses.replace(patient_tool.config, preload=("fcntl", "ctypes", "socket", "struct"))
  with same_way(patient_tool, config) as tool, tool.session() as session:
    assert session.run(code) == "False 2 2 False\n"


def test_the_name_of_the_host_is_hidden(patient_tool: PythonTool) -> None:
  known = os.uname()
  code = """
import ctypes, os, platform, socket
print(os.uname().nodename, os.uname().machine, platform.node(), platform.system())
try: print(socket.gethostname())
except PermissionError: print('refused')
name = ctypes.create_string_buffer(390)
ctypes.CDLL(None).uname(name)
print([name.raw[start : start + 65].decode().strip(chr(0)) for start in (65, 325)])  # the name and the domain's
ctypes.memset(name, 0, 390)
ctypes.CDLL(None).gethostname(name, 390)
print(name.value.decode())
"""
  config = dataclasses.replace(patient_tool.config, preload=("ctypes", "platform", "socket"))
  with same_way(patient_tool, config) as tool, tool.session() as session:
    python, socket_name, *system = session.run(code).splitlines()
  assert python == f"sandbox {known.machine} sandbox Linux"
  if patient_tool.isolation["namespaces"]:
    assert [socket_name, *system] == ["sandbox", "['sandbox', 'sandbox']", "sandbox"]
  else:
    assert [socket_name, *system] == ["refused", "['', '']", ""]


def test_queued_signals_are_limited(patient_tool: PythonTool) -> None:
  code = """
import os, resource, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
for _ in range(1000): os.kill(os.getpid(), signal.SIGRTMIN)
count = 0
while signal.sigtimedwait([signal.SIGRTMIN], 0): count += 1
print(count <= 128, resource.getrlimit(resource.RLIMIT_SIGPENDING))
"""
  config = dataclasses.replace(patient_tool.config, preload=("os", "resource", "signal"))
  with same_way(patient_tool, config) as tool, tool.session() as session:
    assert session.run(code) == "True (128, 128)\n"


IMMORTAL = f"""
import ctypes, os, signal
libc = ctypes.CDLL(None)
libc.prctl(1, 0, 0, 0, 0); libc.prctl(15, b'{MARKER}', 0, 0, 0)
for number in range(1, 65):
  try: signal.signal(number, signal.SIG_IGN)
  except (OSError, ValueError): pass
open('left', 'w').write('x')
try:
  if os.fork() == 0: libc.prctl(1, 0, 0, 0, 0)
except OSError: pass
while True: signal.pause()
"""
KILLED_HOST = """
import sys
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig, _zygote
_zygote._BOOT = sys.argv[2]
tool = PythonTool(PythonToolConfig(backend=sys.argv[1], wall_s=600.0))
code = "import sao_host; sao_host.ask(b'up')\\n" + sys.argv[3]
def up(message):
  print(tool._zygote._scratch, flush=True)
  return b""
tool.session().run(code, listener=up)
"""


def test_what_ignores_every_signal_ends_with_the_zygote(patient_tool: PythonTool) -> None:
  """The kernel may kill the zygote when memory runs out. Its sessions must still end."""
  with patient_tool.session() as session, concurrent.futures.ThreadPoolExecutor(1) as pool:
    text = pool.submit(session.run, IMMORTAL)
    processes.wait_until(lambda: bool(processes.with_marker(MARKER)))
    processes.kill_named(patient_tool.isolation["pid"], "sao_jax_tool")
    assert "interpreter ended" in text.result(LONG_S)
    processes.wait_until(lambda: not processes.with_marker(MARKER))
    assert session.run("6 * 7") == "42\n"


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_host_leaves_neither_processes_nor_directories(way: str) -> None:
  backend, boot = ("subprocess", BARE_BOOT) if way == "no namespaces" else (way, _zygote._BOOT)
  command = [sys.executable, "-c", KILLED_HOST, backend, boot, IMMORTAL]
  with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as host:
    assert host.stdout is not None and host.stderr is not None
    scratch = host.stdout.readline().strip()
    if "bubblewrap does not work here" in (said := "" if scratch else host.stderr.read()):
      pytest.skip(said)
    assert scratch, said
    processes.wait_until(lambda: bool(processes.with_marker(MARKER)))
    host.kill()
  processes.wait_until(lambda: not processes.with_marker(MARKER) and not os.path.exists(scratch))


def test_sessions_cannot_reach_one_another(patient_tool: PythonTool) -> None:
  with patient_tool.session() as one, patient_tool.session() as two:
    one.run("open('mine', 'w').write('secret')")
    text = two.run("""
import os, signal
print(os.listdir('.'))
try: print('READ', os.listdir('/proc')[0])
except (OSError, IndexError): pass
for pid in [*range(2, os.getpid()), *range(os.getpid() + 1, 5000)]:
  try: os.kill(pid, signal.SIGKILL); print('KILLED', pid)
  except OSError: pass
print(True)
""")
    assert text == "[]\nTrue\n"
    assert one.run("open('mine').read()") == "'secret'\n"


def test_a_forked_copy_of_the_interpreter_does_not_answer(patient_tool: PythonTool) -> None:
  if not patient_tool.isolation["processes_counted"]:
    pytest.skip("no processes where the system does not count them")
  with patient_tool.session() as session:
    text = session.run("import os\nif os.fork() == 0: print('child')\nelse: os.wait(); print('parent')")
    assert text == "child\nparent\n"
    assert session.run("6 * 7") == "42\n"


def test_a_session_that_hoards_files_is_ended_where_no_file_system_limits_it(patient_tool: PythonTool) -> None:
  """Files pile up over many calls, since the time limit of a call does not limit its files."""
  with patient_tool.session() as session:
    session.run("import os\nos.mkdir('d')\ndef save(n):\n  open(f'd/{n}', 'wb').write(b'x' * (1 << 20))")
    texts = [""]
    deadline = time.monotonic() + LONG_S
    while not texts[-1] and time.monotonic() < deadline:
      texts.append(session.run(f"save({len(texts)})" if len(texts) < 200 else ""))
      time.sleep(0.05)
  assert "interpreter ended" in texts[-1] or "No space left" in texts[-1]
  assert len(texts) > 4


HOARD = """
import ctypes, os, socket
kept = []
def save(n, how):
  flags = os.O_RDWR | (os.O_TMPFILE if how == 'nameless' else os.O_CREAT)
  fd = os.open('.' if how == 'nameless' else f'{n}', flags, 0o600)
  os.write(fd, b'x' * (1 << 20))
  if how != 'nameless': os.unlink(f'{n}')
  if how == 'mapped':
    ctypes.CDLL(None).mmap(None, ctypes.c_size_t(4096), 1, 2, fd, ctypes.c_long(0))
    os.close(fd)
  if how == 'sent':
    kept.append(socket.socketpair())
    socket.send_fds(kept[-1][0], [b'x'], [fd])
    os.close(fd)
"""


@pytest.mark.parametrize("how", ["open", "nameless", "mapped", "sent"])
def test_removed_files_count_as_long_as_they_are_held(patient_tool: PythonTool, how: str) -> None:
  config = dataclasses.replace(patient_tool.config, preload=("ctypes", "os", "socket"))
  with same_way(patient_tool, config) as tool, tool.session() as session:
    assert session.run(HOARD) == ""
    texts = [""]
    deadline = time.monotonic() + LONG_S
    while not texts[-1] and time.monotonic() < deadline:
      texts.append(session.run(f"save({len(texts)}, {how!r})" if len(texts) < 40 else ""))
      time.sleep(0.05)
  refused = "Operation not permitted" in texts[-1] and how == "sent"  # where descriptors cannot be counted in flight
  assert "interpreter ended" in texts[-1] or "No space left" in texts[-1] or refused
  assert refused or len(texts) > 4 or how == "mapped"  # their size is unknown


def test_a_session_that_holds_little_lives_on(patient_tool: PythonTool) -> None:
  config = dataclasses.replace(patient_tool.config, preload=("ctypes", "os", "socket"))
  with same_way(patient_tool, config) as tool, tool.session() as session:
    assert session.run(f"{HOARD}kept.append(1)\nfor n in range(2): save(n, 'open')") == ""
    for _ in range(3):  # checked several times
      time.sleep(0.3)
      assert session.run("len(kept)") == "1\n"


@pytest.mark.parametrize("entered", [False, True])
def test_a_session_that_cannot_be_inspected_has_outgrown_once_it_has_entered(
  entered: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  def refuse(*args: object) -> int:
    raise PermissionError

  monkeypatch.setattr(_isolation, "_removed_bytes", refuse)
  enter = "ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)" if entered else "None"
  code = f"import ctypes, sys; {enter}; print(flush=True); sys.stdin.read()"
  with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    assert _isolation.has_outgrown(process.pid, str(tmp_path), 1 << 20, 10) == entered
    process.kill()
  assert not _isolation.has_outgrown(process.pid, str(tmp_path), 1 << 20, 10)


def test_the_time_of_code_counts_from_when_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
  clock = [0.0]
  monkeypatch.setattr(_zygote, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
  ours, theirs = socket.socketpair()
  with ours, theirs, concurrent.futures.ThreadPoolExecutor(1) as pool:
    interpreter = _zygote.Interpreter(1, None, ours, 0)  # type: ignore[arg-type]
    pending = pool.submit(interpreter.call, b"pass", LONG_S)
    nonce = theirs.recv(16)[:8]
    clock[0] = 50.0
    theirs.sendall(nonce + b"S" + nonce + b".")
    assert pending.result(LONG_S) == "" and interpreter._deadline == 50.0 + LONG_S


def test_directories_are_removed_however_deep_and_closed(tmp_path: pathlib.Path) -> None:
  top = tmp_path / "top"
  (top / "12").mkdir(parents=True)
  (tmp_path / "kept").write_text("x")
  here = os.open(top / "12", os.O_RDONLY)
  (top / "12" / "link").symlink_to(tmp_path / "kept")
  (top / "12" / "closed").mkdir(mode=0o000)
  for _ in range(60):  # step by step, since the whole path is too long for any call
    os.mkdir("a" * 100, dir_fd=here)
    inner = os.open("a" * 100, os.O_RDONLY, dir_fd=here)
    os.close(here)
    here = inner
  os.close(os.open("file", os.O_CREAT, dir_fd=here))
  os.close(here)
  assert _isolation.is_larger(str(top), 1 << 30, 1024) and not _isolation.is_larger(str(tmp_path / "none"), 0, 0)
  _isolation.remove_tree(str(top))
  assert not top.exists() and (tmp_path / "kept").read_text() == "x"
