"""The other end of `scoring_process`, run as a program: answers requests, one line of JSON each, until its input ends.

It first says whether it could start, then answers every `[limit_s, request]`. A reply is `["reply", value]`, or
`["error", kind, message]` where the function that answers raised.

    python -P _scoring_worker.py MODULE MEMORY_BYTES
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, TextIO

_MAX_MESSAGE_CHARS = 2_000


def _load(name: str) -> Any:
  """Imports a module, but of this library none of the packages' own imports, which cost more than the rest."""
  root = pathlib.Path(__file__).resolve().parents[3]
  parts = name.split(".")[:-1] if name.startswith("sao_jax.") else []
  for package in {"sao_jax", "sao_jax.envs", *(".".join(parts[: i + 1]) for i in range(len(parts)))}:
    sys.modules[package] = module = types.ModuleType(package)
    module.__path__ = [str(root.joinpath(*package.split(".")))]
  return importlib.import_module(name)


def _limit_memory(more_bytes: int) -> None:
  """An answer like 10^(10^10) ends in a MemoryError, not in all of the machine's memory (where /proc tells its use)."""
  with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as file:
    limit = int(file.read().split()[0]) * resource.getpagesize() + more_bytes
    highest = resource.getrlimit(resource.RLIMIT_AS)[1]
    if highest != resource.RLIM_INFINITY:
      limit = min(limit, highest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _own_output() -> TextIO:
  """Standard output, which from here on leads nowhere for everything else that prints."""
  output = os.fdopen(os.dup(1), "w", buffering=1, encoding="ascii")
  os.dup2(2, 1)
  return output


def _reply(function: Callable[..., Any], *arguments: Any) -> str:
  try:
    return json.dumps(["reply", function(*arguments)])
  except Exception as error:  # noqa: BLE001 (the other end raises it)
    return json.dumps(["error", type(error).__name__, str(error)[:_MAX_MESSAGE_CHARS]])


def main(module: str, memory_bytes: int) -> None:
  """Answers until the other end closes."""
  # An interrupt of the terminal is for the other end, which closes the pipe.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  output = _own_output()
  answer: list[Callable[[Any], Any]] = []
  started = _reply(lambda: answer.append(_load(module).start()))
  if answer:
    _limit_memory(memory_bytes)
  output.write(started + "\n")
  for line in sys.stdin if answer else ():
    limit_s, request = json.loads(line)
    # The other end kills this process well before that, unless it was itself killed: then nothing else would.
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 10)
    reply = _reply(answer[0], request)
    signal.setitimer(signal.ITIMER_REAL, 0)
    output.write(reply + "\n")


if __name__ == "__main__":
  main(sys.argv[1], int(sys.argv[2]))
