"""The program of the processes of `template_renderer`: it reads and writes lines of JSON.

A chat template is a program from an untrusted file. It may loop for hours or use all memory of the machine, in any
rendering and even while it is compiled. The operating system enforces limits on this process. The first line of input
is an object of named templates, and its reply is null or an error. Each further line asks for one rendering.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import random
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import jinja2
import jinja2.ext
import jinja2.sandbox

from sao_jax.utils import child_process

CPU_SECONDS = 2.0
"""Processor time of one rendering; real templates take milliseconds."""
WALL_SECONDS = 60.0
"""Time of one rendering on a busy machine."""
MEMORY_BYTES = 1 << 29
"""Memory for compiling and rendering."""
MAX_CHARS = 1 << 23
"""Longest rendered text; no context holds as much."""
DAY: tuple[int, int, int] = (2024, 7, 26)
"""The date that `strftime_now` returns: prompts are the same every day. It is the default of Llama's templates."""

_MAX_MESSAGE_CHARS = 500


class _TooLongError(Exception):
  """The text is longer than `MAX_CHARS`."""


class _Generation(jinja2.ext.Extension):
  """The block `{% generation %}` ... `{% endgeneration %}` around an assistant's text, rendered as its content."""

  tags = {"generation"}  # noqa: RUF012 (the base class declares a plain set)

  def parse(self, parser: Any) -> Any:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def make_environment() -> jinja2.Environment:
  """Returns a sandboxed environment with the filters and functions that templates of checkpoints use."""

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
  )
  environment.filters["tojson"] = to_json
  environment.globals.update(raise_exception=refuse, strftime_now=datetime.datetime(*DAY).strftime)
  return environment


def compile_all(environment: jinja2.Environment, sources: Mapping[str, str]) -> dict[str, jinja2.Template]:
  """Compiles templates by name. Raises ValueError if one is invalid."""
  try:
    return {name: environment.from_string(source) for name, source in sources.items()}
  except jinja2.TemplateSyntaxError as error:
    raise ValueError(f"is not valid jinja2, line {error.lineno}: {error.message}") from error
  except RecursionError as error:
    raise ValueError("is too deeply nested.") from error
  except MemoryError as error:
    raise ValueError(f"fails: compiling it takes more than {MEMORY_BYTES >> 20} MiB.") from error


def render(template: jinja2.Template, values: Mapping[str, Any]) -> dict[str, Any]:
  """Renders one conversation.

  Returns:
    `{"text": ...}` or `{"error": reason, "bound": flag}`. The flag is true if the template exceeded a limit.
  """
  random.seed(0)  # The filter `random` and the function `lipsum` draw from it.
  pieces, size = [], 0
  try:
    for piece in template.generate(values):
      size += len(piece)
      if size > MAX_CHARS:
        raise _TooLongError
      pieces.append(piece)
    return {"text": "".join(pieces)}
  except jinja2.TemplateError as error:
    return {"error": f"refuses the messages: {error.message or ''!s:.{_MAX_MESSAGE_CHARS}}", "bound": False}
  except _TooLongError:
    return {"error": f"fails: the text has more than {MAX_CHARS} characters", "bound": True}
  except MemoryError:
    return {"error": f"fails: rendering takes more than {MEMORY_BYTES >> 20} MiB", "bound": True}
  except Exception as error:  # noqa: BLE001 (a template is a program and may raise anything)
    # The sandbox refuses long ranges by an OverflowError.
    bound = isinstance(error, OverflowError | RecursionError)
    return {"error": f"fails: {error!r:.{_MAX_MESSAGE_CHARS}}", "bound": bound}


@contextlib.contextmanager
def _limited_time() -> Any:
  """Ends the process if the block exceeds the time limits, even inside one long operation."""
  signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
  signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
  try:
    yield
  finally:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)


def _reply(output: TextIO, answer: Callable[[], Any]) -> Any:
  with _limited_time():
    value = answer()
  output.write(json.dumps(value) + "\n")


def main() -> None:
  """Answers requests until the input ends."""
  output = child_process.take_output()
  child_process.limit_memory(MEMORY_BYTES)
  environment = make_environment()
  templates: dict[str, jinja2.Template] = {}

  def compile_them() -> str | None:
    try:
      templates.update(compile_all(environment, json.loads(sys.stdin.readline() or "{}")))
    except ValueError as error:
      return str(error)
    return None

  _reply(output, compile_them)
  for line in sys.stdin:
    name, values = json.loads(line)
    _reply(output, lambda: render(templates[name], values))  # noqa: B023 (called at once)


if __name__ == "__main__":
  main()
