"""Reads compiled HLO text: the collectives that run, and the bytes that they and all instructions move."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterator, Mapping
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
        counts[found.group(2)] += times
        totals[found.group(2)] += times * sum(shape_bytes(_results(found)))
  return {kind: Traffic(counts[kind], totals[kind]) for kind in KINDS if counts[kind]}


def _results(collective: re.Match[str]) -> str:
  """Returns the text of a collective's result shapes. An asynchronous start has its operands before them."""
  shapes, kind, start = collective.groups()
  if not start or kind == "all-reduce":
    return shapes
  arrays = [match.group() for match in _SHAPE.finditer(shapes) if match.group() != "u32[]"]  # TPUs add two counters
  return ", ".join(arrays[len(arrays) // 2 :])


class _Instruction(NamedTuple):
  name: str
  shape: str
  """Text of the result's shape; a tuple in parentheses."""
  operation: str
  operands: tuple[str, ...]
  line: str

  def called(self) -> str:
    return _CALLED.findall(self.line)[0]


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z0-9\-]*)\((.*?)\)(?:,|$)")
_FREE = frozenset((
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "iota", "after-all",
  "partition-id", "replica-id", "copy-done", "slice-done", "async-start", "async-update", "async-done",
))  # fmt: skip
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))


def moved_bytes(text: str) -> float:
  """Counts the bytes that a compiled module moves between a device's main memory and its cores.

  Every instruction reads its operands and writes its results once; those in other memories (`S(1)`: a TPU's VMEM) count
  nothing. Slices and updates count the part that they touch. So do fusions of them. A kernel (custom call) counts its
  operands and results once. Loops with a known number of trips count each trip.
  """
  bodies = {name: _instructions(lines) for name, lines in _computations(text)}
  total = 0.0
  for name, times in _executions(dict(_computations(text))).items():
    if not _is_fused(name, bodies):
      total += times * sum(_traffic(one, bodies[name], bodies) for one in bodies[name].values())
  return total


def _instructions(lines: list[str]) -> dict[str, _Instruction]:
  found = {}
  for line in lines:
    match = _INSTRUCTION.match(re.sub(r"/\*index=\d+\*/", "", line))
    if match is not None:
      name, shape, operation, operands = match.groups()
      found[name] = _Instruction(name, shape, operation, tuple(re.findall(r"%([\w.\-]+)", operands)), line)
  return found


def _is_fused(name: str, bodies: Mapping[str, Mapping[str, _Instruction]]) -> bool:
  """Whether a computation is the inside of a fusion or of a reduction, whose values are not in memory."""
  inside = ("fusion", "reduce", "sort", "all-reduce", "reduce-scatter", "reduce-window", "scatter", "map")
  return any(
    one.operation.removesuffix("-start") in inside and name in _CALLED.findall(one.line)
    for body in bodies.values() for one in body.values()
  )  # fmt: skip


def _traffic(
  one: _Instruction, body: Mapping[str, _Instruction], bodies: Mapping[str, Mapping[str, _Instruction]]
) -> float:
  if one.operation in _FREE or one.operation.endswith("-done"):
    return 0.0
  sources = [body[name] for name in one.operands if name in body]
  if one.operation == "fusion" and one.called() in bodies:
    return _fusion_traffic(one, sources, bodies[one.called()])
  if one.operation.endswith("-start"):  # returns its operands, too
    return sum(_main_memory(source.shape) for source in sources) + max(
      0.0, _main_memory(one.shape) - sum(_main_memory(source.shape) for source in sources)
    )
  if one.operation in _SLICES:
    return 2 * _main_memory(one.shape)
  if one.operation in _UPDATES:
    return 2 * _updated(one, body)
  return _main_memory(one.shape) + sum(_main_memory(source.shape) for source in sources)


def _fusion_traffic(one: _Instruction, sources: list[_Instruction], inside: Mapping[str, _Instruction]) -> float:
  """Reads of a fusion's operands, of which it may use slices, and writes of its results, which it may update."""
  parameters = {
    int(re.findall(r"parameter\((\d+)\)", inner.line)[0]): inner.name
    for inner in inside.values() if inner.operation == "parameter"
  }  # fmt: skip
  total = sum(
    _updated(source, inside) if source.operation in _UPDATES else _main_memory(shape)
    for shape, source in zip(_arrays(one.shape), _outputs(inside), strict=True)
  )
  for number, source in enumerate(sources):
    total += min(_main_memory(source.shape), _used(parameters.get(number, ""), inside))
  return total


def _outputs(inside: Mapping[str, _Instruction]) -> list[_Instruction]:
  """Returns the instructions behind the results of a fusion, without bitcasts."""
  root = next(inner for inner in inside.values() if inner.line.lstrip().startswith("ROOT"))
  found = [inside[name] for name in root.operands] if root.operation == "tuple" else [root]
  return [_without_bitcasts(inner, inside) for inner in found]


def _without_bitcasts(one: _Instruction, inside: Mapping[str, _Instruction]) -> _Instruction:
  while one.operation == "bitcast":
    one = inside[one.operands[0]]
  return one


def _used(name: str, inside: Mapping[str, _Instruction]) -> float:
  """Bytes of a value that its users inside a fusion read."""
  total = 0.0
  for user in inside.values():
    if name not in user.operands:
      continue
    if user.operation in _SLICES and user.operands[0] == name:
      total += sum(shape_bytes(user.shape))
    elif user.operation in _UPDATES and user.operands[0] == name:
      total += _updated(user, inside)
    elif user.operation in ("bitcast", "get-tuple-element"):
      total += _used(user.name, inside)
    else:
      return float("inf")
  return total


def _updated(one: _Instruction, body: Mapping[str, _Instruction]) -> float:
  """Bytes that an update writes: of its second operand, and for a scatter, which has indices there, of its third."""
  return _size(body, one.operands[2 if one.operation == "scatter" else 1])


def _size(body: Mapping[str, _Instruction], name: str) -> float:
  return sum(shape_bytes(body[name].shape)) if name in body else 0.0


def _main_memory(shape: str) -> float:
  """Bytes of a shape's arrays in main memory: those whose layout names no other memory space."""
  return float(sum(sum(shape_bytes(array)) for array in _arrays(shape) if not re.search(r"S\(\d+\)", array)))


def _arrays(shape: str) -> list[str]:
  """Returns the arrays of a shape, with their layouts."""
  return re.findall(r"[a-z]+[0-9]*[a-z0-9]*\[[0-9,]*\](?:\{[^}]*\})?", shape)


def gathered_weights(text: str, tokens: Collection[int]) -> int:
  """Returns the bytes of all-gathers whose result is no activation: it has no dimension of one of `tokens`."""
  bodies = dict(_computations(text))
  total = 0
  for name, times in _executions(bodies).items():
    for line in bodies[name]:
      match = _COLLECTIVE.search(line)
      if match is not None and match.group(2) == "all-gather":
        for shape in _SHAPE.finditer(_results(match)):
          if not any(int(size) in tokens for size in filter(None, shape.group(2).split(","))):
            total += times * sum(shape_bytes(shape.group()))
  return total


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
