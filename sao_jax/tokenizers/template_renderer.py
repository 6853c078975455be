"""Rendering of untrusted chat templates in a process with limits of time, memory and output."""

from __future__ import annotations

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from sao_jax.utils.extras import require_extra

_MAX_REPLY_BYTES = 1 << 27
"""The longest text, every character escaped as twelve others."""


class RefusedError(ValueError):
  """The template refuses these messages or fails on them; it may accept others."""


class TemplateRenderer:
  """Compiles and renders templates in a process of its own, which ends with this object. Thread-safe.

  A rendering that takes more than two seconds of processor time, 512 MiB of memory or 8 million characters is an error,
  and so is a template that breaks the process; the next rendering then starts a new one.

  Args:
    sources: templates by name.

  Raises:
    MissingExtraError: jinja2 is not installed.
    ValueError: jinja2 cannot read a template.
  """

  def __init__(self, sources: Mapping[str, str]):
    with require_extra("hf"):
      import jinja2  # noqa: F401 (the process imports it, whose error nobody would see)

    self._sources = dict(sources)
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None
    self._end: Any = None
    with self._lock:
      self._start()

  def render(self, name: str, values: Mapping[str, Any]) -> str:
    """Renders one template.

    Args:
      name: which.
      values: what it reads: `messages`, `tools`, `add_generation_prompt`, ...; JSON values.

    Raises:
      RefusedError: the template refuses the values or fails on them.
      ValueError: it meets a limit, or the values are not JSON.
    """
    try:
      line = json.dumps([name, values], default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
      raise ValueError(f"messages, tools and options of a chat template must be JSON values: {error}") from error
    with self._lock:
      if self._process is not None and self._process.poll() is not None:  # It was killed since the last call.
        self._stop()
      if self._process is None:
        self._start()
      reply = self._exchange(line)
    if "text" in reply:
      return str(reply["text"])
    raise (ValueError if reply["bound"] else RefusedError)(f"the chat template {reply['error']}")

  def _start(self) -> None:
    # A program of its own, not multiprocessing: that imports the caller's main module again, which a script without a
    # guard and a notebook do not survive. -P: the modules that lie next to the program are not for it.
    program = pathlib.Path(__file__).with_name("_template_worker.py")
    process = subprocess.Popen(
      [sys.executable, "-P", str(program)],
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    self._process, self._end = process, weakref.finalize(self, _kill, process)
    error = self._exchange(json.dumps(self._sources))
    if error is not None:
      self._stop()
      raise ValueError(f"the chat template {error}")

  def _stop(self) -> None:
    self._end()
    self._process = None

  def _exchange(self, line: str) -> Any:
    """Says a line and returns the reply; a process that ends instead is an error."""
    process = self._process
    assert process is not None and process.stdin is not None and process.stdout is not None
    reply = b""
    try:
      with contextlib.suppress(BrokenPipeError):  # It has ended, and will say nothing.
        process.stdin.write(line.encode("ascii") + b"\n")
        process.stdin.flush()
      reply = process.stdout.readline(_MAX_REPLY_BYTES)
      if not reply:
        process.wait()
    finally:
      if not reply.endswith(b"\n"):  # It died of the template; or an interrupt left a reply under way.
        self._stop()
    if not reply.endswith(b"\n"):
      raise ValueError(f"the chat template fails: {_cause(process.returncode)}")
    return json.loads(reply)


def _as_dict(value: Any) -> dict[str, Any]:
  if isinstance(value, Mapping):
    return dict(value)
  raise TypeError(f"received a {type(value).__name__}")


def _cause(returncode: int) -> str:
  from sao_jax.tokenizers import _template_worker

  if returncode == -signal.SIGPROF:
    return f"it takes more than {_template_worker.CPU_SECONDS:g} s of processor time"
  if returncode == -signal.SIGALRM:
    return f"it takes more than {_template_worker.WALL_SECONDS:g} s"
  return f"it ends the process that renders it (exit status {returncode})"


def _kill(process: subprocess.Popen[bytes]) -> None:
  process.kill()
  process.wait()
  for pipe in (process.stdin, process.stdout):
    if pipe is not None:
      with contextlib.suppress(BrokenPipeError):  # What it was never able to read.
        pipe.close()
