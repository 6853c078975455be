"""Programs that meet their limits, and one that does not."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from sao_jax.utils import limited_process
from tests.waiting import LONG_S

ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(folder, source, request=b"", *, cpu_seconds=5.0, wall_seconds=60.0, memory_bytes=1 << 28):
  program = folder / "program.py"
  program.write_text(source)
  return limited_process.run(
    program, request, cpu_seconds=cpu_seconds, wall_seconds=wall_seconds, memory_bytes=memory_bytes
  )


def test_the_request_goes_in_and_the_output_comes_back(tmp_path):
  source = "import sys; print(__name__, len(sys.stdin.read()))"
  assert run(tmp_path, source, b"x" * 1_000_000) == b"__main__ 1000000\n"
  assert run(tmp_path, "", b"x" * 1_000_000) == b""  # that it does not read


def test_processor_time_is_limited_inside_one_long_operation(tmp_path):
  with pytest.raises(ValueError, match=r"^it takes more than 0\.2 s of processor time$"):
    run(tmp_path, "10 ** 10 ** 9", cpu_seconds=0.2)


def test_signals_that_the_caller_ignores_count(tmp_path):
  """The limit holds under a caller that ignores and blocks its signal."""
  program = tmp_path / "program.py"
  program.write_text("while True: pass")
  caller = f"""
import pathlib, signal, time
from sao_jax.utils import limited_process
signal.signal(signal.SIGPROF, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGPROF}})
try:
  limited_process.run(pathlib.Path({str(program)!r}), b"", cpu_seconds=0.2, wall_seconds=60.0, memory_bytes=1 << 28)
except ValueError as error:
  print(error)
"""
  done = subprocess.run([sys.executable, "-c", caller], cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout == "it takes more than 0.2 s of processor time\n"


def test_time_is_limited_where_no_processor_is_used(tmp_path):
  began = time.monotonic()
  with pytest.raises(ValueError, match=r"^it takes more than 0\.5 s$"):
    run(tmp_path, "import time; time.sleep(1000)", wall_seconds=0.5)
  assert time.monotonic() - began < LONG_S


def test_memory_is_limited(tmp_path):
  with pytest.raises(ValueError, match=r"^it takes more than 256 MiB of memory, .* \(exit status 1\)$"):
    run(tmp_path, "x = bytearray(1 << 29)")
  assert run(tmp_path, "x = bytearray(1 << 27); print(len(x))") == b"134217728\n"


def test_a_crash_is_told(tmp_path):
  with pytest.raises(ValueError, match=rf"breaks the process \(signal {signal.SIGABRT.value}\)"):
    run(tmp_path, "import os; os.abort()")


def test_its_start_does_not_import_the_library(tmp_path):
  assert run(tmp_path, "import sys; print('jax' in sys.modules, 'numpy' in sys.modules)") == b"False False\n"


def line_process(folder, source):
  program = folder / "program.py"
  program.write_text(source)
  return limited_process.LineProcess(program, "a", environment={"B": "b"})


def test_lines_are_exchanged_with_a_process_that_stays(tmp_path):
  process = line_process(tmp_path, """
import os, sys
from sao_jax.utils import child_process
output = child_process.take_output()
print("not a reply")
output.write(f"{sys.argv[1:]} {os.environ['B']} {'jax' in sys.modules}\\n")
for line in sys.stdin:
  output.write("x" * (1 << 27) + "\\n" if line == "long\\n" else line.strip() * 2 + "\\n")
""")  # fmt: skip
  assert process.exchange(b"") == b"['a'] b False\n"
  assert process.exchange(b"x" * 1_000_000 + b"\n", 60.0) == b"x" * 2_000_000 + b"\n"
  with pytest.raises(EOFError):
    process.exchange(b"long\n")
  assert not process.is_alive and process.popen.returncode == -signal.SIGKILL


def test_a_process_without_a_reply_is_stopped(tmp_path):
  process = line_process(tmp_path, "import time; time.sleep(1000)")
  with pytest.raises(TimeoutError):
    process.exchange(b"", 0.2)
  assert process.popen.returncode == -signal.SIGKILL
  process = line_process(tmp_path, "raise SystemExit(3)")
  with pytest.raises(EOFError):
    process.exchange(b"x" * 1_000_000 + b"\n")  # which it does not read
  assert process.popen.returncode == 3
