"""Sharding rules: tables from paths to mesh axes, for parameters, optimizer states, batches and caches.

A rule is a pattern for the END of a path and, for each dimension, the mesh axes that split it. Of several rules for a
path, the first whose axes divide the dimensions counts. Optimizer states need no rules of their own, since the path of
a moment ends with the path of its parameter. Scalars are replicated. A path without a rule, a wrong rank and a
dimension that no rule divides are errors, because a large weight that is replicated by mistake is noticed too late.

`RULES` is the learner's table: every parameter is split over all devices but `data`, and gathered layer by layer.
`ENGINE_RULES` is that of a rollout engine on a mesh of its own (`mesh.EngineMeshConfig`): it decodes one token per
sequence and step, so that gathering weights would cost far more than reading them. There the activations travel.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from sao_jax.parallel.axes import EXPERT_SHARD, ROWS, SHARD, axes_for, check_split

Axes: TypeAlias = tuple[str, ...] | str | None
"""Mesh axes that split a dimension."""


class IfEven(NamedTuple):
  """An axis that splits a dimension only if it divides it. Otherwise the dimension is replicated along the axis."""

  axis: str


class Rule(NamedTuple):
  """A row of the table."""

  pattern: str
  """Components joined by `/`, matched against the last components of the path. A component may be `*` or `{a,b}`."""
  dims: tuple[Axes, ...]
  """One entry per dimension."""
  cast: bool = True
  """Whether an engine holds the weight in the model's compute dtype. False: the model computes in the weight's own
  dtype."""


RULES: tuple[Rule, ...] = (
  # Token embedding [V, D] and output heads.
  Rule("embed/embedding", ("tensor", SHARD)),
  Rule("lm_head/kernel", (SHARD, "tensor")),
  Rule("value_head/kernel", (None, None)),
  Rule("value_head/bias", (None,)),
  # Attention: heads over `tensor`.
  Rule("attention/{q_proj,k_proj,v_proj}/kernel", (SHARD, "tensor")),
  Rule("attention/{q_proj,k_proj,v_proj}/bias", ("tensor",)),
  Rule("attention/o_proj/kernel", ("tensor", SHARD)),
  Rule("attention/o_proj/bias", (None,)),
  Rule("attention/{q_norm,k_norm}/scale", (None,)),
  # Latent attention: heads over `tensor`; what all heads share, the indexer included, on every device along it.
  Rule("attention/{q_a_proj,kv_a_proj}/kernel", (SHARD, None)),
  Rule("attention/{q_a_proj,kv_a_proj}/bias", (None,)),
  Rule("attention/{q_b_proj,kv_b_proj}/kernel", (SHARD, "tensor")),
  Rule("indexer/{wq_b,wk,weights_proj}/kernel", (SHARD, None)),
  Rule("indexer/k_norm/bias", (None,)),
  # SwiGLU, dense or shared by all tokens: width over `tensor`.
  Rule("{mlp,shared_experts}/{gate_proj,up_proj}/kernel", (SHARD, "tensor")),
  Rule("{mlp,shared_experts}/{gate_proj,up_proj}/bias", ("tensor",)),
  Rule("{mlp,shared_experts}/down_proj/kernel", ("tensor", SHARD)),
  Rule("{mlp,shared_experts}/down_proj/bias", (None,)),
  # Low-rank adapters (`models.lora`), [in, r] and [r, out]: split as the kernel [in, out] is.
  Rule("{q_proj,k_proj,v_proj,gate_proj,up_proj}/kernel_lora_a", (SHARD, None)),
  Rule("{q_proj,k_proj,v_proj,gate_proj,up_proj}/kernel_lora_b", (None, "tensor")),
  Rule("{o_proj,down_proj}/kernel_lora_a", ("tensor", None)),
  Rule("{o_proj,down_proj}/kernel_lora_b", (None, SHARD)),
  # Stacked experts [E, D, F] and [E, F, D], and the router [D, E].
  Rule("moe/{gate_proj,up_proj}", ("expert", EXPERT_SHARD, "tensor")),
  Rule("moe/down_proj", ("expert", "tensor", EXPERT_SHARD)),
  Rule("router/kernel", (SHARD, None)),
  Rule("router/correction_bias", (None,)),
  # Norms.
  Rule("*norm/scale", (None,)),
)

VOCABULARY = ("tensor", "expert")
ENGINE_RULES: tuple[Rule, ...] = (
  Rule("embed/embedding", (VOCABULARY, None), cast=False),
  Rule("embed/embedding", ("tensor", None), cast=False),
  Rule("embed/embedding", (None, None), cast=False),
  Rule("lm_head/kernel", (None, VOCABULARY), cast=False),
  Rule("lm_head/kernel", (None, "tensor"), cast=False),
  Rule("lm_head/kernel", (None, None), cast=False),
  Rule("{q_proj,k_proj,v_proj,qkv}/kernel", (None, "tensor")),
  Rule("{q_proj,k_proj,v_proj,qkv}/bias", ("tensor",)),
  Rule("o_proj/kernel", ("tensor", None)),
  Rule("o_proj/bias", (None,)),
  Rule("{q_norm,k_norm}/scale", (None,), cast=False),
  Rule("qk_scale", (None, None), cast=False),
  # Latent attention: heads over `tensor`. Latents, and the indexer, are the same on all devices.
  Rule("{q_a_proj,kv_a_proj}/kernel", (None, None)),
  Rule("{q_a_proj,kv_a_proj}/bias", (None,)),
  Rule("{q_b_proj,kv_b_proj}/kernel", (None, "tensor")),
  Rule("absorbed/{0,1}", ("tensor", None, None)),
  Rule("indexer/{wq_b,wk}/kernel", (None, None)),
  Rule("indexer/weights_proj/kernel", (None, None), cast=False),
  Rule("indexer/k_norm/bias", (None,), cast=False),
  Rule("{mlp,shared_experts}/{gate_proj,up_proj}/kernel", (None, "tensor")),
  Rule("{mlp,shared_experts}/{gate_proj,up_proj}/bias", ("tensor",)),
  Rule("{mlp,shared_experts}/down_proj/kernel", ("tensor", None)),
  Rule("{mlp,shared_experts}/down_proj/bias", (None,)),
  # Whole experts where there are enough of them: their widths stay multiples of a kernel's tile.
  Rule("moe/{gate_proj,up_proj}", (("expert", "tensor"), None, None)),
  Rule("moe/{gate_proj,up_proj}", ("expert", None, "tensor")),
  Rule("moe/down_proj", (("expert", "tensor"), None, None)),
  Rule("moe/down_proj", ("expert", "tensor", None)),
  Rule("router/kernel", (None, None), cast=False),
  Rule("router/correction_bias", (None,), cast=False),
  Rule("*norm/scale", (None,), cast=False),
)
"""Weights that stay in place: tensor and expert axes, replicas along `data`. Joined weights of `CachedPolicy.prepare`
have rows, too."""

CACHE_RULES: tuple[Rule, ...] = (  # `tensor` may have more devices than a model has key/value heads.
  Rule("key", (ROWS, IfEven("tensor"), None, "context")),  # [S, K, Dh, max_len]
  Rule("value", (ROWS, IfEven("tensor"), "context", None)),  # [S, K, max_len, Dh]
  Rule("{latent,index_key}", (ROWS, "context", None)),  # [S, max_len, width]: shared by all heads
)


def path_components(path: Sequence[Any]) -> tuple[str, ...]:
  """Components of a key path of `jax.tree_util` as strings: dict keys, attribute names, positions."""
  names = ("key", "name", "idx")
  return tuple(str(next(getattr(entry, name) for name in names if hasattr(entry, name))) for entry in path)


def matches(pattern: str, path: Sequence[str]) -> bool:
  """Whether the last components of `path` match the pattern.

  >>> matches("attention/{q_proj,k_proj}/kernel", ("0", "mu", "layers_3", "attention", "k_proj", "kernel"))
  True
  >>> matches("attention/{q_proj,k_proj}/kernel", ("layers_3", "attention", "o_proj", "kernel"))
  False
  """
  parts = pattern.split("/")
  tail = path[len(path) - len(parts) :] if len(parts) <= len(path) else ()
  return len(tail) == len(parts) and all(_component_matches(p, name) for p, name in zip(parts, tail, strict=True))


def _component_matches(pattern: str, name: str) -> bool:
  choices = pattern[1:-1].split(",") if pattern.startswith("{") else [pattern]
  return any(fnmatch.fnmatchcase(name, choice) for choice in choices)


def spec_for(
  path: Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh, rules: Sequence[Rule] = RULES
) -> PartitionSpec:
  """Partition spec of an array, by the first rule that matches its path and divides its dimensions.

  Raises:
    ValueError: no rule matches, the rank differs from the rule's, or a dimension does not divide; the message names the
      path.
  """
  if not shape:
    return PartitionSpec()
  name = "/".join(path)
  found = rules_for(path, rules)
  if not found:
    raise ValueError(f"no sharding rule matches {name!r} of shape {tuple(shape)}; add a rule for it.")
  for rule in found:
    if len(rule.dims) != len(shape):
      raise ValueError(
        f"{name!r} has shape {tuple(shape)}, but its sharding rule {rule.pattern!r} is for {len(rule.dims)} dimensions."
      )
    try:
      return PartitionSpec(*(_fit(name, shape, dim, axes, mesh) for dim, axes in enumerate(rule.dims)))
    except ValueError:
      if rule is found[-1]:
        raise
  raise AssertionError("unreachable: the last rule returns or raises")


def rules_for(path: Sequence[str], rules: Sequence[Rule] = RULES) -> list[Rule]:
  """Returns the rules whose pattern matches a path, in the table's order."""
  return [rule for rule in rules if matches(rule.pattern, path)]


def _fit(name: str, shape: Sequence[int], dim: int, axes: Axes, mesh: Mesh | AbstractMesh) -> Axes:
  """The axes in use, checked to divide the dimension."""
  wanted = (axes,) if isinstance(axes, str) else axes or ()
  if not isinstance(axes, IfEven):
    check_split(mesh, f"dimension {dim} of {name!r} (shape {tuple(shape)})", shape[dim], *wanted)
  used = axes_for(mesh, shape[dim], *wanted)
  return used if len(used) > 1 else used[0] if used else None


def shardings_for(tree: Any, mesh: Mesh | AbstractMesh, rules: Sequence[Rule] = RULES) -> Any:
  """Shardings of a tree of parameters, of optimizer states, or of both (a whole learner state).

  Args:
    tree: arrays or `jax.ShapeDtypeStruct`s.
    mesh: from `make_mesh`.
    rules: the table; models with other parameter paths need their own.

  Returns:
    The same tree with a `NamedSharding` at each leaf.

  Raises:
    ValueError: see `spec_for`.
  """

  def leaf_sharding(path: Any, leaf: Any) -> NamedSharding:
    return NamedSharding(mesh, spec_for(path_components(path), leaf.shape, mesh, rules))

  return jax.tree_util.tree_map_with_path(leaf_sharding, tree)


def cache_shardings(cache: Any, mesh: Mesh) -> Any:
  """Shardings of key/value caches: slots over `ROWS`, heads over `tensor` if it divides them, time over `context`."""
  return shardings_for(cache, mesh, CACHE_RULES)


def batch_shardings(batch: Any, mesh: Mesh) -> Any:
  """Shardings of packed batches, `[B, T]` or `[M, B, T]` per leaf: rows over `ROWS`, tokens over `context`.

  Raises:
    ValueError: rows or tokens do not divide; the message names the field.
  """

  def leaf_sharding(path: Any, leaf: Any) -> NamedSharding:
    name = "batch/" + "/".join(path_components(path))
    if len(leaf.shape) not in (2, 3):
      raise ValueError(f"leaves of a batch must be [B, T] or [M, B, T]; {name!r} has shape {leaf.shape}.")
    dims: tuple[Axes, ...] = (*(None,) * (len(leaf.shape) - 2), ROWS, "context")
    return NamedSharding(mesh, PartitionSpec(*(_fit(name, leaf.shape, i, axes, mesh) for i, axes in enumerate(dims))))

  return jax.tree_util.tree_map_with_path(leaf_sharding, batch)


def replicated(mesh: Mesh) -> NamedSharding:
  """Sharding of arrays that every device holds whole."""
  return NamedSharding(mesh, PartitionSpec())
