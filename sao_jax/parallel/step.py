"""Pure functions on a mesh: jitted learner steps, and model callables whose gradients stay sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sao_jax.parallel.axes import ROWS
from sao_jax.parallel.rules import RULES, Rule, batch_shardings, replicated, shardings_for
from sao_jax.types import Params, TokenBatch

F = TypeVar("F", bound=Callable[..., Any])


def jit_step(
  step: Callable[..., tuple[Any, Any]],
  state: Any,
  batch: TokenBatch,
  mesh: Mesh,
  rules: Sequence[Rule] = RULES,
  *,
  constants: Sequence[Any] = (),
) -> Any:
  """Compiles a learner step `(state, batch, num_microbatches, *constants) -> (state, metrics)` for a mesh.

  The state (donated) is sharded by the rules, the batch by `batch_shardings`; metrics are replicated. Results equal
  those of the unsharded step, except for the order of float sums. The step sums over global arrays, so that each shard
  counts by its number of action tokens.

  Args:
    step: a plain function, e.g. `learner.update.make_update_step(..., jit=False)`.
    state: arrays or shapes of the state.
    batch: arrays or shapes of a batch (the number of microbatches may differ from call to call).
    mesh: from `make_mesh`.
    rules: the table for the state.
    constants: further trees that the step reads, such as frozen parameters; sharded by the rules, and not donated.

  Returns:
    The jitted step; it takes a state placed by `place` and a batch from `place_batch` or NumPy arrays.

  Raises:
    ValueError: a path without a rule, or a dimension that does not divide.
  """
  state_shardings, whole = shardings_for(state, mesh, rules), replicated(mesh)
  return jax.jit(
    on_mesh(step, mesh),
    in_shardings=(
      state_shardings, batch_shardings(batch, mesh), whole, *(shardings_for(tree, mesh, rules) for tree in constants)
    ),
    out_shardings=(state_shardings, whole),
    donate_argnums=0,
  )


def on_mesh(fn: F, mesh: Mesh) -> F:
  """Traces `fn` with the mesh as JAX's ambient mesh, which the models' per-platform kernels read."""

  def traced(*args: Any, **kwargs: Any) -> Any:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return fn(*args, **kwargs)

  return traced  # type: ignore[return-value]


def constrain_params(apply: F, mesh: Mesh, rules: Sequence[Rule] = RULES) -> F:
  """Constrains the parameters of a `PolicyApply` or `ValueApply`, and by transposition their gradients, to the rules.

  Without it, the compiler may replicate the gradient accumulator, which does not fit for a large model.
  """
  tokens_sharding = NamedSharding(mesh, PartitionSpec(ROWS, "context"))

  def constrained(params: Params, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> Any:
    params = jax.tree.map(_constrain, params, shardings_for(params, mesh, rules))
    tokens, positions, segment_ids = (
      jax.lax.with_sharding_constraint(x, tokens_sharding) for x in (tokens, positions, segment_ids)
    )
    return apply(params, tokens, positions, segment_ids)

  return constrained  # type: ignore[return-value]


def _constrain(x: jax.Array, sharding: NamedSharding) -> jax.Array:
  @jax.custom_vjp
  def constrained(x: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, sharding)

  def forward(x: jax.Array) -> tuple[jax.Array, None]:
    return constrained(x), None

  def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    # The barrier keeps the sum over devices inside loops over microbatches. Otherwise the compiler would sum once after
    # the loop, and every device would accumulate whole gradients.
    return (jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(gradient, sharding)),)

  constrained.defvjp(forward, backward)
  return constrained(x)


def place(tree: Any, mesh: Mesh, rules: Sequence[Rule] = RULES) -> Any:
  """Puts host or device arrays on the mesh by the rules. Every process must hold the same values.

  Each process copies only the slices of its own devices. The result owns its buffers, so it may be donated.
  """

  def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.array(leaf[index]))

  return jax.tree.map(put, tree, shardings_for(tree, mesh, rules))


def place_batch(batch: TokenBatch, mesh: Mesh) -> TokenBatch:
  """Puts a packed batch on the mesh: rows over the row axes, tokens over `context`.

  Every process must hold the same batch. Each copies only the rows of its own devices, without network traffic.
  """

  def put(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

  placed: TokenBatch = jax.tree.map(put, batch, batch_shardings(batch, mesh))
  return placed
