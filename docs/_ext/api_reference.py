"""The API reference follows the code: names that a package exports, and references by any name that Python knows."""

from __future__ import annotations

import ast
import functools
import importlib
import pathlib
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

ROOT = pathlib.Path(__file__).parents[2]
GENERATED = "api/generated"

_log = logging.getLogger(__name__)


def source(module: str) -> pathlib.Path | None:
  """The file of a module or package of the library; None if there is none."""
  base = ROOT.joinpath(*module.split("."))
  return next((path for path in (base / "__init__.py", base.with_suffix(".py")) if path.is_file()), None)


@functools.cache
def defined(module: str) -> dict[str, str | None]:
  """The names of a module: None for what it defines itself, the full name for what it imports from the library."""
  path = source(module)
  if path is None:
    return {}
  names: dict[str, str | None] = {}
  for node in ast.parse(path.read_text(encoding="utf-8")).body:
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sao_jax":
      names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    elif isinstance(node, ast.ClassDef | ast.FunctionDef):
      names[node.name] = None
    elif isinstance(node, ast.Assign | ast.AnnAssign):
      targets = node.targets if isinstance(node, ast.Assign) else [node.target]
      names |= {target.id: None for target in targets if isinstance(target, ast.Name)}
  return names


def canonical(name: str) -> str:
  """The full name of an object where it is defined, given a name that it can be imported by."""
  module, _, last = name.rpartition(".")
  imported = None if source(name) else defined(module).get(last)
  return canonical(imported) if imported else name


def exports(package: str) -> list[str]:
  """Where the names that a package exports are defined: those of `__all__`, else those its `__init__` imports."""
  path = source(package)
  if path is None or path.name != "__init__.py":
    return []
  module = importlib.import_module(package)
  imported = {name: canonical(target) for name, target in defined(package).items() if target and name[0] != "_"}
  names = []
  for name in getattr(module, "__all__", imported):
    value = getattr(module, name)
    if name in imported:
      full = imported[name]
    elif name in defined(package) or not hasattr(value, "__qualname__"):
      continue  # on the package's own page
    else:  # imported when it is first used
      full = f"{value.__module__}.{value.__qualname__}"
    if source(full) is None and full not in names:
      names.append(full)
  return sorted(names, key=lambda full: full.rpartition(".")[2].lower())


def exports_by_package() -> dict[str, list[str]]:
  """The exports of every package of the library."""
  files = (ROOT / "sao_jax").rglob("__init__.py")
  packages = [".".join(file.parent.relative_to(ROOT).parts) for file in files]
  return {package: exports(package) for package in sorted(packages)}


def _remove_old_pages(app: Sphinx) -> None:
  """Removes generated pages of modules that are gone: they would end the build."""
  for page in (pathlib.Path(app.srcdir) / GENERATED).glob("*.rst"):
    if source(page.stem) is None:
      page.unlink()


@functools.cache
def type_aliases() -> dict[str, str]:
  """The library's type aliases, to be shown by name; those of one name in two modules are left out."""
  found: dict[str, str] = {}
  ambiguous = set()
  for path in sorted((ROOT / "sao_jax").rglob("*.py")):
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
      if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).endswith("TypeAlias"):
        name = ast.unparse(node.target)
        ambiguous |= {name} & set(found)
        found[name] = f"{module}.{name}"
  return {name: full for name, full in found.items() if name not in ambiguous and name[0] != "_"}


def _choose_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
  """Leaves imported constants and aliases to the module that defines them, and Flax's fields to Flax."""
  module = app.env.current_document.autodoc_module
  if what == "module":
    return True if defined(module).get(name) or (name not in defined(module) and not skip) else None
  if name == "__call__" and getattr(obj, "__doc__", None):
    return False
  return True if module.startswith("sao_jax.models") and name in ("name", "parent", "scope") else None


def _resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.Element) -> nodes.Element | None:
  """Looks a name up as a reader would: in the module it stands in, and in the packages around that."""
  if node.get("refdomain") != "py":
    return None
  target, module = node["reftarget"].removesuffix("()"), node.get("py:module") or ""
  domain = env.domains.python_domain
  scopes = [module.rsplit(".", n)[0] for n in range(module.count(".") + 1)] if module else ["sao_jax"]
  for name in (f"{scope}.{target}" for scope in [*scopes, "sao_jax"]):
    full = canonical(name)
    if full not in domain.objects and "." in full:  # a member of a class that is imported from elsewhere
      owner, _, member = full.rpartition(".")
      full = f"{canonical(owner)}.{member}"
    if full in domain.objects:
      return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, contnode)
  if not node["refdoc"].startswith("api/"):
    _log.warning("%s is not in the API reference.", node["reftarget"], location=node, type="ref", subtype="python")
  return None


def setup(app: Sphinx) -> dict[str, bool]:
  app.connect("builder-inited", _remove_old_pages, priority=100)
  app.connect("autodoc-skip-member", _choose_member)
  app.connect("missing-reference", _resolve)
  return {"parallel_read_safe": True, "parallel_write_safe": True}
