"""Starts test programs in processes of their own, with virtual CPU devices."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

from tests.child_environment import fast_compile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


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
