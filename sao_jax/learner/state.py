"""What the learner carries from step to step: one pytree, donated to every step and saved as it is."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from sao_jax.learner import optimizers, partition
from sao_jax.learner.config import LearnerConfig
from sao_jax.types import Params

StateT = TypeVar("StateT")


class Counters(NamedTuple):
  """Updates that were skipped since the run began; int32 scalars."""

  policy_nonfinite: jax.Array
  critic_nonfinite: jax.Array
  policy_empty: jax.Array
  critic_empty: jax.Array


class LearnerState(NamedTuple):
  """Policy, critic, their optimizers and the counts.

  The jitted steps donate it: whoever else needs the parameters (the rollout engine) takes a copy.
  """

  policy: Params
  policy_opt: optax.OptState
  critic: Params | None
  """All parameters of the critic, frozen ones included; None for algorithms without a critic."""
  critic_opt: optax.OptState | None
  """State for the trainable parameters only."""
  step: jax.Array
  """int32: learner steps done."""
  counters: Counters

  @property
  def version(self) -> jax.Array:
    """Version of the policy: every learner step makes a new one, a skipped or held update included, so that staleness
    and admission go on."""
    return self.step


def init_state(config: LearnerConfig, policy_params: Params, critic_params: Params | None = None) -> LearnerState:
  """A fresh state that owns its buffers: what is handed in is copied.

  Args:
    config: decides the optimizers and what of the critic trains.
    policy_params: the policy's parameters.
    critic_params: the critic's; required by algorithms with a critic, refused by those without.

  Raises:
    ValueError: critic parameters missing or superfluous, or `frozen_critic` names a component that does not exist.
  """
  if config.uses_critic != (critic_params is not None):
    wanted = "required" if config.uses_critic else "not used"
    raise ValueError(f"critic_params is {wanted} with advantage={config.advantage!r}; received {type(critic_params)}.")
  policy = copy(policy_params)
  policy_opt = optimizers.init_optimizer(optimizers.make_optimizer(config.policy_optimizer), policy)
  critic = critic_opt = None
  if critic_params is not None:
    critic = copy(critic_params)
    trainable, _ = partition.split(critic, config.frozen_critic)
    critic_opt = optimizers.init_optimizer(optimizers.make_optimizer(config.critic_optimizer), trainable)
  state = LearnerState(
    policy=policy,
    policy_opt=policy_opt,
    critic=critic,
    critic_opt=critic_opt,
    step=jnp.zeros((), jnp.int32),
    counters=Counters(*(jnp.zeros((), jnp.int32) for _ in Counters._fields)),
  )
  return commit(state, policy)


def copy(params: Params) -> Params:
  """The same parameters in buffers of their own, on the same devices."""
  return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)


def commit(state: StateT, params: Params) -> StateT:
  """Ties every leaf of `state` to the devices of `params`, those that lie elsewhere replicated.

  A jitted step's outputs are tied to a device if any input is; without this its second call would find other placements
  than its first, and be compiled again.
  """
  first = jax.tree.leaves(params)[0]
  if isinstance(first, jax.core.Tracer):
    return state  # shapes alone (`jax.eval_shape`): nothing lies anywhere
  home = first.sharding
  if isinstance(home, jax.sharding.NamedSharding):
    home = jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec())

  def place(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, leaf.sharding if leaf.sharding.device_set == home.device_set else home)

  return jax.tree.map(place, state)
