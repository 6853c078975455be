"""The program of the processes of `scoring_process`: it answers requests, one line of JSON each, until its input ends.

Its arguments are the module that answers and the memory limit in bytes. It first reports whether it could start. Then
it answers each request `[limit_s, request]` with `["reply", value]`, or with `["error", kind, message]` where the
function that answers raised an exception.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from typing import Any

from sao_jax.utils import child_process

_MAX_MESSAGE_CHARS = 2_000


def _reply(function: Callable[..., Any], *arguments: Any) -> str:
  try:
    return json.dumps(["reply", function(*arguments)])
  except Exception as error:  # noqa: BLE001 (the caller raises it)
    return json.dumps(["error", type(error).__name__, str(error)[:_MAX_MESSAGE_CHARS]])


def main(module: str, memory_bytes: int) -> None:
  """Answers requests until the input ends."""
  output = child_process.take_output()
  answer: list[Callable[[Any], Any]] = []
  started = _reply(lambda: answer.append(child_process.import_alone(module).start()))
  if answer:
    child_process.limit_memory(memory_bytes)  # An answer like 10^(10^10) then ends in a MemoryError.
  output.write(started + "\n")
  for line in sys.stdin if answer else ():
    limit_s, request = json.loads(line)
    # The caller kills this process well before that. If the caller itself was killed, nothing else would end it.
    signal.setitimer(signal.ITIMER_REAL, 2 * limit_s + 10)
    reply = _reply(answer[0], request)
    signal.setitimer(signal.ITIMER_REAL, 0)
    output.write(reply + "\n")


if __name__ == "__main__":
  main(sys.argv[1], int(sys.argv[2]))
