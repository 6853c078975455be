"""The real server over a tiny policy, on a thread of the test's process or in its own process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from sao_jax.rollout import EngineConfig
from sao_jax.rollout.server.completions import Completions
from sao_jax.rollout.server.config import ServerConfig
from sao_jax.rollout.server.server import CompletionServer
from tests.rollout.fakes import POLICY, STOP, VOCAB, make_params
from tests.waiting import LONG_S

MAX_LEN = 256
ENGINE = EngineConfig(
  num_slots=4, max_len=MAX_LEN, max_action_tokens=MAX_LEN, chunk_steps=4, token_budget=64
)  # fmt: skip


def save_table(params: Any, folder: pathlib.Path) -> None:
  """Writes the fake policy's parameters."""
  folder.mkdir(parents=True)
  np.savez(folder / "params.npz", **jax.device_get(params))


def load_table(folder: pathlib.Path) -> Any:
  try:
    with np.load(folder / "params.npz", allow_pickle=False) as file:
      return {name: jax.numpy.asarray(file[name]) for name in ("table", "id", "mark")}
  except KeyError as error:
    raise ValueError(f"not a policy: {error}") from error


@contextlib.contextmanager
def serving(
  *,
  params: Any = None,
  completions: Completions | None = None,
  load: Any = load_table,
  tokenizer: Any = None,
  **config: Any,
) -> Iterator[str]:
  """Yields the URL of a server over the fake policy, or over other `completions`."""
  params = make_params(0) if params is None else params
  made = completions or Completions(
    model=POLICY, params=params, label="default", vocab_size=VOCAB, stop_ids=(STOP,), config=ENGINE
  )
  with made:
    settings = ServerConfig(port=0, **config)
    server = CompletionServer(made, name="tiny", load=load, config=settings, tokenizer=tokenizer)
    with on_thread(server.running()) as (host, port):
      yield f"http://{host}:{port}"


@contextlib.contextmanager
def on_thread(context: contextlib.AbstractAsyncContextManager[Any]) -> Iterator[Any]:
  """Enters an asynchronous context on an event loop that runs on a thread."""
  loop = asyncio.new_event_loop()
  thread = threading.Thread(target=loop.run_forever, daemon=True)
  thread.start()
  try:
    value = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(LONG_S)
    try:
      yield value
    finally:
      asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(LONG_S)
  finally:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(LONG_S)
    loop.close()


def call(url: str, body: Any = None, *, method: str | None = None, headers: Any = None) -> tuple[int, Any]:
  """Sends a request and returns the status and JSON of the response; a `body` of bytes is sent unchanged."""
  data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
  headers = {"Content-Type": "application/json", **(headers or {})}
  method = method or ("GET" if data is None else "POST")
  request = urllib.request.Request(url, data=data, method=method, headers=headers)
  try:
    with urllib.request.urlopen(request, timeout=LONG_S) as response:
      return response.status, json.loads(response.read() or b"null")
  except urllib.error.HTTPError as error:
    with error:
      return error.code, json.loads(error.read() or b"null")


class Process:
  """`python -m experiments.serve` in its own process; `kill` sends SIGKILL."""

  def __init__(self, *arguments: str, log: pathlib.Path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "experiments.serve", *arguments]
    with log.open("ab") as errors:
      self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
      assert self._process.stdout is not None
      line = self._process.stdout.readline()
      match = re.fullmatch(r"serving on (http://\S+)\n", line)
      if match is None:
        raise RuntimeError(f"the server did not start: {line!r}\n{log.read_text()}")
    except BaseException:  # the test's timeout too
      self.kill()
      raise
    self.url = match[1]

  def kill(self) -> None:
    self._process.kill()
    self._wait()

  def stop(self) -> int:
    """Sends SIGTERM; returns the exit status."""
    self._process.terminate()
    return self._wait()

  def _wait(self) -> int:
    status = self._process.wait(LONG_S)
    assert self._process.stdout is not None
    self._process.stdout.close()
    return status
