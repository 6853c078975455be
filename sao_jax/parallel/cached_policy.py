"""The rollout engine's policy on a mesh: slots over the row axes, heads over `tensor`, cached time over `context`.

If `tensor` does not divide the key/value heads, each of its devices caches all of them. Query heads are split even
then, except over pages, where each device computes all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sao_jax.parallel.axes import ROWS, axes_for, axes_in_use, weights_in_place
from sao_jax.parallel.rules import (
  CACHE_RULES,
  ENGINE_RULES,
  matches,
  path_components,
  replicated,
  shardings_for,
  spec_for,
)
from sao_jax.parallel.step import on_mesh
from sao_jax.types import Cache, CachedPolicy, PagedPolicy, Params, SlotPlacement, Window


def cached_on_mesh(
  policy: CachedPolicy, mesh: Mesh, dispatching: Callable[[], contextlib.AbstractContextManager[Any]]
) -> CachedPolicy:
  """Constrains a policy's cache to `cache_shardings`. The row axes must divide the slots, and `context` the time.

  `context` splits a slot's time, so a shorter live part of it would lie on a few devices only. With more than one
  device along `context`, every step therefore attends to the whole cache, masked. With one, only the live part is read.

  Args:
    policy: e.g. `models.cached_policy(config)`.
    mesh: mesh of the engine, over devices of this process.
    dispatching: see `types.SlotPlacement`.
  """
  whole_time = mesh.shape.get("context", 1) > 1

  def constrain_cache(tree: Any) -> Any:
    """Constrains the keys and values of a cache or of a window to their shardings."""

    def leaf(path: Any, x: jax.Array) -> jax.Array:
      names = path_components(path)
      if not any(matches(rule.pattern, names) for rule in CACHE_RULES):
        return x
      return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec_for(names, x.shape, mesh, CACHE_RULES)))

    return jax.tree_util.tree_map_with_path(leaf, tree)

  def init_cache(num_slots: int, max_len: int) -> Cache:
    return constrain_cache(policy.init_cache(num_slots, max_len))

  def extend(params: Params, cache: Cache, *args: Any, live_len: int) -> tuple[jax.Array, Cache]:
    hidden, cache = policy.extend(params, cache, *args, live_len=_time(cache) if whole_time else live_len)
    return hidden, constrain_cache(cache)

  def window(cache: Cache, slots: jax.Array, positions: jax.Array, *, steps: int, live_lens: tuple[int, ...]) -> Window:
    if whole_time:
      # Room for all steps after a full slot, rounded up to shards of equal length.
      live_lens = (-(-(_time(cache) + steps) // mesh.shape["context"]) * mesh.shape["context"],)
    return constrain_cache(policy.window(cache, slots, positions, steps=steps, live_lens=live_lens))

  def step(prepared: Params, window: Window, tokens: jax.Array, i: jax.Array) -> tuple[jax.Array, Window]:
    hidden, window = policy.step(prepared, window, tokens, i)
    return hidden, constrain_cache(window)

  def prepare(params: Params) -> Params:
    prepared = policy.prepare(params)
    return _constrain_converted(prepared, params, mesh) if weights_in_place(mesh) else prepared

  def merge(cache: Cache, window: Window, count: jax.Array) -> Cache:
    return constrain_cache(policy.merge(cache, window, count))

  slots = PartitionSpec(axes_in_use(mesh, *ROWS) or None)
  return CachedPolicy(
    init_cache=init_cache,
    extend=on_mesh(extend, mesh),
    prepare=prepare,
    window=window,
    step=on_mesh(step, mesh),
    lm_head=policy.lm_head,
    num_tokens=policy.num_tokens,
    paged=_paged_on_mesh(policy.paged, mesh),
    merge=merge,
    placement=SlotPlacement(
      slots=NamedSharding(mesh, slots),
      whole=replicated(mesh),
      dispatching=dispatching,
      row_multiple=math.prod(mesh.shape.get(axis, 1) for axis in ROWS),
      logits=lambda x: _constrain_logits(x, mesh) if weights_in_place(mesh) else x,
    ),
  )


def _constrain_logits(x: jax.Array, mesh: Mesh) -> jax.Array:
  """Constrains logits to lie as the output head does, and then by rows: one all-to-all.

  Without the first constraint, the compiler would gather the output head.
  """
  head = spec_for(("lm_head", "kernel"), (1, x.shape[-1]), mesh, ENGINE_RULES)[1]
  rows = axes_for(mesh, x.shape[0], *ROWS, "tensor") or axes_in_use(mesh, *ROWS)
  x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(axes_in_use(mesh, "data") or None, head)))
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(rows or None)))


def _constrain_converted(prepared: Params, params: Params, mesh: Mesh) -> Params:
  """Constrains the prepared weights that are no weights of `params`; those lie where they should."""
  in_place = {id(x) for x in jax.tree.leaves(params)}

  def constrain(x: jax.Array, place: NamedSharding) -> jax.Array:
    return x if id(x) in in_place else jax.lax.with_sharding_constraint(x, place)

  return jax.tree.map(constrain, prepared, shardings_for(prepared, mesh, ENGINE_RULES))


def _paged_on_mesh(policy: PagedPolicy | None, mesh: Mesh) -> PagedPolicy | None:
  """Returns the policy over pages, or None if an axis other than `tensor` is in use: pages are not divided by rows."""
  if policy is None or mesh.size != mesh.shape.get("tensor", 1):
    return None
  return PagedPolicy(
    init_cache=on_mesh(policy.init_cache, mesh),
    step=on_mesh(policy.step, mesh),
    lm_head=policy.lm_head,
    has_kernel=on_mesh(policy.has_kernel, mesh),
  )


def _time(cache: Cache) -> int:
  """Number of positions in a slot's cache: the dimension that the rule of its first array splits over `context`."""
  path, leaf = jax.tree_util.tree_flatten_with_path(cache)[0][0]
  rule = next(rule for rule in CACHE_RULES if matches(rule.pattern, path_components(path)))
  return int(leaf.shape[rule.dims.index("context")])
