"""A repository with a problem to be solved, in the format of SWE-bench: the files, the model's tools and the grade.

The model changes texts in memory. To run tests they are written into a new copy of the prepared folder, which a new
sandbox can only read. The grade takes neither the model's tests nor its settings of tests: see `Repository.grade`.

The tests and the code share a process, as in SWE-bench. Code that takes over pytest from there can fake a pass; a
control, a test that must fail, finds those ways that make every test pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import secrets
import shlex
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence

from sao_jax.envs.coding import test_runs
from sao_jax.envs.coding.patches import apply_patch
from sao_jax.envs.coding.swe_bench import SweBenchInstance

_SETTINGS = frozenset(
  ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")
  + ("sitecustomize.py", "usercustomize.py", "pytest.py", "pytest", "_pytest")
)
"""Files and folders that decide how tests run."""
_SETTINGS_ENDS = (".pth", ".dist-info", ".egg-info", ".egg-link")
_PATH = re.compile(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*", re.ASCII)
_CONTROL = "import unittest\n\nclass Control(unittest.TestCase):\n  def test_control(self):\n    self.fail()\n"
_MAX_PATH = 200

Edits = Mapping[str, str | None]
"""New texts by path; None for a file that is removed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepositoryConfig:
  """Limits of an episode's tools."""

  max_turns: int = 50
  max_observation_chars: int = 8_000
  max_file_chars: int = 1_000_000
  """Longest file that the tools read or write."""
  max_edited_files: int = 100

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"RepositoryConfig.{field.name} must be an integer >= 1; received {value!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repository:
  """An instance with its prepared folder, which is never written to.

  Raises:
    ValueError: there is no such folder, a test is not named as pytest does, there is no test to pass, or the test patch
      does not fit.
  """

  instance: SweBenchInstance
  folder: pathlib.Path
  """The repository at the base commit. `.git` in it is ignored."""
  runs: test_runs.Runs
  options: tuple[str, ...] = ()
  """Further options of pytest, such as `("-o", "addopts=")`."""

  def __post_init__(self) -> None:
    name, tests = self.instance.instance_id, (*self.instance.fail_to_pass, *self.instance.pass_to_pass)
    if not self.folder.is_dir():
      raise ValueError(f"{name}: there is no folder {str(self.folder)!r}.")
    if not self.instance.fail_to_pass:
      raise ValueError(f"{name}: FAIL_TO_PASS must name a test; received none.")
    for test in tests:
      if ".py::" not in test:
        raise ValueError(f"{name}: tests must be named as pytest does, as path.py::test; received {test!r}.")
    try:
      self.hidden_tests()
    except ValueError as error:
      raise ValueError(f"{name}: test_patch: {error}") from error

  def read(self, path: str) -> str | None:
    """Returns the text of a file at the base commit, or None. Raises ValueError if it is not text in UTF-8."""
    file = self.folder / path
    if ".." in file.parts or not _is_plain(self.folder, path) or not file.is_file():
      return None
    return file.read_bytes().decode("utf-8")

  def texts(self, max_chars: int) -> dict[str, str]:
    """Returns all files of text up to a length, by path. Links are not followed."""
    found: dict[str, str] = {}
    for folder, names, files in os.walk(self.folder):
      names[:] = [name for name in names if name != ".git"]
      for file in (pathlib.Path(folder, name) for name in files):
        mode = file.lstat()
        if stat.S_ISREG(mode.st_mode) and mode.st_size <= 4 * max_chars:
          with contextlib.suppress(UnicodeDecodeError):  # The tools show only text.
            text = file.read_bytes().decode("utf-8")
            if len(text) <= max_chars and "\0" not in text:
              found[file.relative_to(self.folder).as_posix()] = text
    return found

  def hidden_tests(self) -> Edits:
    """Returns the files that the test patch changes, from the base commit."""
    return apply_patch(self.read, self.instance.test_patch)

  def solution(self) -> Edits:
    """Returns the files that the instance's own patch changes."""
    return apply_patch(self.read, self.instance.patch)

  def grade(self, edits: Edits) -> tuple[bool, str]:
    """Whether all tests of FAIL_TO_PASS and PASS_TO_PASS pass, and the output of pytest.

    The tests run on a new copy of the base commit, with the test patch and those edits that cannot decide about tests.
    Left out are edits of files that the test patch changes, of files with named tests, of all files in the test folders
    around these, and of settings (`conftest.py`, `pytest.ini`, `pyproject.toml`, `sitecustomize.py`, ...).
    """
    hidden = self.hidden_tests()
    kept = {path: text for path, text in edits.items() if not self._decides(path, hidden)}
    control = f"test_{secrets.token_hex(8)}.py"
    tests = (*self.instance.fail_to_pass, *self.instance.pass_to_pass)
    with _copy(self.folder, {**kept, **hidden, control: _CONTROL}) as tree:
      return test_runs.passes(self.runs, tree, tests, f"{control}::Control::test_control", self.options)

  def run_tests(self, edits: Edits, arguments: Sequence[str]) -> str:
    """Runs pytest on the model's files, its own tests and settings included, and returns the output."""
    with _copy(self.folder, edits) as tree:
      return test_runs.show(self.runs, tree, [*self.options, *arguments])

  def _decides(self, path: str, hidden: Edits) -> bool:
    parts = path.split("/")
    return (
      any(f"{path}/".startswith(f"{other}/") or other.startswith(f"{path}/") for other in (*hidden, *self._test_places))
      or not _SETTINGS.isdisjoint(parts)
      or any(part.endswith(_SETTINGS_ENDS) for part in parts)
    )

  @functools.cached_property
  def _test_places(self) -> frozenset[str]:
    """Files of named tests, and the outermost folders around them whose names start with `test`."""
    places = set()
    for test in (*self.instance.fail_to_pass, *self.instance.pass_to_pass):
      parts = test.partition("::")[0].split("/")
      outer = next((i for i, part in enumerate(parts) if part.startswith("test")), len(parts) - 1)
      places.add("/".join(parts[: outer + 1]))
    return frozenset(places)


class Workspace:
  """The files of one episode, and the functions that a model calls as tools."""

  def __init__(self, config: RepositoryConfig):
    self._config = config
    self._repository: Repository | None = None
    self._base: dict[str, str] = {}
    self._edits: dict[str, str | None] = {}

  @property
  def tools(self) -> Sequence[Callable[..., str]]:
    """The functions to offer."""
    return self.list_files, self.read_file, self.search, self.edit_file, self.run_tests

  def start(self, repository: Repository) -> None:
    """Begins an episode."""
    self._repository = repository
    self._base = repository.texts(self._config.max_file_chars)
    self._edits = {}

  def grade(self) -> float:
    """Returns 1 if the hidden tests pass, else 0."""
    return float(self._now.grade(self._edits)[0])

  def list_files(self, folder: str = "") -> str:
    """Lists the files and folders in a folder of the repository.

    Args:
      folder: path of the folder; empty for the root.
    """
    start = f"{folder.strip('/')}/" if folder.strip("/.") else ""
    below = {path[len(start) :] for path in self._paths() if path.startswith(start)}
    if not below:
      raise ValueError(f"there is no folder {folder!r:.200}.")
    return self._cut("\n".join(sorted({path.partition("/")[0] + "/" * ("/" in path) for path in below})))

  def read_file(self, path: str, first: int = 1, last: int = 1_000_000) -> str:
    """Reads lines of a file, with their numbers.

    Args:
      path: path of the file.
      first: first line, counted from 1.
      last: last line.
    """
    lines = self._text(path).split("\n")
    return self._cut("\n".join(f"{n}: {line}" for n, line in enumerate(lines, 1) if first <= n <= last))

  def search(self, text: str, folder: str = "") -> str:
    """Finds the lines that contain a text.

    Args:
      text: the text, which is not a pattern.
      folder: folder or file to search in; empty for all.
    """
    if not text:
      raise ValueError("text must not be empty.")
    start = folder.strip("/") if folder.strip("/.") else ""
    places = [path for path in self._paths() if not start or f"{path}/".startswith(f"{start}/")]
    texts = ((path, self._text(path)) for path in places)
    found = [
      f"{path}:{n}: {line}"
      for path, content in texts if text in content
      for n, line in enumerate(content.split("\n"), 1) if text in line
    ]  # fmt: skip
    return self._cut("\n".join(found) or "not found")

  def edit_file(self, path: str, old: str, new: str) -> str:
    """Replaces a text that occurs once in a file. With an empty old text it makes a new file.

    Args:
      path: path of the file.
      old: the text to replace, with its indentation and enough lines to be unique; empty for a new file.
      new: the text to put in its place.
    """
    if not old:
      self._check_new(path)
      text = new
    else:
      before = self._text(path)
      if (count := before.count(old)) != 1:
        raise ValueError(f"old must occur in {path} exactly once; it occurs {count} times.")
      text = before.replace(old, new)
    text.encode()  # A lone surrogate is a ValueError.
    if len(text) > self._config.max_file_chars:
      raise ValueError(f"the file would have more than {self._config.max_file_chars} characters.")
    if path not in self._edits and len(self._edits) >= self._config.max_edited_files:
      raise ValueError(f"no more than {self._config.max_edited_files} files can be changed.")
    self._edits[path] = text
    return f"edited {path}"

  def run_tests(self, arguments: str = "") -> str:
    """Runs pytest in the repository, which it cannot write to, and returns its output.

    Args:
      arguments: files, names of tests and options, as on a command line.
    """
    return self._cut(self._now.run_tests(self._edits, shlex.split(arguments)))

  @property
  def _now(self) -> Repository:
    if self._repository is None:
      raise RuntimeError("a Workspace must be started before its tools are called.")
    return self._repository

  def _paths(self) -> list[str]:
    return sorted({*self._base, *self._edits})

  def _text(self, path: str) -> str:
    text = self._edits.get(path, self._base.get(path))
    if text is None:
      raise ValueError(f"there is no file of text {path!r:.200}.")
    return text

  def _check_new(self, path: str) -> None:
    if len(path) > _MAX_PATH or not _PATH.fullmatch(path):
      raise ValueError(f"path must be like folder/name.py, without links and hidden files; received {path!r:.200}.")
    parents = ["/".join(path.split("/")[:i]) for i in range(1, path.count("/") + 1)]
    taken = os.path.lexists(self._now.folder / path) or path in self._edits
    if taken or any(other.startswith(f"{path}/") for other in self._edits):
      raise ValueError(f"{path} exists.")
    if any(parent in self._edits for parent in parents) or not _is_plain(self._now.folder, path):
      raise ValueError(f"{path} is not below a folder.")

  def _cut(self, text: str) -> str:
    limit = self._config.max_observation_chars
    return text if len(text) <= limit else f"{text[: limit // 2]}\n[... cut ...]\n{text[-(limit // 2) :]}"


def _is_plain(folder: pathlib.Path, path: str) -> bool:
  """Whether no part of a path below a folder is a link, and all parts that exist above the last are folders."""
  place = folder
  *above, last = pathlib.PurePosixPath(path).parts
  for part in above:
    place /= part
    if place.is_symlink() or (place.exists() and not place.is_dir()):
      return False
  return not (place / last).is_symlink()


@contextlib.contextmanager
def _copy(folder: pathlib.Path, edits: Edits) -> Iterator[pathlib.Path]:
  """Makes a copy of a folder with edits, alone in a new folder, and removes it in the end."""
  with tempfile.TemporaryDirectory(prefix="sao_jax_tests_", ignore_cleanup_errors=True) as parent:
    os.chmod(parent, 0o755)
    tree = pathlib.Path(parent, f"repository-{secrets.token_hex(8)}")
    shutil.copytree(folder, tree, symlinks=True, copy_function=_copy_file, ignore=shutil.ignore_patterns(".git"))
    for path, text in edits.items():
      file = tree / path
      if ".." in file.parts or not _is_plain(tree, path):
        raise ValueError(f"{path!r} is not a file of the repository.")
      file.unlink(missing_ok=True)
      if text is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
        file.chmod(0o644)
    for top, _, _ in os.walk(tree):
      os.chmod(top, 0o755)
    yield tree


def _copy_file(source: str, target: str) -> None:
  shutil.copyfile(source, target)
  os.chmod(target, 0o755 if os.stat(source).st_mode & stat.S_IXUSR else 0o644)
