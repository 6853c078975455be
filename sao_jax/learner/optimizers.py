"""Optimizers, and a guard that skips updates which are not finite or have nothing to learn from."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float32, Int, PyTree

from sao_jax.learner.config import OptimizerConfig
from sao_jax.parallel.rules import path_components
from sao_jax.types import Params

FINAL_RATE = 0.05
"""Share of the learning rate that is left after its decay."""


class Applied(NamedTuple):
  """Result of one update, applied or skipped."""

  params: Params
  opt_state: optax.OptState
  grad_norm: Float32[Array, ""]
  """Global norm before clipping."""
  nonfinite: Bool[Array, ""]
  """Skipped, because the loss, the gradient or an input of theirs was not finite."""
  empty: Bool[Array, ""]
  """Skipped, because no token contributed."""


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
  """Linear warm-up, then a cosine decay to `FINAL_RATE` of the peak, or a constant rate.

  Update i (from 1) of the warm-up uses i / warmup_steps of the peak, so the first update already moves. The parts are
  joined here because in `optax.warmup_cosine_decay_schedule` the cosine starts one update earlier.
  """
  peak, warmup = config.learning_rate, config.warmup_steps
  if config.decay_steps is None:
    after = optax.constant_schedule(peak)
  else:
    after = optax.cosine_decay_schedule(peak, config.decay_steps - warmup, alpha=FINAL_RATE)
  if not warmup:
    return after
  return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup - 1), after], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Clipping by global norm, Adam, decoupled weight decay on matrices, and the schedule `learning_rate`."""
  steps = [] if config.max_grad_norm is None else [optax.clip_by_global_norm(config.max_grad_norm)]
  steps.append(optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps))
  if config.weight_decay:
    steps.append(optax.add_decayed_weights(config.weight_decay, mask=_decays))
  steps.append(optax.scale_by_learning_rate(learning_rate(config)))
  return optax.chain(*steps)


def init_optimizer(optimizer: optax.GradientTransformation, params: Params) -> optax.OptState:
  """Makes the optimizer's initial state. Moments are float32 whatever the parameters' dtype."""
  return optimizer.init(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))


def guarded_update(
  optimizer: optax.GradientTransformation,
  gradients: Params,
  opt_state: optax.OptState,
  params: Params,
  *,
  loss: Float32[Array, ""],
  kept: Int[Array, ""],
  finite: Bool[Array, ""] | bool = True,
  allowed: Bool[Array, ""] | bool = True,
) -> Applied:
  """Applies one optimizer update, or skips it: then parameters, moments and counts do not change in any bit.

  The update is skipped if the loss, the gradient or an input of theirs is not finite, if no token was kept (weight
  decay and momentum would move the parameters even then), or if it is not `allowed`.

  Args:
    optimizer: from `make_optimizer`.
    gradients: float32, same structure as `params`.
    opt_state: the optimizer's state.
    params: the parameters.
    loss: the loss.
    kept: number of tokens that contributed to the loss. Tokens in the clip mask do not count: if a batch has no other
      tokens, its gradient is zero and it should move nothing.
    finite: False if log-probs, values, advantages or targets are not finite; a loss that masks tokens need not show it.
    allowed: False skips the update without counting it as nonfinite or empty.
  """
  norm = optax.tree.norm(gradients)
  nonfinite = ~(jnp.isfinite(norm) & jnp.isfinite(loss) & finite)
  empty = ~nonfinite & (kept == 0)
  apply = ~nonfinite & ~empty & allowed
  updates, new_opt_state = optimizer.update(gradients, opt_state, params)
  new_params = optax.apply_updates(params, updates)

  def choose(new: jax.Array, old: jax.Array) -> jax.Array:
    return jnp.where(apply, new, old)

  return Applied(
    params=jax.tree.map(choose, new_params, params),
    opt_state=jax.tree.map(choose, new_opt_state, opt_state),
    grad_norm=norm,
    nonfinite=nonfinite,
    empty=empty,
  )


def _decays(params: Params) -> PyTree[bool]:
  """Matrices decay, except those of an indexer (`models.sparse_attention`): no gradient could restore them."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: leaf.ndim >= 2 and "indexer" not in path_components(path), params
  )
