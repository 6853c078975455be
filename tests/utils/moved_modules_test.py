"""Old module paths import the same module objects."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys

import pytest

from sao_jax.utils import moved_modules

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("old", sorted(moved_modules.MOVED))
def test_an_old_path_gives_the_module_at_its_new_path(old: str) -> None:
  sys.modules.pop(old, None)
  with pytest.warns(DeprecationWarning, match="has moved to"):
    found = importlib.import_module(old)
  new = importlib.import_module(moved_modules.MOVED[old])
  assert found is new and new.__name__ == moved_modules.MOVED[old]
  assert new.__spec__ is not None and new.__spec__.name == moved_modules.MOVED[old]


def test_modules_of_a_moved_package_and_names_in_them() -> None:
  program = """
import warnings
warnings.simplefilter("ignore")
from sao_jax.envs.tools import PythonTool, _zygote
import sao_jax.envs.tools._isolation as old
from sao_jax.envs.sandbox import _isolation, _zygote as new
assert old is _isolation and _zygote is new
from sao_jax import loop
from sao_jax.training import loop as there
assert loop is there
"""
  done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr


def test_nothing_old_and_new_exists() -> None:
  for old, new in moved_modules.MOVED.items():
    assert not (ROOT / f"{old.replace('.', '/')}.py").exists()
    assert any((ROOT / f"{new.replace('.', '/')}{end}").exists() for end in (".py", "/__init__.py"))
