"""Instances in the format of SWE-bench, made from installed packages: a bug, its patch, and a test that finds it."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import pathlib
import shutil
import textwrap
from typing import Any

from sao_jax.envs.coding.tasks import mutations

# File, function with the bug, kind of the bug, hidden test, test that passes before and after.
SPECS = (
  (
    "mdurl/_encode.py", "encode", "comparison",
    "import mdurl\ndef test_bug():\n  assert mdurl.encode('a b/\u00e9') == 'a%20b/%C3%A9'\n",
    "import mdurl\ndef test_same():\n  assert mdurl.decode('a') == 'a'\n",
  ),
  (
    "cfgv.py", "check_type", "negated condition",
    "import cfgv, pytest\ndef test_bug():\n  with pytest.raises(cfgv.ValidationError):\n    cfgv.check_bool(1)\n",
    "import cfgv\ndef test_same():\n  assert cfgv.apply_defaults({'a': 1}, cfgv.Map('M', 'a')) == {'a': 1}\n",
  ),
  (
    "simpy/core.py", "peek", "returns nothing",
    "import simpy\ndef test_bug():\n  env = simpy.Environment()\n  env.timeout(3)\n  assert env.peek() == 3\n",
    "import simpy\ndef test_same():\n  assert simpy.Environment(4).now == 4\n",
  ),
  (
    "idna/intranges.py", "intranges_contain", "negated condition",
    "from idna import intranges\ndef test_bug():\n  assert intranges.intranges_contain(5, ((4 << 32) | 7,))\n",
    "from idna import intranges\ndef test_same():\n  assert len(intranges.intranges_from_list([1, 2])) == 1\n",
  ),
  (
    "identify/identify.py", "tags_from_filename", "comparison",
    "from identify import identify\nimport pytest\n@pytest.mark.parametrize('name', ['x.py', 'y.rst'])\n"
    "def test_bug(name):\n  assert 'text' in identify.tags_from_filename(name)\n",
    "from identify import identify\ndef test_same():\n  assert 'python' in identify.tags_from_interpreter('python3')\n",
  ),
)  # fmt: skip


def make_instance(spec: tuple[str, ...], folders: pathlib.Path) -> dict[str, Any]:
  """Copies the package into a prepared folder, with the bug, and returns the row of the instance."""
  module, function, bug, hidden, same = spec
  package = module.removesuffix(".py").partition("/")[0]
  found = importlib.util.find_spec(package)
  assert found is not None and found.origin, f"{package} is not installed"
  folder = folders / f"{package}-1"
  path = folder / module
  if "/" in module:
    ignored = shutil.ignore_patterns("__pycache__", "py.typed")
    shutil.copytree(pathlib.Path(found.origin).parent, folder / package, ignore=ignored)
  else:
    folder.mkdir(parents=True)
    shutil.copyfile(found.origin, path)
  source = path.read_text(encoding="utf-8")
  wrong = _with_bug(source, function, bug)
  path.write_text(wrong, encoding="utf-8")
  (folder / "tests").mkdir()
  (folder / "tests" / "test_same.py").write_text(same)
  tests = ("test_bug[x.py]", "test_bug[y.rst]") if "parametrize" in hidden else ("test_bug",)
  return {
    "instance_id": f"{package}-1",
    "repo": f"example/{package}",
    "base_commit": "0" * 40,
    "problem_statement": f"`{function}` in {module} is wrong.",
    "patch": diff(module, wrong, source),
    "test_patch": diff("tests/test_bug.py", None, hidden),
    "FAIL_TO_PASS": json.dumps([f"tests/test_bug.py::{test}" for test in tests]),
    "PASS_TO_PASS": json.dumps(["tests/test_same.py::test_same"]),
  }


def diff(path: str, old: str | None, new: str) -> str:
  """Returns a patch as git writes it."""
  head = f"diff --git a/{path} b/{path}\n" + ("new file mode 100644\n" if old is None else "")
  before, after = (text.splitlines(keepends=True) for text in (old or "", new))
  lines = difflib.unified_diff(before, after, f"a/{path}" if old else "/dev/null", f"b/{path}")
  return head + "".join(lines)


def _with_bug(source: str, function: str, bug: str) -> str:
  """Applies the first mutation of that kind to the function."""
  definitions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
  node = next(node for node in definitions if node.name == function)
  lines = source.split("\n")
  body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
  wrong = next(text for kind, text in mutations(body) if kind == bug).rstrip("\n")
  lines[node.lineno - 1 : node.end_lineno] = textwrap.indent(wrong, " " * node.col_offset).split("\n")
  return "\n".join(lines)
