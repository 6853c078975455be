"""The files that sessions may read: system programs and libraries, the standard library, and requested packages.

No other files of the interpreter's prefix or of `/usr` are bound. Folders named `*-packages` in bound folders are
masked, because installed packages may hold data such as the tests of a benchmark.
"""

from __future__ import annotations

import dataclasses
import glob
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterable

from sao_jax.envs.sandbox.python_tool_config import PythonToolConfig
from sao_jax.utils.extras import MissingExtraError

PACKAGES = "/packages"
"""Folder of the packages in the private root of a session."""

_PROGRAMS = ("/bin", "/usr/bin")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_OTHERS = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)[^;]*(;.*)?", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadableFiles:
  """Paths in the private root of a session, and the files and folders of the host behind them."""

  bound: dict[str, str] = dataclasses.field(default_factory=dict)
  """File or folder of the host, by path in the root."""
  masked: dict[str, str] = dataclasses.field(default_factory=dict)
  """Folder of the host that stays hidden below a bound one, by path in the root."""
  links: dict[str, str] = dataclasses.field(default_factory=dict)
  """Target of a symbolic link, by path in the root."""
  packages: dict[str, str] = dataclasses.field(default_factory=dict)
  """File or folder of a package, by path in the folder of packages."""
  modules: list[str] = dataclasses.field(default_factory=list)
  """Modules of the named packages."""

  def bind(self, source: str, target: str, kept: Collection[str] | None = None) -> None:
    """Adds a file or folder. If `kept` is given, only these folders in it stay visible."""
    self.bound[target] = source
    for path in _hidden_below(source, kept):
      self.masked[target + path[len(source) :]] = path


def interpreter() -> str:
  """Returns the Python program that runs sessions: the base of a virtual environment."""
  return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def find(config: PythonToolConfig) -> ReadableFiles:
  """Finds the files on this machine.

  Raises:
    MissingExtraError: a package is not installed, or its installation has no modules of its own.
  """
  files = ReadableFiles()
  files.modules.extend(_find_packages(config.packages, files.packages))
  for path in (*_PROGRAMS, *_OTHERS, *_library_folders()):
    if os.path.islink(path):
      files.links[path] = os.readlink(path)
    elif path in (*_PROGRAMS, *_OTHERS) and os.path.exists(path):
      files.bind(path, path)
    elif os.path.isdir(path):
      _bind_libraries(files, path)
  if os.path.dirname(interpreter()) not in _PROGRAMS:
    files.bind(interpreter(), interpreter())
  for index, folder in enumerate(config.python_path):
    files.bind(folder, f"/site/{index}")
  for name, source in files.packages.items():
    files.bind(source, f"{PACKAGES}/{name}")
  for masked in list(files.masked):
    if any(path.startswith(masked + "/") for path in files.bound):  # One prefix may be below the libraries of another.
      del files.masked[masked]
  return files


def _library_folders() -> list[str]:
  """Lists the folders of shared libraries and of the standard library, under all their names."""
  prefixes = (sys.base_prefix, os.path.dirname(os.path.dirname(interpreter())))
  folders = [*_LIBRARIES, *(os.path.join(prefix, name) for prefix in prefixes for name in ("lib", sys.platlibdir))]
  return list(dict.fromkeys([*folders, *map(os.path.realpath, folders)]))


def _bind_libraries(files: ReadableFiles, folder: str) -> None:
  kept = [os.path.basename(sysconfig.get_path("stdlib")), "locale"]
  machine = sysconfig.get_config_var("MULTIARCH")
  if machine:
    kept.append(machine)
  if folder in _LIBRARIES and machine and os.path.isdir(os.path.join(folder, machine)):
    # Debian and relatives keep all libraries in one subfolder, beside many other files.
    parts = [os.path.join(folder, name) for name in kept] + glob.glob(f"{folder}/ld-*.so*")
    for part in filter(os.path.exists, parts):
      files.bind(part, part)
  else:
    files.bind(folder, folder, kept)


def _hidden_below(top: str, kept: Collection[str] | None) -> list[str]:
  hidden = []
  for folder, names, _ in os.walk(top):
    for name in list(names):
      if name.endswith("-packages") or (kept is not None and folder == top and name not in kept):
        hidden.append(os.path.join(folder, name))
        names.remove(name)
  return hidden


def _find_packages(names: Iterable[str], found: dict[str, str]) -> list[str]:
  """Adds the files of packages and their requirements to `found`; returns the modules of the named packages."""
  modules = []
  seen: set[str] = set()
  waiting = [(name, "") for name in names]
  for name, needed_by in waiting:  # grows during the loop
    if (key := re.sub("[-_.]+", "-", name).lower()) in seen:
      continue
    seen.add(key)
    try:
      package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
      reason = f"'{needed_by}' needs '{name}', which" if needed_by else f"packages names '{name}', which"
      raise MissingExtraError(f"PythonToolConfig: {reason} is not installed here.", name=name) from None
    entries = _entries(package)
    for entry in entries:
      found[entry] = os.path.abspath(str(package.locate_file(entry)))
    if not needed_by:
      modules += _modules(package, entries)
    waiting += [(required, name) for required in _requirements(package)]
  return modules


def _requirements(package: importlib.metadata.Distribution) -> list[str]:
  """Lists required packages. Conditional ones count if they are installed, except those of extras."""
  required = []
  for line in package.requires or ():
    match = _REQUIREMENT.match(line)
    name, condition = (match[1], match[2]) if match else (line, None)
    if condition and (re.search(r"\bextra\b", condition) or not any(importlib.metadata.distributions(name=name))):
      continue
    required.append(name)
  return required


def _entries(package: importlib.metadata.Distribution) -> list[str]:
  """Lists the outermost folders of a package, and its files outside of folders, without programs."""
  parts = [file.parts for file in package.files or ()]
  parts = [part for part in parts if part[0] not in ("..", "/", "__pycache__") and not part[-1].endswith(".pth")]
  outermost: set[tuple[str, ...]] = set()
  for folder in sorted({part[:-1] for part in parts if len(part) > 1}, key=len):
    if not any(folder[:length] in outermost for length in range(1, len(folder))):
      outermost.add(folder)
  return sorted("/".join(part) for part in outermost.union(part for part in parts if len(part) == 1))


def _modules(package: importlib.metadata.Distribution, entries: list[str]) -> list[str]:
  names = {str(file) for file in package.files or ()}
  modules = [entry.replace("/", ".") for entry in entries if f"{entry}/__init__.py" in names]
  modules = modules or [entry.split(".")[0] for entry in entries if entry.endswith((".py", ".so"))]
  if not modules:  # in editable mode, without a list of files, or without code
    raise MissingExtraError(
      f"PythonToolConfig: packages names '{package.name}', of which no module is installed here as files of its own.",
      name=package.name,
    )
  return modules
