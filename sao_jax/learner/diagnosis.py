"""Names the quantities that are not finite in a batch whose update was skipped, trajectory by trajectory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sao_jax.learner import batching, regularization, targets, update
from sao_jax.learner.config import LearnerConfig
from sao_jax.learner.state import LearnerState
from sao_jax.types import Params, PolicyApply, TokenBatch, Trajectory, ValueApply

Diagnosis: TypeAlias = Callable[[LearnerState, Sequence[Trajectory]], list[list[str]]]
"""`(state after the skipped update (not donated), its batch) -> names per trajectory`. All are empty if only sums over
the batch overflow. Since the update was skipped, the model's parameters are still those that met the batch."""


def make_diagnosis(
  config: LearnerConfig,
  policy_apply: PolicyApply,
  value_apply: ValueApply | None,
  *,
  base: Params | None = None,
  join: Callable[[Params, Params], Params] = lambda base, trained: trained,
) -> Diagnosis:
  """Builds a function that names the quantities of each trajectory that are not finite, each examined on its own.

  The quantities are reward, behavior_logp, reference_logp, logp, ratio, policy_loss, policy_gradient, value, return,
  advantage, value_loss and critic_gradient. It costs about a learner step per microbatch-full of trajectories, so use
  it on skipped batches only. Baselines from rewards alone are not examined: their advantage is 1 here.

  Args:
    config: the learner's.
    policy_apply: the policy.
    value_apply: the value model; None for algorithms without one.
    base: frozen parameters that the state lacks, if any.
    join: `join(base, trained)` gives the parameters that policy and value model take.
  """

  @jax.jit
  def examine(state: LearnerState, batch: TokenBatch, used: jax.Array, base: Params | None) -> dict[str, jax.Array]:
    def on_base(apply: Any) -> Any:
      return lambda trained, *tokens: apply(join(base, trained), *tokens)

    value = None if value_apply is None else on_base(value_apply)
    return _quantities(config, on_base(policy_apply), value, state, batch, used)

  def find(state: LearnerState, trajectories: Sequence[Trajectory]) -> list[list[str]]:
    found = []
    for trajectory in trajectories:
      batch, packed = batching.pack_batch(config, [trajectory], [1.0])
      finite = jax.device_get(examine(state, batch, np.int32(packed.num_microbatches), base))
      found.append([name for name in sorted(finite) if not finite[name]])
    return found

  return find


def _quantities(
  config: LearnerConfig,
  policy_apply: PolicyApply,
  value_apply: ValueApply | None,
  state: LearnerState,
  batch: TokenBatch,
  used: jax.Array,
) -> dict[str, jax.Array]:
  """Returns a bool scalar for each quantity of a batch: True if it is finite."""
  mask = batch.action_mask

  def finite(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x) | ~mask)

  result = {"reward": finite(batch.rewards), "behavior_logp": finite(batch.behavior_logp)}
  adv = jnp.where(mask, batch.baseline_adv, 0.0)
  if value_apply is not None:
    critic = update.update_critic(config, value_apply, state, batch, used, num_updates=1)
    adv = targets.policy_advantages(config, critic.v_after, batch)
    result |= {
      "value": finite(targets.values_before(critic.v_after)),
      "return": finite(critic.returns),
      "advantage": finite(adv),
      "value_loss": jnp.isfinite(critic.metrics["value_loss"]),
      "critic_gradient": jnp.isfinite(critic.metrics["critic_grad_norm"]),
    }
  reference_logp = regularization.reference_logp(config, policy_apply, state.reference, batch, used)
  if reference_logp is not None:
    result["reference_logp"] = finite(reference_logp)
  zeros = jnp.zeros_like(batch.behavior_logp)
  gradient, loss, outputs = update.policy_gradient(
    config, policy_apply, state.policy, batch, adv, 0, used,
    denominator=jnp.maximum(jnp.sum(mask), 1), outputs=update.PolicyOutputs(zeros, zeros),
    reference_logp=reference_logp,
  )  # fmt: skip
  return result | {
    "logp": finite(outputs.logp),
    "ratio": finite(jnp.exp(jnp.where(mask, outputs.logp - batch.behavior_logp, 0.0))),
    "policy_loss": jnp.isfinite(loss),
    "policy_gradient": jnp.isfinite(optax.tree.norm(gradient)),
  }
