"""Real packages with a bug: solved by their own patch, not without it, and not by files that decide about tests."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from sao_jax.envs.coding.repository import Edits, Repository, RepositoryConfig, Workspace
from sao_jax.envs.coding.swe_bench import SweBenchInstance
from sao_jax.envs.coding.test_runs import PythonRuns
from sao_jax.envs.sandbox import _zygote
from tests.envs.coding.instances import SPECS, make_instance

RUNS = PythonRuns(config=dataclasses.replace(PythonRuns.config, backend="subprocess"))
PATCHED_REPORTS = """
import _pytest.reports
_make = _pytest.reports.TestReport.from_item_and_call.__func__
def _passed(cls, item, call):
  report = _make(cls, item, call)
  report.outcome, report.longrepr = "passed", None
  return report
_pytest.reports.TestReport.from_item_and_call = classmethod(_passed)
"""
HOOK = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
  outcome = yield
  if "test_bug" in item.nodeid:
    outcome.get_result().outcome = "passed"
"""
PASSES = "def test_bug(): pass\ndef test_same(): pass\n"
ATTACKS: dict[str, dict[str, str]] = {
  "conftest.py": {"conftest.py": HOOK, "tests/conftest.py": HOOK},
  "changed tests": {"tests/test_bug.py": PASSES, "tests/test_same.py": PASSES, "tests/__init__.py": ""},
  "sitecustomize.py": {"sitecustomize.py": PATCHED_REPORTS, "usercustomize.py": PATCHED_REPORTS},
  "settings": {"pytest.ini": "[pytest]\naddopts = -p plugin\n", "plugin.py": HOOK},
  "entry points": {"p-1.dist-info/entry_points.txt": "[pytest11]\np = plugin\n", "p-1.dist-info/METADATA": "Name: p\n",
                   "plugin.py": HOOK},
  "another pytest": {"pytest.py": "def main(*args, **kwargs): pass\n", "_pytest/__init__.py": ""},
  "module in the place of the package": {"mdurl.py": "def encode(text): return ''\n"},
  "patched reports": {"mdurl/_parse.py": PATCHED_REPORTS + "from mdurl._url import URL\ndef url_parse(*args): pass\n"},
  "exit": {"mdurl/__init__.py": "import os\nos._exit(0)\n"},
  "message": {"mdurl/__init__.py": "import sao_host\nsao_host.ask(b'passed')\nimport os\nos._exit(0)\n"},
}  # fmt: skip


def load(spec: tuple[str, ...], folder: pathlib.Path, runs: PythonRuns = RUNS, **change: Any) -> Repository:
  instance = SweBenchInstance.from_row({**make_instance(spec, folder), **change})
  return Repository(instance=instance, folder=folder / instance.instance_id, runs=runs)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec[0])
def test_instances_are_solved_by_their_own_patch_only(spec: tuple[str, ...], tmp_path: pathlib.Path) -> None:
  runs = PythonRuns() if spec is SPECS[0] else RUNS  # the first with bubblewrap, where it works
  repository = load(spec, tmp_path, runs)
  solved, text = repository.grade(repository.solution())
  assert solved, text
  failed, text = repository.grade({})
  assert not failed and "test_bug" in text
  assert "test_bug.py" not in repository.run_tests({}, []), "hidden tests are not shown"


@pytest.mark.parametrize("attack", ATTACKS)
def test_files_of_the_candidate_do_not_decide(attack: str, tmp_path: pathlib.Path) -> None:
  repository = load(SPECS[0], tmp_path)
  edits: Edits = ATTACKS[attack]
  assert repository.grade(edits)[0] is False
  if attack in ("conftest.py", "patched reports"):  # They would work in a run without these precautions.
    hidden = repository.hidden_tests()
    assert " passed" in (said := repository.run_tests({**edits, **hidden}, ["-q"])) and "failed" not in said
  if attack in ("conftest.py", "changed tests", "settings", "another pytest"):  # They do no harm to a solution.
    assert repository.grade({**edits, **repository.solution()})[0] is True


def test_without_namespaces(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  bare = "package._isolation.enter_namespaces = lambda settings: False\nmodule.main(settings)"
  monkeypatch.setattr(_zygote, "_BOOT", _zygote._BOOT.replace("module.main(settings)", bare))
  repository = load(SPECS[0], tmp_path)
  solved, text = repository.grade(repository.solution())
  assert solved, text
  assert repository.grade(ATTACKS["conftest.py"])[0] is False


def test_tests_that_must_go_on_passing(tmp_path: pathlib.Path) -> None:
  repository = load(SPECS[1], tmp_path)
  solution = repository.solution()
  assert isinstance(solution["cfgv.py"], str)
  broken = {"cfgv.py": solution["cfgv.py"] + "\ndef apply_defaults(*args): pass\n"}
  assert repository.grade(broken)[0] is False


def test_tools(tmp_path: pathlib.Path) -> None:
  repository = load(SPECS[0], tmp_path)
  (repository.folder / "link.py").symlink_to("/etc/passwd")
  (repository.folder / "data.bin").write_bytes(b"\xff\0")
  (repository.folder / ".git").mkdir()
  (repository.folder / ".git" / "config").write_text("secret\n")
  workspace = Workspace(RepositoryConfig(max_observation_chars=300))
  workspace.start(repository)
  assert workspace.list_files() == "mdurl/\ntests/" and "_encode.py" in workspace.list_files("mdurl/")
  line = next(text for text in workspace.search("while i <= l", "mdurl").splitlines())
  number = int(line.split(":")[1])
  assert line.startswith("mdurl/_encode.py:") and workspace.search("no such text") == "not found"
  assert workspace.read_file("mdurl/_encode.py", number, number) == f"{number}:     while i <= l:"
  assert "[... cut ...]" in workspace.read_file("mdurl/_encode.py")
  for path in ("link.py", ".git/config", "../x", "/etc/passwd", "data.bin", "none.py"):
    with pytest.raises(ValueError, match="there is no file of text"):
      workspace.read_file(path)
  for path in ("link.py", ".git/hooks", "../x", "/x", "mdurl/_encode.py", "mdurl", "link.py/x", ""):
    with pytest.raises(ValueError, match=r"path must be like|exists|not below"):
      workspace.edit_file(path, "", "x")
  with pytest.raises(ValueError, match="exactly once; it occurs"):
    workspace.edit_file("mdurl/_encode.py", "i += 1", "i += 2")
  with pytest.raises(ValueError, match="surrogates"):
    workspace.edit_file("new.py", "", "\ud800")
  assert workspace.edit_file("tests/test_new.py", "", SPECS[0][3]) == "edited tests/test_new.py"
  assert "1 failed, 1 passed" in workspace.run_tests("tests -q") and workspace.grade() == 0.0
  workspace.edit_file("mdurl/_encode.py", "while i <= l:", "while i < l:")
  assert "2 passed" in workspace.run_tests("tests -q") and workspace.grade() == 1.0
  workspace.start(repository)
  assert "while i <= l:" in workspace.search("while i"), "the folder has not changed"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"FAIL_TO_PASS": []}, "mdurl-1: FAIL_TO_PASS must name a test"),
    ({"PASS_TO_PASS": ["test_x (tests.Case)"]}, r"as path.py::test; received 'test_x \(tests.Case\)'"),
    ({"test_patch": "--- a/t/none.py\n+++ b/t/none.py\n@@ -1 +1 @@\n-a\n+b\n"}, "mdurl-1: test_patch: .*none.py"),
  ],
)
def test_what_cannot_be_graded_is_refused(tmp_path: pathlib.Path, change: dict[str, Any], message: str) -> None:
  with pytest.raises(ValueError, match=message):
    load(SPECS[0], tmp_path, **change)
