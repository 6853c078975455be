"""Rendering of untrusted chat templates in a process with limits of time, memory and output."""

from __future__ import annotations

import json
import pathlib
import signal
import threading
from collections.abc import Mapping
from typing import Any

from sao_jax.utils.extras import require_extra
from sao_jax.utils.limited_process import LineProcess


class RefusedError(ValueError):
  """The template refuses these messages or fails on them; it may accept others."""


class TemplateRenderer:
  """Compiles and renders templates in a child process, which ends with this object. Thread-safe.

  A rendering may take two seconds of processor time, 512 MiB of memory and 8 million characters. Beyond that it is an
  error. A template that crashes the process is an error too, and the next rendering starts a new process.

  Args:
    sources: templates by name.

  Raises:
    MissingExtraError: jinja2 is not installed.
    ValueError: jinja2 cannot read a template.
  """

  def __init__(self, sources: Mapping[str, str]):
    with require_extra("hf"):
      import jinja2  # noqa: F401 (the child process cannot report a missing package)

    self._sources = dict(sources)
    self._lock = threading.Lock()
    self._process = self._start()

  def render(self, name: str, values: Mapping[str, Any]) -> str:
    """Renders one template.

    Args:
      name: name of the template.
      values: variables of the template: `messages`, `tools`, `add_generation_prompt`, ...; JSON values.

    Raises:
      RefusedError: the template refuses the values or fails on them.
      ValueError: the rendering exceeds a limit, or the values are not JSON.
    """
    try:
      line = json.dumps([name, values], default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
      raise ValueError(f"messages, tools and options of a chat template must be JSON values: {error}") from error
    with self._lock:
      if not self._process.is_alive:
        self._process = self._start()
      reply = self._exchange(self._process, line)
    if "text" in reply:
      return str(reply["text"])
    raise (ValueError if reply["bound"] else RefusedError)(f"the chat template {reply['error']}")

  def _start(self) -> LineProcess:
    process = LineProcess(pathlib.Path(__file__).with_name("_template_worker.py"))
    error = self._exchange(process, json.dumps(self._sources))
    if error is not None:
      process.stop()
      raise ValueError(f"the chat template {error}")
    return process

  def _exchange(self, process: LineProcess, line: str) -> Any:
    try:
      return json.loads(process.exchange(line.encode("ascii") + b"\n"))
    except EOFError as error:
      raise ValueError(f"the chat template fails: {_cause(process.popen.returncode)}") from error


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
