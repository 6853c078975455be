"""Normal use of the Python tool, on every backend that works here."""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from sao_jax.envs.sandbox import PythonTool, PythonToolConfig
from tests.envs.sandbox import processes
from tests.waiting import LONG_S


@pytest.fixture(scope="module", params=["subprocess", "bubblewrap"])
def tool(request: pytest.FixtureRequest) -> Iterator[PythonTool]:
  try:
    tool = PythonTool(PythonToolConfig(backend=request.param, wall_s=60.0, cpu_s=1, max_output_bytes=300))
  except RuntimeError as error:
    pytest.skip(f"{request.param}: {error}")
  with tool:
    yield tool


@pytest.mark.parametrize(
  ("code", "text"),
  [
    ("print(2 + 3)", "5\n"),
    ("2 + 3", "5\n"),
    ("x = 1\nx", "1\n"),
    ("x = 1", ""),
    ("None", ""),
    ("", ""),
    ("# nothing", ""),
    ("'é' + chr(0x4e2d)", "'é中'\n"),
    ("import sys\nprint('a'); print('b', file=sys.stderr)", "a\nb\n"),
    ("def f(n):\n  return 1 if n < 2 else n * f(n - 1)\nf(20)", "2432902008176640000\n"),
    ("from fractions import Fraction\nFraction(1, 3) + Fraction(1, 6)", "Fraction(1, 2)\n"),
    ("import csv, sqlite3, unittest\n'modules outside the preloaded ones'[:7]", "'modules'\n"),
    ("open('a.txt', 'w').write('hello')\nopen('a.txt').read()", "'hello'\n"),
    ("__name__", "'__main__'\n"),
    ("import asyncio\nasync def f(): return 7\nasyncio.run(f())", "7\n"),
  ],
)
def test_output_is_what_a_notebook_would_show(tool: PythonTool, code: str, text: str) -> None:
  with tool.session() as session:
    assert session.run(code) == text


def test_threads_and_processes_that_end_are_fine(tool: PythonTool) -> None:
  if not tool.isolation["processes_counted"]:
    pytest.skip("no threads or processes where the system does not count them")
  code = "import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as p:\n  print(sum(p.map(abs, [-1, -2])))"
  with tool.session() as session:
    assert session.run("kept = 5\n" + code) == "3\n"
    assert session.run("import subprocess\nsubprocess.run(['/bin/echo', 'hello']).returncode") == "hello\n0\n"
    assert session.run("kept") == "5\n"


@pytest.mark.parametrize(
  ("code", "last_line"),
  [
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("print(", "SyntaxError: '(' was never closed"),
    ("int('x')", "ValueError: invalid literal for int() with base 10: 'x'"),
    ("class E(Exception): pass\nraise E('mine')", "E: mine"),
    ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
    ("input()", "EOFError: EOF when reading a line"),
  ],
)
def test_errors_end_with_their_message_and_keep_the_session(tool: PythonTool, code: str, last_line: str) -> None:
  with tool.session() as session:
    session.run("kept = 5")
    assert session.run(code).rstrip().splitlines()[-1] == last_line
    assert session.run("kept") == "5\n"


def test_traceback_shows_the_code_and_no_frame_of_the_worker(tool: PythonTool) -> None:
  with tool.session() as session:
    text = session.run("def f():\n  return missing\nf()")
  assert text.startswith("Traceback") and "return missing" in text and "_execute" not in text


PROGRAMS = (
  ("def f(x: int) -> 'str': pass\nprint(f.__annotations__)", "{'x': <class 'int'>, 'return': 'str'}\n"),
  ("x: int = 3\nprint(__annotations__)", "{'x': <class 'int'>}\n"),
  ("class A:\n  x: missing", "NameError: name 'missing' is not defined\n"),
  ("exec('def f(x: int): pass')\nprint(f.__annotations__)", "{'x': <class 'int'>}\n"),
  (
    "from functools import singledispatch\n@singledispatch\ndef f(x): pass\n@f.register\ndef _(x: int): return 7\nf(3)",
    "7\n",
  ),
  ("from __future__ import annotations\ndef f(x: int): pass\nprint(f.__annotations__)", "{'x': 'int'}\n"),
  ("[name for name in globals() if not name.startswith('__')]", "[]\n"),
  ("__name__, __doc__, __spec__, __package__, __builtins__.__name__", "('__main__', None, None, None, 'builtins')\n"),
  ("__builtins__.len('ab')", "2\n"),
  ("import sys\n[name for name in sys.modules if name.startswith('sao_jax')]", "[]\n"),
  ("import sys\nsys.argv, sys.orig_argv == [sys.executable]", "([''], True)\n"),
  ("import sao_jax", "ModuleNotFoundError: No module named 'sao_jax'\n"),
)  # fmt: skip


@pytest.mark.parametrize(("code", "end"), PROGRAMS)
def test_code_inherits_nothing_of_the_tool(tool: PythonTool, code: str, end: str) -> None:
  with tool.session() as session:
    text = session.run(code)
  assert text.endswith(end) and (text == end or text.startswith("Traceback")) and "<tool>" not in text


def test_future_features_stay_from_call_to_call_and_not_between_sessions(tool: PythonTool) -> None:
  code = "def f(x: int): pass\nf.__annotations__"
  with tool.session() as one, tool.session() as two:
    assert one.run("from __future__ import annotations") == ""
    assert (one.run(code), two.run(code)) == ("{'x': 'int'}\n", "{'x': <class 'int'>}\n")


EXITS = (
  ("print(1)\nexit()\nprint(2)", "1\n"),
  ("print(1)\nquit(0)", "1\n"),
  ("import sys\nprint(1)\nsys.exit()", "1\n"),
  ("import sys\nsys.exit(False)", ""),
  ("def f():\n  raise SystemExit\nf()", ""),
  ("try:\n  exit()\nexcept Exception:\n  print('caught')", ""),
  ("import sys\nsys.exit('no such file')", "no such file\n"),
  ("raise SystemExit([1, 2])", "[1, 2]\n"),
  ("import sys\nsys.exit(3)", "[exit code 3]\n"),
  ("print('a', end='')\nquit(-1)", "a\n[exit code 255]\n"),
  ("import sys\nsys.stdout.close()\nsys.exit(True)", "[exit code 1]\n"),
  ("try:\n  exit(4)\nexcept SystemExit as error:\n  print(error.code)", "4\n"),
  ("class E:\n  def __str__(self): return 1 / 0\nexit(E())", "ZeroDivisionError: division by zero\n"),
  ("import os\nprint(1)\nos._exit(3)", "1\n[the interpreter ended; variables are lost]\n"),
)


@pytest.mark.parametrize(("code", "end"), EXITS)
def test_programs_that_exit_end_as_python_ends_them(tool: PythonTool, code: str, end: str) -> None:
  with tool.session() as session:
    session.run("kept = 5")
    text = session.run(code)
    assert text == end or (end.startswith("Zero") and text.endswith(end))
    assert session.run("kept") == "5\n" or "os._exit" in code


def test_forked_children_exit_with_their_own_status(tool: PythonTool) -> None:
  if not tool.isolation["processes_counted"]:
    pytest.skip("no threads or processes where the system does not count them")
  for end, status in (("exit(5)", 5), ("raise SystemExit", 0), ("1 / 0", 1)):
    with tool.session() as session:
      text = session.run(f"import os\nif not (pid := os.fork()):\n  {end}\nos.waitpid(pid, 0)[1] >> 8")
      assert text.endswith(f"\n{status}\n" if end == "1 / 0" else f"{status}\n") and "exit code" not in text


def test_names_of_the_prompt(tool: PythonTool) -> None:
  with tool.session() as session:
    assert "len(obj, /)" in session.run("help(len)")
    assert session.run("help()").startswith("Welcome to Python")  # and goes on without a listener
    assert session.run("exit").startswith("Use exit()") and "Python Software Foundation" in session.run("copyright")
    assert "EOFError" not in session.run("help('for')") + session.run("credits()")


def test_sets_have_one_order_in_every_session_process_and_backend(tool: PythonTool) -> None:
  code = "print({f'word {i}' for i in range(20)}, hash('a'))"
  other = PythonTool(PythonToolConfig(pool_size=1, max_output_bytes=300))
  with other, tool.session() as one, tool.session() as two, other.session() as three:
    expected = one.run(code)
    assert expected == two.run(code) == three.run(code) and expected.startswith("{'word")
    if tool.isolation["processes_counted"]:
      assert one.run(f"import subprocess, sys\n_ = subprocess.run([sys.executable, '-c', {code!r}])") == expected


def test_state_lives_within_a_session_and_never_between_sessions(tool: PythonTool) -> None:
  with tool.session() as one, tool.session() as two:
    one.run("secret = 1\nimport math\nmath.pi = 3\nopen('secret', 'w').write('x')")
    assert one.run("secret, math.pi") == "(1, 3)\n"
    assert "NameError" in two.run("secret")
    assert two.run("import math, os; math.pi == 3, os.listdir('.')") == "(False, [])\n"
  with tool.session() as three:
    assert three.run("import math, os; math.pi == 3, os.listdir('.')") == "(False, [])\n"


def test_long_output_is_cut_in_the_middle(tool: PythonTool) -> None:
  with tool.session() as session:
    text = session.run("print('a' * 1000, 'z' * 1000)")
  assert text.startswith("aaaa") and text.endswith("zzz\n") and "2002 bytes, limit 300" in text and len(text) < 400


def test_wall_clock_limit_ends_the_interpreter_and_the_next_call_has_a_new_one() -> None:
  with PythonTool(PythonToolConfig(wall_s=2.0)) as tool, tool.session() as session:
    session.run("x = 1")
    start = time.monotonic()
    text = session.run("print('before')\nimport time; time.sleep(600)")
    assert time.monotonic() - start < LONG_S
    assert text == "before\n[time limit of 2 s exceeded; variables are lost]\n"
    assert "NameError" in session.run("x")


def test_cpu_limit_is_an_error_in_the_code_and_keeps_the_session(tool: PythonTool) -> None:
  with tool.session() as session:
    session.run("x = 1")
    text = session.run("while True: pass")
    assert "TimeoutError: CPU time limit of 1 s exceeded" in text and "<tool>" not in text
    assert session.run("x") == "1\n"


def test_without_persistence_every_call_starts_anew() -> None:
  with PythonTool(PythonToolConfig(persistent=False, wall_s=60.0)) as tool, tool.session() as session:
    assert session.run("x = 1; x") == "1\n"
    assert "NameError" in session.run("x")


def test_short_tracebacks_and_extra_modules(tmp_path: object) -> None:
  (tmp_path / "extra_module.py").write_text("VALUE = 8\n")  # type: ignore[operator]
  config = PythonToolConfig(traceback_frames=0, wall_s=60.0, python_path=(str(tmp_path),))
  os.chmod(str(tmp_path), 0o755)
  with PythonTool(config) as tool, tool.session() as session:
    assert session.run("1 / 0") == "ZeroDivisionError: division by zero\n"
    assert session.run("import extra_module; extra_module.VALUE") == "8\n"


MISDEEDS = ("while True: pass", "x = bytearray(10**10)", "import os; os._exit(1)", "print('x' * 10**6)")


def test_64_sessions_at_once_each_with_its_own_state_and_some_of_them_hostile(tool: PythonTool) -> None:
  all_live = threading.Barrier(64)

  def episode(number: int) -> bool:
    with tool.session() as session:
      session.run(f"x = {number}")
      all_live.wait(400)
      if number % 4 == 0:
        text = session.run(MISDEEDS[number // 4 % len(MISDEEDS)])
        return 0 < len(text) < 1_500 and session.run("1 + 1") == "2\n"
      return all(session.run(f"x += 1; x * {k}") == f"{(number + k) * k}\n" for k in range(1, 6))

  before = processes.descendants(tool.isolation["pid"])
  with concurrent.futures.ThreadPoolExecutor(64) as pool:
    assert all(pool.map(episode, range(64)))
  processes.wait_until(lambda: len(processes.descendants(tool.isolation["pid"])) <= len(before) + 1)


def test_zygote_is_started_again_when_it_dies(tool: PythonTool) -> None:
  with tool.session() as session:
    session.run("x = 1")
    processes.kill_descendants(tool.isolation["pid"])
    assert "variables are lost" in session.run("x")
    assert session.run("1 + 1") == "2\n"


def test_close_leaves_nothing_running(tool: PythonTool) -> None:
  own = PythonTool(PythonToolConfig(backend=tool.config.backend))
  session = own.session()
  session.run("x = 1")
  pid = own.isolation["pid"]
  started = processes.descendants(pid)
  assert pid in started and len(started) > 1
  own.close()
  processes.wait_until(lambda: not started & processes.running())
  assert session.run("x") == "[the interpreter ended; variables are lost]\n"
  with pytest.raises(RuntimeError, match="closed"):
    session.run("x")


FORK = """
import os, sys
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig
with PythonTool(PythonToolConfig(backend=sys.argv[1], wall_s=60.0)) as tool, tool.session() as session:
  session.run("x = 1")
  if os.fork() == 0:
    try: tool.session().run("1")
    except RuntimeError as error: print(error, flush=True)
    session.close()
    tool.close()
    os._exit(0)
  os.wait()
  print(session.run("x"), tool.session().run("2"))
"""


def test_a_fork_of_the_host_cannot_disturb_its_sessions(tool: PythonTool) -> None:
  command = [sys.executable, "-c", FORK, tool.config.backend]
  done = subprocess.run(command, capture_output=True, text=True, timeout=500)
  assert done.returncode == 0, done.stderr[-2000:]
  assert "belongs to the process that made it" in done.stdout and done.stdout.endswith("1\n 2\n\n")


def test_sessions_may_be_closed_twice_and_used_again(tool: PythonTool) -> None:
  session = tool.session()
  session.close()
  assert session.run("x = 1; x") == "1\n"
  session.close()
  session.close()
  assert "NameError" in session.run("x")
  session.close()


def test_code_may_send_messages_to_a_listener(tool: PythonTool) -> None:
  heard: list[bytes] = []

  def listener(message: bytes) -> bytes | None:
    heard.append(message)
    return None if message == b"no" else message[::-1] * 100_000

  with tool.session() as session:
    code = "import sao_host\nkept = sao_host.ask(b'abc')\nprint('said'); len(kept), kept[:4]"
    assert session.run(code, listener=listener) == "said\n(300000, b'cbac')\n"
    assert session.run("sao_host.ask(b'')", listener=listener) == "b''\n" and heard == [b"abc", b""]
    assert session.run("len(kept)") == "300000\n"
    assert "state was damaged" in session.run("import sao_host; sao_host.ask(b'no')", listener=listener)
    assert "state was damaged" in session.run("import sao_host; sao_host.ask(b'x')")
    assert "state was damaged" in session.run("import sao_host; sao_host.ask(bytes(1 << 21))", listener=listener)
  assert heard == [b"abc", b"", b"no"]


@pytest.mark.parametrize(
  "change", [{"backend": "docker"}, {"wall_s": 0.0}, {"cpu_s": 0}, {"pool_size": True}, {"traceback_frames": -1}]
)
def test_bad_configs_are_refused(change: dict[str, object]) -> None:
  with pytest.raises(ValueError, match=next(iter(change))):
    PythonToolConfig(**change)  # type: ignore[arg-type]
