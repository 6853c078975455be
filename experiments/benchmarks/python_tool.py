"""Cost of the sandboxed Python tool: `python -m experiments.benchmarks.python_tool`.

For each backend that works on this machine, it measures a new session with one call (the cost of an episode's first
call) and a repeated call in a live session. It prints wall-clock time per call with one caller, calls per second with
several callers, and CPU time per call. CPU time is summed over this process, the zygote and the sessions; on a small
machine, it is lost to training.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

from absl import flags

from experiments.support import command
from sao_jax.envs.sandbox import PythonTool, PythonToolConfig

_CALLS = flags.DEFINE_integer("calls", 500, "The number of calls per measurement.", lower_bound=1)
_THREADS = flags.DEFINE_integer("threads", 8, "The number of callers in the throughput measurement.", lower_bound=1)

_CODE = "a = 127\nprint(a * 391 - 18)"


def _cpu_seconds() -> float:
  """Returns the CPU seconds of this process and its descendants, including those that their parents have reaped."""
  usage: dict[int, tuple[int, int]] = {}
  for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
      pid, rest = path.read_text().split(" ", 1)
      fields = rest[rest.rindex(")") + 2 :].split()
      usage[int(pid)] = int(fields[1]), sum(int(ticks) for ticks in fields[11:15])
  found = {os.getpid()}
  while more := {pid for pid, (parent, _) in usage.items() if parent in found} - found:
    found |= more
  return sum(usage[pid][1] for pid in found) / os.sysconf("SC_CLK_TCK")


def _fresh(tool: PythonTool, calls: int) -> None:
  for _ in range(calls):
    with tool.session() as session:
      assert session.run(_CODE) == "49639\n"


def _repeated(tool: PythonTool, calls: int) -> None:
  with tool.session() as session:
    for _ in range(calls):
      assert session.run(_CODE) == "49639\n"


def _measure(backend: Any, work: Callable[[PythonTool, int], None], calls: int, threads: int) -> dict[str, float]:
  tool = PythonTool(PythonToolConfig(backend=backend))
  work(tool, 3)
  cpu, start = _cpu_seconds(), time.perf_counter()
  work(tool, calls)
  single = time.perf_counter() - start
  share = -(-calls // threads)
  start = time.perf_counter()
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:
    for future in [pool.submit(work, tool, share) for _ in range(threads)]:
      future.result()
  many = time.perf_counter() - start
  time.sleep(0.2)  # until killed processes are reaped, which makes their CPU time count
  cpu = _cpu_seconds() - cpu
  tool.close()
  return {
    "ms_per_call": 1e3 * single / calls,
    "calls_per_s": share * threads / many,
    "cpu_ms_per_call": 1e3 * cpu / (calls + share * threads),
  }


def main(argv: list[str]) -> None:
  del argv
  results: dict[str, Any] = {}
  for backend in ("subprocess", "bubblewrap"):
    for name, work in (("fresh", _fresh), ("repeated", _repeated)):
      try:
        figures = _measure(backend, work, _CALLS.value, _THREADS.value)
      except RuntimeError as error:
        print(f"{backend}: {error}")
        break
      results[f"{backend}_{name}"] = figures
      print(f"{backend:>10} {name:>8}: " + ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
  print(json.dumps(results))


if __name__ == "__main__":
  command.run(main)
