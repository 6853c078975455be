"""The first program of a child process (see `limited_process`), and functions for the program that it then runs.

    python -P child_process.py PROGRAM CPU_SECONDS MEMORY_BYTES [ARGUMENT ...]

Importing the whole library would take longer than the rest of the start. So the package `sao_jax` is empty in a child,
and programs import only the modules they need, such as this one. This module uses the standard library only.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import resource
import runpy
import signal
import sys
import types
from typing import Any, TextIO


def limit_memory(more_bytes: int) -> None:
  """Limits the address space to its present size plus `more_bytes`. Does nothing on systems without /proc."""
  with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def take_output() -> TextIO:
  """Returns standard output for the caller alone; anything else that prints writes to standard error instead."""
  output = os.fdopen(os.dup(1), "w", buffering=1, encoding="ascii")
  os.dup2(2, 1)
  return output


def import_alone(name: str) -> Any:
  """Imports a module, but skips the `__init__` modules of the library's packages above it."""
  parts = name.split(".")
  for length in range(1, len(parts)) if parts[0] == "sao_jax" else ():
    _replace_package(parts[:length])
  return importlib.import_module(name)


def extend_path(folders: list[str]) -> None:
  """Appends the caller's `sys.path`, so that modules of its working directory or notebook can be imported here too."""
  sys.path += [folder for folder in folders if folder not in sys.path]


def _replace_package(parts: list[str]) -> None:
  name = ".".join(parts)
  if name not in sys.modules:
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [str(pathlib.Path(__file__).resolve().parents[1].joinpath(*parts[1:]))]


def main(program: str, cpu_seconds: float, memory_bytes: int, *arguments: str) -> None:
  """Sets the limits (0 stands for none) and runs the program with the arguments."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for the caller, who ends this process.
  for number in (signal.SIGPROF, signal.SIGALRM):  # The caller may ignore or block them, and that is inherited.
    signal.signal(number, signal.SIG_DFL)
  signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
  os.environ.pop("RUST_BACKTRACE", None)
  _replace_package(["sao_jax"])
  if memory_bytes:
    limit_memory(memory_bytes)
  signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
  sys.argv[:] = [program, *arguments]
  runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
  main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
