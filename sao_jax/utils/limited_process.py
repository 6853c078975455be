"""Programs in child processes, with limits of time and memory that the operating system enforces.

For code that may never end: native libraries that read untrusted files, chat templates, and scorers that evaluate a
model's text. `run` runs a program once. A `LineProcess` stays and answers requests.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping

from sao_jax.utils import child_process

_MAX_REPLY_BYTES = 1 << 27
"""Enough for the longest text of a chat template with every character escaped as twelve."""
_END_TIMEOUT_S = 10.0
"""Time for a process that has closed its output to end."""


def run(
  program: pathlib.Path, request: bytes, *, cpu_seconds: float, wall_seconds: float, memory_bytes: int
) -> bytes:
  """Runs a Python program that reads a request from standard input and writes its reply to standard output.

  Args:
    program: the file. It cannot import other files of its folder.
    request: the whole input.
    cpu_seconds: limit of processor time.
    wall_seconds: limit of elapsed time; allow for a busy machine.
    memory_bytes: limit of address space, beyond what Python itself uses.

  Returns:
    The output.

  Raises:
    ValueError: the program exceeds a limit, or its exit status is not 0.
  """
  command = _command(program, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
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


class LineProcess:
  """A running Python program that replies to each line with a line. The process ends with this object.

  One thread at a time may use it. The program sets its own limits (see `child_process`).

  Args:
    program: the file. It cannot import other files of its folder.
    *arguments: its command-line arguments.
    environment: environment variables to set besides the caller's.
  """

  def __init__(self, program: pathlib.Path, *arguments: str, environment: Mapping[str, str] | None = None):
    self.popen = subprocess.Popen(
      _command(program, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
      bufsize=0, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    for pipe in (self.popen.stdin, self.popen.stdout):
      assert pipe is not None
      os.set_blocking(pipe.fileno(), False)
    self.stop = weakref.finalize(self, _stop, self.popen, os.getpid())
    """Ends the process. It may be called more than once."""

  @property
  def is_alive(self) -> bool:
    return self.popen.poll() is None

  def exchange(self, line: bytes, timeout_s: float | None = None) -> bytes:
    """Sends a line, unless it is empty, and returns the next line of the program.

    A process that gives no reply is stopped, even if this call is interrupted.

    Args:
      line: the request, with its line break.
      timeout_s: seconds to wait for the reply; None waits until the process ends.

    Raises:
      TimeoutError: there is no reply in time.
      EOFError: the process ended (see `popen.returncode`), or its reply is too long.
    """
    reply = b""
    try:
      reply = _exchange(self.popen, line, timeout_s)
    finally:
      if not reply:
        self.stop()
    return reply


def _command(program: pathlib.Path, *arguments: str, cpu_seconds: float = 0.0, memory_bytes: int = 0) -> list[str]:
  # multiprocessing would import the caller's main module again, which fails for a notebook and for a script without a
  # `__main__` guard. -P keeps files beside the program from being imported in place of installed modules.
  limits = (str(cpu_seconds), str(memory_bytes))
  return [sys.executable, "-P", child_process.__file__, str(program), *limits, *arguments]


def _stop(process: subprocess.Popen[bytes], owner: int) -> None:
  if os.getpid() == owner:  # A fork of the owner runs this too when it exits, but the process is not its child.
    process.kill()
    process.wait()
  for pipe in (process.stdin, process.stdout):
    if pipe is not None:
      pipe.close()


def _exchange(process: subprocess.Popen[bytes], line: bytes, timeout_s: float | None) -> bytes:
  assert process.stdin is not None and process.stdout is not None
  source, sink = process.stdout.fileno(), process.stdin.fileno()
  deadline = None if timeout_s is None else time.monotonic() + timeout_s
  poll = select.poll()
  poll.register(source, select.POLLIN)
  if line:
    poll.register(sink, select.POLLOUT)
  unsent, reply = memoryview(line), bytearray()
  while not reply.endswith(b"\n"):
    ready = poll.poll(None if deadline is None else max(0.0, deadline - time.monotonic()) * 1_000)
    if not ready:
      raise TimeoutError
    for file, _ in ready:
      if file == source:
        chunk = os.read(source, 1 << 16)
        reply += chunk
        if not chunk or len(reply) > _MAX_REPLY_BYTES:
          with contextlib.suppress(subprocess.TimeoutExpired):  # Wait for its exit status.
            process.wait(0 if chunk else _END_TIMEOUT_S)
          raise EOFError
      else:
        try:
          unsent = unsent[os.write(sink, unsent) :]
        except BlockingIOError:  # The pipe has less room than the write needs.
          pass
        except BrokenPipeError:  # The process has ended. Its output ends too.
          unsent = unsent[:0]
        if not unsent:
          poll.unregister(sink)
  return bytes(reply)
