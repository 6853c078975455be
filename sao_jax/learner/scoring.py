"""Log-probs of the action tokens of a packed batch, or of whole sequences.

The output head is evaluated at the scored tokens only.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int, Int32

from sao_jax.learner import microbatches
from sao_jax.learner.config import LearnerConfig
from sao_jax.ops import logprobs, masking
from sao_jax.parallel.axes import ROWS, axes_for
from sao_jax.types import AnyArray, Params, PolicyApply, PolicyOutput, TokenBatch


def make_scorer(
  policy_apply: PolicyApply, *, temperature: float = 1.0, chunk_size: int
) -> Callable[[Params, Int32[AnyArray, "B T"]], Float32[Array, "B T"]]:
  """Builds `f(params, tokens) -> log π(tokens[t] | tokens[:t])` for rows of one sequence each; 0 at index 0.

  Args:
    policy_apply: the policy.
    temperature: the engine's.
    chunk_size: number of tokens whose logits exist at once.
  """

  def score(params: Params, tokens: Int32[AnyArray, "B T"]) -> Float32[Array, "B T"]:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    output = policy_apply(params, tokens, positions, jnp.ones_like(tokens))
    logp, _ = logprobs.masked_token_logprobs(
      masking.align_predictions(output.hidden), output.lm_head, tokens, positions > 0,
      temperature=temperature, chunk_size=chunk_size, num_tokens=output.num_tokens,
    )  # fmt: skip
    return logp

  return score


def action_logprobs(
  output: PolicyOutput, batch: TokenBatch, *, temperature: float = 1.0, chunk_size: int
) -> tuple[Float32[Array, "B T"], Float32[Array, "B T"]]:
  """`(log π(tokens[t] | tokens[:t]), entropy)` of action tokens; 0 elsewhere.

  Action tokens are gathered first, from all rows into one. On a mesh, each device gathers from its own part of the
  rows, and all devices run as many chunks as the device with the most tokens. Each device sums the gradient of the head
  over its own tokens; these sums are added once, after all chunks.

  Args:
    output: the policy's output on these rows.
    batch: `[B, T]` leaves.
    temperature: the engine's.
    chunk_size: number of tokens whose logits a device holds at once.
  """
  mesh = jax.sharding.get_abstract_mesh()
  rows, columns = axes_for(mesh, batch.tokens.shape[0], *ROWS), axes_for(mesh, batch.tokens.shape[1], "context")

  def score(hidden: jax.Array, head: jax.Array, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    logp, entropy = logprobs.masked_token_logprobs(
      hidden.reshape(-1, hidden.shape[-1]), head.astype(dtype), tokens.reshape(-1), mask.reshape(-1),
      temperature=temperature, chunk_size=chunk_size, axis_names=rows + columns, num_tokens=output.num_tokens,
    )  # fmt: skip
    return logp.reshape(tokens.shape), entropy.reshape(tokens.shape)

  head, dtype = output.lm_head, output.lm_head.dtype
  if rows or columns:
    # Gathered in its own dtype. The cast costs nothing here, and makes the sum of gradients over devices float32.
    gathered = NamedSharding(mesh, PartitionSpec(None, PartitionSpec.UNCONSTRAINED))
    head = jax.lax.with_sharding_constraint(head, gathered).astype(jnp.float32)
    here = PartitionSpec(rows or None, columns or None)
    score = jax.shard_map(
      score, mesh=mesh, in_specs=(here, PartitionSpec(), here, here), out_specs=here, axis_names={*rows, *columns},
      check_vma=False,
    )  # fmt: skip
  return score(masking.align_predictions(output.hidden), head, batch.tokens, batch.action_mask)


def batch_logprobs(
  config: LearnerConfig, policy_apply: PolicyApply, params: Params, batch: TokenBatch, num_microbatches: Int[Array, ""]
) -> Float32[Array, "M B T"]:
  """Log-probs of a batch's action tokens, as constants; 0 elsewhere and in unused microbatches.

  Args:
    config: names the temperature and the chunk size.
    policy_apply: the policy.
    params: its parameters.
    batch: `[M, B, T]` leaves.
    num_microbatches: microbatches from this on are not computed.
  """

  def logp(tokens: TokenBatch) -> jax.Array:
    output = policy_apply(params, tokens.tokens, tokens.positions, tokens.segment_ids)
    return action_logprobs(output, tokens, temperature=config.temperature, chunk_size=config.logprob_chunk_size)[0]

  buffers = jnp.zeros_like(batch.behavior_logp)
  return jax.lax.stop_gradient(microbatches.map_microbatches(logp, batch, buffers, 0, num_microbatches))
