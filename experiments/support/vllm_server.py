"""vLLM's server in a process of its own, from another Python environment."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

PYTHON_VARIABLE = "SAO_JAX_TEST_VLLM_PYTHON"
"""Environment variable: the python of an environment that has vLLM."""
_START_S = 900.0


@contextlib.contextmanager
def vllm_server(python: str, checkpoint: pathlib.Path, *arguments: str) -> Iterator[str]:
  """Serves a checkpoint on loopback; yields the URL once the server responds.

  Args:
    python: of the environment that has vLLM.
    checkpoint: Hugging Face folder. The server's log is written next to it.
    arguments: further flags of the server.

  Raises:
    RuntimeError: the server ended or did not respond in time; the message has the end of its log.
  """
  with socket.create_server(("127.0.0.1", 0)) as found:
    port = found.getsockname()[1]
  command = [
    python, "-m", "vllm.entrypoints.openai.api_server", f"--model={checkpoint}", "--host=127.0.0.1", f"--port={port}",
    "--skip-tokenizer-init", *arguments,
  ]  # fmt: skip
  settings = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
  log_path = checkpoint.with_name(f"vllm-{port}.log")
  with log_path.open("wb") as log:
    server = subprocess.Popen(
      command, env={**os.environ, **settings}, stdout=log, stderr=log, start_new_session=True
    )
  try:
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + _START_S
    while not _responds(url):
      if server.poll() is not None or time.monotonic() > deadline:
        raise RuntimeError(f"vLLM did not start: {log_path.read_text(errors='replace')[-4000:]}")
      time.sleep(0.5)
    yield url
  finally:
    server.terminate()
    try:
      server.wait(60)
    except subprocess.TimeoutExpired:
      with contextlib.suppress(ProcessLookupError):  # its engine and workers too, which are in its session
        os.killpg(server.pid, signal.SIGKILL)
      server.wait()


def _responds(url: str) -> bool:
  try:
    with urllib.request.urlopen(f"{url}/health", timeout=5):
      return True
  except (urllib.error.URLError, TimeoutError, ConnectionError):
    return False
