"""Starts test programs in processes of their own, with virtual CPU devices."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tests.child_environment import fast_compile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@contextlib.contextmanager
def launches() -> Iterator[list[dict[str, str]]]:
  """The environments of two processes that find each other.

  The coordinator's port is held meanwhile, or another program might be given it first: JAX's server shares a port.
  """
  with socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("localhost", 0))
    both = {
      "SAO_COORDINATOR": f"localhost:{held.getsockname()[1]}", "SAO_NUM_PROCESSES": "2",
      "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }  # fmt: skip
    yield [{**both, "SAO_PROCESS_ID": str(i)} for i in range(2)]


def start(module: str, *args: str, devices: int, **environment: str) -> subprocess.Popen[str]:
  """Starts `python -m module args` with `devices` virtual CPU devices, and a compiler that takes no pains."""
  env = fast_compile(f"--xla_force_host_platform_device_count={devices}", **environment)
  command = [sys.executable, "-m", module, *args]
  return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], timeout: float) -> Any:
  """The JSON object on the last line of its output."""
  with process:
    try:
      output, errors = process.communicate(timeout=timeout)
    finally:
      process.kill()
  assert process.returncode == 0, errors
  return json.loads(output.splitlines()[-1])
