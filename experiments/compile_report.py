"""Memory and compute of a model on a mesh, without weights or devices: `python -m experiments.compile_report`.

Lowers and compiles the policy step, the critic step and the decode step from shapes. Prints memory per device, FLOPs,
bytes moved, collectives, and the savings of the critic's frozen attention. With the `libtpu` package, any machine can
compile for a real TPU topology:

    python -m experiments.compile_report --model=qwen3_30b_a3b --mesh=fsdp=8,context=8 --seq=131072 --topology=v5p:4x4x4

Deep models are compiled at two small depths and extrapolated in the number of layers. This is a rough estimate: while
memory allows, the compiler overlaps several layers, so a few layers say little about many. `--exact` compiles all
layers. `--memory_only` makes that affordable, because it stops the compiler before it generates TPU code. Resident
memory is always computed from shapes at full depth.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import jax
from absl import app, flags
from jax.sharding import Mesh

from experiments.presets.model_configs import MODELS
from experiments.support import aot, command
from sao_jax.learner import LearnerConfig
from sao_jax.learner.partition import parameter_counts
from sao_jax.models import ModelConfig
from sao_jax.parallel import MeshConfig, make_mesh, parse_mesh
from sao_jax.parallel.axes import AXES, ROWS, axes_in_use, check_split

PROGRAMS = ("policy", "critic", "decode")
_HBM_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}
"""Memory that the compiler grants a program on one chip, as stated in its out-of-memory errors."""
_EXACT_UP_TO = 8

_MODEL = flags.DEFINE_enum("model", "qwen3_0p6b", sorted(MODELS), "The architecture.")
_MESH = flags.DEFINE_string(
  "mesh", "fsdp=8", "Axes and their sizes, such as fsdp=8,context=4. With --topology, one size may be -1."
)
_SEQ = flags.DEFINE_integer("seq", 4096, "The number of tokens of a row and of a slot's cache.", lower_bound=2)
_ROWS = flags.DEFINE_integer(
  "rows", None, "The number of rows of a microbatch. Defaults to one per shard of the rows.", lower_bound=1
)
_SLOTS = flags.DEFINE_integer("slots", None, "The slots of the decode step. Defaults to --rows.", lower_bound=1)
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "The TPU topology to compile for, such as v5p:4x4x4 or v6e:8x8. Needs libtpu."
)
_PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS), f"The programs to compile, out of {', '.join(PROGRAMS)}.")
_ATTENTION = flags.DEFINE_string("attention", "auto", "The model's attention_impl.")
_MOE = flags.DEFINE_string("moe", "auto", "The model's moe_impl.")
_REMAT = flags.DEFINE_string("remat", "full", "The model's remat: what the backward pass of a layer recomputes.")
_EXACT = flags.DEFINE_bool("exact", False, "Compiles all layers instead of extrapolating.")
_MEMORY_ONLY = flags.DEFINE_bool(
  "memory_only", False, "Stops before code generation, so that no FLOPs are reported. Needs --topology."
)
_FROZEN = flags.DEFINE_list("frozen", ["attention"], "The frozen components of the critic.")
_CHUNK = flags.DEFINE_integer("logprob_chunk", 1024, "The number of tokens per device whose logits exist at a time.")


def main(argv: Sequence[str]) -> None:
  del argv
  sys.stdout.reconfigure(line_buffering=True)  # each program takes minutes: show results at once, through pipes too
  unknown = set(_PROGRAMS.value) - set(PROGRAMS)
  if unknown:
    raise app.UsageError(f"--programs must name some of {', '.join(PROGRAMS)}; received {', '.join(sorted(unknown))}.")
  if _MEMORY_ONLY.value and _TOPOLOGY.value is None:
    raise app.UsageError("--memory_only needs --topology: for CPU devices, the whole compilation takes seconds.")
  mesh = build_mesh(parse_mesh(_MESH.value), _TOPOLOGY.value)
  model = build_model()
  rows = _ROWS.value or math.prod(mesh.shape[axis] for axis in ROWS)
  load = aot.Workload(rows=rows, seq=_SEQ.value, slots=_SLOTS.value or rows)
  check_splits(load, mesh)
  learner = LearnerConfig(
    eps_low=0.3, eps_high=5.0, frozen_critic=tuple(_FROZEN.value), row_length=load.seq, rows_per_microbatch=rows,
    logprob_chunk_size=_CHUNK.value,
  )  # fmt: skip
  axes = ", ".join(f"{name}={mesh.shape[name]}" for name in axes_in_use(mesh, *AXES)) or "one device"
  target = _TOPOLOGY.value or f"{mesh.size} virtual CPU devices"
  print(f"{_MODEL.value} on {target}: {axes}; {load.rows} rows x {load.seq} tokens, {load.slots} slots")
  print(f"attention_impl={model.attention_impl} moe_impl={model.moe_impl} remat={model.remat} dtype={model.dtype}")
  state = report_resident(model, learner, mesh)
  programs = {name: report_program(name, model, learner, mesh, load) for name in _PROGRAMS.value}
  compiled = {name: program for name, program in programs.items() if program is not None}
  if compiled.keys() == set(PROGRAMS):
    report_run(state, compiled)


def check_splits(load: aot.Workload, mesh: Mesh) -> None:
  """Rejects sizes that the mesh cannot split before the compilation, which takes minutes."""
  for name, axes in (("rows", ROWS), ("slots", ROWS), ("seq", ("context",))):
    check_split(mesh, f"--{name}", getattr(load, name), *axes)


def build_mesh(config: MeshConfig, topology: str | None) -> Mesh:
  """Makes a mesh of the topology's devices, or of as many virtual CPU devices as the axis sizes multiply to."""
  jax.config.update("jax_platforms", "cpu")
  if topology is not None:
    # libtpu must not look for a TPU on this machine, nor lock one for this process.
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    for name, value in quiet.items():
      os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
      description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:
      raise ValueError(
        f"--topology={topology} needs libtpu (pip install -e '.[tpu]') and a topology that it knows: {error}"
      ) from error
    return make_mesh(config, description.devices)
  if -1 in config.axes().values():
    raise ValueError(f"--mesh must give every size without --topology; received {_MESH.value!r}.")
  jax.config.update("jax_num_cpu_devices", math.prod(config.axes().values()))
  return make_mesh(config)


def build_model() -> ModelConfig:
  return dataclasses.replace(
    MODELS[_MODEL.value](), dtype="bfloat16", remat=_REMAT.value, attention_impl=_ATTENTION.value, moe_impl=_MOE.value
  )


def report_resident(model: ModelConfig, learner: LearnerConfig, mesh: Mesh) -> int:
  """Prints weights, optimizer states and what freezing saves; returns the bytes per device, by the sharding rules."""
  state = aot.state_shapes(model, learner)
  print(f"\n{'resident':<22}{'total':>12}{'per device':>12}")
  parts = ("policy", "policy_opt", "critic", "critic_opt")
  on_device = [aot.device_bytes(getattr(state, name), mesh) for name in parts]
  for name, size in zip(parts, on_device, strict=True):
    print(f"{name:<22}{readable(aot.total_bytes(getattr(state, name))):>12}{readable(size):>12}")
  rows = parameter_counts(state.critic, learner.frozen_critic)
  print(f"\n{'critic':<12}{'parameters':>18}{'trainable':>18}")
  for row in rows:
    print(f"{row.name:<12}{row.total:>18,}{row.trainable:>18,}")
  frozen = rows[0].total - rows[0].trainable
  gradient, moments = 4 * frozen, 8 * frozen
  print(
    f"freezing {', '.join(learner.frozen_critic) or 'nothing'} ({frozen / rows[0].total:.1%} of the critic) saves "
    f"{readable(gradient)} of gradients and {readable(moments)} of Adam moments, "
    f"{readable((gradient + moments) / mesh.size)} per device"
  )
  return sum(on_device)


def report_run(state: int, programs: Mapping[str, aot.Program]) -> None:
  """Prints what a run holds at once: both models, the larger update's temporaries, the engine's weights and caches."""
  update = max(programs[name].temporaries for name in ("policy", "critic"))
  engine = programs["decode"].arguments + programs["decode"].temporaries
  total = state + update + engine
  print(
    f"\nwhole run{_verdict(total)}\n  per device: learner state {readable(state)}, update temporaries "
    f"{readable(update)}, engine {readable(engine)}, in total {readable(total)}"
  )


def _verdict(size: float) -> str:
  limit = _HBM_GIB.get((_TOPOLOGY.value or "").split(":")[0])
  gib = size / 2**30
  return "" if limit is None else f", {'fits' if gib < limit else 'DOES NOT FIT'}: {gib:.2f} of {limit} GiB"


def report_program(
  name: str, model: ModelConfig, learner: LearnerConfig, mesh: Mesh, load: aot.Workload
) -> aot.Program | None:
  """Compiles one program and prints its figures; returns None if it does not fit into memory."""
  start = time.monotonic()
  try:
    program, how = compile_at_depth(functools.partial(_compile, name, learner, mesh, load), model)
  except RuntimeError as error:
    if "RESOURCE_EXHAUSTED" not in str(error):
      raise
    print(f"\n{name} step: DOES NOT FIT: {str(error).splitlines()[0][:400]}")
    return None
  print(f"\n{name} step ({how}; {time.monotonic() - start:.0f} s){_verdict(program.peak)}")
  print(
    f"  per device: arguments {readable(program.arguments)}, temporaries {readable(program.temporaries)}, output "
    f"{readable(program.outputs)} ({readable(program.aliased)} in place), peak {readable(program.peak)}"
  )
  if not _MEMORY_ONLY.value:
    moved = readable(program.bytes_moved)
    print(f"  {program.flops / 1e12:.3f} TFLOP, {moved} moved (without kernels; each loop body counted once)")
  for kind, traffic in program.collectives.items():
    print(f"  {kind:<20}{traffic.count:>8} x  {readable(traffic.bytes):>12} in total")
  return program


def compile_at_depth(
  compile_model: Callable[[ModelConfig], aot.Program], model: ModelConfig
) -> tuple[aot.Program, str]:
  """Compiles all layers, or two depths with the dense and some sparse layers and extrapolates from them."""
  if _EXACT.value or model.num_layers <= _EXACT_UP_TO:
    return compile_model(model), f"{model.num_layers} layers compiled"
  shallow, deep = two_depths(model)
  programs = [compile_model(at_depth(model, depth)) for depth in (shallow, deep)]
  steps = (model.num_layers - deep) / (deep - shallow)
  how = f"{model.num_layers} layers, extrapolated from {shallow} and {deep}"
  return programs[1].extrapolate(programs[0], steps), how


def at_depth(model: ModelConfig, depth: int) -> ModelConfig:
  """The first `depth` layers of a model."""
  return dataclasses.replace(model, num_layers=depth, indexer_types=model.indexer_types[:depth])


def two_depths(model: ModelConfig) -> tuple[int, int]:
  """Depths with one expert layer and with 2 or more further ones, after which the kinds of expert layers repeat."""
  full = [i for i, kind in enumerate(model.indexer_types) if kind == "full" and i >= model.first_dense_layers]
  shallow = model.first_dense_layers + 1
  return shallow, shallow + (max(2, full[1] - full[0]) if len(full) > 1 else 2)


def _compile(name: str, learner: LearnerConfig, mesh: Mesh, load: aot.Workload, model: ModelConfig) -> aot.Program:
  if not _MEMORY_ONLY.value:
    return aot.compile_program(_lower(name, model, learner, mesh, load))
  remade = functools.partial(_lower_anew, name, model, learner, _MESH.value, _TOPOLOGY.value, load)
  return aot.compile_memory(remade)


def _lower_anew(
  name: str, model: ModelConfig, learner: LearnerConfig, axes: str, topology: str, load: aot.Workload
) -> jax.stages.Lowered:
  """Calls `_lower` in a process that has no mesh yet."""
  return _lower(name, model, learner, build_mesh(parse_mesh(axes), topology), load)


def _lower(name: str, model: ModelConfig, learner: LearnerConfig, mesh: Mesh, load: aot.Workload) -> jax.stages.Lowered:
  if name == "policy":
    return aot.lower_policy_step(model, learner, mesh, load)
  if name == "critic":
    return aot.lower_critic_step(model, learner, mesh, load)
  return aot.lower_decode_step(model, mesh, load)


def readable(size: float) -> str:
  """Formats bytes in powers of 1,000, the unit in which memory limits are stated."""
  for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
    if abs(size) >= scale:
      return f"{size / scale:.2f} {unit}"
  return f"{size / 1e3:.2f} kB"


if __name__ == "__main__":
  command.run(main)
