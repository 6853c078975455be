"""Whether code passes tests that it must not see, when it would do anything to be said to pass them.

The code and the tests never share a process. The code runs in one sandbox session, as a function that the host calls;
the tests run in another, where `candidate(...)` is a stub: arguments and results cross between the two, through the
host, as texts of plain values (`_plain_values`). The session of the tests reads nothing else of the code's making, and
only it can say that they passed. So whatever the code does to its interpreter (patching builtins, walking frames,
exiting, printing), all that it can choose are the values it returns, which the tests compare in a process of their own,
as objects that cannot lie about equality.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from sao_jax.envs.coding import _plain_values
from sao_jax.envs.sandbox import PythonSession, PythonTool

_PASSED = b"passed"

_FILES = """
import os, sys
sys.dont_write_bytecode = True
sys.path.insert(0, os.getcwd())
for _path, _text in {files!r}.items():
  os.makedirs(os.path.dirname(_path) or ".", exist_ok=True)
  with open(_path, "w", encoding="utf-8", errors="surrogatepass") as _file: _ = _file.write(_text)
"""

_CANDIDATE = """
import importlib, types, sao_host
_sao_plain = types.ModuleType("plain")
exec({plain!r}, _sao_plain.__dict__)
def _sao_call(text):
  try:
    args, kwargs = _sao_plain.decode(text)
    function = getattr(importlib.import_module({module!r}), {function!r})
    reply = ["return", _sao_plain.encode(function(*args, **kwargs))]
  except Exception as error:
    reply = ["raise", type(error).__name__, str(error)[:200]]
  sao_host.ask(_sao_plain.json.dumps(reply).encode())
"""

_TESTS = """
import builtins, types, sao_host
_plain = types.ModuleType("plain")
exec({plain!r}, _plain.__dict__)
def _exception(name, message):
  kind = getattr(builtins, name, None)
  if not isinstance(kind, type) or not issubclass(kind, Exception):
    kind = RuntimeError
  if issubclass(kind, (StopIteration, StopAsyncIteration)):  # would end a loop of the test instead of the test
    kind = RuntimeError
  try:
    return kind(message)
  except TypeError:
    return RuntimeError(message)
def candidate(*args, **kwargs):
  reply = _plain.json.loads(sao_host.ask(_plain.encode([list(args), kwargs]).encode()))
  if not isinstance(reply, list) or not all(type(part) is str for part in reply):
    raise RuntimeError("not a reply")
  if len(reply) == 3 and reply[0] == "raise":
    raise _exception(*reply[1:])
  if len(reply) != 2 or reply[0] != "return":
    raise RuntimeError("not a reply")
  return _plain.decode(reply[1])
exec(compile({tests!r}, "<tests>", "exec", dont_inherit=True), {{"__name__": "tests", "candidate": candidate}})
sao_host.ask(b"passed")
"""


class _Candidate:
  """Answers the calls of the tests by running them in the code's session."""

  def __init__(self, session: PythonSession):
    self._session = session
    self._replies: list[bytes] = []
    self.passed = False

  def answer(self, message: bytes) -> bytes | None:
    """What the tests' session asks; None, which ends it, once the code has lost its interpreter."""
    if message == _PASSED:
      self.passed = True
      return b""
    self._replies.clear()
    self._session.run(f"_sao_call({message.decode('ascii')!r})", listener=self._hear)
    return self._replies[0] if self._replies else None

  def _hear(self, message: bytes) -> bytes | None:
    if self._replies:
      return None  # one reply per call
    self._replies.append(message)
    return b""


def passes_hidden_tests(tool: PythonTool, files: Mapping[str, str], entry_point: str, tests: str) -> bool:
  """Whether a repository's function passes tests that it cannot see or touch.

  Args:
    tool: runs both sides; its wall-clock limit is that of the tests as a whole.
    files: the repository, path to text.
    entry_point: `module:function`, called for every `candidate(...)` of the tests.
    tests: a program that raises unless `candidate` is right. Plain values go in and come out (see `_plain_values`).
  """
  module, _, function = entry_point.partition(":")
  if not module or not function:
    raise ValueError(f"entry_point must be of the form 'module:function'; received {entry_point!r}.")
  plain = pathlib.Path(_plain_values.__file__).read_text(encoding="utf-8")
  with tool.session() as code, tool.session() as judge:
    code.run(_FILES.format(files=dict(files)) + _CANDIDATE.format(plain=plain, module=module, function=function))
    candidate = _Candidate(code)
    judge.run(_TESTS.format(plain=plain, tests=tests), listener=candidate.answer)
    return candidate.passed


def run_test(tool: PythonTool, files: Mapping[str, str], program: str) -> tuple[bool, str]:
  """Runs a test program in the repository, next to the code: `(passed, output)`.

  The code can fake that it passed: for what the model is shown, not for rewards.
  """
  said: list[bytes] = []

  def hear(message: bytes) -> bytes | None:
    said.append(message)
    return b"" if len(said) == 1 else None

  run = f"""
try: exec(compile({program!r}, "<test>", "exec", dont_inherit=True), {{"__name__": "test"}})
except SystemExit as error: raise RuntimeError(f"the test ended early, by {{error!r}}") from None
"""
  tell = 'import sao_host\n_ = sao_host.ask(b"passed")\n'
  with tool.session() as session:
    text = session.run(_FILES.format(files=dict(files)) + run + tell, listener=hear)
  return said == [_PASSED], text
