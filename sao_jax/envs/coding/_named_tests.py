"""Pytest in a sandbox: which of the named tests pass? Only the text of this module is used; it runs in the sandbox.

It uses nothing but the standard library and pytest. Code of the
repository runs later, within pytest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any


class _Watcher:
  """A pytest plugin that keeps only named tests, and remembers which passed."""

  def __init__(self, names: Sequence[str]):
    self._names = frozenset(names)
    self.passed: set[str] = set()
    self.failed: set[str] = set()

  def pytest_collection_modifyitems(self, items: list[Any]) -> None:
    items[:] = [item for item in items if item.nodeid in self._names]

  def pytest_runtest_logreport(self, report: Any) -> None:
    # A failure that a test's own mark expects (xfail) counts as passed, as in SWE-bench.
    if report.failed or (report.skipped and not hasattr(report, "wasxfail")):
      self.failed.add(report.nodeid)
    elif report.when == "call":
      self.passed.add(report.nodeid)


def enter(root: str, scratch: str) -> None:
  """Goes to the root of the repository and puts it first in the path, as `python -m pytest` does."""
  os.chdir(root)
  sys.dont_write_bytecode = True
  sys.path.insert(0, root)
  os.environ.update(PYTHONDONTWRITEBYTECODE="1", TMPDIR=scratch)  # Without namespaces, /tmp is not writable.


def _arguments(root: str, scratch: str) -> list[str]:
  return [f"--rootdir={root}", f"--basetemp={scratch}/pytest", "-p", "no:cacheprovider"]


def show(root: str, scratch: str, arguments: Sequence[str], tell: Callable[[str], None]) -> None:
  """Runs pytest for the model to read. Tells nothing."""
  del tell
  import pytest

  enter(root, scratch)
  pytest.main([*_arguments(root, scratch), *arguments])


def grade(
  root: str, scratch: str, names: Sequence[str], control: str, options: Sequence[str], tell: Callable[[str], None]
) -> None:
  """Runs the named tests and tells whether all pass, and whether the control, which must fail, failed last.

  Args:
    root: folder of the repository.
    scratch: folder for temporary files.
    names: names of the tests.
    control: name of a test that fails. If it does not, the code of the repository has changed how results are made.
    options: further options of pytest.
    tell: tells the host `"passed"` or `"failed"`.
  """
  import pytest

  enter(root, scratch)
  watcher = _Watcher([*names, control])
  paths = dict.fromkeys(name.partition("::")[0] for name in (*names, control))
  files = [path for path in paths if os.path.exists(path)]
  pytest.main(
    [*_arguments(root, scratch), "-q", "--continue-on-collection-errors", *options, *files], plugins=[watcher]
  )
  right = control in watcher.failed and control not in watcher.passed
  tell("passed" if right and frozenset(names) <= watcher.passed - watcher.failed else "failed")
