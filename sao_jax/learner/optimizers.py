"""Optimizers, and the guard that every update passes: not finite or nothing to learn from means no change at all."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from sao_jax.learner.config import OptimizerConfig
from sao_jax.types import Params

FINAL_RATE = 0.05
"""What is left of the learning rate after its decay."""


class Applied(NamedTuple):
  """What became of one update."""

  params: Params
  opt_state: optax.OptState
  grad_norm: jax.Array
  """Global norm before clipping; float32."""
  nonfinite: jax.Array
  """bool: loss, gradient or something that they are made of was not finite, and the update was skipped."""
  empty: jax.Array
  """bool: no token contributed, and the update was skipped."""


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
    steps.append(optax.add_decayed_weights(config.weight_decay, mask=_is_matrix))
  steps.append(optax.scale_by_learning_rate(learning_rate(config)))
  return optax.chain(*steps)


def init_optimizer(optimizer: optax.GradientTransformation, params: Params) -> optax.OptState:
  """The optimizer's first state; moments are float32 whatever the parameters' dtype."""
  return optimizer.init(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))


def guarded_update(
  optimizer: optax.GradientTransformation,
  gradients: Params,
  opt_state: optax.OptState,
  params: Params,
  *,
  loss: jax.Array,
  kept: jax.Array,
  finite: jax.Array | bool = True,
  allowed: jax.Array | bool = True,
) -> Applied:
  """One optimizer update, or none: parameters, moments and counts then stay bit for bit what they were.

  It is skipped if the loss, the gradient or what they are made of is not finite, if no token was kept (weight decay and
  momentum would move the parameters all the same), or if it is not `allowed`.

  Args:
    optimizer: from `make_optimizer`.
    gradients: float32, the structure of `params`.
    opt_state: the optimizer's state.
    params: what to update.
    loss: float32 scalar.
    kept: number of tokens that contributed to the loss, scalar. Tokens that the loss masks (DIS) did not: a batch of
      them alone has a gradient of zero, and moves nothing.
    finite: bool scalar; False says that log-probs, values, advantages or targets are not finite, which a loss that
      masks tokens need not show.
    allowed: bool scalar; False also skips, and counts as neither kind of fault.
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


def _is_matrix(params: Params) -> Params:
  return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
