"""Pure functions of RL for language agents: arrays in, arrays out.

Every function stands in a module by topic, and is importable from here as well: `ops.dis_policy_loss` is
`ops.policy_losses.dis_policy_loss`. `init`, `update` and `value` are those of `RunningMean`.
"""

from __future__ import annotations

from sao_jax.ops import (
  advantages,
  baselines,
  diagnostics,
  importance,
  logprobs,
  masking,
  policy_losses,
  value_losses,
)
from sao_jax.ops.advantages import (
  group_relative_advantages,
  length_adaptive_lambda,
  skip_observation_gae,
  skip_observation_returns,
  step_level_gae,
)
from sao_jax.ops.baselines import RunningMean, ValueTracker, init, update, value
from sao_jax.ops.diagnostics import approx_kl, effective_sample_size, explained_variance
from sao_jax.ops.importance import (
  dis_coefficient,
  dis_mask,
  dis_outside,
  icepop_outside,
  importance_ratio,
  log_ratio,
  rounding_slack,
  sequence_log_ratio,
)
from sao_jax.ops.logprobs import (
  MIN_CHUNKS,
  chunked_token_logprobs,
  exclude_padding,
  masked_chunks,
  masked_token_logprobs,
  token_logprobs,
)
from sao_jax.ops.masking import Moments, align_predictions, masked_mean, masked_moments, masked_whiten
from sao_jax.ops.policy_losses import (
  dis_policy_loss,
  entropy_loss,
  gspo_loss,
  icepop_loss,
  kl_loss,
  ppo_clip_loss,
  score_function_loss,
  truncated_is_loss,
)
from sao_jax.ops.value_losses import clipped_value_loss, squared_value_loss

__all__ = [
  "MIN_CHUNKS",
  "Moments",
  "RunningMean",
  "ValueTracker",
  "advantages",
  "align_predictions",
  "approx_kl",
  "baselines",
  "chunked_token_logprobs",
  "clipped_value_loss",
  "diagnostics",
  "dis_coefficient",
  "dis_mask",
  "dis_outside",
  "dis_policy_loss",
  "effective_sample_size",
  "entropy_loss",
  "exclude_padding",
  "explained_variance",
  "group_relative_advantages",
  "gspo_loss",
  "icepop_loss",
  "icepop_outside",
  "importance",
  "importance_ratio",
  "init",
  "kl_loss",
  "length_adaptive_lambda",
  "log_ratio",
  "logprobs",
  "masked_chunks",
  "masked_mean",
  "masked_moments",
  "masked_token_logprobs",
  "masked_whiten",
  "masking",
  "policy_losses",
  "ppo_clip_loss",
  "rounding_slack",
  "score_function_loss",
  "sequence_log_ratio",
  "skip_observation_gae",
  "skip_observation_returns",
  "squared_value_loss",
  "step_level_gae",
  "token_logprobs",
  "truncated_is_loss",
  "update",
  "value",
  "value_losses",
]
