"""Memory and compute of a model on a mesh, without weights or devices: `python -m experiments.compile_report`.

Lowers and compiles the policy step, the critic step, and the engine's programs from shapes: the decode step and the
prefill over windows, and the ragged step over pages (on TPUs). Prints memory per device, FLOPs, bytes moved,
collectives, and the savings of the critic's frozen attention; at the end, one JSON object. With the `libtpu` package,
any machine can compile for a real TPU topology:

    python -m experiments.compile_report --model=qwen3_30b_a3b --mesh=fsdp=8,context=8 --seq=131072 --topology=v5p:4x4x4

With `--lora_rank` the programs train adapters of that rank, and policy and critic share the frozen parameters.

With `--rollout_mesh` the engine's programs are compiled for a mesh of its own, on the first devices:

    python -m experiments.compile_report --model=qwen3_30b_a3b --rollout_mesh=expert=8 --slots=64 --live_tokens=60000 \
      --programs=decode --topology=v5p:2x2x2

The bytes of `decode` and `ragged` are compared with a limit: weights (in the compute dtype) and the live cache once,
divided by the devices.

Deep models are compiled at two small depths and extrapolated in the number of layers. This is a rough estimate: while
memory allows, the compiler overlaps several layers, so a few layers say little about many. `--exact` compiles all
layers. `--memory_only` makes that affordable, because it stops the compiler before it generates TPU code. Resident
memory is always computed from shapes at full depth.
"""

from __future__ import annotations

import dataclasses
import functools
import json
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
from sao_jax.models.lora import LoraConfig
from sao_jax.parallel import MeshConfig, make_mesh, parse_engine_mesh, parse_mesh
from sao_jax.parallel.axes import ROWS, axes_in_use, check_split, weights_in_place
from sao_jax.training.run_meshes import check_engine_mesh

PROGRAMS = ("policy", "critic", "decode", "prefill", "ragged")
ENGINE_PROGRAMS = PROGRAMS[2:]
_HBM_GIB = {"v4": 30.75, "v5e": 15.75, "v5p": 95.74, "v6e": 31.25}
"""Memory that the compiler grants a program on one chip, as stated in its out-of-memory errors."""
_EXACT_UP_TO = 8

_MODEL = flags.DEFINE_enum("model", "qwen3_0p6b", sorted(MODELS), "The architecture.")
_MESH = flags.DEFINE_string(
  "mesh", "fsdp=8", "Axes and their sizes, such as fsdp=8,context=4. With --topology, one size may be -1."
)
_ROLLOUT_MESH = flags.DEFINE_string(
  "rollout_mesh", None, "The engine's own mesh, such as data=2,tensor=4 or expert=8. Defaults to --mesh."
)
_SEQ = flags.DEFINE_integer("seq", 4096, "The number of tokens of a row and of a slot's cache.", lower_bound=2)
_ROWS = flags.DEFINE_integer(
  "rows", None, "The number of rows of a microbatch. Defaults to one per shard of the rows.", lower_bound=1
)
_SLOTS = flags.DEFINE_integer("slots", None, "The slots of the decode step. Defaults to --rows.", lower_bound=1)
_LIVE = flags.DEFINE_integer(
  "live_tokens", None, "The tokens that each slot of the engine holds. Defaults to --seq.", lower_bound=1
)
_PREFILL_ROWS = flags.DEFINE_integer("prefill_rows", 8, "The sequences of a prefill step.", lower_bound=1)
_PREFILL_TOKENS = flags.DEFINE_integer(
  "prefill_tokens", 512, "The tokens that a prefill step computes of each sequence.", lower_bound=1
)
_TOPOLOGY = flags.DEFINE_string(
  "topology", None, "The TPU topology to compile for, such as v5p:4x4x4 or v6e:8x8. Needs libtpu."
)
_PROGRAMS = flags.DEFINE_list("programs", list(PROGRAMS[:3]), f"The programs to compile, out of {', '.join(PROGRAMS)}.")
_ATTENTION = flags.DEFINE_string("attention", "auto", "The model's attention_impl.")
_MOE = flags.DEFINE_string("moe", "auto", "The model's moe_impl.")
_REMAT = flags.DEFINE_string("remat", "full", "The model's remat: what the backward pass of a layer recomputes.")
_EXACT = flags.DEFINE_bool("exact", False, "Compiles all layers instead of extrapolating.")
_MEMORY_ONLY = flags.DEFINE_bool(
  "memory_only", False, "Stops before code generation, so that no FLOPs are reported. Needs --topology."
)
_FROZEN = flags.DEFINE_list("frozen", ["attention"], "The frozen components of the critic.")
_KL_COEF = flags.DEFINE_float(
  "kl_coef", 0.0, "The learner's kl_coef: above 0, a reference policy is held and evaluated.", lower_bound=0.0
)
_LORA_RANK = flags.DEFINE_integer(
  "lora_rank", None, "The rank of adapters that train in place of the parameters. By default there are none.",
  lower_bound=1,
)
_LORA_MODULES = flags.DEFINE_string("lora_modules", LoraConfig.modules, "The modules that have adapters: lora.modules.")
_CHUNK = flags.DEFINE_integer("logprob_chunk", 1024, "The number of tokens per device whose logits exist at a time.")


def main(argv: Sequence[str]) -> None:
  del argv
  sys.stdout.reconfigure(line_buffering=True)  # each program takes minutes: show results at once, through pipes too
  unknown = set(_PROGRAMS.value) - set(PROGRAMS)
  if unknown:
    raise app.UsageError(f"--programs must name some of {', '.join(PROGRAMS)}; received {', '.join(sorted(unknown))}.")
  if _MEMORY_ONLY.value and _TOPOLOGY.value is None:
    raise app.UsageError("--memory_only needs --topology: for CPU devices, the whole compilation takes seconds.")
  meshes = build_meshes()
  mesh, engine_mesh = meshes
  model = build_model()
  rows = _ROWS.value or math.prod(mesh.shape[axis] for axis in ROWS)
  load = aot.Workload(
    rows=rows, seq=_SEQ.value, slots=_SLOTS.value or math.prod(engine_mesh.shape.get(axis, 1) for axis in ROWS),
    live_tokens=_LIVE.value, prefill_rows=_PREFILL_ROWS.value, prefill_tokens=_PREFILL_TOKENS.value,
  )  # fmt: skip
  learns = not set(_PROGRAMS.value) <= set(ENGINE_PROGRAMS)
  check_splits(load, mesh if learns else None, engine_mesh)
  if weights_in_place(engine_mesh):
    check_engine_mesh("--rollout_mesh", aot.policy_shapes(model), engine_mesh)
  adapters = build_adapters()
  learner = LearnerConfig(
    eps_low=0.3, eps_high=5.0, frozen_critic=() if adapters else tuple(_FROZEN.value), row_length=load.seq,
    rows_per_microbatch=rows, logprob_chunk_size=_CHUNK.value, kl_coef=_KL_COEF.value,
  )  # fmt: skip
  target = _TOPOLOGY.value or "virtual CPU devices"
  print(f"{_MODEL.value} on {target}: learner {shown(mesh)}; engine {shown(engine_mesh)}")
  print(f"{load.rows} rows x {load.seq} tokens; {load.slots} slots with {load.live} live tokens each")
  print(f"attention_impl={model.attention_impl} moe_impl={model.moe_impl} remat={model.remat} dtype={model.dtype}")
  state = report_resident(model, learner, mesh, adapters) if learns or not weights_in_place(engine_mesh) else 0
  programs = {name: report_program(name, model, learner, meshes, load) for name in _PROGRAMS.value}
  compiled = {name: program for name, program in programs.items() if program is not None}
  if compiled.keys() >= set(PROGRAMS[:3]):
    report_run(state, compiled)
  limits = {name: aot.decode_limit(model, engine_mesh, load) for name in ENGINE_PROGRAMS}
  sizes = {"model": _MODEL.value, "slots": load.slots, "live_tokens": load.live, "devices": engine_mesh.size}
  print(json.dumps({**sizes, **{name: summary(program, limits.get(name)) for name, program in programs.items()}}))


def shown(mesh: Mesh) -> str:
  """Returns the axes in use and their sizes."""
  axes = ", ".join(f"{name}={mesh.shape[name]}" for name in axes_in_use(mesh, *mesh.axis_names))
  return f"{axes or 'one device'} ({mesh.size})"


def summary(program: aot.Program | None, limit: float | None) -> dict[str, float | None] | None:
  """Returns a program's figures per device, for the last line; None if it does not fit. `limit`: of an engine's."""
  if program is None:
    return None
  moved = None if math.isnan(program.bytes_moved) else program.bytes_moved
  figures = {
    "moved_bytes_per_device": moved,
    "collective_bytes": program.collective_bytes,
    "peak_bytes_per_device": program.peak,
    "flops_per_device": None if math.isnan(program.flops) else program.flops,
  }
  if limit is None:
    return figures
  return {
    "limit_bytes_per_device": limit,
    "ratio_to_limit": None if moved is None else moved / limit,
    "weight_all_gather_bytes": program.gathered_weights,
    **figures,
  }


def check_splits(load: aot.Workload, mesh: Mesh | None, engine_mesh: Mesh) -> None:
  """Rejects sizes that the meshes cannot split before the compilation, which takes minutes."""
  if mesh is not None:
    for name, axes in (("rows", ROWS), ("seq", ("context",))):
      check_split(mesh, f"--{name}", getattr(load, name), *axes)
  check_split(engine_mesh, "--slots", load.slots, *ROWS)
  check_split(engine_mesh, "--seq" if load.live_tokens is None else "--live_tokens", load.live, "context")


def build_meshes() -> tuple[Mesh, Mesh]:
  """Makes the meshes of learner and engine: the same, unless --rollout_mesh names one of the engine's own."""
  config = parse_mesh(_MESH.value)
  if _ROLLOUT_MESH.value is None:
    mesh = build_mesh(config, _TOPOLOGY.value)
    return mesh, mesh
  rollout = parse_engine_mesh(_ROLLOUT_MESH.value)
  size = rollout.num_devices()
  if size is None:
    raise ValueError(f"--rollout_mesh must give every size; received {_ROLLOUT_MESH.value!r}.")
  if set(_PROGRAMS.value) <= set(ENGINE_PROGRAMS):  # the learner's mesh does not matter
    config = MeshConfig(data=size if _TOPOLOGY.value is None else -1)
  mesh = build_mesh(config, _TOPOLOGY.value)
  if mesh.size < size:
    raise ValueError(f"--rollout_mesh must fit on the topology's {mesh.size} devices; received {size}.")
  # The topology's own order: neighbouring devices come first.
  return mesh, make_mesh(rollout, sorted(mesh.devices.flat, key=lambda device: device.id)[:size])


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


def build_adapters() -> LoraConfig | None:
  """Returns the adapters that the flags ask for."""
  return None if _LORA_RANK.value is None else LoraConfig(rank=_LORA_RANK.value, modules=_LORA_MODULES.value)


def report_resident(
  model: ModelConfig, learner: LearnerConfig, mesh: Mesh, adapters: LoraConfig | None = None
) -> int:
  """Prints weights, optimizer states and what freezing saves; returns the bytes per device, by the sharding rules."""
  state = aot.state_shapes(model, learner, adapters)
  print(f"\n{'resident':<22}{'total':>12}{'per device':>12}")
  parts = {name: getattr(state, name) for name in ("policy", "policy_opt", "critic", "critic_opt")}
  if learner.kl_coef:
    parts["reference"] = state.reference
  if adapters is not None:
    parts = {"frozen, shared": aot.policy_shapes(model), **parts}
  on_device = [aot.device_bytes(tree, mesh) for tree in parts.values()]
  for (name, tree), size in zip(parts.items(), on_device, strict=True):
    print(f"{name:<22}{readable(aot.total_bytes(tree)):>12}{readable(size):>12}")
  if adapters is not None:
    return sum(on_device)
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
  name: str, model: ModelConfig, learner: LearnerConfig, meshes: tuple[Mesh, Mesh], load: aot.Workload
) -> aot.Program | None:
  """Compiles one program and prints its figures; returns None if it does not fit into memory."""
  start = time.monotonic()
  try:
    program, how = compile_at_depth(functools.partial(_compile, name, learner, meshes, load), model)
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
    print(f"  {program.flops / 1e12:.3f} TFLOP (without kernels; each loop body counted once), ", end="")
    print(f"{readable(program.bytes_moved)} moved (of a kernel, its operands and results)")
  for kind, traffic in program.collectives.items():
    print(f"  {kind:<20}{traffic.count:>8} x  {readable(traffic.bytes):>12} in total")
  if name in ("decode", "ragged"):
    limit = aot.decode_limit(model, meshes[1], load)
    print(
      f"  must read {readable(limit)}: weights and live cache once, divided by {meshes[1].size} devices; moves "
      f"{program.bytes_moved / limit:.2f} times that; {readable(program.gathered_weights)} of weights gathered"
    )
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


def _compile(
  name: str, learner: LearnerConfig, meshes: tuple[Mesh, Mesh], load: aot.Workload, model: ModelConfig
) -> aot.Program:
  tokens = activation_sizes(name, meshes[1], load)
  if not _MEMORY_ONLY.value:
    return aot.compile_program(_lower(name, model, learner, meshes, load), tokens)
  rank = None if _LORA_RANK.value is None else str(_LORA_RANK.value)
  texts = (_MESH.value, _ROLLOUT_MESH.value, _TOPOLOGY.value, rank, _LORA_MODULES.value)
  return aot.compile_memory(functools.partial(_lower_anew, name, model, learner, texts, load), tokens)


def activation_sizes(name: str, mesh: Mesh, load: aot.Workload) -> set[int]:
  """Returns the sizes of the dimension of an engine's activations that counts tokens: of all, or of a data shard."""
  if name not in ENGINE_PROGRAMS:
    return set()
  counts = {load.slots} if name != "prefill" else {load.prefill_rows, load.prefill_rows * load.prefill_tokens}
  return counts | {count // mesh.shape["data"] for count in counts if count >= 8 * mesh.shape["data"]}


def _lower_anew(
  name: str, model: ModelConfig, learner: LearnerConfig, texts: tuple[str | None, ...], load: aot.Workload
) -> jax.stages.Lowered:
  """Calls `_lower` in a process that has no flags and no mesh yet."""
  names = ("mesh", "rollout_mesh", "topology", "lora_rank", "lora_modules")
  flags.FLAGS([name, *(f"--{flag}={text}" for flag, text in zip(names, texts, strict=True) if text is not None)])
  return _lower(name, model, learner, build_meshes(), load)


def _lower(
  name: str, model: ModelConfig, learner: LearnerConfig, meshes: tuple[Mesh, Mesh], load: aot.Workload
) -> jax.stages.Lowered:
  mesh, engine_mesh = meshes
  if name == "policy":
    return aot.lower_policy_step(model, learner, mesh, load, build_adapters())
  if name == "critic":
    return aot.lower_critic_step(model, learner, mesh, load, build_adapters())
  lower = {"decode": aot.lower_decode_step, "prefill": aot.lower_prefill_step, "ragged": aot.lower_ragged_step}
  return lower[name](model, engine_mesh, load)


def readable(size: float) -> str:
  """Formats bytes in powers of 1,000, the unit in which memory limits are stated."""
  for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
    if abs(size) >= scale:
      return f"{size / scale:.2f} {unit}"
  return f"{size / 1e3:.2f} kB"


if __name__ == "__main__":
  command.run(main)
