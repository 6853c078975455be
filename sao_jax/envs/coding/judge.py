"""Hidden tests for untrusted code, which may try to fake a pass.

The code and the tests never share a process. The code runs in one sandbox session, as a function that the host calls.
The tests run in another session, where `candidate(...)` is a stub. Arguments and results cross between the sessions
through the host, as texts of plain values (`_plain_values`). The session of the tests reads nothing else from the code,
and only that session can report a pass. The code may patch builtins, walk frames, exit or print in its interpreter. It
can still choose only the values that it returns. The tests compare those in their own process, as plain objects that
cannot fake equality.
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
  if issubclass(kind, (StopIteration, StopAsyncIteration)):  # These would end a loop of the test instead of the test.
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
  """Runs the calls of the tests in the session of the code."""

  def __init__(self, session: PythonSession):
    self._session = session
    self._replies: list[bytes] = []
    self.passed = False

  def answer(self, message: bytes) -> bytes | None:
    """Replies to the session of the tests. None ends that session, since the code has lost its interpreter."""
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
  """Whether a function of a repository passes tests that it cannot see or change.

  Args:
    tool: runs both sides. Its wall-clock limit holds for all tests together.
    files: texts of the repository by path.
    entry_point: `module:function`, called for every `candidate(...)` of the tests.
    tests: program that raises unless `candidate` is right. Arguments and results are plain values (see
      `_plain_values`).
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
  """Runs a test program in the repository and returns `(passed, output)`.

  The code shares a process with the test and can fake a pass. Show the result to the model, but give no reward for it.
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
