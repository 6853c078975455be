"""Errors about a command's input end it with one line, and bugs keep their tracebacks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import matplotlib.font_manager  # noqa: F401 (makes the font cache, of which the command would else print a line)
import pytest
from absl import app

from experiments.support import command
from sao_jax.io.workdir import WorkdirError, WorkdirLock
from sao_jax.parallel import parse_mesh
from sao_jax.rollout import TooManyFailuresError

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def line_of(tmp_path: pathlib.Path) -> Callable[..., str | None]:
  """Returns the message for the exception that a source raises in a module of a package."""

  def line_of(source: str, package: str | None = "sao_jax.room") -> str | None:
    path = tmp_path / f"module{len(list(tmp_path.iterdir()))}.py"
    path.write_text(source, encoding="utf-8")
    with pytest.raises(BaseException) as caught:
      exec(compile(source, str(path), "exec"), {"__name__": "__main__", "__package__": package})
    return command.one_line(caught.value)

  return line_of


@pytest.mark.parametrize(
  ("source", "line"),
  [
    ("raise ValueError('seq must be >= 2; received 1.')", "seq must be >= 2; received 1."),
    ("def f(x):\n  raise TypeError(\n    f'no {x}'\n  )\nf(1)", "no 1"),
    ("try:\n  int('x')\nexcept ValueError as e:\n  raise ImportError('install it') from e", "install it"),
    ("raise OSError('the disk is full')", "the disk is full"),
    ("open('/nowhere/file')", "cannot read or write '/nowhere/file': No such file or directory"),
    ("import os\nos.rename('/no', '/where')", "cannot read or write '/no' -> '/where': No such file or directory"),
  ],
)
def test_answers_are_told_in_a_line(line_of: Callable[..., str | None], source: str, line: str) -> None:
  assert line_of(source) == line
  assert line_of(source, "experiments") == line


@pytest.mark.parametrize(
  "source",
  [
    "int('x')",
    "len(3)",
    "a, b = (1,)",
    "def f(x): pass\nf()",
    "import json\njson.loads('{')",
    "import nothing_there",
    "raise KeyError('x')",
    "raise RuntimeError('x')",
    "assert False",
    "1/0",
  ],
)
def test_bugs_keep_their_tracebacks(line_of: Callable[..., str | None], source: str) -> None:
  assert line_of(source) is None


@pytest.mark.parametrize("package", ["somewhere.experiments", "experiments_of_others", "", None])
def test_what_others_raise_keeps_its_traceback(line_of: Callable[..., str | None], package: str | None) -> None:
  assert line_of("raise ValueError('x')", package) is None
  assert command.one_line(ValueError("never raised")) is None


def test_own_exceptions_are_told(tmp_path: pathlib.Path) -> None:
  with WorkdirLock(tmp_path), pytest.raises(WorkdirError) as caught:
    WorkdirLock(tmp_path)
  assert command.one_line(caught.value) == str(caught.value)
  assert command.one_line(TooManyFailuresError("all failed")) == "all failed"
  assert command.one_line(app.UsageError("--x needs --y")) == "--x needs --y"
  with pytest.raises(ValueError, match="mesh") as wrong:
    parse_mesh("fdsp=8")
  assert command.one_line(wrong.value) == str(wrong.value)


@pytest.mark.parametrize(
  ("arguments", "line"),
  [
    (["--workdir=nowhere"], "plots: workdir must be the folder of a run; 'nowhere' holds no metrics.jsonl."),
    (["more"], "plots: unexpected arguments: more"),
  ],
)
def test_a_command_ends_with_the_line(arguments: list[str], line: str, tmp_path: pathlib.Path) -> None:
  done = subprocess.run(
    [sys.executable, "-m", "experiments.plots", *arguments], capture_output=True, text=True, cwd=tmp_path, timeout=500,
    env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, check=False,
  )  # fmt: skip
  assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.startswith("plots: ")
  assert line in done.stderr and done.stdout == ""
