"""The documentation's sources: every page is reachable, and every name that a page or package offers can be looked up.

The site itself is built in `.ci/run`; what is tested here needs no Sphinx.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pathlib
import re
import types

import pytest

import sao_jax

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in [*DOCS.glob("*.md"), *DOCS.glob("api/*.md")])
PACKAGES = sorted(
  path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in ROOT.glob("sao_jax/*/__init__.py")
)


def load(name: str) -> types.ModuleType:
  """A module of `docs/_ext` that does not import Sphinx."""
  spec = importlib.util.spec_from_file_location(name, DOCS / "_ext" / f"{name}.py")
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


NAMES = load("library_names")


def find(name: str) -> object:
  """The object of a dotted name below `sao_jax`."""
  found: object = sao_jax
  path = "sao_jax"
  for part in name.removeprefix("sao_jax").strip(".").split("."):
    path += f".{part}"
    if NAMES.source(path) is not None:
      importlib.import_module(path)
    found = getattr(found, part)
  return found


def test_every_page_is_in_a_toctree():
  listed = {"index.md"}
  for page in PAGES:
    text = (DOCS / page).read_text()
    for body in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
      listed |= {f"{line.strip()}.md" for line in body.splitlines() if line.strip() and not line.startswith(":")}
  assert set(PAGES) <= listed


def test_the_api_reference_starts_from_every_package():
  text = (DOCS / "api" / "index.md").read_text()
  assert sorted(re.findall(r"^   (sao_jax\.\w+)$", text, re.MULTILINE)) == sorted([*PACKAGES, "sao_jax.types"])
  assert ":recursive:" in text


@pytest.mark.parametrize("package", PACKAGES)
def test_names_that_a_package_exports_are_documented_where_they_are_defined(package):
  module = importlib.import_module(package)
  exported = NAMES.exports(package)
  values = [find(name) for name in exported]
  for name in getattr(module, "__all__", []):
    value = getattr(module, name)
    here = name in NAMES.defined(package) and NAMES.defined(package)[name] is None
    assert here or inspect.ismodule(value) or any(value is other for other in values), name
  for name, value in zip(exported, values, strict=True):
    if inspect.isclass(value) or inspect.isfunction(value):
      assert value.__doc__, f"{name} has no docstring"


def test_every_public_function_of_ops_has_a_docstring_and_is_beside_its_equation():
  text = (DOCS / "method.md").read_text()
  shown = {name.rpartition(".")[2] for name in re.findall(r"\{py:obj\}`(ops\.[\w.]+)`", text)}
  for name in ("importance", "policy_losses", "value_losses", "advantages", "diagnostics"):
    module = importlib.import_module(f"sao_jax.ops.{name}")
    for function, value in inspect.getmembers(module, inspect.isfunction):
      if value.__module__ == module.__name__ and not function.startswith("_"):
        assert value.__doc__, f"{name}.{function} has no docstring"
        if re.search(r"arXiv 2607\.07508, (Eq|Sec|app)", value.__doc__):
          assert function in shown, f"{name}.{function} is not on the page of the method"


@pytest.mark.parametrize("page", PAGES)
def test_names_on_a_page_exist(page):
  for name in re.findall(r"\{py:\w+\}`([\w.]+)`", (DOCS / page).read_text()):
    find(name)


@pytest.mark.parametrize("page", PAGES)
def test_pages_load_nothing_from_other_hosts(page):
  text = (DOCS / page).read_text()
  assert not re.search(r"!\[[^\]]*\]\(https?:|<(img|script|iframe|link)\b", text)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_shows_or_links_to_exist(page):
  for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", (DOCS / page).read_text()):
    copied = target.removeprefix("notebooks/")
    path = ROOT / "colab" / copied if copied != target else (DOCS / page).parent / target
    assert path.exists(), target


@pytest.mark.parametrize("name", ["docstring_markup", "library_names", "outside_sources"])
def test_examples_of_the_extensions(name):
  assert doctest.testmod(load(name)).failed == 0


def test_markup_is_escaped_outside_code_only():
  to_rst = load("docstring_markup").to_rst
  assert to_rst("lambda_ * `a_` | ``b_`` and `x[t]`s")== r"lambda\_ \* `a_` \| ``b_`` and ``x[t]``\ s"


def test_indented_blocks_and_aligned_lines_are_literal():
  to_rst = load("docstring_markup").to_rst
  assert to_rst("With x:\n  y = x_\n\nEnd.").split("\n") == ["With x:", "", "::", "", "  y = x_", "", "End."]
  assert to_rst("async    one_ thing\nsync     two things") == "::\n\n  async    one_ thing\n  sync     two things"


def test_sections_keep_their_names_and_split_their_errors():
  to_rst = load("docstring_markup").to_rst
  text = (
    "Args:\n  lambda_: of `T`_s,\n    again.\n  **rest: more.\n\n"
    "Raises:\n  ValueError: bad. TypeError: worse, in\n  two lines."
  )
  lines = [line for line in to_rst(text).split("\n") if line]
  assert lines == [
    "Args:", r"  lambda_: of `T`\ _s,", "    again.", "  **rest: more.",
    "Raises:", "  ValueError: bad.", "  TypeError: worse, in", "    two lines.",
  ]  # fmt: skip
