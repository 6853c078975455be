"""Programs in processes of their own, with limits of time and memory that the operating system enforces.

For code that cannot be trusted to end: native libraries that read untrusted files. The process first runs this file,
which sets the limits, and then the program. Neither may import the library, whose own imports would cost more than the
rest of the start.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import runpy
import signal
import subprocess
import sys


def run(
  program: pathlib.Path, request: bytes, *, cpu_seconds: float, wall_seconds: float, memory_bytes: int
) -> bytes:
  """Runs a Python file, which reads the request from standard input and writes its reply to standard output.

  Args:
    program: the file; imports of its neighbours do not work.
    request: all of its input.
    cpu_seconds: processor time that it may take.
    wall_seconds: time that it may take on a busy machine.
    memory_bytes: address space that it may take beyond Python's own.

  Returns:
    Its output.

  Raises:
    ValueError: it met a limit, or ended otherwise than with status 0; "it takes more than ...".
  """
  # A program of its own, not multiprocessing: that imports the caller's main module again, which a script without a
  # guard and a notebook do not survive. -P: the modules that lie next to the program are not for it.
  command = [sys.executable, "-P", __file__, str(program), str(cpu_seconds), str(memory_bytes)]
  with subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
  ) as process:
    try:
      reply, _ = process.communicate(request, timeout=wall_seconds)
    except subprocess.TimeoutExpired as error:
      raise ValueError(f"it takes more than {wall_seconds:g} s") from error
    finally:
      process.kill()
  if process.returncode == -signal.SIGPROF:
    raise ValueError(f"it takes more than {cpu_seconds:.1f} s of processor time")
  if process.returncode:
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
    raise ValueError(f"it takes more than {memory_bytes >> 20} MiB of memory, or breaks the process ({ended})")
  return reply


def _limit_memory(most: int) -> None:
  """Limits the address space to what is used now and `most` (where /proc tells what is used)."""
  with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:
    wanted = int(file.read().split()[0]) * resource.getpagesize() + most
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(program: str, cpu_seconds: float, memory_bytes: int) -> None:
  """Sets the limits and runs the program."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # An interrupt of the terminal is for the caller, who ends this process.
  signal.signal(signal.SIGPROF, signal.SIG_DFL)  # A caller may have ignored or blocked it, which is inherited.
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  os.environ.pop("RUST_BACKTRACE", None)
  _limit_memory(memory_bytes)
  signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
  runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
  main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
