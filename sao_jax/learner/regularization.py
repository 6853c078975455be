"""Terms beside the policy's loss: the KL divergence to a reference policy, and the entropy bonus.

They are not part of SAO. With both coefficients 0, nothing here adds to the learner's program.
"""

from __future__ import annotations

from jaxtyping import Array, Bool, Float, Float32, Int

from sao_jax.learner import scoring
from sao_jax.learner.config import LearnerConfig
from sao_jax.ops import masking, policy_losses
from sao_jax.types import Params, PolicyApply, TokenBatch


def reference_logp(
  config: LearnerConfig,
  policy_apply: PolicyApply,
  reference: Params | None,
  batch: TokenBatch,
  num_microbatches: Int[Array, ""],
) -> Float32[Array, "M B T"] | None:
  """Log-probs of action tokens under the reference policy, from a forward pass; None with `kl_coef` = 0.

  Args:
    config: names the coefficient.
    policy_apply: the policy.
    reference: parameters of the reference, `LearnerState.reference`.
    batch: `[M, B, T]` leaves.
    num_microbatches: microbatches from this on are not computed.

  Raises:
    ValueError: `kl_coef` > 0, and there is no reference.
  """
  if config.kl_coef == 0.0:
    return None
  if reference is None:
    raise ValueError(f"LearnerState.reference is required with kl_coef={config.kl_coef}; received None.")
  return scoring.batch_logprobs(config, policy_apply, reference, batch, num_microbatches)


def regularized_loss(
  config: LearnerConfig,
  loss: Float32[Array, "B T"],
  logp: Float32[Array, "B T"],
  entropy: Float32[Array, "B T"],
  reference_logp: Float32[Array, "B T"] | None,
  action_mask: Bool[Array, "B T"],
) -> Float32[Array, "B T"]:
  """ℓ_t + kl_coef · KL_t − entropy_coef · H_t; the loss itself with both coefficients 0.

  Args:
    config: holds the coefficients.
    loss: of the policy, per token.
    logp: the learner's log-probs.
    entropy: of the learner's distributions.
    reference_logp: see `reference_logp`.
    action_mask: True on action tokens.
  """
  if reference_logp is not None:
    loss = loss + config.kl_coef * policy_losses.kl_loss(logp, reference_logp, action_mask)
  if config.entropy_coef > 0.0:
    loss = loss + config.entropy_coef * policy_losses.entropy_loss(entropy, action_mask)
  return loss


def metrics(
  logp: Float[Array, "M B T"], reference_logp: Float[Array, "M B T"] | None, action_mask: Bool[Array, "M B T"]
) -> dict[str, Float32[Array, ""]]:
  """`reference_kl`, the mean of KL_t over action tokens; empty without a reference."""
  if reference_logp is None:
    return {}
  return {"reference_kl": masking.masked_mean(policy_losses.kl_loss(logp, reference_logp, action_mask), action_mask)}
