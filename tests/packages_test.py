"""The names that the packages export."""

from __future__ import annotations

import ast
import importlib
import inspect

import pytest

PACKAGES = ["sao_jax", "sao_jax.ops", "sao_jax.learner", "sao_jax.models", "sao_jax.parallel"]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_exports_every_name_that_it_imports(name):
  package = importlib.import_module(name)
  tree = ast.parse(inspect.getsource(package))
  aliases = [a for n in tree.body if isinstance(n, ast.ImportFrom) and n.module != "__future__" for a in n.names]
  assert not [a.name for a in aliases if a.asname is not None]  # `advantages as advantages`
  internal = {"moved_modules"}  # makes old paths importable
  assert sorted(package.__all__) == sorted(a.name for a in aliases if a.name not in internal)
  assert all(hasattr(package, exported) for exported in package.__all__)
