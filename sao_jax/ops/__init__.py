"""Pure functions of RL for language agents: arrays in, arrays out. What other JAX code imports from this library."""

from __future__ import annotations

from sao_jax.ops import (
  advantages as advantages,
)
from sao_jax.ops import (
  baselines as baselines,
)
from sao_jax.ops import (
  diagnostics as diagnostics,
)
from sao_jax.ops import (
  importance as importance,
)
from sao_jax.ops import (
  logprobs as logprobs,
)
from sao_jax.ops import (
  masking as masking,
)
from sao_jax.ops import (
  policy_losses as policy_losses,
)
from sao_jax.ops import (
  value_losses as value_losses,
)

__all__ = [
  "advantages",
  "baselines",
  "diagnostics",
  "importance",
  "logprobs",
  "masking",
  "policy_losses",
  "value_losses",
]
