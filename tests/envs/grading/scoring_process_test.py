from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sao_jax.envs.grading.scoring_process import NoReplyError, WorkerError, WorkerPool, shared_pool
from sao_jax.utils.extras import MissingExtraError
from tests.waiting import LONG_S, until

pytestmark = pytest.mark.timeout(600)

ODD_WORKER = '''
import builtins, os, sys, time

class MissingExtraError(ImportError):
  pass

def start():
  return lambda request: globals()[request[0]](*request[1:])

def echo(value):
  return value

def pid():
  return os.getpid()

def hash_seed():
  return [os.environ["PYTHONHASHSEED"], hash("text")]

def sleep(seconds):
  time.sleep(seconds)
  return seconds

def spin():
  while True:
    pass

def fill():
  return len([bytearray(1 << 20) for _ in range(1 << 20)])

def die(code):
  print("not a reply", flush=True)
  os._exit(code)

def fail(kind, message):
  kinds = {**vars(builtins), "Missing": MissingExtraError, "Own": type("Own", (Exception,), {})}
  raise kinds[kind](message)

def loaded():
  return "jax" in sys.modules
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp("modules")
  (folder / "odd_worker.py").write_text(ODD_WORKER)
  (folder / "broken_worker.py").write_text("import no_such_package\n")
  (folder / "slow_worker.py").write_text("import time\ndef start():\n  time.sleep(1_000)\n")
  (folder / "dying_worker.py").write_text("import os\nos._exit(3)\n")
  return folder


@pytest.fixture(autouse=True)
def importable(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.fixture
def pool(importable: None) -> Iterator[WorkerPool]:
  pool = WorkerPool("odd_worker", max_workers=2, memory_bytes=1 << 28)
  yield pool
  pool.close()


def ask(pool: WorkerPool, *request: Any, timeout_s: float = LONG_S) -> Any:
  return pool.call(list(request), timeout_s=timeout_s)


@pytest.mark.parametrize(
  "value", [None, 1.5, "\ud800\0\u2028 line\nline", ["a", [1, {"b": None}]], "x" * 3_000_000, 10**4_000]
)
def test_values_come_back(pool: WorkerPool, value: Any) -> None:
  assert ask(pool, "echo", value) == value


def test_one_process_answers_and_loads_no_more_than_its_module(pool: WorkerPool) -> None:
  assert ask(pool, "pid") == ask(pool, "pid") != os.getpid()
  assert not ask(pool, "loaded")


def test_all_processes_have_one_hash_seed(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setenv("PYTHONHASHSEED", "5")
  seed, first = ask(pool, "hash_seed")
  pool.close()
  assert [seed, first] == ask(pool, "hash_seed") and seed == "0"


@pytest.mark.parametrize("request_", [["spin"], ["sleep", 1_000]])
def test_a_request_that_never_ends_is_given_up_in_time(pool: WorkerPool, request_: list[Any]) -> None:
  before = ask(pool, "pid")
  began = time.perf_counter()
  with pytest.raises(NoReplyError, match=r"odd_worker gave no reply: it took more than 0\.5 s") as error:
    ask(pool, *request_, timeout_s=0.5)
  assert 0.5 <= time.perf_counter() - began < LONG_S
  assert error.value.timed_out and pool.timeouts == 1
  assert ask(pool, "pid") != before and not pathlib.Path(f"/proc/{before}").exists()


def test_a_stopped_process_that_reads_nothing_is_given_up_in_time(pool: WorkerPool) -> None:
  os.kill(ask(pool, "pid"), signal.SIGSTOP)
  with pytest.raises(NoReplyError, match="took more than"):
    ask(pool, "echo", "x" * 1_000_000, timeout_s=0.5)
  assert ask(pool, "echo", 1) == 1


def test_a_process_that_dies_is_started_again(pool: WorkerPool) -> None:
  with pytest.raises(NoReplyError, match="its process ended") as error:
    ask(pool, "die", 0)
  assert not error.value.timed_out and pool.timeouts == 0
  os.kill(pid := ask(pool, "pid"), signal.SIGKILL)
  os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # Its memory is gone before its status can be read.
  assert ask(pool, "echo", 2) == 2


def test_memory_is_limited(pool: WorkerPool) -> None:
  with pytest.raises(WorkerError, match="MemoryError"):
    ask(pool, "fill")
  assert ask(pool, "echo", 3) == 3


@pytest.mark.parametrize(
  ("kind", "raised", "message"),
  [
    ("ValueError", ValueError, "^no$"), ("KeyError", WorkerError, "^KeyError: 'no'$"),
    ("Own", WorkerError, "^Own: no$"), ("RecursionError", WorkerError, "^RecursionError: no$"),
    ("Missing", MissingExtraError, "^no$"),
  ],
)  # fmt: skip
def test_exceptions_come_back(pool: WorkerPool, kind: str, raised: type[Exception], message: str) -> None:
  before = ask(pool, "pid")
  with pytest.raises(raised, match=message):
    ask(pool, "fail", kind, "no")
  assert ask(pool, "pid") == before


def test_a_request_that_is_no_json_is_refused_and_the_next_one_answered(pool: WorkerPool) -> None:
  with pytest.raises(TypeError, match="not JSON serializable"):
    ask(pool, "echo", object())
  assert ask(pool, "echo", 4) == 4


def test_a_busy_process_is_joined_by_another_one(pool: WorkerPool) -> None:
  first = ask(pool, "pid")

  def work() -> None:
    with pytest.raises(NoReplyError):
      ask(pool, "sleep", 1_000)

  slow = threading.Thread(target=work)
  slow.start()
  until(lambda: not pool._idle)
  try:
    assert ask(pool, "pid") != first
    assert slow.is_alive() and pool._num_workers == 2
  finally:
    os.kill(first, signal.SIGKILL)
    slow.join(LONG_S)
  assert not slow.is_alive()


def test_a_caller_that_waits_while_the_pool_is_closed_is_answered(folder: pathlib.Path) -> None:
  pool = WorkerPool("odd_worker", max_workers=1)
  pid = ask(pool, "pid")

  def work() -> None:
    with pytest.raises(NoReplyError):
      ask(pool, "sleep", 1_000)

  answers: list[Any] = []
  calls = (work, pool.close, lambda: answers.append(ask(pool, "echo", 5)))
  threads = [threading.Thread(target=call, daemon=True) for call in calls]
  for number, thread in enumerate(threads):
    thread.start()
    until((lambda: not pool._idle) if number == 0 else (lambda n=number: len(pool._changed._waiters) == n))  # type: ignore[misc]
  os.kill(pid, signal.SIGKILL)
  for thread in threads:
    thread.join(LONG_S)
  assert answers == [5]
  pool.close()


def test_many_threads_share_the_processes(pool: WorkerPool) -> None:
  results: dict[int, Any] = {}
  pids: set[int] = set()

  def work(i: int) -> None:
    pids.add(ask(pool, "pid"))
    results[i] = [ask(pool, "echo", [i, j]) for j in range(20)]

  threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(LONG_S)
  assert results == {i: [[i, j] for j in range(20)] for i in range(16)} and 1 <= len(pids) <= 2


def test_processes_that_do_not_start_say_why() -> None:
  with pytest.raises(WorkerError, match="ModuleNotFoundError: No module named 'no_such_package'"):
    WorkerPool("broken_worker").call(1, timeout_s=1.0)
  with pytest.raises(RuntimeError, match=r"did not start: slow_worker gave no reply: it took more than 0\.3 s"):
    WorkerPool("slow_worker", start_timeout_s=0.3).call(1, timeout_s=1.0)
  with pytest.raises(RuntimeError, match="did not start: dying_worker gave no reply: its process ended"):
    WorkerPool("dying_worker").call(1, timeout_s=1.0)
  with pytest.raises(ValueError, match="max_workers must be at least 1; received 0"):
    WorkerPool("odd_worker", max_workers=0)


def test_shared_pools_are_one_for_each_module() -> None:
  assert shared_pool("odd_worker") is shared_pool("odd_worker") is not shared_pool("broken_worker")


def test_processes_end_with_the_program_that_started_them(folder: pathlib.Path) -> None:
  code = (
    "from sao_jax.envs.grading.scoring_process import shared_pool\n"
    "print(shared_pool('odd_worker').call(['pid'], timeout_s=60.0))\n"
  )
  root = pathlib.Path(__file__).parents[2]
  done = subprocess.run(
    [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=500, check=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(root)])},
  )  # fmt: skip
  process = pathlib.Path(f"/proc/{int(done.stdout)}")
  deadline = time.monotonic() + LONG_S
  while process.exists() and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not process.exists()
