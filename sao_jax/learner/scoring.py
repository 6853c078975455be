"""Log-probs of a packed batch's action tokens: the head is evaluated for nothing else."""

from __future__ import annotations

import jax

from sao_jax.ops import logprobs, masking
from sao_jax.types import PolicyOutput, TokenBatch


def action_logprobs(
  output: PolicyOutput, batch: TokenBatch, *, temperature: float = 1.0, chunk_size: int
) -> tuple[jax.Array, jax.Array]:
  """`(log pi(tokens[t] | tokens[:t]), entropy)` of action tokens, both `[B, T]` float32; 0 elsewhere.

  Action tokens are gathered first: from all rows into one, on a mesh each row's own, whose devices need not look at one
  another. Where a row's tokens are split over devices (`context`), gathering would bring them all to each of these;
  there every token is scored, by the device that has it.

  Args:
    output: of the policy on these rows.
    batch: `[B, T]` leaves.
    temperature: the engine's.
    chunk_size: tokens whose logits are held at once.
  """
  hidden, tokens, mask = masking.align_predictions(output.hidden), batch.tokens, batch.action_mask
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty and mesh.shape.get("context", 1) > 1:
    return logprobs.chunked_token_logprobs(
      hidden, output.lm_head, tokens, temperature=temperature, chunk_size=chunk_size
    )
  if mesh.empty or mesh.size == 1:
    hidden, tokens, mask = hidden.reshape(-1, hidden.shape[-1]), tokens.reshape(-1), mask.reshape(-1)
  logp, entropy = logprobs.masked_token_logprobs(
    hidden, output.lm_head, tokens, mask, temperature=temperature, chunk_size=chunk_size
  )
  return logp.reshape(batch.tokens.shape), entropy.reshape(batch.tokens.shape)
