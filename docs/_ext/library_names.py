"""The names of the library, read from its source: which a package exports, and where each is defined."""

from __future__ import annotations

import ast
import functools
import importlib
import pathlib

ROOT = pathlib.Path(__file__).parents[2]


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
