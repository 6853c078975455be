"""Runs in the root of an image, for which this machine's own root stands, and runs that cannot start."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import pytest

from sao_jax.envs.coding.repository import Repository
from sao_jax.envs.coding.swe_bench import SweBenchInstance
from sao_jax.envs.coding.test_runs import ImageRuns, PythonRuns
from tests.envs.coding.instances import SPECS, make_instance

BWRAP = shutil.which("bwrap")
# An image has a /tmp of its own, which would hide an interpreter there.
HIDDEN = sys.prefix.startswith(tempfile.gettempdir())
WORKS = False
if BWRAP is not None and not HIDDEN:
  WORKS = subprocess.run([BWRAP, "--unshare-all", "--ro-bind", "/", "/", "true"]).returncode == 0


@pytest.mark.skipif(not WORKS, reason="bubblewrap does not work here, or Python is in /tmp")
def test_image(tmp_path: pathlib.Path) -> None:
  row = make_instance(SPECS[0], tmp_path)
  runs = ImageRuns(root="/", folder="/mnt", python=sys.executable)
  repository = Repository(instance=SweBenchInstance.from_row(row), folder=tmp_path / "mdurl-1", runs=runs)
  solved, text = repository.grade(repository.solution())
  assert solved, text
  escape = "import os\nfor file in range(3, 64):\n  try: os.write(file, b'\\npassed\\n')\n  except OSError: pass\n"
  spoils = "try: open('/mnt/spoilt', 'w')\nexcept OSError: pass\nelse: raise SystemError\nos._exit(0)\n"
  passed, text = repository.grade({"mdurl/__init__.py": escape + spoils})
  assert not passed and "passed" in text and "SystemError" not in text
  missing = dataclasses.replace(repository, runs=dataclasses.replace(runs, python="/no/python"))
  with pytest.raises(RuntimeError, match=r"pytest did not start in /: .*/no/python"):
    missing.grade({})


def test_an_image_without_bubblewrap_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(shutil, "which", lambda name: None)
  with pytest.raises(RuntimeError, match="images need bubblewrap"):
    ImageRuns(root="/").run(tmp_path, "show", [[]])


def test_without_pytest_a_run_is_an_error() -> None:
  config = dataclasses.replace(PythonRuns.config, packages=(), backend="subprocess")
  with tempfile.TemporaryDirectory() as folder, pytest.raises(RuntimeError, match="No module named 'pytest'"):
    os.chmod(folder, 0o755)
    tree = pathlib.Path(folder, "tree")
    tree.mkdir()
    PythonRuns(config=config).run(tree, "show", [[]])
