"""Reads compiled HLO text: the collectives that run, how often, and on how many bytes."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_BYTES: Mapping[str, int] = {
  "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4,
  "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Traffic(NamedTuple):
  """The collectives of one kind."""

  count: int
  bytes: int
  """Sum of the results' sizes on one device."""


class Assigned(NamedTuple):
  """Bytes of a device's main memory as the compiler assigned them before code generation."""

  arguments: int
  aliased: int
  """Arguments whose memory an output reuses."""
  outputs: int
  """Outputs with their own memory."""
  temporaries: int
  """Temporaries and constants."""


def assigned_memory(text: str) -> Assigned:
  """Adds up the compiler's dump of its buffer assignment.

  Raises:
    ValueError: the text holds no allocation.
  """
  found = Assigned(0, 0, 0, 0)
  allocations = _ALLOCATION.findall(text)
  if not allocations:
    raise ValueError(f"a buffer assignment must list allocations; received {text[:200]!r}.")
  for size, kind in allocations:
    if "color" in kind or "thread-local" in kind:  # other memories, and parts of allocations that are counted already
      continue
    live_out = int(size) if "maybe-live-out" in kind else 0
    if "parameter" in kind:
      found = found._replace(arguments=found.arguments + int(size), aliased=found.aliased + live_out)
    elif live_out:
      found = found._replace(outputs=found.outputs + live_out)
    else:
      found = found._replace(temporaries=found.temporaries + int(size))
  return found


def shape_bytes(text: str) -> list[int]:
  """Returns the sizes in bytes of all array shapes in a piece of HLO text.

  >>> shape_bytes("(bf16[8,128]{1,0}, f32[4])")
  [2048, 16]
  """
  sizes = []
  for dtype, dims in _SHAPE.findall(text):
    if dtype in _BYTES:
      size = _BYTES[dtype]
      for dim in filter(None, dims.split(",")):
        size *= int(dim)
      sizes.append(size)
  return sizes


def collectives(text: str) -> dict[str, Traffic]:
  """Counts collectives and their bytes by kind in a compiled module.

  Loops with a known number of trips count each trip. Loops over data (microbatches) count once.
  """
  bodies = dict(_computations(text))
  counts: collections.Counter[str] = collections.Counter()
  totals: collections.Counter[str] = collections.Counter()
  for name, times in _executions(bodies).items():
    for line in bodies[name]:
      found = _COLLECTIVE.search(line)
      if found is not None:
        result, kind, start = found.groups()
        sizes = shape_bytes(result)
        if start and kind != "all-reduce":
          sizes = sizes[len(sizes) // 2 :]  # an asynchronous start returns a pair: operands first, then results
        counts[kind] += times
        totals[kind] += times * sum(sizes)
  return {kind: Traffic(counts[kind], totals[kind]) for kind in KINDS if counts[kind]}


def _computations(text: str) -> Iterator[tuple[str, list[str]]]:
  """Yields `(name, lines)` of each computation. The entry computation has the name "ENTRY"."""
  name, lines = "", []
  for line in text.splitlines():
    header = _COMPUTATION.match(line)
    if header is not None:
      name, lines = ("ENTRY" if header.group(1) else header.group(2)), []
    elif line.startswith("}"):
      yield name, lines
    else:
      lines.append(line)


def _executions(bodies: Mapping[str, list[str]]) -> dict[str, int]:
  """Returns how often each computation runs per run of the entry."""
  times: collections.Counter[str] = collections.Counter()

  def visit(name: str, factor: int) -> None:
    if name not in bodies:
      return
    times[name] += factor
    for line in bodies[name]:
      if " async-done(" in line or " async-update(" in line:
        continue  # these refer to a computation that runs as part of their start
      called = _CALLED.findall(line)
      for branches in _BRANCHES.findall(line):
        called += [branch.strip().lstrip("%") for branch in branches.split(",")]
      trips = _TRIPS.search(line)
      for other in called:
        visit(other, factor * (int(trips.group(1)) if trips and " while(" in line else 1))

  visit("ENTRY", 1)
  return dict(times)
