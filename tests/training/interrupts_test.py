"""Signals that come while the main thread is in a call that does not return: each in a process of its own."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import psutil
import pytest

from tests.waiting import LONG_S, until

ROOT = pathlib.Path(__file__).resolve().parents[2]
# No signal interrupts this call: like a compiler it runs without Python for minutes.
STUCK = """
import hashlib, os, signal, sys, threading, time
def stuck(rounds=2**31 - 1):
  print("stuck", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
def fails():
  raise OSError("disk full")
"""
INTERRUPTS = """
from sao_jax.training import signals
signals._ABORT_AFTER_S = 0.5
"""
# Without the package, whose import takes seconds.
EXITS = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("exits", {str(ROOT / "sao_jax" / "utils" / "process_exit.py")!r})
exits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exits)
exits._PATIENCE_S = 0.2
"""


def send(program: str, *numbers: signal.Signals, computes: bool = True) -> tuple[int, str, str]:
  """Runs `program` until it is stuck, sends signals, waits for its end; returns exit code and what it printed.

  Args:
    program: prints "stuck" right before the call that does not return.
    numbers: the signals.
    computes: that call takes processor time: a signal is sent once it has taken some, which tells that it is in it (and
      has received the signal before, with which this one would else be merged).
  """
  command = [sys.executable, "-c", STUCK + program]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0) as process:
    try:
      assert process.stdout is not None
      assert process.stdout.readline() == b"stuck\n"
      for number in numbers:
        before = used_s(process)
        until(lambda before=before: not computes or used_s(process) > before + 0.1)
        process.send_signal(number)
      out, err = process.communicate(timeout=LONG_S)
    finally:
      process.kill()
    return process.returncode, out.decode(), err.decode()


def used_s(process: subprocess.Popen[bytes]) -> float:
  return psutil.Process(process.pid).cpu_times().user


def test_what_can_be_aborted_is_saved_and_aborted() -> None:
  program = "with signals.StopSignals() as i, i.interruptible(emergency_checkpoint=lambda: print('saved')): stuck()"
  code, out, err = send(INTERRUPTS + program, signal.SIGTERM)
  assert (code, out) == (0, "saved\n") and "Aborted a call" in err


def test_an_exception_that_python_loses_is_raised_again() -> None:
  program = """
import gc
signals._ABORT_AFTER_S, signals._RESEND_S = 60, 0.5
def callback(phase, info):
  if phase == "start":
    print("stuck", flush=True)
    time.sleep(600)
gc.disable()
gc.callbacks.append(callback)
try:
  with signals.StopSignals() as i, i.interruptible():
    gc.collect(0)
    gc.callbacks.remove(callback)
    print("lost", flush=True)
    time.sleep(600)
except signals.Interrupted:
  print("ended")
"""
  code, out, err = send(INTERRUPTS + program, signal.SIGTERM, computes=False)
  assert code == 0 and out.split() == ["lost", "ended"] and "Exception ignored" in err


def test_an_emergency_checkpoint_that_fails_is_reported() -> None:
  program = "with signals.StopSignals() as i, i.interruptible(emergency_checkpoint=fails): stuck()"
  code, _, err = send(INTERRUPTS + program, signal.SIGINT)
  assert code == 1 and "disk full" in err


def test_an_emergency_checkpoint_that_cannot_be_written_yet_is_tried_again() -> None:
  program = """
asked = []
def save():
  asked.append(1)
  if len(asked) < 3:
    raise signals.RetryLater
  print(len(asked))
with signals.StopSignals() as i, i.abortable(save): stuck()
"""
  code, out, err = send(INTERRUPTS + program, signal.SIGTERM)
  assert (code, out) == (0, "3\n") and "Traceback" not in err


def test_a_second_ctrl_c_ends_what_does_not_return() -> None:
  code, out, _ = send(INTERRUPTS + "with signals.StopSignals() as i: stuck()", *[signal.SIGINT] * 2)
  assert (code, out) == (130, "")


def test_what_may_not_be_aborted_is_waited_for() -> None:
  program = """
with signals.StopSignals() as i:
  with i.abortable():
    pass
  stuck(3_000_000)
  while not i.requested:
    time.sleep(0.1)
  try:
    i.check()
  except signals.Interrupted:
    print("saved")
"""
  code, out, _ = send(INTERRUPTS + program, signal.SIGTERM, computes=False)
  assert (code, out) == (0, "saved\n")


def test_a_forked_child_is_not_the_run() -> None:
  """Its signals are its own, and the run's end does not wait for it."""
  program = """
with signals.StopSignals() as i, i.interruptible():
  stuck(1)
  children = []
  started, start = os.pipe()
  for _ in range(2):
    if not (child := os.fork()):
      os.write(start, b"started\\n")
      while True: signal.pause()
    children.append(child)
  for _ in children:
    print(os.read(started, 8).decode(), end="", flush=True)
  os.kill(children[0], signal.SIGTERM)
  print(os.WTERMSIG(os.waitpid(children[0], 0)[1]), flush=True)
  time.sleep(1.5)
  print(i.requested, flush=True)
print("over", flush=True)
os.kill(children[1], signal.SIGKILL)
"""
  code, out, _ = send(INTERRUPTS + program)
  assert code == 0 and out.split() == ["started", "started", "15", "False", "over"]


@pytest.mark.parametrize(
  ("end", "code", "told"),
  [
    ("", 0, "begun"),
    ("sys.exit(3)", 3, "begun"),
    ("sys.exit('no disk')", 1, "no disk"),
    ("raise ValueError('wrong')", 1, "ValueError: wrong"),
  ],
)
@pytest.mark.parametrize("daemon", [False, True])
def test_threads_that_are_left_do_not_keep_the_process(end: str, code: int, told: str, daemon: bool) -> None:
  """One that an environment began, or one of ours that hangs (compiling: the interpreter's end would abort)."""
  program = f"""
with exits.exit_after_main():
  name = "sao_jax-env" if {daemon} else "begun"
  threading.Thread(target=time.sleep, args=(600,), name=name, daemon={daemon}).start()
  print("stuck", flush=True)
  print("out")
  {end}
"""
  found, out, err = send(EXITS + program)
  assert found == code and "out" in out and told.replace("begun", "Exiting while threads are still running") in err


def test_a_process_without_such_threads_ends_as_usual() -> None:
  program = """
import atexit
atexit.register(print, "as usual")
with exits.exit_after_main():
  print("stuck", flush=True)
  sys.exit(4)
"""
  assert send(EXITS + program)[:2] == (4, "as usual\n")
