"""Import rules and habits, checked by reading the source. The rules are the table in `CONTRIBUTING.md`."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

import pytest

from tests import conftest

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "sao_jax").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 70


def rules(text: str) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
  """The table of `CONTRIBUTING.md`: what each package may import of the library, and the libraries confined to some.

  Rows look like ``| `learner` | ... | `types`, `ops` | `optax` |``; the cell "everything" stands for all packages.
  """
  internal: dict[str, set[str]] = {}
  confined: dict[str, set[str]] = {}
  for package, _, may_import, libraries in re.findall(r"^\| `(\w+)` \|(.*?)\|(.*?)\|(.*?)\|$", text, re.MULTILINE):
    internal[package] = set(re.findall(r"`(\w+)`", may_import)) or ({"*"} if "everything" in may_import else set())
    for library in re.findall(r"`(\w+)`", libraries):
      confined.setdefault(library, set()).add(package)
  return internal, confined


PACKAGES, CONFINED = rules((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
OPS_MAY_IMPORT = {
  "__future__", "abc", "chex", "collections", "dataclasses", "enum", "functools", "jax", "jaxtyping", "math", "numpy",
  "operator", "typing",
}  # fmt: skip
# Calls that a module-level assignment may make, besides those of a class (`Rule(...)`): they build constants.
CONSTANT_CALLS = {
  "chr", "compile", "custom_jvp", "custom_vjp", "dtype", "escape", "fields", "finfo", "float", "float32", "frozenset",
  "get_args", "getLogger", "iinfo", "int32", "jit", "join", "namedtuple", "object", "ord", "pack", "partial", "range",
  "slice", "tuple", "zip",
}  # fmt: skip
STATEFUL_CLASSES = {"Condition", "Event", "Lock", "Pool", "Popen", "Process", "Queue", "RLock", "Semaphore", "Thread"}
DECLARATIONS = {"defjvp", "defvjp"}
MUTABLE_VALUES = (ast.List, ast.Set, ast.Dict, ast.ListComp, ast.SetComp, ast.DictComp)
READ_ONLY_ANNOTATIONS = ("Mapping", "Sequence", "Set", "TypeAlias")
# `tests/PACKAGE/FILE_test.py` tests `sao_jax/PACKAGE/FILE.py` (or `_FILE.py`); files directly in `tests/` test the
# project as a whole. These test no single module:
TESTS_WITHOUT_MODULE = {
  "envs/sandbox/hostile_test.py": "the whole sandbox against hostile programs",
  "experiments/": "programs that use the library",
  "models/gmm_test.py": "the TPU's path through moe, interpreted",
  "parallel/adapted_test.py": "runs with adapters on meshes, in a process with 4 devices",
  "parallel/latent_test.py": "latent attention on meshes, in a process with 8 devices",
  "parallel/layers_test.py": "layers of models under shard_map, in a process with 8 devices",
  "parallel/loop_mesh_test.py": "the whole loop on meshes and in two processes",
  "parallel/split_mesh_test.py": "engines on meshes of their own, in processes with 8 and 12 devices",
  "rollout/engine/invariants_test.py": "the engine with any environment and with real models",
  "rollout/remote/vllm_test.py": "a real vLLM server, where one is installed",
  "training/adapted_run_test.py": "a whole run with low-rank adapters, up to its export",
  "training/cluster_loop_test.py": "the whole loop with engines in Ray workers",
  "training/disk_test.py": "the whole loop on a full disk and in a read-only workdir",
  "training/interrupts_test.py": "signals, each in a process of its own",
}


def parse(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).as_posix()


def package_of(path: pathlib.Path) -> str:
  return pathlib.PurePath(path.relative_to(ROOT / "sao_jax").parts[0]).stem


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
  """Yields `(line, dotted name)` of everything imported, inside functions too; `from a import b` gives `a.b`."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      for alias in node.names:
        yield node.lineno, alias.name
    elif isinstance(node, ast.ImportFrom):
      if node.level:
        yield node.lineno, "." * node.level + (node.module or "")
      else:
        for alias in node.names:
          yield node.lineno, f"{node.module}.{alias.name}"


def import_faults(path: pathlib.Path, tree: ast.Module) -> list[str]:
  faults = []
  package = package_of(path)
  if package not in PACKAGES:
    return [f"{name_of(path)}: package {package!r} is not in the table of CONTRIBUTING.md: enter what it may import"]
  allowed = PACKAGES[package]
  for line, name in imports(tree):
    top = name.split(".")[0]
    where = f"{name_of(path)}:{line}"
    if name.startswith("."):
      faults.append(f"{where}: relative import {name!r}; write it out")
    elif top in ("experiments", "tests"):
      faults.append(f"{where}: the library imports {name}")
    elif top == "sao_jax":
      parts = name.split(".")
      target = parts[1] if len(parts) > 1 else "the package itself"
      if target != package and target not in allowed and "*" not in allowed:
        faults.append(f"{where}: {package} imports {name}; it may import {sorted(allowed) or 'nothing of the library'}")
    elif package == "ops" and top not in OPS_MAY_IMPORT:
      faults.append(f"{where}: ops imports {name}; it may import {sorted(OPS_MAY_IMPORT)}")
    elif top in CONFINED and package not in CONFINED[top]:
      faults.append(f"{where}: {name} belongs to {sorted(CONFINED[top])}")
    if name.startswith("absl.flags"):
      faults.append(f"{where}: the library never reads flags")
  return faults


def caller_faults(path: pathlib.Path, tree: ast.Module) -> list[str]:
  """The library never names its caller, not in a string either (docstrings may)."""
  documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
  return [
    f"{name_of(path)}:{node.lineno}: the library names its caller: {node.value!r}"
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    and re.search(r"\bexperiments\.|--stage\b", node.value)
  ]  # fmt: skip


def call_name(node: ast.Call) -> str:
  return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "?")


def is_main_guard(node: ast.stmt) -> bool:
  guards = ("__name__ == '__main__'", "TYPE_CHECKING", "typing.TYPE_CHECKING")
  return isinstance(node, ast.If) and ast.unparse(node.test) in guards


def builds_constant(call: ast.Call) -> bool:
  name = call_name(call).lstrip("_")
  is_class = name[:1].isupper() and not name.isupper() and name not in STATEFUL_CLASSES
  return is_class or name in CONSTANT_CALLS


def top_level_faults(path: pathlib.Path, tree: ast.Module) -> list[str]:
  """No work at import, no global mutable state."""
  faults = []
  for node in tree.body:
    where = f"{name_of(path)}:{node.lineno}"
    definition = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    if isinstance(node, definition) or is_main_guard(node):
      continue
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
      continue
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and call_name(node.value) in DECLARATIONS:
      continue
    if name_of(path) == "sao_jax/__init__.py" and ast.unparse(node) == "moved_modules.install()":
      continue  # old module paths can be imported in no other way
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
      faults.append(f"{where}: work at import: {ast.unparse(node).splitlines()[0]}")
      continue
    for call in ast.walk(node.value):
      if isinstance(call, ast.Call) and not builds_constant(call):
        faults.append(f"{where}: work at import: calls {call_name(call)}")
    target = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
    annotation = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else ""
    read_only = any(word in annotation for word in READ_ONLY_ANNOTATIONS)
    if isinstance(node.value, MUTABLE_VALUES) and target != "__all__" and not read_only:
      faults.append(f"{where}: {target} is mutable: use a tuple, a frozenset or the annotation Mapping[...]")
  for node in ast.walk(tree):
    if isinstance(node, ast.Global):
      faults.append(f"{name_of(path)}:{node.lineno}: global state: {', '.join(node.names)}")
  return faults


def comment_lines(path: pathlib.Path) -> set[int]:
  with path.open("rb") as file:
    return {token.start[0] for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT}


def is_broad(kind: ast.expr | None) -> bool:
  kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
  return any(isinstance(k, ast.Name) and k.id in ("Exception", "BaseException") for k in kinds)


def exception_faults(path: pathlib.Path, tree: ast.Module) -> list[str]:
  """Bare except; a broad one that neither re-raises nor uses the exception; a silent one without a reason."""
  faults = []
  comments = comment_lines(path)
  for node in ast.walk(tree):
    where = f"{name_of(path)}:{getattr(node, 'lineno', 0)}"
    if isinstance(node, ast.ExceptHandler):
      inside = [n for statement in node.body for n in ast.walk(statement)]
      raises = any(isinstance(n, ast.Raise) for n in inside)
      uses = any(isinstance(n, ast.Name) and n.id == node.name for n in inside)
      silent = all(isinstance(n, ast.Pass | ast.Continue) for n in node.body)
      if node.type is None:
        faults.append(f"{where}: bare except")
      elif is_broad(node.type) and not raises and not uses:
        faults.append(f"{where}: `except {ast.unparse(node.type)}` swallows the exception")
      elif silent and not comments & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
        faults.append(f"{where}: a handler that does nothing must say why in a comment")
    elif isinstance(node, ast.Call) and call_name(node) == "suppress" and any(is_broad(a) for a in node.args):
      faults.append(f"{where}: contextlib.suppress of a broad exception")
  return faults


def size_faults(path: pathlib.Path, tree: ast.Module) -> list[str]:
  faults = []
  lines = len(path.read_text(encoding="utf-8").splitlines())
  if lines > MAX_FILE_LINES:
    faults.append(f"{name_of(path)}: {lines} lines (at most {MAX_FILE_LINES})")
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
      first = node.body[0]
      docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(node) is not None else 0
      length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
      if length > MAX_FUNCTION_LINES:
        faults.append(f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines (at most {MAX_FUNCTION_LINES})")
  return faults


def report(faults: list[str]) -> None:
  assert not faults, "\n" + "\n".join(faults)


def test_import_rules():
  report([fault for path in LIBRARY for fault in import_faults(path, parse(path))])


def test_the_library_never_names_its_caller():
  report([fault for path in LIBRARY for fault in caller_faults(path, parse(path))])


def test_no_work_and_no_mutable_state_at_import():
  report([fault for path in LIBRARY for fault in top_level_faults(path, parse(path))])


def test_no_swallowed_exceptions():
  report([fault for path in LIBRARY + EXPERIMENTS for fault in exception_faults(path, parse(path))])


def test_sizes():
  report([fault for path in LIBRARY + EXPERIMENTS for fault in size_faults(path, parse(path))])


def test_every_package_exists_and_has_tests():
  packages = [path for path in (ROOT / "sao_jax").rglob("*") if path.is_dir() and list(path.glob("*.py"))]
  report([f"{name_of(package)} lacks __init__.py" for package in packages if not (package / "__init__.py").exists()])
  tests = [path.relative_to(ROOT / "tests").parts for path in (ROOT / "tests").rglob("*_test.py")]
  for package in packages:
    parts = package.relative_to(ROOT / "sao_jax").parts
    assert any(test[: len(parts)] == parts for test in tests), f"tests/{'/'.join(parts)} holds no test"
  listed = {path.stem for path in (ROOT / "sao_jax").iterdir() if path.suffix == ".py" or path in packages}
  assert set(PACKAGES) == listed, "the table of CONTRIBUTING.md and the packages differ"


def test_test_files_mirror_modules():
  tests = {path.relative_to(ROOT / "tests").as_posix(): path for path in (ROOT / "tests").glob("*/**/*_test.py")}
  excepted = {test for test in tests if test.startswith(tuple(TESTS_WITHOUT_MODULE))}
  mirrored = set()
  for test, path in tests.items():
    module, name = (ROOT / "sao_jax" / test).parent, path.stem.removesuffix("_test") + ".py"
    if (module / name).exists() or (module / f"_{name}").exists():
      mirrored.add(test)
  report([f"tests/{test}: no module of this name; rename it or add it to TESTS_WITHOUT_MODULE"
          for test in sorted(tests.keys() - excepted - mirrored)])  # fmt: skip
  report([f"tests/{test} has a module: remove it from TESTS_WITHOUT_MODULE" for test in sorted(excepted & mirrored)])
  unused = [name for name in TESTS_WITHOUT_MODULE if not any(test.startswith(name) for test in excepted)]
  report([f"tests/{name} does not exist: remove it from TESTS_WITHOUT_MODULE" for name in unused])
  gone = [name for name in conftest.LONGEST_FILES if name not in tests]
  report([f"tests/{name} does not exist: remove it from LONGEST_FILES" for name in gone])


@pytest.mark.parametrize(
  ("check", "package", "source", "fault"),
  [
    (import_faults, "ops", "import flax", "ops imports flax"),
    (import_faults, "ops", "import threading", "ops imports threading"),
    (import_faults, "learner", "from sao_jax.models import layers", "learner imports sao_jax.models.layers"),
    (import_faults, "rollout", "def f():\n  import sao_jax.learner.state", "rollout imports sao_jax.learner.state"),
    (import_faults, "envs", "from absl import flags", "never reads flags"),
    (import_faults, "rollout", "from sao_jax import models", "rollout imports sao_jax.models"),
    (import_faults, "io", "from . import metrics", "relative import"),
    (import_faults, "envs", "import experiments.train", "the library imports experiments.train"),
    (import_faults, "learner", "from flax import linen", "belongs to ['models']"),
    (import_faults, "cellar", "", "not in the table"),
    (caller_faults, "training", 'FACTORY = "experiments.tasks.chat:make"', "names its caller"),
    (caller_faults, "training", 'raise ValueError("give --stage=all")', "names its caller"),
    (top_level_faults, "ops", "import jax.numpy as jnp\nZERO = jnp.zeros(3)", "calls zeros"),
    (top_level_faults, "io", "print(1)", "work at import"),
    (top_level_faults, "io", "LOCK = threading.Lock()", "calls Lock"),
    (top_level_faults, "io", "LIBC = ctypes.CDLL(None)", "calls CDLL"),
    (top_level_faults, "io", "CACHE = {}", "CACHE is mutable"),
    (top_level_faults, "io", "def f():\n  global x\n  x = 1", "global state: x"),
    (exception_faults, "io", "try:\n  f()\nexcept:\n  raise", "bare except"),
    (exception_faults, "io", "try:\n  f()\nexcept (OSError, Exception):\n  x = 1", "swallows"),
    (exception_faults, "io", "try:\n  f()\nexcept OSError:\n  pass", "must say why"),
    (exception_faults, "io", "with contextlib.suppress(Exception):\n  f()", "suppress"),
    (size_faults, "io", "x = 1\n" * 451, "451 lines"),
    (size_faults, "io", "def f():\n" + "  x = 1\n" * 70, "f has 71 lines"),
  ],
)  # fmt: skip
def test_the_checks_find_faults(check, package, source, fault, tmp_path, monkeypatch):
  monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
  path = tmp_path / "sao_jax" / package / "module.py"
  path.parent.mkdir(parents=True)
  path.write_text(source)
  assert any(fault in found for found in check(path, parse(path)))


@pytest.mark.parametrize(
  ("check", "source"),
  [
    (import_faults, "from sao_jax import types\nfrom sao_jax.io import metrics\nimport orbax.checkpoint"),
    (top_level_faults, '"""Doc."""\nif __name__ == "__main__":\n  f()'),
    (top_level_faults, 'import re\nWORD = re.compile("a")\nSIZES: Mapping[str, int] = {"a": 1}'),
    (exception_faults, "try:\n  f()\nexcept Exception as error:\n  log(error)"),
    (exception_faults, "try:\n  f()\nexcept OSError:\n  pass  # already gone"),
    (size_faults, 'def f():\n  """' + "doc\n" * 100 + '"""\n  return 1'),
  ],
)
def test_the_checks_let_good_code_pass(check, source, tmp_path, monkeypatch):
  monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
  path = tmp_path / "sao_jax" / "io" / "module.py"
  path.parent.mkdir(parents=True)
  path.write_text(source)
  assert check(path, parse(path)) == []


def test_importing_every_module_starts_nothing():
  """Runs in a process of its own: no jax backend, no thread, no flag may come from importing the library."""
  modules = [name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in LIBRARY]
  program = f"""
import importlib, threading
from absl import flags
import jax
before, known = threading.active_count(), set(flags.FLAGS)
for name in {modules!r}:
  importlib.import_module(name)
  assert threading.active_count() == before, f"{{name}} starts a thread"
from jax._src import xla_bridge
assert not xla_bridge._backends, "an import initialises a jax backend"
print("imported", len({modules!r}))
"""
  command = [sys.executable, "-c", program]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout == f"imported {len(modules)}\n"
