"""Supervised warm start: cross-entropy on the action tokens of demonstrations, packed like rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int, Int32, Integer

from sao_jax.learner import batching, microbatches, optimizers, scoring
from sao_jax.learner.config import OptimizerConfig
from sao_jax.learner.state import commit
from sao_jax.ops import masking
from sao_jax.parallel.copies import copy_leaves
from sao_jax.types import Params, PolicyApply, TokenBatch, Trajectory


class SftState(NamedTuple):
  """Parameters, their optimizer and counts; donated to every step."""

  params: Params
  opt_state: optax.OptState
  step: Int32[Array, ""]
  skipped: Int32[Array, ""]
  """Updates that were skipped because the loss or gradient was not finite, or no token counted."""


SftStep: TypeAlias = Callable[[SftState, TokenBatch, Any], tuple[SftState, dict[str, jax.Array]]]
"""`(state (donated), batch [M, B, T], num_microbatches int32) -> (state, metrics)`."""


def init_sft_state(config: OptimizerConfig, params: Params) -> SftState:
  """Makes an initial state. It owns its buffers: the parameters are copied."""
  params = copy_leaves(params)
  opt_state = optimizers.init_optimizer(optimizers.make_optimizer(config), params)
  state = SftState(params, opt_state, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))
  return commit(state, params)


def make_sft_step(
  config: OptimizerConfig, policy_apply: PolicyApply, *, logprob_chunk_size: int = 1024, jit: bool = True
) -> SftStep:
  """Builds the step: L = −1/N Σ_t M_t log π(tokens[t] | tokens[:t]), with N the batch's number of action tokens.

  Args:
    config: the optimizer.
    policy_apply: the policy.
    logprob_chunk_size: number of tokens whose logits each device holds at once.
    jit: compile the step, donating its state; False returns the plain function.

  Returns:
    The step; its metrics are `loss`, `entropy`, `grad_norm`, `action_tokens` and `skipped`, device scalars.
  """
  optimizer = optimizers.make_optimizer(config)

  def step(
    state: SftState, batch: TokenBatch, num_microbatches: Int[Array, ""]
  ) -> tuple[SftState, dict[str, jax.Array]]:
    count = jnp.sum(batch.action_mask)

    def loss_fn(params: Params, tokens: TokenBatch) -> tuple[jax.Array, jax.Array]:
      output = policy_apply(params, tokens.tokens, tokens.positions, tokens.segment_ids)
      logp, entropy = scoring.action_logprobs(output, tokens, chunk_size=logprob_chunk_size)
      return -masking.masked_mean(logp, tokens.action_mask, denominator=jnp.maximum(count, 1)), entropy

    grads, loss, entropy = microbatches.accumulate_gradients(
      loss_fn, state.params, batch, jnp.zeros_like(batch.behavior_logp), 0, num_microbatches
    )
    done = optimizers.guarded_update(optimizer, grads, state.opt_state, state.params, loss=loss, kept=count)
    skipped = state.skipped + (done.nonfinite | done.empty)
    metrics = {
      "loss": loss,
      "entropy": masking.masked_mean(entropy, batch.action_mask),
      "grad_norm": done.grad_norm,
      "action_tokens": count.astype(jnp.float32),
      "skipped": skipped.astype(jnp.float32),
    }
    return SftState(done.params, done.opt_state, state.step + 1, skipped), metrics

  return jax.jit(step, donate_argnums=0) if jit else step


def demonstration_trajectory(
  tokens: Integer[np.ndarray, "T"] | Sequence[int],
  action_mask: Bool[np.ndarray, "T"] | Sequence[bool],
  *,
  index: int = 0,
  reward: float = 0.0,
) -> Trajectory:
  """Wraps a demonstration as a `Trajectory`, so that it packs like a rollout.

  A demonstration was not sampled. Its log-probs and versions are zeros, which the supervised loss does not read.

  Args:
    tokens: `[T]` token ids, prompt first.
    action_mask: `[T]` bool, True on the tokens to imitate.
    index: task index and episode id.
    reward: reward of the last action token.

  >>> demonstration_trajectory(np.array([5, 7, 2]), np.array([False, True, True])).num_actions
  2
  """
  tokens = np.asarray(tokens, np.int32)
  action_mask = np.asarray(action_mask, np.bool_)
  rewards = np.zeros(tokens.shape, np.float32)
  if action_mask.any():
    rewards[np.flatnonzero(action_mask)[-1]] = reward
  return Trajectory(
    tokens=tokens,
    action_mask=action_mask,
    behavior_logp=np.where(action_mask, 0.0, np.nan).astype(np.float32),
    versions=np.where(action_mask, 0, -1).astype(np.int32),
    rewards=rewards,
    ended="terminal",
    task_index=index,
    episode_id=index,
    group_id=index,
    num_turns=int(batching.turn_ids(action_mask).max(initial=0)),
    success=reward > 0,
  )
