"""Code that fakes a pass must fail. Right code must pass, for all plain values that it takes and returns."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest

from sao_jax.envs.coding import _plain_values, judge
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig

TESTS = """
import math
METADATA = {'author': 'hidden-7361'}
def close(a, b): return abs(a - b) < 1e-6
def check(candidate):
  assert candidate([1, 3, 2]) == 3, "hidden-7361"
  assert candidate([]) is None
  assert close(candidate([0.5, 0.25]), 0.5)
  assert all(map(candidate, [[1], [2, 5]])), "every one of them"
  assert [candidate(x) for x in ([7], [8, 9])] == [7, 9]
check(candidate)
"""
RIGHT = "def largest(xs):\n  return max(xs) if xs else None\n"

FORGERIES = {
  "marks in the main module": "import __main__, sys\n__main__._sao_passed = True\ndef largest(xs): sys.exit(0)\n",
  "exits at import": "import os\nos._exit(0)\n",
  "exits in the call": "import os\ndef largest(xs): os._exit(0)\n",
  "SystemExit": "def largest(xs): raise SystemExit(0)\n",
  "exit handlers": """
import atexit, sao_host
atexit.register(sao_host.ask, b'passed')
def largest(xs): raise SystemExit
""",
  "says that it passed": "import sao_host\nsao_host.ask(b'passed')\ndef largest(xs): return sao_host.ask(b'passed')\n",
  "replies passed": "import sao_host\ndef largest(xs): sao_host.ask(b'passed')\n",
  "prints markers": "def largest(xs): print('passed'); print('[\"return\", true]'); print(True)\n",
  "equal to everything": """
class Any(int):
  def __eq__(self, other): return True
  def __ne__(self, other): return False
  __lt__ = __le__ = __gt__ = __ge__ = __eq__
  def __hash__(self): return 0
  def __sub__(self, other): return self
  __rsub__ = __abs__ = __sub__
def largest(xs): return Any()
""",
  "object that is no value": """
class Any:
  def __eq__(self, other): return True
def largest(xs): return Any()
""",
  "string that is equal to everything": """
class Any(str):
  def __eq__(self, other): return True
  def __hash__(self): return 0
def largest(xs): return Any('x')
""",
  "list that is equal to everything": """
class Any(list):
  def __eq__(self, other): return True
def largest(xs): return Any([1])
""",
  "not a number": "def largest(xs): return float('nan')\n",
  "patched builtins": """
import builtins
for name in ('all', 'any', 'abs', 'max', 'exec', 'compile', 'isinstance', 'map'):
  setattr(builtins, name, lambda *a, **k: True)
builtins.AssertionError = type('Quiet', (Exception,), {})
def largest(xs): return 0
""",
  "patched modules": """
import sys, math, json
json.loads = lambda *a: ['return', 'true']
for module in list(sys.modules.values()):
  for name in ('check', 'close', 'candidate', 'assertEqual', 'isclose'):
    try: setattr(module, name, lambda *a, **k: True)
    except Exception: pass
def largest(xs): return 0
""",
  "looks for the tests in frames": """
import sys, gc
def largest(xs):
  frame = sys._getframe()
  while frame:
    if 'hidden-7361' in repr(frame.f_locals) + repr(frame.f_globals):
      return 3 if xs else None
    frame = frame.f_back
  for thing in gc.get_objects():
    if isinstance(thing, dict) and thing.get('METADATA'): return 3
  return 0
""",
  "looks for the tests in files": """
import os
def largest(xs):
  for top in ('.', '/tmp', '/proc', '/site'):
    for folder, _, names in os.walk(top):
      for name in names:
        try: text = open(os.path.join(folder, name), errors='replace').read(100000)
        except (OSError, ValueError): continue
        if 'hidden-7361' in text and not name.startswith('solution'): return 3 if xs else None
  return 0
""",
  "trace functions": """
import sys, threading
def trace(frame, event, arg):
  if 'passed' in frame.f_locals: frame.f_locals['passed'] = True
  return trace
sys.settrace(trace); threading.settrace(trace)
def largest(xs): return 0
""",
  "stop of an iteration": "def largest(xs):\n  if xs and xs[0] in (1, 2): raise StopIteration\n  return 3\n",
  "every exception": "def largest(xs): raise AssertionError('passed')\n",
  "group of exceptions": "def largest(xs): raise BaseExceptionGroup('passed', [SystemExit(0)])\n",
  "answers the protocol": """
import gc, socket, struct
def largest(xs):
  for thing in gc.get_objects():
    if isinstance(thing, socket.socket):
      thing.sendall(b'12345678.' * 100 + struct.pack('<QcI', 1, b'Q', 6) + b'passed')
  return 0
""",
  "answers with the right number": """
import sao_host
def largest(xs):
  session = sao_host.ask.__self__
  for _ in range(3): session._connection.sendall(session._number.to_bytes(8, 'little') + b'.')
  return 0
""",
  "ill-formed replies": """
import sao_host
def largest(xs): sao_host.ask(b'["return"' + b'[' * 5000 + b'1' * 5000)
""",
  "replies that are no texts": "import sao_host\ndef largest(xs): sao_host.ask(b'[\"return\", [true]]')\n",
  "endless messages": "import sao_host\nwhile True: sao_host.ask(b'passed')\n",
  "a message too long": "import sao_host\ndef largest(xs): sao_host.ask(b'x' * (1 << 24))\n",
  "a value too long": "def largest(xs): return 'x' * (1 << 24)\n",
  "a value too deep": "def largest(xs):\n  x = []\n  for _ in range(100000): x = [x]\n  return x\n",
  "a value that ends its decoder": "def largest(xs): return {float('nan'): 1, 'a' * 1000: [2] * 1000}\n",
  "children that stay": """
import os, sao_host
if os.fork() == 0:
  while True: sao_host.ask(b'passed')
def largest(xs): return 0
""",
  "another file that is imported": "import json\ndef largest(xs): return 0\n",
  "an enumeration": """
import enum
class E(enum.IntEnum): A = 3
E.__eq__ = lambda self, other: True
def largest(xs): return E.A
""",
  "a number that is shown as another": """
class I(int):
  def __repr__(self): return '3'
  __str__, __index__, __int__ = __repr__, lambda self: 3, lambda self: 3
def largest(xs): return I(0)
""",
  "a number that is none and equal to all": """
class F(float):
  def __repr__(self): return '3.0'
  def __eq__(self, other): return True
  __hash__ = float.__hash__
def largest(xs): return F('nan')
""",
  "a coroutine": "async def largest(xs): return max(xs) if xs else None\n",
  "an awaitable": "class R:\n  def __await__(self): yield\ndef largest(xs): return R()\n",
  "an exception by a builtin's name": "def largest(xs): raise type('SystemExit', (Exception,), {})(0)\n",
  "an exception by the name of a function": "def largest(xs): raise type('__import__', (Exception,), {})('os')\n",
  "an exception that no text makes": "def largest(xs): raise type('ExceptionGroup', (Exception,), {})('x')\n",
  "a value that holds itself": "def largest(xs):\n  d = {}\n  d[1] = d\n  return d\n",
  "arguments emptied": "def largest(xs):\n  xs.clear()\n  return 0\n",
  "small integers exchanged": "import ctypes\nctypes.memmove(id(0) + 24, id(3) + 24, 4)\ndef largest(xs): return 0\n",
  "a module that has every function": """
import sys
class M(type(sys)):
  def __getattr__(self, name): return lambda *a: 3
sys.modules['solution'] = M('solution')
""",
  "another file that is configuration": "def largest(xs): return 0\n",
}
EXTRA_FILES = {
  "json.py": "loads = lambda text: ['return', 'true']\ndumps = lambda x: '[\"return\", \"true\"]'\n",
  "sao_host.py": "ask = lambda message: b'passed'\n",
  "conftest.py": "import os\nos._exit(0)\n",
  "sitecustomize.py": "import os\nos._exit(0)\n",
  "importlib/__init__.py": "import_module = lambda name: None\n",
}


@pytest.fixture(scope="module", params=["subprocess", "bubblewrap"])
def tool(request: pytest.FixtureRequest) -> Iterator[PythonTool]:
  try:
    tool = PythonTool(PythonToolConfig(backend=request.param, wall_s=60.0, cpu_s=5, memory_mb=256))
  except RuntimeError as error:
    pytest.skip(f"{request.param}: {error}")
  with tool:
    yield tool


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_verdict_is_no_verdict(tool: PythonTool, name: str) -> None:
  files = {"solution.py": FORGERIES[name]} | (EXTRA_FILES if name.startswith("another file") else {})
  assert not judge.passes_hidden_tests(tool, files, "solution:largest", TESTS)


def test_right_code_passes_and_wrong_code_fails(tool: PythonTool) -> None:
  assert judge.passes_hidden_tests(tool, {"solution.py": RIGHT}, "solution:largest", TESTS)
  for wrong in ("return 3", "return max(xs)", "return min(xs) if xs else None", "return max(xs) if xs else 0"):
    files = {"solution.py": f"def largest(xs):\n  {wrong}\n"}
    assert not judge.passes_hidden_tests(tool, files, "solution:largest", TESTS)
  for files in ({}, {"solution.py": ""}, {"solution.py": "def largest("}, {"solution.py": "largest = 3"}):
    assert not judge.passes_hidden_tests(tool, files, "solution:largest", TESTS)


def test_code_that_prints_keeps_state_and_works_in_packages(tool: PythonTool) -> None:
  files = {
    "pkg/__init__.py": "",
    "pkg/helper.py": "calls = []\n",
    "pkg/core.py": "from pkg import helper\ndef count(*, by=1):\n  print('noise' * 2000)\n  helper.calls.append(by)\n"
    "  return sum(helper.calls)\n",
  }
  tests = "assert [candidate(), candidate(by=3), candidate()] == [1, 4, 5]\n"
  assert judge.passes_hidden_tests(tool, files, "pkg.core:count", tests)


def test_exceptions_of_the_code_reach_tests_that_expect_them(tool: PythonTool) -> None:
  code = "class Mine(Exception): pass\ndef f(kind):\n  raise Mine('m') if kind == 'Mine' else eval(kind)('m')"
  tests = """
for name, kind in (('ValueError', ValueError), ('KeyError', KeyError), ('Mine', RuntimeError)):
  try: candidate(name)
  except Exception as error: assert type(error) is kind and 'm' in str(error), (name, error)
  else: raise AssertionError(name)
"""
  assert judge.passes_hidden_tests(tool, {"solution.py": code}, "solution:f", tests)


VALUES = [
  None,
  True,
  False,
  0,
  -1,
  10**4000,
  1.5,
  -0.0,
  math.inf,
  1e-308,
  2 + 3j,
  "",
  "é\n\0\ud800",
  b"\x00\xff",
  [],
  [1, [2.0, "x"]],
  (),
  (1, (2,)),
  {},
  {1: "a", (2, 3): [4]},
  {True: None},
  {1, 2},
  frozenset({"a"}),
  [{"a": {1: (None, {2.5})}}],
]


def test_plain_values_cross_exactly(tool: PythonTool) -> None:
  tests = f"""
from math import inf
values = {VALUES!r}
def exactly(a, b):
  if type(a) is not type(b): return False
  if isinstance(a, (list, tuple)): return len(a) == len(b) and all(map(exactly, a, b))
  return repr(a) == repr(b) if isinstance(a, float) else a == b
for value in values: assert exactly(candidate(value), value), value
"""
  assert judge.passes_hidden_tests(tool, {"solution.py": "def same(x): return x"}, "solution:same", tests)


def test_integers_of_any_length_cross() -> None:
  assert _plain_values.decode(_plain_values.encode(-(10**5000))) == -(10**5000)


def test_instances_of_subclasses_become_what_they_derive_from() -> None:
  class Loud(str):
    def __eq__(self, other: object) -> bool:
      return True

    __hash__ = str.__hash__

  value = _plain_values.decode(_plain_values.encode([Loud("a"), {Loud("b"): True}]))
  assert value == ["a", {"b": True}] and type(value[0]) is str and value[0] != "c"
  assert all(type(key) is str for key in value[1])


@pytest.mark.parametrize("value", [object(), iter([1]), range(3), len, Exception(), [object()], {1: object()}])
def test_other_values_do_not_cross(value: object) -> None:
  with pytest.raises(TypeError, match="not a plain value"):
    _plain_values.encode(value)


@pytest.mark.parametrize(
  "text",
  [
    "",
    "1",
    "1.5",
    "NaN",
    "{}",
    '{"int": 5}',
    '{"int": "x"}',
    '{"int": "1", "float": "1"}',
    '{"set": [[]]}',
    '{"object": []}',
    '{"tuple": "ab"}',
    '{"complex": ["1"]}',
    '{"dict": [["a"]]}',
    '{"dict": [[[], "a"]]}',
    "[" * 100_000,
  ],
)
def test_texts_that_describe_no_value_are_refused(text: str) -> None:
  with pytest.raises((ValueError, TypeError, RecursionError)):
    _plain_values.decode(text)


def test_a_time_limit_bounds_the_tests_as_a_whole() -> None:
  files = {"solution.py": "import time\ndef slow(x):\n  time.sleep(0.4)\n  return x\n"}
  with PythonTool(PythonToolConfig(wall_s=1.0)) as tool:
    assert not judge.passes_hidden_tests(tool, files, "solution:slow", "for i in range(9): candidate(i)")


def test_the_shown_test_reports_output_and_failure(tool: PythonTool) -> None:
  files = {"solution.py": RIGHT}
  assert judge.run_test(tool, files, "from solution import largest\nprint(largest([4]))") == (True, "4\n")
  passed, text = judge.run_test(tool, files, "print(4)\nimport sys\nsys.exit(0)\nassert False")
  assert not passed and text.startswith("4\n") and text.endswith("the test ended early, by SystemExit(0)\n")
  passed, text = judge.run_test(tool, files, "from solution import largest\nassert largest([4]) == 5, 'no'")
  assert not passed and "no" in text
  for program in ("import os; os._exit(0)", "raise SystemExit(0)"):
    assert not judge.run_test(tool, files, program)[0]


@pytest.mark.parametrize("entry_point", ["", "solution", ":f", "solution:"])
def test_a_bad_entry_point_is_named(tool: PythonTool, entry_point: str) -> None:
  with pytest.raises(ValueError, match="entry_point"):
    judge.passes_hidden_tests(tool, {}, entry_point, "")


def test_many_at_once(tool: PythonTool) -> None:
  results: dict[int, bool] = {}

  def one(index: int) -> None:
    code = RIGHT if index % 2 else "def largest(xs): return 0"
    results[index] = judge.passes_hidden_tests(tool, {"solution.py": code}, "solution:largest", TESTS)

  threads = [threading.Thread(target=one, args=(index,)) for index in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert results == {index: bool(index % 2) for index in range(8)}
