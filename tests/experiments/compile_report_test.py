"""The compile report: figures from HLO, extrapolation, and one run as a command."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from experiments import compile_report
from experiments.presets.model_configs import MODELS
from experiments.support import aot, hlo
from sao_jax.parallel import make_mesh, parse_engine_mesh
from sao_jax.parallel.axes import AXES

ROOT = pathlib.Path(__file__).resolve().parents[2]
HLO = """HloModule jit_step, is_scheduled=true

%body.1 (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %x = f32[8]{0} get-tuple-element(%arg), index=1
  %r = f32[8]{0} all-reduce(%x), channel_id=1, to_apply=%add
  ROOT %t = (s32[], f32[8]) tuple(%i, %r)
}

%cond.1 (arg: (s32[], f32[8])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p0: bf16[4,8]) -> f32[8] {
  %g = bf16[32,8]{1,0} all-gather(%p0), channel_id=2, dimensions={0}
  %s = (bf16[4,8]{1,0}, bf16[32,8]{1,0}) all-gather-start(%p0), channel_id=3, dimensions={0}
  %d = bf16[32,8]{1,0} all-gather-done(%s)
  %w = (s32[], f32[8]) while(%t0), condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %o = f32[8]{0} get-tuple-element(%w), index=1
}
"""


def test_collectives_are_counted_with_their_trips():
  found = hlo.collectives(HLO)
  assert found == {"all-gather": hlo.Traffic(2, 2 * 512), "all-reduce": hlo.Traffic(5, 5 * 32)}


def test_the_counters_of_a_permute_on_a_tpu_are_no_results():
  text = (
    "ENTRY %main (p: bf16[8,8]) -> bf16[8,8] {\n"
    "  %s = (bf16[8,8]{1,0}, bf16[8,8]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p), channel_id=1\n"
    "  ROOT %d = bf16[8,8]{1,0} collective-permute-done(%s)\n}\n"
  )
  assert hlo.collectives(text) == {"collective-permute": hlo.Traffic(1, 128)}


def test_all_results_of_a_fusion_count():
  """One is updated in place, behind a bitcast; the other is new."""
  text = (
    "%both (c: f32[100,8], u: f32[1,8], j: s32[]) -> (f32[800], f32[16,8]) {\n"
    "  %c = f32[100,8]{1,0} parameter(0)\n  %u = f32[1,8]{1,0} parameter(1)\n  %j = s32[] parameter(2)\n"
    "  %o = f32[100,8]{1,0} dynamic-update-slice(%c, %u, %j, %j)\n  %b = f32[800]{0} bitcast(%o)\n"
    "  %n = f32[16,8]{1,0} broadcast(%u), dimensions={0,1}\n"
    "  ROOT %t = (f32[800]{0}, f32[16,8]{1,0}) tuple(%b, %n)\n}\n\n"
    "ENTRY %main (c: f32[100,8], u: f32[1,8], j: s32[]) -> (f32[800], f32[16,8]) {\n"
    "  %c = f32[100,8]{1,0} parameter(0)\n  %u = f32[1,8]{1,0} parameter(1)\n  %j = s32[] parameter(2)\n"
    "  ROOT %f = (f32[800]{0}, f32[16,8]{1,0}) fusion(%c, %u, %j), kind=kLoop, calls=%both\n}\n"
  )
  assert hlo.moved_bytes(text) == 2 * 32 + 16 * 32 + 32 + 4


def test_gathers_of_weights_are_told_from_those_of_activations():
  assert hlo.gathered_weights(HLO, {32}) == 0
  assert hlo.gathered_weights(HLO, {64}) == 2 * 512
  several = "ENTRY %main (p: f32[4]) -> f32[8] {\n  %g = (f32[8]{0}, f32[16]{0}, f32[3]{0}) all-gather(%a, %b, %c)\n}\n"
  assert hlo.gathered_weights(several, {3}) == 32 + 64


MOVES = """HloModule jit_step, is_scheduled=true

%sliced (p: f32[100,8], i: s32[]) -> f32[1,8] {
  %p = f32[100,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %d = f32[1,8]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,8}
}

%updated (c: f32[100,8], u: f32[1,8], j: s32[]) -> f32[100,8] {
  %c = f32[100,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %o = f32[100,8]{1,0} dynamic-update-slice(%c, %u, %j, %j)
}

%scattered (c: f32[100,8], r: s32[3,1], u: f32[3,8]) -> f32[100,8] {
  %c = f32[100,8]{1,0} parameter(0)
  %r = s32[3,1]{1,0} parameter(1)
  %u = f32[3,8]{1,0} parameter(2)
  ROOT %o = f32[100,8]{1,0} scatter(%c, %r, %u), to_apply=%replace
}

ENTRY %main (a: f32[100,8], w: bf16[8,16], z: s32[], rows: s32[3,1], new: f32[3,8]) -> f32[100,8] {
  %a = f32[100,8]{1,0:T(8,128)} parameter(0)
  %w = bf16[8,16]{1,0} parameter(1)
  %z = s32[] parameter(2)
  %row = f32[1,8]{1,0:T(8,128)S(1)} fusion(%a, %z), kind=kLoop, calls=%sliced
  %start = (bf16[8,16]{1,0:S(1)}, bf16[8,16]{1,0}, u32[]{:S(2)}) copy-start(%w)
  %done = bf16[8,16]{1,0:S(1)} copy-done(%start)
  %k = f32[1,16]{1,0} custom-call(%row, %done, /*index=2*/%w), custom_call_target="tpu_custom_call"
  %rows = s32[3,1]{1,0} parameter(3)
  %new = f32[3,8]{1,0} parameter(4)
  %next = f32[100,8]{1,0} fusion(%a, %row, %z), kind=kLoop, calls=%updated
  ROOT %out = f32[100,8]{1,0} fusion(%next, %rows, %new), kind=kCustom, calls=%scattered
}
"""


def test_bytes_between_memory_and_core_are_counted():
  sliced = 32  # a row of the array, into the core's own memory
  copied = 256  # of w, into the core's own memory, from where the kernel reads it for nothing
  kernel = 256 + 64  # reads w from main memory, writes its result
  updated = 32 + 32  # touches a row of the array: XLA reads and writes it; the new row is in the core's memory
  indices = 2 * 4
  scattered = 96 + 96 + 12 + 96  # three rows of the array, twice; their numbers; the new rows
  assert hlo.moved_bytes(MOVES) == sliced + copied + kernel + updated + indices + scattered


ASSIGNMENT = """BufferAssignment:
allocation 0: size 32, page 0, thread-local:
 value: <12 call-start{0} @0> (size=32,offset=0): bf16[4,4]
allocation 1: size 512, page 0, parameter 7, shape |f32[128]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 8192, page 0, parameter 9, shape |f32[1,1,2048]| at ShapeIndex {}:
allocation 3: size 16, page 0, output shape is |f32[4]|, maybe-live-out:
allocation 4: size 4096, page 0, constant:
allocation 5: size 100000, page 0, preallocated-temp:
allocation 6: size 777, color 1, page 0, preallocated-temp:
"""


def test_memory_is_read_from_the_buffer_assignment():
  assert hlo.assigned_memory(ASSIGNMENT) == hlo.Assigned(
    arguments=512 + 8192, aliased=512, outputs=16, temporaries=4096 + 100000
  )
  with pytest.raises(ValueError, match="must list allocations"):
    hlo.assigned_memory("another form")


def _refuse():
  raise ValueError("no such topology")


def test_a_compiler_that_fails_says_why():
  with pytest.raises(RuntimeError, match="before it assigned memory: no such topology"):
    aot.compile_memory(_refuse)


def program(scale):
  traffic = {"all-reduce": hlo.Traffic(scale, 10 * scale)}
  names = ("arguments", "outputs", "aliased", "temporaries", "flops", "bytes_moved", "gathered_weights")
  return aot.Program(**dict.fromkeys(names, float(scale)), collectives=traffic)


def test_depths_repeat_the_kinds_of_layers():
  depths = {name: compile_report.two_depths(make()) for name, make in MODELS.items()}
  assert (depths["qwen3_30b_a3b"], depths["glm5_744b"], depths["glm5_2_744b"]) == ((1, 3), (4, 6), (4, 8))
  deep = compile_report.at_depth(MODELS["glm5_2_744b"](), 8)
  assert deep.indexer_types[4:] == ("shared", "shared", "full", "shared")


def test_extrapolation_is_linear_in_depth():
  deep = program(5).extrapolate(program(3), steps=10)  # from depths 1 and 3 to 23: two per step
  assert deep == program(25)
  assert deep.peak == 2 * 25


@pytest.mark.parametrize(
  ("name", "billions", "active"),
  [("qwen3_0p6b", 0.596, 0.596), ("qwen3_30b_a3b", 30.53, 3.35), ("glm4_moe_106b", 106.9, 13.4),
   ("glm4_moe_355b", 352.8, 33.5), ("glm5_744b", 743.9, 41.8), ("smollm2_135m", 0.1345, 0.1345)],
)  # fmt: skip
def test_models_have_their_published_sizes(name, billions, active):
  model = MODELS[name]()
  params = aot.policy_shapes(model)
  assert aot.total_size(params) / 1e9 == pytest.approx(billions, rel=0.01)
  experts = aot.expert_size(params)
  share = model.num_experts_per_tok / model.num_experts if model.num_experts else 0.0
  assert (aot.total_size(params) - experts * (1 - share)) / 1e9 == pytest.approx(active, rel=0.01)


@pytest.mark.parametrize(
  ("sizes", "message"),
  [
    ((4, 64, 8), None),
    ((6, 64, 8), r"--rows must be a multiple of 4, since fsdp=2 x expert=2 splits it; received 6"),
    ((4, 64, 2), r"--slots must be a multiple of 4"),
    ((4, 66, 8), r"--seq must be a multiple of 4, since context=4 splits it; received 66"),
  ],
)
def test_sizes_that_the_mesh_cannot_split_are_refused_before_compiling(sizes, message):
  mesh = jax.sharding.AbstractMesh((1, 2, 3, 2, 4), AXES)
  with contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message):
    compile_report.check_splits(aot.Workload(*sizes), mesh, mesh)


def test_memory_alone_is_a_tpu_compilers():
  command = [sys.executable, "-m", "experiments.compile_report", "--model=tiny_moe", "--mesh=fsdp=1", "--seq=32"]
  done = subprocess.run([*command, "--memory_only"], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
  assert done.returncode == 1
  assert "--memory_only needs --topology" in done.stderr, done.stderr


def report(*arguments):
  """Runs the command on a tiny model; returns its output, and the JSON object of its last line."""
  command = [sys.executable, "-m", "experiments.compile_report", "--model=tiny_moe", "--seq=32", *arguments]
  environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
  done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590, check=False)
  assert done.returncode == 0, done.stderr
  return done.stdout, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
def test_the_command_reports_a_decode_step():
  text, found = report("--mesh=fsdp=2,tensor=2", "--programs=decode", "--kl_coef=0.1")
  expected = ("fsdp=2, tensor=2 (4)", "\nreference  ", "freezing attention", "decode step (2 layers", "all-gather")
  for words in expected:
    assert words in text, text
  assert found["decode"]["weight_all_gather_bytes"] > 0


@pytest.mark.timeout(600)
def test_an_engine_on_a_mesh_of_its_own_gathers_no_weight():
  text, found = report("--rollout_mesh=data=2,tensor=2,expert=2", "--slots=16", "--live_tokens=20", "--programs=decode")
  assert "decode step (2 layers" in text and "resident" not in text
  decode = found["decode"]
  assert decode["weight_all_gather_bytes"] == 0 < decode["collective_bytes"]
  model = MODELS["tiny_moe"]()
  cache = 2 * 2 * model.num_kv_heads * model.head_dim * model.num_layers * 16 * 20
  weights = 2 * aot.total_size(aot.policy_shapes(model))
  assert decode["limit_bytes_per_device"] == (weights + cache) / 8
  assert decode["ratio_to_limit"] == decode["moved_bytes_per_device"] / decode["limit_bytes_per_device"] > 0.5


@pytest.mark.timeout(600)
def test_the_command_reports_a_step_over_pages():
  text, found = report("--rollout_mesh=tensor=2", "--slots=4", "--live_tokens=100", "--programs=ragged")
  assert "ragged step (2 layers" in text and "0.00 kB of weights gathered" in text
  assert found["ragged"]["weight_all_gather_bytes"] == 0 < found["ragged"]["collective_bytes"]


def test_a_step_over_pages_needs_keys_and_values_of_heads():
  with pytest.raises(ValueError, match="needs a model without latent attention, and a mesh with no axis but tensor"):
    mesh = make_mesh(parse_engine_mesh("data=1"), jax.devices()[:1])
    aot.lower_ragged_step(MODELS["glm5_744b"](), mesh, aot.Workload(rows=1, seq=32, slots=4))


@pytest.mark.timeout(600)
def test_adapters_take_the_place_of_optimizer_states():
  text, found = report("--mesh=fsdp=2", "--programs=policy", "--lora_rank=2")
  frozen = aot.total_bytes(aot.policy_shapes(MODELS["tiny_moe"]())) / 2
  assert f"frozen, shared{compile_report.readable(2 * frozen):>20}" in text, text
  # The step takes the parameters, and little besides: adapters, their moments, and tokens.
  arguments = re.search(r"per device: arguments ([\d.]+) kB", text)
  assert arguments is not None and frozen < 1e3 * float(arguments[1]) < 1.2 * frozen, text
  assert found["policy"]["flops_per_device"] > 0 and "freezing" not in text
