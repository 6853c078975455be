"""Flax NNX modules as policies and value models: `nnx_policy`, `nnx_value`.

An NNX module holds its parameters, but the learner needs a pure function of a nested dict. The adapter splits the
module once and rebuilds it inside the function. Transformations, donation, frozen parameters and sharding rules then
work as with the library's own models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Int, PyTree

from sao_jax.types import AnyArray, Params, PolicyApply, PolicyOutput, ValueApply

_Output = TypeVar("_Output")


def nnx_policy(
  module: nnx.Module, forward: Callable[[Any, jax.Array, jax.Array, jax.Array], PolicyOutput]
) -> tuple[PolicyApply, Params]:
  """Makes a `types.PolicyApply` from an NNX module.

  Args:
    module: any NNX module. Its `nnx.Param`s become the parameters; other state (rotary tables, caches) stays constant.
    forward: calls the module: `(module, tokens, positions, segment_ids) -> PolicyOutput(hidden, lm_head)`. It must keep
      segments apart. Its updates of other state are dropped.

  Returns:
    `(apply, params)`: `apply(params, tokens, positions, segment_ids)`, and the module's parameters as a nested dict of
    arrays, keyed by the module's attribute names (list indices as strings). The arrays are the module's own: if
    `params` is donated, copy them before using the module again.

  Raises:
    ValueError: the module has no parameters, or `apply` receives a tree of another structure.
  """
  return cast(tuple[PolicyApply, Params], _pure(module, forward))


def nnx_value(
  module: nnx.Module, forward: Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
) -> tuple[ValueApply, Params]:
  """Makes a `types.ValueApply` from an NNX module, like `nnx_policy`; `forward` returns values `[B, T]`."""
  return cast(tuple[ValueApply, Params], _pure(module, forward))


def _pure(
  module: nnx.Module, forward: Callable[[Any, jax.Array, jax.Array, jax.Array], _Output]
) -> tuple[Callable[[Params, jax.Array, jax.Array, jax.Array], _Output], Params]:
  parts: Any = nnx.split(module, nnx.Param, ...)
  graph, state, rest = parts
  flat, structure = jax.tree_util.tree_flatten_with_path(state)
  if not flat:
    raise ValueError(f"{type(module).__name__} has no nnx.Param: there is nothing to train.")
  paths = [_names(path) for path, _ in flat]

  def apply(
    params: Params, tokens: Int[AnyArray, "B T"], positions: Int[AnyArray, "B T"], segment_ids: Int[AnyArray, "B T"]
  ) -> _Output:
    expected: Any = jax.tree.structure(_nest(paths, list(range(len(paths)))))
    if jax.tree.structure(params) != expected:
      raise ValueError(f"params must have the structure {expected}; received {jax.tree.structure(params)}.")
    leaves = [_lookup(params, path) for path in paths]
    rebuilt = nnx.merge(graph, jax.tree_util.tree_unflatten(structure, leaves), rest)
    return forward(rebuilt, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segment_ids))

  return apply, _nest(paths, [leaf for _, leaf in flat])


def _names(path: Sequence[Any]) -> tuple[str, ...]:
  """Attribute names and indices of a leaf, without the accessor of the variable's value."""
  names = []
  for entry in path:
    if isinstance(entry, jax.tree_util.GetAttrKey):
      continue
    names.append(str(entry.key if hasattr(entry, "key") else entry.idx))
  return tuple(names)


def _nest(paths: Sequence[tuple[str, ...]], leaves: Sequence[Any]) -> PyTree:
  nested: dict[str, Any] = {}
  for path, leaf in zip(paths, leaves, strict=True):
    inner = nested
    for name in path[:-1]:
      inner = inner.setdefault(name, {})
    inner[path[-1]] = leaf
  return nested


def _lookup(params: Params, path: tuple[str, ...]) -> jax.Array:
  for name in path:
    params = params[name]
  return params
