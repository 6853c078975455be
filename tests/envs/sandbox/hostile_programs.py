"""Programs that attack the sandbox, its limits, or the protocol between it and the host."""

from __future__ import annotations

import secrets

MARKER = f"hm{secrets.token_hex(4)}"  # fits a process name; every hostile process carries it

PROGRAMS = {
  "fork bomb": """
while True:
  try: os.fork()
  except OSError: pass
""",
  "fork bomb without loops in the parent": """
def bomb():
  while True:
    if os.fork() == 0: continue
bomb()
""",
  "thread bomb": """
def spin():
  while True: time.sleep(0.01)
while True: threading.Thread(target=spin).start()
""",
  "threads that never end": """
for _ in range(3): threading.Thread(target=time.sleep, args=(1000,)).start()
print('started')
""",
  "memory bomb": "x = bytearray(10**11)",
  "slow memory bomb": "x = []\nwhile True: x.append(bytearray(10**6))",
  "memory bomb in children": """
for _ in range(50):
  try:
    if os.fork() == 0:
      x = [bytearray(10**6) for _ in range(10**6)]
  except OSError: pass
time.sleep(100)
""",
  "infinite output": "while True: print('x' * 1000)",
  "a gigabyte at once": "print('x' * 10**8)\nfor _ in range(10): sys.stdout.write('y' * 10**8)",
  "infinite output on the descriptor": "while True: os.write(1, b'z' * 65536)",
  "infinite loop": "while True: pass",
  "infinite loop in C": "sum(iter(int, 1))",
  "sleep": "time.sleep(1000)",
  "loop that catches everything": """
while True:
  try:
    while True: pass
  except BaseException: pass
""",
  "ignoring signals": """
for number in range(1, 65):
  try: signal.signal(number, signal.SIG_IGN)
  except (OSError, ValueError): pass
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while True: pass
""",
  "killing its parent": "os.kill(os.getppid(), signal.SIGKILL)\nprint('alive')",
  "killing everything": "os.kill(-1, signal.SIGKILL)\nprint('alive')",
  "killing many": """
for pid in range(1, 70000):
  if pid != os.getpid():
    try: os.kill(pid, signal.SIGKILL)
    except OSError: pass
""",
  "killing its group": "os.killpg(0, signal.SIGKILL)",
  "killing itself": "os.kill(os.getpid(), signal.SIGKILL)\nsignal.raise_signal(signal.SIGTERM)",
  "double-forked daemon": f"""
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    for fd in range(3): os.close(fd)
    os.execv('/usr/bin/sleep', ['{MARKER}', '1000'])
  os._exit(0)
time.sleep(0.2)
print('left')
""",
  "subprocess that stays": f"""
import subprocess
subprocess.Popen(['/bin/sh', '-c', 'sleep 1000; : {MARKER}'], start_new_session=True)
print('left')
""",
  "exec": f"os.execv('/usr/bin/sleep', ['{MARKER}', '1000'])",
  "os._exit": "print('bye'); os._exit(3)",
  "sys.exit": "sys.exit('bye')",
  "abort": "os.abort()",
  "segfault": "import ctypes; ctypes.string_at(0)",
  "deep recursion": "def f(): return f()\nf()",
  "deeper recursion": "sys.setrecursionlimit(10**9)\ndef f(): return f()\nf()",
  "deep recursion in C": "sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
  "deep expression": "eval('(' * 10000 + ')' * 10000)",
  "huge power": "x = 10 ** 10 ** 10",
  "huge integer shown": "10 ** 10000",
  "not UTF-8": "sys.stdout.buffer.write(bytes(range(256)) * 3)\nprint('\\udc80\\ud800')",
  "surrogates in the code": "print('\ud800')",
  "NUL in the code": "print('\0')",
  "input": "input('name? ')",
  "reading standard input": "sys.stdin.read(); os.read(0, 100)",
  "closing every descriptor": "os.closerange(0, 65536)\nprint('closed')",
  "writing to every descriptor": """
for fd in range(1024):
  try: os.write(fd, b'\\x00' * 9 + b'.' * 1000)
  except OSError: pass
""",
  "answering by itself": """
import gc, socket
for thing in gc.get_objects():
  if isinstance(thing, socket.socket):
    thing.sendall(b'12345678.' * 1000)
""",
  "swallowing the protocol": """
for fd in range(3, 1024):
  try:
    os.set_blocking(fd, True)
    while os.read(fd, 1000): pass
  except OSError: pass
""",
  "shrinking and growing the output": "os.ftruncate(201, 0)\nos.ftruncate(201, 10**12)",
  "printing markers": "print('\\0not started\\n' * 3, '[time limit of 1 s exceeded; variables are lost]')",
  "replacing builtins": """
import builtins
for name in dir(builtins):
  try: setattr(builtins, name, None)
  except BaseException as error: pass
""",
  "replacing sys.stdout": "sys.stdout = sys.stderr = sys.stdin = None\nsys.modules.clear()",
  "closing sys.stdout": "sys.stdout.close(); sys.stderr.close()",
  "replacing what the worker uses": """
os.getpid = os._exit = os.dup2 = os.ftruncate = os.kill = None
sys._current_frames = signal.setitimer = lambda *a: {}
""",
  "trace function": "sys.settrace(lambda *a: 1 / 0)\nsys.setprofile(lambda *a: 1 / 0)",
  "exit handlers": "import atexit\natexit.register(lambda: time.sleep(1000))\nsys.exit()",
  "exception that cannot be shown": """
class E(BaseException):
  def __str__(self): raise E
  __repr__ = __str__
raise E
""",
  "exception that takes for ever to show": """
class E(BaseException):
  def __str__(self):
    while True: pass
raise E
""",
  "value that prints for ever": """
class V:
  def __repr__(self):
    while True: pass
V()
""",
  "alarm": "signal.setitimer(signal.ITIMER_REAL, 0.05, 0.001)\nsignal.signal(signal.SIGALRM, lambda *a: 1 / 0)",
  "alarm that kills": "signal.alarm(1); signal.setitimer(signal.ITIMER_PROF, 0.01)\nwhile True: pass",
  "filling the disk with one file": "f = open('a', 'wb')\nwhile True: f.write(b'x' * 10**6)",
  "filling the disk with many": """
n = 0
while True:
  n += 1
  with open(f'{n}', 'wb') as f: f.write(b'x' * 10**6)
""",
  "using up inodes": "n = 0\nwhile True:\n  n += 1\n  os.mkdir(f'{n}')",
  "using up descriptors": "x = []\nwhile True: x.append(open('/dev/null'))",
  "using up pipes": "x = []\nwhile True: x.append(os.pipe())",
  "anonymous files": "x = []\nwhile True:\n  x.append(os.memfd_create('x')); os.write(x[-1], b'x' * 10**6)",
  "raising its limits": """
import resource
for kind in range(16):
  try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
  except (OSError, ValueError): pass
x = bytearray(10**10)
""",
  "saying that it did not start": "os.ftruncate(201, 0); os.pwrite(201, b'\\0not started\\n', 0); os._exit(0)",
  "saying that it did not start, for ever": """
import sao_host
os.ftruncate(201, 0)
while True: sao_host.ask.__self__._connection.sendall(sao_host.ask.__self__._number.to_bytes(8, 'little') + b'S')
""",
  "asking where nobody listens": "import sao_host; print(sao_host.ask(b'x'))",
  "asking too much": "import sao_host; sao_host.ask(b'x' * (1 << 24))",
  "half an answer": "import sao_host; sao_host.ask.__self__._connection.sendall(b'1234'); time.sleep(100)",
  "answers without end": """
import sao_host
while True: sao_host.ask.__self__._connection.sendall(sao_host.ask.__self__._number.to_bytes(8, 'little') + b'.')
""",
  "another output": "os.dup2(os.open('mine', os.O_RDWR | os.O_CREAT), 201); print('x')",
  "output that changes while it is read": """
import mmap
os.ftruncate(201, 4096)
page = mmap.mmap(201, 4096)
if os.fork() == 0:
  while True: page[:] = os.urandom(4096)
""",
  "stopping itself": "os.kill(os.getpid(), signal.SIGSTOP)\nos.killpg(0, signal.SIGSTOP)\nprint('on')",
  "stopping everything": "os.kill(-1, signal.SIGSTOP)",
  "all signals": """
for number in range(1, 65):
  try: os.kill(os.getpid(), number)
  except BaseException: pass
""",
  "outliving its parent": f"""
import ctypes
ctypes.CDLL(None).prctl(1, 0, 0, 0, 0); ctypes.CDLL(None).prctl(15, b'{MARKER}', 0, 0, 0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: pass
""",
  "threads that nobody counts": """
import _thread
for _ in range(3): _thread.start_new_thread(time.sleep, (1000,))
sys._current_frames = lambda: {1: None}
""",
  "shared memory": "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 24)); x[-1].write(b'x' * (1 << 24))",
  "pipes filled": """
import fcntl
x = []
for _ in range(25):
  x.append(os.pipe())
  os.set_blocking(x[-1][1], False)
  try:
    fcntl.fcntl(x[-1][1], 1031, 1 << 20)
    while True: os.write(x[-1][1], b'x' * 65536)
  except OSError: pass
""",
  "descriptors in flight": """
import socket
a, b = socket.socketpair()
while True:
  one, two = os.pipe()
  socket.send_fds(a, [b'x'], [one, two]); os.close(one); os.close(two)
""",
  "deep directories": "while True: os.mkdir('a'); os.chdir('a')",
  "directories that cannot be read": "os.mkdir('d'); open('d/f', 'w').close(); os.chmod('d', 0); os.chmod('.', 0o500)",
  "sparse file": "os.truncate(os.open('s', os.O_RDWR | os.O_CREAT), 1 << 40)",
  "waiting on a pipe in the file system": "os.mkfifo('p'); open('p').read()",
  "machine code": """
import ctypes, mmap
page = mmap.mmap(-1, 4096, prot=7)
page.write(b'\\xb8\\x02\\x00\\x00\\x00\\xcd\\x80\\xeb\\xf7')  # fork by a 32-bit call, in a loop
ctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
""",
  "regular expression": "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
  "sources that are gone": "import linecache\nlinecache.cache = None\n1 / 0",
  "compiling that does nothing": "import builtins\nbuiltins.compile = builtins.exec = lambda *a, **k: None",
  "showing that does nothing": "sys.displayhook = lambda value: time.sleep(1000)\n1",
  "importing that takes for ever": """
class Finder:
  def find_spec(self, *a): time.sleep(1000)
sys.meta_path.insert(0, Finder())
import nothing_of_this_name
""",
  "finalizer that makes another": """
class Again:
  def __del__(self): Again()
Again()
""",
  "unused memory of the compiler": "exec('x = ' + 'lambda: ' * 20000 + '0')",
  "long code": "x = '" + "a" * 900_000 + "'",
  "code too long": "#" + "x" * 10_000_000,
  "brackets": "(" * 100_000,
  "signs": "x = " + "-" * 200_000 + "1",
  "terminal sequences and odd characters": "print('\\x1b]0;x\\x07\\x1b[2J\\u202e\\u2028')",
  "SIGKILL from an exiting child of a stopped parent": """
pid = os.fork()
if pid == 0:
  os.kill(os.getppid(), signal.SIGSTOP); time.sleep(50)
os.waitpid(pid, 0)
""",
  "vfork by ctypes": """
import ctypes
while True: ctypes.CDLL(None).vfork()
""",
  "clone with a shared memory": """
import ctypes
libc = ctypes.CDLL(None)
for flags in (0x100, 0x10f00, 0x3d0f00, 0x80000000):
  libc.syscall(56, flags | 17, 0, 0, 0, 0)
time.sleep(30)
""",
  "posix_spawn storm": f"""
for _ in range(10000):
  try: os.posix_spawn('/bin/sleep', ['{MARKER}', '1000'], {{}})
  except OSError: pass
""",
  "orphans with closed descriptors and new sessions": """
for _ in range(30):
  try:
    if os.fork() == 0:
      os.setsid(); os.closerange(0, 1000)
      if os.fork() == 0:
        while True: pass
      os._exit(0)
  except OSError: pass
""",
  "pidfd of the parent": """
try:
  fd = os.pidfd_open(os.getppid()); signal.pidfd_send_signal(fd, 9); print('SENT')
except OSError as e: print(e.errno)
""",
  "setpriority, affinity of others": """
for pid in [0, 1, os.getppid()]:
  for call in (lambda: os.setpriority(os.PRIO_PROCESS, pid, -20), lambda: os.sched_setaffinity(pid, {0}),
               lambda: os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(50))):
    try: call()
    except OSError: pass
while True: pass
""",
  "passing its protocol socket away": """
import socket, sao_host
c = sao_host.ask.__self__._connection
a, b = socket.socketpair()
socket.send_fds(a, [b'x'], [c.fileno()]); c.close()
if os.fork() == 0: time.sleep(100)
""",
  "shutdown of its protocol socket": """
import socket, sao_host
sao_host.ask.__self__._connection.shutdown(socket.SHUT_RDWR)
print('on')
""",
  "half shutdown": """
import socket, sao_host
sao_host.ask.__self__._connection.shutdown(socket.SHUT_RD)
print('on')
""",
  "drains its protocol socket in a thread": """
import threading, sao_host
def drain():
  while True: sao_host.ask.__self__._connection.recv(1 << 16)
threading.Thread(target=drain, daemon=True).start()
""",
  "changes its worker's methods": """
import sao_host
w = sao_host.ask.__self__
w._run = lambda code: None
w._end_children = lambda: time.sleep(100)
""",
  "worker that says another number": """
import sao_host
sao_host.ask.__self__._number = 7
""",
  "globals replaced": """
import sao_host
sao_host.ask.__self__._globals = None
""",
  "audit hook that raises": "sys.addaudithook(lambda *a: 1 / 0)",
  "switch interval": """
sys.setswitchinterval(1e9)
import threading
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
""",
  "faulthandler": """
import faulthandler
faulthandler.dump_traceback_later(0.1, repeat=True, exit=False)
time.sleep(0.5); faulthandler._sigsegv()
""",
  "stack overflow in C": """
import ctypes
sys.setrecursionlimit(10**8)
class A:
  def __getattr__(self, n): return getattr(self, n)
A().x
""",
  "pickle bomb": """
import pickle
x = b'\\x80\\x04' + b'(' * 10**7
pickle.loads(x)
""",
  "zip bomb": """
import zlib
x = zlib.compress(b'0' * 10**8)
for _ in range(100): x = zlib.compress(x)
zlib.decompress(zlib.compress(b'0' * 10**9))
""",
  "symlink loop": "os.symlink('b', 'a'); os.symlink('a', 'b'); open('a')",
  "directory descriptor escape": """
fd = os.open('/', os.O_RDONLY)
for _ in range(3): os.mkdir('x') if not os.path.exists('x') else None
os.chdir('x'); os.fchdir(fd); print(sorted(os.listdir('.'))[:3])
""",
  "proc self mem": """
try:
  f = open('/proc/self/mem', 'r+b'); print('OPENED')
except OSError as e: print('no')
""",
  "ioctl of terminals": """
import fcntl, termios
for fd in range(256):
  try: fcntl.ioctl(fd, termios.TIOCSTI, b'x'); print('PUSHED')
  except OSError: pass
""",
  "file locks": """
import fcntl
fcntl.flock(201, fcntl.LOCK_EX); fcntl.lockf(201, fcntl.LOCK_EX)
print('x')
""",
  "output sealed": """
import fcntl
for seal in (1, 2, 4, 8, 16):
  try: fcntl.fcntl(201, 1033, seal)
  except OSError as e: print(e.errno)
print('sealed')
""",
  "output made enormous and sparse": """
os.ftruncate(201, 4 * 2**20)
os.pwrite(201, b'x', 4 * 2**20 - 1)
""",
  "output removed by punching holes": """
import ctypes
print('a' * 5000); ctypes.CDLL(None).fallocate(201, 3, 0, 4096)
""",
  "nonblocking protocol": "os.set_blocking(200, False)",
  "protocol closed on exec": f"""os.set_inheritable(200, True)
os.execv('/bin/cat', ['{MARKER}', '/proc/self/fd/200'])""",
  "signals to the group at exit": """
import atexit
atexit.register(os.killpg, 0, 9)
sys.exit(0)
""",
  "subinterpreter": """
import _xxsubinterpreters as s
for _ in range(50): s.create()
""",
  "environment": "os.environ.update({str(i): 'x' * 1000 for i in range(10**6)})",
  "traceback that is very long": """
def f(n): return f(n - 1) if n else 1 / 0
f(900)
""",
  "exception chain without end": """
e = ValueError('x')
for _ in range(100000):
  n = ValueError('y'); n.__cause__ = e; e = n
raise e
""",
  "exception cycle": """
a, b = ValueError(), ValueError()
a.__cause__, b.__cause__ = b, a
raise a
""",
  "exception group": "raise ExceptionGroup('x', [ValueError(i) for i in range(10**5)])",
  "notes": """
e = ValueError('x')
for _ in range(10**5): e.add_note('n' * 100)
raise e
""",
  "syntax error with a huge line": "eval('x ' * 10**6)",
  "native threads": """
import ctypes
libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
for _ in range(4): libc.pthread_create(ctypes.byref(thread), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)
""",
  "a filter of its own that refuses every call": """
import ctypes, struct
refuse = ctypes.create_string_buffer(struct.pack('<HBBI', 6, 0, 0, 0x00050001))
ctypes.CDLL(None).prctl(22, 2, struct.pack('@HP', 1, ctypes.addressof(refuse)), 0, 0)
""",
  "child that answers first": """
import sao_host
worker = sao_host.ask.__self__
if os.fork() == 0:
  worker._connection.sendall(worker._number.to_bytes(8, 'little') + b'.')
  time.sleep(100)
time.sleep(0.2)
""",
  "child that poses as the worker": "real = os.getpid()\nos.getpid = lambda: real\nos.fork()",
  "dump of the interpreter into the protocol": "import faulthandler\nfaulthandler.dump_traceback(file=200)",
  "error handlers of codecs": """
import codecs
for name in ('backslashreplace', 'replace'): codecs.register_error(name, lambda error: ('x' * 10**7, error.end))
print('\\ud800')
""",
  "builtins deleted": "import builtins\nfor name in ('len', 'isinstance', 'BaseException'): delattr(builtins, name)",
  "exception whose class cannot be named": """
class Meta(type):
  def __getattribute__(cls, name): raise SystemExit
class E(Exception, metaclass=Meta): pass
raise E
""",
  "exception with a huge name": "raise type('E' * 10**7, (Exception,), {})",
  "bytecode that is none": "f = lambda: 0\nf.__code__ = f.__code__.replace(co_code=bytes(range(256)))\nf()",
  "types overwritten": "import ctypes\nctypes.memset(id(int), 0, 200)\nint('3')",
}
