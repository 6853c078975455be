"""State of the learner: one pytree, donated to every step and saved as it is."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int32

from sao_jax.learner import optimizers, partition
from sao_jax.learner.config import LearnerConfig
from sao_jax.parallel.copies import copy_leaves
from sao_jax.types import AnyArray, Params

StateT = TypeVar("StateT")


class Counters(NamedTuple):
  """Number of updates that were skipped since the run began."""

  policy_nonfinite: Int32[Array, ""]
  critic_nonfinite: Int32[Array, ""]
  policy_empty: Int32[Array, ""]
  critic_empty: Int32[Array, ""]


class LearnerState(NamedTuple):
  """Policy, critic, their optimizers, counts, and the reference policy.

  Jitted steps donate it, so others that need the parameters (the rollout engine) must take a copy.
  """

  policy: Params
  policy_opt: optax.OptState
  critic: Params | None
  """All parameters of the critic, frozen ones included; None for algorithms without a critic."""
  critic_opt: optax.OptState | None
  """For the trainable parameters only."""
  step: Int32[Array, ""]
  """Number of learner steps done."""
  counters: Counters
  reference: Params | None = None
  """The policy at the start of RL, which `kl_coef` keeps the policy near to; None with `kl_coef` = 0."""

  @property
  def version(self) -> Int32[AnyArray, ""]:
    """Version of the policy. Every learner step makes a new one, even if its update is skipped or held, so that
    staleness keeps counting."""
    return self.step


def init_state(config: LearnerConfig, policy_params: Params, critic_params: Params | None = None) -> LearnerState:
  """Makes an initial state. It owns its buffers: the parameters are copied.

  Args:
    config: decides the optimizers and the frozen parameters of the critic.
    policy_params: the policy's parameters.
    critic_params: the critic's; required by algorithms with a critic, refused by those without.

  Raises:
    ValueError: critic parameters are missing or not used, or `frozen_critic` names a component that does not exist.
  """
  if config.uses_critic != (critic_params is not None):
    wanted = "required" if config.uses_critic else "not used"
    raise ValueError(f"critic_params is {wanted} with advantage={config.advantage!r}; received {type(critic_params)}.")
  policy = copy_leaves(policy_params)
  policy_opt = optimizers.init_optimizer(optimizers.make_optimizer(config.policy_optimizer), policy)
  critic = critic_opt = None
  if critic_params is not None:
    critic = copy_leaves(critic_params)
    trainable, _ = partition.split(critic, config.frozen_critic)
    critic_opt = optimizers.init_optimizer(optimizers.make_optimizer(config.critic_optimizer), trainable)
  state = LearnerState(
    policy=policy,
    policy_opt=policy_opt,
    critic=critic,
    critic_opt=critic_opt,
    step=jnp.zeros((), jnp.int32),
    counters=Counters(*(jnp.zeros((), jnp.int32) for _ in Counters._fields)),
    reference=copy_leaves(policy_params) if config.kl_coef > 0.0 else None,
  )
  return commit(state, policy)


def commit(state: StateT, params: Params) -> StateT:
  """Commits every leaf of `state` to the devices of `params`; leaves that lie elsewhere are replicated there.

  The outputs of a jitted step are committed if any input is. Without this, the step's second call would see other
  placements than its first, and compile again.
  """
  first = jax.tree.leaves(params)[0]
  if isinstance(first, jax.core.Tracer):
    return state  # traced (`jax.eval_shape`): there are no devices
  home = first.sharding
  if isinstance(home, jax.sharding.NamedSharding):
    home = jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec())

  def place(leaf: jax.Array) -> jax.Array:
    return jax.device_put(leaf, leaf.sharding if leaf.sharding.device_set == home.device_set else home)

  return jax.tree.map(place, state)
