"""Signals that come while the main thread is in a call that does not return: each in a process of its own."""

from __future__ import annotations

import signal

from tests.stuck_program import send

INTERRUPTS = """
from sao_jax.training import signals
signals._ABORT_AFTER_S = 0.5
"""


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
  assert code == 0 and out.split()[-1] == "ended" and "Exception ignored" in err


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
