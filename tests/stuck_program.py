"""Programs that are in a call that does not return when a signal reaches them."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import psutil

from tests.waiting import LONG_S, until

ROOT = pathlib.Path(__file__).resolve().parents[1]
# No signal interrupts this call: like a compiler it runs without Python for minutes.
STUCK = """
import hashlib, os, signal, sys, threading, time
def stuck(rounds=2**31 - 1):
  print("stuck", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)
def fails():
  raise OSError("disk full")
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
