"""The memory that a run needs on each device, computed from shapes, against what there is.

`check` counts what a run holds for certain, so that what it refuses could not have run. `activations` is a rough
estimate on top, for the choice of lengths in `defaults`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from sao_jax import models, parallel
from sao_jax.learner import LearnerState, init_state, partition
from sao_jax.learner.config import LearnerConfig
from sao_jax.models import lora
from sao_jax.models.config import ModelConfig
from sao_jax.models.lora import LoraConfig
from sao_jax.parallel.axes import ROWS
from sao_jax.parallel.engine_weights import cast_for_engine
from sao_jax.parallel.rules import CACHE_RULES, ENGINE_RULES, RULES, Rule
from sao_jax.training.config import RunConfig, rl_learner
from sao_jax.types import Params

_GB = 1e9
_HINTS: Mapping[str, str] = {
  "policy": "more devices along mesh.fsdp, low-rank adapters (lora.rank), or a smaller model",
  "critic": "more devices along mesh.fsdp, low-rank adapters (lora.rank), or an algorithm without a critic",
  "weights of the engine": "more devices along mesh.fsdp, or a smaller lag",
  "cache of the engine": "a smaller engine.cache_tokens, engine.max_len or engine.num_slots, or policy.dtype=bfloat16",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
  """Shapes of what a run holds; they do not depend on the mesh."""

  policy: Params
  """All parameters of the policy."""
  state: LearnerState
  """With adapters, it holds these only; policy and critic share the parameters."""
  trainable_critic: Params

  @classmethod
  def of(cls, policy: ModelConfig, learner: LearnerConfig, adapters: LoraConfig | None = None) -> Shapes:
    """Computes them without allocating anything."""
    key, adapters = jax.random.key(0), adapters or LoraConfig()

    def make() -> tuple[Params, LearnerState, Params]:
      params = lora.init_trained(policy, adapters, key)
      critic = models.init_critic(policy, key, params) if learner.uses_critic else None
      trainable = None if critic is None else partition.split(critic, learner.frozen_critic)[0]
      whole = models.init_policy(policy, key) if adapters.enabled else params
      return whole, init_state(learner, params, critic), trainable

    whole, state, trainable = jax.eval_shape(make)
    return cls(policy=whole, state=state, trainable_critic=trainable)


def needs(
  config: RunConfig, mesh: Mesh, engine_mesh: Mesh, shapes: Shapes | None = None, *, learning: bool = True
) -> dict[str, int]:
  """Returns the bytes per device that a run holds for certain while it learns, by what holds them.

  Gradients count once: those of policy and critic are not held at the same time. Not counted are activations, the
  logits of a chunk, and what the compiler adds.

  Args:
    config: the run.
    mesh: of the learner.
    engine_mesh: of the rollout engine.
    shapes: `Shapes.of` the run's policy, learner and adapters, if known already.
    learning: False counts only what sampling takes: the policy, its copy for the engine, and the cache.

  Raises:
    ValueError: the mesh cannot split a parameter; the message names it.
  """
  shapes = shapes or Shapes.of(config.policy, rl_learner(config), config.lora)
  state, adapted = shapes.state, config.lora.enabled
  weights, fixed = _engine_weights(config, shapes, engine_mesh)
  frozen = _bytes(shapes.policy, mesh) if adapted else 0
  if learning:
    found = {
      "policy": frozen + _bytes((state.policy, state.policy_opt), mesh),
      "critic": _bytes((state.critic, state.critic_opt), mesh),
      "reference policy": _bytes(state.reference, mesh),
      "gradients": max(_bytes(state.policy, mesh), _bytes(shapes.trainable_critic, mesh)),
      # While a version is published, the engine still holds the one before.
      "weights of the engine": fixed + weights * max(2, config.lag + 1),
    }
  else:
    found = {"policy": frozen + _bytes(state.policy, mesh), "weights of the engine": fixed + weights}
  if config.uses_embedded_engine:
    found["cache of the engine"] = _cache_bytes(config, engine_mesh)
  return found


def activations(config: RunConfig, mesh: Mesh) -> int:
  """Estimates the bytes per device of a learner step's activations and of the logits of a chunk."""
  model, learner = config.policy, config.learner
  rows = math.ceil(learner.rows_per_microbatch / math.prod(mesh.shape[axis] for axis in ROWS))
  tokens = rows * learner.row_length // mesh.shape["context"]
  width = max(model.intermediate_size, model.moe_intermediate_size * model.num_experts_per_tok)
  layer = 8 * model.hidden_size + 3 * width + 2 * model.num_heads * model.head_dim
  kept = model.hidden_size * model.num_layers if model.remat == "full" else layer * model.num_layers
  logits = 3 * 4 * min(tokens, learner.logprob_chunk_size) * model.vocab_size
  return tokens * (kept + 2 * layer) * model.compute_dtype.itemsize + logits


def available(mesh: Mesh, *, total: bool = False) -> int | None:
  """Returns the bytes for each device of the mesh on this host; None where that cannot be read.

  CPU devices share the host's memory.

  Args:
    mesh: the devices.
    total: False counts what is free now, True all that this process could have.
  """
  devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
  if devices[0].platform == "cpu":
    found = host_memory(total=total)
    return None if found is None else found // len(devices)
  statistics = [device.memory_stats() or {} for device in devices]
  if not all("bytes_limit" in found for found in statistics):
    return None
  return min(found["bytes_limit"] - (0 if total else found.get("bytes_in_use", 0)) for found in statistics)


def host_memory(*, total: bool = False) -> int | None:
  """Returns the host's memory in bytes, by the kernel and by this process's cgroup; None if it cannot be read.

  Args:
    total: False counts what is free now.
  """
  wanted = "MemTotal:" if total else "MemAvailable:"
  try:
    lines = pathlib.Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    size = next(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))
  except (OSError, StopIteration):
    return None
  group = pathlib.Path("/sys/fs/cgroup")
  try:
    limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    cached = next(int(x.split()[1]) for x in (group / "memory.stat").read_text().splitlines() if x.startswith("file "))
  except (OSError, ValueError, StopIteration):
    return size  # no limit that could be read
  return size if limit == "max" else min(size, int(limit) - (0 if total else used - cached))


def check(config: RunConfig, mesh: Mesh, engine_mesh: Mesh, *, learning: bool = True) -> None:
  """Checks that the run, or sampling alone, fits before anything is allocated.

  Raises:
    ValueError: it does not; the message says what needs how much, and what to change.
  """
  found = needs(config, mesh, engine_mesh, learning=learning)
  if config.rollout_mesh.placement == "split":
    _check_devices(engine_mesh, {name: found.pop(name) for name in list(found) if name.endswith("of the engine")})
  _check_devices(mesh, found)


def _check_devices(mesh: Mesh, found: Mapping[str, int]) -> None:
  free = available(mesh)
  if free is None:
    return
  if (total := sum(found.values())) <= free:
    return
  sizes = ", ".join(f"{name} {size / _GB:.1f} GB" for name, size in found.items() if size)
  largest = max(_HINTS, key=lambda name: found.get(name, 0))
  device = mesh.devices.flat[0]
  each = f" on each of {mesh.size} devices" if mesh.size > 1 else ""
  where = "of the host's memory is free for it" if device.platform == "cpu" else f"is free on {device.device_kind}"
  raise ValueError(
    f"this run does not fit: it needs at least {total / _GB:.1f} GB{each}, and {free / _GB:.1f} GB {where}. In detail: "
    f"{sizes}. The largest part that a setting changes is the {largest}: use "
    f"{_HINTS[largest]}."
  )


def _engine_weights(config: RunConfig, shapes: Shapes, mesh: Mesh) -> tuple[int, int]:
  """Returns the bytes of the weights that each version has anew, and of those that all versions have in common.

  The latter exist with adapters only. Weights that an engine on the learner's devices takes as they are count for
  neither: it shares them with the learner.
  """
  follows = config.rollout_mesh.follows_learner

  def for_engine(params: Params) -> Params:
    if config.remote.url is not None:
      return params
    return jax.eval_shape(functools.partial(cast_for_engine, dtype=config.policy.compute_dtype), params)

  def size(params: Params) -> int:
    return _bytes(params, mesh, RULES if follows else ENGINE_RULES)

  if not config.lora.enabled:
    return size(for_engine(shapes.policy)), 0
  merged = jax.eval_shape(functools.partial(lora.merge, config.lora), shapes.policy, shapes.state.policy)
  frozen = lora.without(shapes.policy, merged)
  copied = for_engine(frozen)
  if follows:
    copied = jax.tree.map(lambda old, new: None if old.dtype == new.dtype else new, frozen, copied)
  return size(for_engine(merged)), size(copied)


def _bytes(tree: Any, mesh: Mesh, rules: Sequence[Rule] = RULES) -> int:
  """Returns the bytes of a tree's shards on one device."""
  places = parallel.shardings_for(tree, mesh, rules)
  sizes = jax.tree.map(lambda x, place: math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize, tree, places)
  return sum(jax.tree.leaves(sizes))


def _cache_bytes(config: RunConfig, mesh: Mesh) -> int:
  make, engine = models.cached_policy(config.policy).init_cache, config.engine
  rows = math.prod(mesh.shape.get(axis, 1) for axis in ROWS)
  per_stream = -(-(engine.num_pages // engine.num_streams + 1) // rows) * rows  # with the null page
  pages = jax.eval_shape(lambda: make(engine.num_streams * per_stream, engine.page_size))
  return _bytes(pages, mesh, CACHE_RULES)
