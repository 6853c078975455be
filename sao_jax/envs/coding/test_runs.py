"""Runs of pytest on a repository, each in a new sandbox that can write only to its own temporary folder.

`PythonRuns` uses this Python, with the packages that its config names. `ImageRuns` uses the unpacked root of a
container image, and the Python in it, through bubblewrap.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any, Protocol

from sao_jax.envs.coding import _named_tests
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig, _seccomp

_STARTED = "started"
_PASSED = "passed"
_MAX_MESSAGES = 2

_PROGRAM = """
def _main():
  import os, sys, types
{channel}
  import pytest
  module = types.ModuleType("named_tests")
  exec(compile({text!r}, "<tests>", "exec", dont_inherit=True), module.__dict__)
  tell("started")
  module.{function}(root, scratch, *{arguments!r}, tell)
_main()
"""

# Code of the repository cannot import `sao_host`, since it is removed first.
_SESSION_CHANNEL = """
  import sao_host
  ask = sys.modules.pop("sao_host").ask
  def tell(word): ask(word.encode())
  scratch = os.getcwd()
  root = next(path for path in (folder + "/" + {name!r} for folder in sys.path) if os.path.isdir(path))
"""

_IMAGE_CHANNEL = """
  import resource
  for kind, value in {limits!r}:
    resource.setrlimit(getattr(resource, kind), (value, value))
  channel = os.dup(1)
  os.dup2(2, 1)
  def tell(word): os.write(channel, ({token!r} + word + chr(10)).encode())
  root, scratch = {root!r}, "/tmp"
"""


class Runs(Protocol):
  """A way to run pytest on a folder whose code may do anything."""

  def run(self, tree: pathlib.Path, function: str, arguments: Sequence[Any]) -> tuple[list[str], str]:
    """Calls a function of `_named_tests` and returns what it told, and the output.

    Args:
      tree: the repository, alone in its parent folder.
      function: name of the function.
      arguments: its arguments between `scratch` and `tell`, as literals.

    Raises:
      RuntimeError: pytest could not be started. This is no fault of the repository.
    """
    ...


def show(runs: Runs, tree: pathlib.Path, arguments: Sequence[str]) -> str:
  """Runs pytest with arguments of the model and returns its output. Code can fake it, so it gives no reward."""
  return runs.run(tree, "show", [list(arguments)])[1]


def passes(
  runs: Runs, tree: pathlib.Path, names: Sequence[str], control: str, options: Sequence[str] = ()
) -> tuple[bool, str]:
  """Whether all named tests pass, and the output. `control` names a test that must fail (see `_named_tests.grade`)."""
  told, text = runs.run(tree, "grade", [list(names), control, list(options)])
  return told == [_STARTED, _PASSED], text


@dataclasses.dataclass(frozen=True, kw_only=True)
class PythonRuns:
  """Runs with the present Python. `config.packages` must hold pytest and what the repository requires."""

  config: PythonToolConfig = PythonToolConfig(
    packages=("pytest",), wall_s=100.0, cpu_s=100, session_cpu_s=200, memory_mb=2048, scratch_mb=64, pool_size=1,
    max_output_bytes=16_384,
  )  # fmt: skip

  def run(self, tree: pathlib.Path, function: str, arguments: Sequence[Any]) -> tuple[list[str], str]:
    told: list[str] = []

    def listen(message: bytes) -> bytes | None:
      told.append(message.decode(errors="replace"))
      return b"" if len(told) <= _MAX_MESSAGES else None

    # The folder above the repository, which holds no module, is what the sandbox makes importable. So no file of the
    # repository can take the place of a module that the sandbox itself imports.
    config = dataclasses.replace(self.config, python_path=(*self.config.python_path, str(tree.parent)))
    with PythonTool(config) as tool, tool.session() as session:
      text = session.run(_program(_SESSION_CHANNEL.format(name=tree.name), function, arguments), listener=listen)
    if told[:1] != [_STARTED]:
      raise RuntimeError(f"pytest did not start: {text}")
    return told, text


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageRuns:
  """Runs in the unpacked root of a container image. The defaults are the paths in the images of SWE-bench.

  The image is mounted read-only, with the repository at `folder`. There is no network, and no capability.
  """

  root: str
  """Folder with the unpacked root."""
  folder: str = "/testbed"
  """Path of the repository in the image."""
  python: str = "/opt/miniconda3/envs/testbed/bin/python"
  """Path of the interpreter in the image. It must have pytest."""
  config: PythonToolConfig = PythonRuns.config
  """Limits. The number of processes is not limited."""

  def run(self, tree: pathlib.Path, function: str, arguments: Sequence[Any]) -> tuple[list[str], str]:
    if shutil.which("bwrap") is None:
      raise RuntimeError("images need bubblewrap (bwrap), which is not installed.")
    token = secrets.token_hex(16)
    size, cpu_s = self.config.scratch_mb << 20, self.config.session_cpu_s
    limits = [
      ("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", size), ("RLIMIT_AS", self.config.memory_mb << 20), ("RLIMIT_CPU", cpu_s),
    ]  # fmt: skip
    channel = _IMAGE_CHANNEL.format(limits=limits, token=token, root=self.folder)
    program = _program(channel, function, arguments)
    with tempfile.TemporaryFile() as told, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as rules:
      rules.write(_seccomp.program(os.uname().machine, processes=True))
      rules.seek(0)
      command = self._command(tree, rules.fileno() if os.fstat(rules.fileno()).st_size else None)
      late = ""
      try:
        subprocess.run(
          command, input=program.encode(), stdout=told, stderr=output, timeout=self.config.wall_s, check=False,
          pass_fds=(rules.fileno(),), env={}, start_new_session=True,
        )  # fmt: skip
      except subprocess.TimeoutExpired:
        late = f"[time limit of {self.config.wall_s:g} s exceeded]\n"
      text = _ends(output.fileno(), self.config.max_output_bytes) + late
      lines = os.pread(told.fileno(), 4096, 0).decode(errors="replace").splitlines()
    words = [line.removeprefix(token) for line in lines if line.startswith(token)]
    if words[:1] != [_STARTED] and not late:
      raise RuntimeError(f"pytest did not start in {self.root}: {text}")
    return words, text

  def _command(self, tree: pathlib.Path, rules: int | None) -> list[str]:
    variables = {"PATH": f"{os.path.dirname(self.python)}:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
    return [
      "bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox",
      "--ro-bind", self.root, "/", "--proc", "/proc", "--dev", "/dev",
      "--size", str(self.config.scratch_mb << 20), "--tmpfs", "/tmp",
      "--ro-bind", str(tree), self.folder, "--chdir", self.folder, "--clearenv",
      *(word for name, value in variables.items() for word in ("--setenv", name, value)),
      *(() if rules is None else ("--seccomp", str(rules))),
      self.python, "-I", "-c", "import sys; exec(sys.stdin.read())",
    ]  # fmt: skip


def _program(channel: str, function: str, arguments: Sequence[Any]) -> str:
  text = pathlib.Path(_named_tests.__file__).read_text(encoding="utf-8")
  return _PROGRAM.format(channel=channel, text=text, function=function, arguments=tuple(arguments))


def _ends(file: int, limit: int) -> str:
  size = os.fstat(file).st_size
  if size <= limit:
    return os.pread(file, limit, 0).decode(errors="replace")
  tail = limit // 3
  first, last = os.pread(file, limit - tail, 0), os.pread(file, tail, size - tail)
  return f"{first.decode(errors='replace')}\n[... output cut ...]\n{last.decode(errors='replace')}"
