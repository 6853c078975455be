"""Ends of processes with threads that do not end: each in a process of its own."""

from __future__ import annotations

import pathlib

import pytest

from tests.stuck_program import send

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Without the package, whose import takes seconds.
EXITS = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("exits", {str(ROOT / "sao_jax" / "utils" / "process_exit.py")!r})
exits = importlib.util.module_from_spec(spec)
spec.loader.exec_module(exits)
exits._TIMEOUT_S = 0.2
"""


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
