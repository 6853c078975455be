"""Compiles the programs of the learner and the engine from shapes alone, without any weights."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import multiprocessing
import os
import pathlib
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from experiments.support import hlo
from sao_jax.learner import LearnerConfig, LearnerState, init_state, make_critic_step
from sao_jax.learner.update import update_policy
from sao_jax.models import ModelConfig, cached_policy, init_critic, init_policy, lora, policy_apply, value_apply
from sao_jax.models.lora import LoraConfig
from sao_jax.models.paged_attention import pages_spec
from sao_jax.parallel import (
  batch_shardings,
  cache_shardings,
  cached_on_mesh,
  constrain_params,
  on_mesh,
  replicated,
  shardings_for,
)
from sao_jax.parallel.axes import weights_in_place
from sao_jax.parallel.engine_weights import cast_for_engine
from sao_jax.parallel.rules import ENGINE_RULES, RULES, Rule
from sao_jax.types import Params, RaggedBatch, TokenBatch

PAGE_SIZE = 64
"""Tokens per page of the ragged step."""
_ASSIGNMENT = "*after_optimizations-buffer-assignment.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """Needs of a compiled program in bytes and FLOPs per device."""

  arguments: float
  outputs: float
  aliased: float
  """Outputs that reuse the memory of (donated) arguments."""
  temporaries: float
  flops: float
  """The compiler's count: loop bodies once, Pallas kernels not at all. NaN if the compiler was stopped early."""
  bytes_moved: float
  """Between main memory and cores; see `hlo.moved_bytes`. NaN if the compiler was stopped early."""
  collectives: Mapping[str, hlo.Traffic]
  gathered_weights: float = 0.0
  """Bytes of all-gathers of anything but activations; see `hlo.gathered_weights`."""

  @property
  def peak(self) -> float:
    """Bytes that must fit: arguments, outputs that do not reuse them, and temporaries."""
    return self.arguments + self.outputs - self.aliased + self.temporaries

  @property
  def collective_bytes(self) -> int:
    """Bytes of the results of all collectives."""
    return sum(traffic.bytes for traffic in self.collectives.values())

  def extrapolate(self, other: Program, steps: float) -> Program:
    """Returns `self + steps * (self - other)` in every number, for programs with different numbers of layers."""

    def along(a: float, b: float) -> float:
      return a + steps * (a - b)

    kinds = self.collectives.keys() | other.collectives.keys()
    none = hlo.Traffic(0, 0)
    pairs = {kind: (self.collectives.get(kind, none), other.collectives.get(kind, none)) for kind in sorted(kinds)}
    numbers = {
      field.name: along(getattr(self, field.name), getattr(other, field.name))
      for field in dataclasses.fields(self) if field.name != "collectives"
    }  # fmt: skip
    traffic = {
      kind: hlo.Traffic(round(along(a.count, b.count)), round(along(a.bytes, b.bytes)))
      for kind, (a, b) in pairs.items()
    }
    return Program(**numbers, collectives=traffic)


class Workload(NamedTuple):
  """The sizes of one step."""

  rows: int
  seq: int
  slots: int
  live_tokens: int | None = None
  """Tokens that each slot of an engine holds; None: `seq`."""
  prefill_rows: int = 8
  prefill_tokens: int = 512

  @property
  def live(self) -> int:
    return self.live_tokens or self.seq


def compile_program(lowered: jax.stages.Lowered, tokens: Collection[int] = ()) -> Program:
  """Compiles a program and reads its figures.

  Args:
    lowered: the program.
    tokens: sizes of the dimensions by which an activation is recognized, in the program of an engine.
  """
  # Uses the compiler's own dump: the format behind `as_text()` differs between versions of jaxlib and libtpu.
  with tempfile.TemporaryDirectory() as folder:
    compiled = lowered.compile(compiler_options=_dump_to(folder))
    text = _largest(pathlib.Path(folder), "*after_optimizations.txt").read_text(encoding="utf-8")
  memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
  return Program(
    arguments=memory.argument_size_in_bytes,
    outputs=memory.output_size_in_bytes,
    aliased=memory.alias_size_in_bytes,
    temporaries=memory.temp_size_in_bytes,
    flops=cost.get("flops", math.nan),
    bytes_moved=hlo.moved_bytes(text),
    collectives=hlo.collectives(text),
    gathered_weights=hlo.gathered_weights(text, tokens),
  )


def compile_memory(lower: Callable[[], jax.stages.Lowered], tokens: Collection[int] = ()) -> Program:
  """Compiles in a separate process that is stopped once memory is assigned, since a TPU's code takes most of the time.

  Args:
    lower: a picklable function that makes its own mesh.
    tokens: see `compile_program`.

  Raises:
    RuntimeError: the compiler ended before it assigned memory; the message gives the reason.
  """
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    compiler = multiprocessing.get_context("spawn").Process(target=_compile_into, args=(name, lower), daemon=True)
    compiler.start()
    try:
      while not _written(folder, "*memory-usage-report.txt", "*after_optimizations.txt", _ASSIGNMENT):
        if not compiler.is_alive():
          failure = folder / "error.txt"
          reason = failure.read_text(encoding="utf-8") if failure.exists() else f"exit code {compiler.exitcode}"
          raise RuntimeError(f"the compiler ended before it assigned memory: {reason}")
    finally:
      compiler.kill()
      compiler.join()
    assigned = hlo.assigned_memory(_largest(folder, _ASSIGNMENT).read_text(encoding="utf-8"))
    text = _largest(folder, "*after_optimizations.txt").read_text(encoding="utf-8")
  return Program(
    arguments=assigned.arguments,
    outputs=assigned.outputs + assigned.aliased,
    aliased=assigned.aliased,
    temporaries=assigned.temporaries,
    flops=math.nan,
    bytes_moved=math.nan,
    collectives=hlo.collectives(text),
    gathered_weights=hlo.gathered_weights(text, tokens),
  )


def _written(folder: pathlib.Path, *patterns: str, quiet_s: float = 2.0) -> bool:
  """Returns whether files of all patterns exist and none of them has grown within `quiet_s` seconds."""

  def sizes() -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_size) for pattern in patterns for path in folder.glob(pattern))

  complete, before = all(list(folder.glob(pattern)) for pattern in patterns), sizes()
  time.sleep(quiet_s)
  return complete and all(size for _, size in before) and sizes() == before


def _compile_into(folder: str, lower: Callable[[], jax.stages.Lowered]) -> None:
  threading.Thread(target=_end_with_parent, daemon=True).start()
  try:
    lower().compile(compiler_options=_dump_to(folder))
  except Exception as error:
    (pathlib.Path(folder) / "error.txt").write_text(str(error), encoding="utf-8")
    raise


def _end_with_parent() -> None:
  """Ends this process with its parent. A killed parent would otherwise leave it compiling for an hour in vain."""
  parent = multiprocessing.parent_process()
  if parent is not None:
    parent.join()
    os._exit(1)


def _dump_to(folder: str) -> dict[str, str | bool]:
  return {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}


def _largest(folder: pathlib.Path, pattern: str) -> pathlib.Path:
  return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


def placed(tree: Any, shardings: Any) -> Any:
  """Attaches shardings to shapes."""
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


def state_shapes(model: ModelConfig, learner: LearnerConfig, adapters: LoraConfig | None = None) -> LearnerState:
  """Returns the shapes of policy, critic and both optimizers, and of a reference policy if the learner has one.

  With adapters, they are the shapes of what trains.
  """

  def make() -> LearnerState:
    key = jax.random.key(0)
    policy = lora.init_trained(model, adapters or LoraConfig(), key)
    return init_state(learner, policy, init_critic(model, key, policy))

  return jax.eval_shape(make)


def policy_shapes(model: ModelConfig) -> Params:
  """Returns the shapes of a policy's parameters."""
  return jax.eval_shape(lambda: init_policy(model, jax.random.key(0)))


def batch_shapes(load: Workload) -> TokenBatch:
  """Returns the shapes of one microbatch `[1, B, T]`."""
  dtypes = dict.fromkeys(("tokens", "positions", "segment_ids", "turn_ids", "version"), jnp.int32)
  dtypes |= dict.fromkeys(("action_mask", "truncated"), jnp.bool_)
  dtypes |= dict.fromkeys(("behavior_logp", "rewards", "lambda_policy", "baseline_adv"), jnp.float32)
  return TokenBatch(**{k: jax.ShapeDtypeStruct((1, load.rows, load.seq), dtype) for k, dtype in dtypes.items()})


def lower_policy_step(
  model: ModelConfig, learner: LearnerConfig, mesh: Mesh, load: Workload, adapters: LoraConfig | None = None
) -> jax.stages.Lowered:
  """Lowers the policy's update on given advantages. The critic is left out, since it need not be on the device then."""
  on_base = _on_base(policy_apply(model), mesh, adapters)
  state = state_shapes(model, learner, adapters)._replace(critic=None, critic_opt=None)

  def step(state: LearnerState, batch: TokenBatch, adv: jax.Array, count: jax.Array, *base: Params) -> Any:
    return update_policy(learner, on_base(*base), state, batch, adv, count)

  batch = batch_shapes(load)
  return _lower_step(step, mesh, state, batch, batch.rewards, base=_base(model, adapters))


def lower_critic_step(
  model: ModelConfig, learner: LearnerConfig, mesh: Mesh, load: Workload, adapters: LoraConfig | None = None
) -> jax.stages.Lowered:
  """Lowers the critic's K updates with its frozen components. The policy is left out."""
  on_base = _on_base(value_apply(model), mesh, adapters)
  state = state_shapes(model, learner, adapters)._replace(policy=None, policy_opt=None, reference=None)

  def step(state: LearnerState, batch: TokenBatch, count: jax.Array, *base: Params) -> Any:
    return make_critic_step(learner, on_base(*base), jit=False)(state, batch, count)

  return _lower_step(step, mesh, state, batch_shapes(load), base=_base(model, adapters))


def _base(model: ModelConfig, adapters: LoraConfig | None) -> tuple[Params, ...]:
  """Returns the shapes of the frozen parameters, as the step's last argument; without adapters, there is none."""
  return () if adapters is None else (policy_shapes(model),)


def _on_base(apply: Any, mesh: Mesh, adapters: LoraConfig | None) -> Callable[..., Any]:
  """Returns a function from the frozen parameters, if any, to the model as a function of what it trains."""
  if adapters is None:
    return lambda: constrain_params(apply, mesh)
  adapted = constrain_params(lora.with_adapters(adapters, apply), mesh)
  return lambda base: lambda trained, *tokens: adapted(lora.join(base, trained), *tokens)


def _lower_step(
  step: Callable[..., Any], mesh: Mesh, state: LearnerState, *inputs: Any, base: tuple[Params, ...]
) -> jax.stages.Lowered:
  state_shardings, whole = shardings_for(state, mesh), replicated(mesh)
  arguments = [placed(state, state_shardings)]
  arguments += [placed(x, _batch_shardings(x, mesh)) for x in inputs]
  count = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
  jitted = jax.jit(on_mesh(step, mesh), donate_argnums=0, out_shardings=(state_shardings, whole))
  return jitted.lower(*arguments, count, *(placed(tree, shardings_for(tree, mesh)) for tree in base))


def _batch_shardings(x: Any, mesh: Mesh) -> Any:
  return batch_shardings(x, mesh) if isinstance(x, TokenBatch) else batch_shardings({"adv": x}, mesh)["adv"]


def lower_decode_step(model: ModelConfig, mesh: Mesh, load: Workload) -> jax.stages.Lowered:
  """Lowers one decode step of every slot, which returns the next logits and updates windows of `live` tokens in place.

  The engine also holds the pages and the contexts that the windows are made from, so its peak is larger.

  Args:
    model: the model.
    mesh: the learner's, on which weights have the learner's dtype and sharding; or an engine's own, on which they stay
      in place in the compute dtype.
    load: slots, and tokens that each holds.
  """
  policy = cached_on_mesh(cached_policy(model), mesh, contextlib.nullcontext)
  assert policy.placement is not None
  on_slots, whole, sampled = policy.placement.slots, policy.placement.whole, policy.placement.logits
  params = engine_shapes(model, mesh)
  prepared_before = weights_in_place(mesh)
  if prepared_before:
    params = jax.eval_shape(cached_policy(model).prepare, params)

  def step(params: Any, window: Any, tokens: jax.Array, i: jax.Array) -> tuple[jax.Array, Any]:
    prepared = params if prepared_before else policy.prepare(params)
    hidden, window = policy.step(prepared, window, tokens, i)
    return sampled(jnp.dot(hidden, policy.lm_head(prepared), preferred_element_type=jnp.float32)), window

  slots = jax.ShapeDtypeStruct((load.slots,), jnp.int32, sharding=on_slots)
  cache = jax.eval_shape(lambda: policy.init_cache(load.slots, load.live))
  window = jax.eval_shape(lambda cache, at: policy.window(cache, at, at, steps=1, live_lens=(load.live,)), cache, slots)
  places = {**jax.tree.map(lambda _: whole, window), "groups": cache_shardings(window["groups"], mesh)}
  jitted = jax.jit(on_mesh(step, mesh), donate_argnums=1, out_shardings=(None, places))
  i = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
  return jitted.lower(placed(params, engine_shardings(params, mesh)), placed(window, places), slots, i)


def lower_ragged_step(model: ModelConfig, mesh: Mesh, load: Workload) -> jax.stages.Lowered:
  """Lowers a pass over pages that decodes a token of every sequence, as engines on TPUs do; see `engine.ragged`.

  Raises:
    ValueError: the engine has no such step for the model or on the mesh.
  """
  policy = cached_on_mesh(cached_policy(model), mesh, contextlib.nullcontext)
  placement, paged = policy.placement, policy.paged
  assert placement is not None
  if paged is None:
    raise ValueError("the ragged step needs a model without latent attention, and a mesh with no axis but tensor.")
  params, whole = engine_shapes(model, mesh), placement.whole

  def step(params: Any, pages: Any, tokens: jax.Array, batch: RaggedBatch) -> tuple[jax.Array, Any]:
    hidden, pages = paged.step(params, pages, tokens, batch)
    return placement.logits(jnp.dot(hidden, paged.lm_head(params), preferred_element_type=jnp.float32)), pages

  def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

  each, row_pages = int32(load.slots), -(-load.live // PAGE_SIZE)
  batch = RaggedBatch(each, each, each, int32(load.slots, row_pages), int32(load.slots + 1), int32(1))
  pages = jax.eval_shape(lambda: paged.init_cache(1 + load.slots * row_pages, PAGE_SIZE))
  places = jax.tree.map(lambda _: NamedSharding(mesh, pages_spec(model.num_kv_heads, mesh)), pages)
  jitted = jax.jit(on_mesh(step, mesh), donate_argnums=1, out_shardings=(None, places))
  return jitted.lower(placed(params, engine_shardings(params, mesh)), placed(pages, places), each, batch)


def lower_prefill_step(model: ModelConfig, mesh: Mesh, load: Workload) -> jax.stages.Lowered:
  """Lowers the prefill of `prefill_tokens` tokens of each of `prefill_rows` slots, behind contexts of `live` tokens."""
  policy = cached_on_mesh(cached_policy(model), mesh, contextlib.nullcontext)
  assert policy.placement is not None
  params, whole = engine_shapes(model, mesh), policy.placement.whole

  def step(params: Any, cache: Any, tokens: jax.Array, slots: jax.Array, start: jax.Array, count: jax.Array) -> Any:
    return policy.extend(params, cache, tokens, slots, start, count, live_len=load.live)[1]

  def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=whole)

  cache = jax.eval_shape(lambda: policy.init_cache(load.slots, load.live))
  places = cache_shardings(cache, mesh)
  rows = (int32(load.prefill_rows),) * 3
  jitted = jax.jit(step, donate_argnums=1, out_shardings=places)
  tokens = int32(load.prefill_rows, load.prefill_tokens)
  return jitted.lower(placed(params, engine_shardings(params, mesh)), placed(cache, places), tokens, *rows)


def engine_shapes(model: ModelConfig, mesh: Mesh) -> Params:
  """Returns the shapes of an engine's copy of the weights: on a mesh of its own, in the compute dtype."""
  shapes = policy_shapes(model)
  return jax.eval_shape(lambda x: cast_for_engine(x, model.compute_dtype), shapes) if weights_in_place(mesh) else shapes


def engine_shardings(params: Params, mesh: Mesh) -> Any:
  """Returns the shardings of an engine's weights."""
  return shardings_for(params, mesh, ENGINE_RULES if weights_in_place(mesh) else RULES)


def engine_bytes(model: ModelConfig, mesh: Mesh | AbstractMesh) -> int:
  """Returns the bytes of an engine's weights on one device of a mesh of its own."""
  params = jax.eval_shape(lambda x: cast_for_engine(x, model.compute_dtype), policy_shapes(model))
  return device_bytes(params, mesh, ENGINE_RULES)


def decode_limit(model: ModelConfig, mesh: Mesh, load: Workload) -> float:
  """Returns the bytes per device that a decode step must read: all weights and the live cache once, divided evenly."""
  cache = jax.eval_shape(lambda: cached_policy(model).init_cache(1, 1))
  weights = total_size(policy_shapes(model)) * model.compute_dtype.itemsize
  return (weights + total_bytes(cache) * load.slots * load.live) / mesh.size


def device_bytes(tree: Any, mesh: Mesh | AbstractMesh, rules: Sequence[Rule] = RULES) -> int:
  """Returns the bytes of a tree of shapes on one device, according to the sharding rules."""
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(shardings_for(tree, mesh, rules)), strict=True)
  return sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)


def total_bytes(tree: Any) -> int:
  """Returns the bytes of a tree of arrays or shapes."""
  return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def total_size(tree: Any) -> int:
  """Returns the number of parameters."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def expert_size(params: Params) -> int:
  """Returns the number of parameters in stacked experts. A token uses `num_experts_per_tok / num_experts` of them."""
  return sum(math.prod(x.shape) for x in jax.tree.leaves(params) if len(x.shape) == 3)
