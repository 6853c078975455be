"""The learning-rate schedule against its definition in float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.learner.config import OptimizerConfig
from sao_jax.learner.optimizers import learning_rate


def expected(count: int, peak: float, warmup: int, decay: int | None) -> float:
  warm = min(1.0, (count + 1) / max(warmup, 1))
  if decay is None:
    return peak * warm
  done = min(max((count - warmup) / (decay - warmup), 0.0), 1.0)
  return peak * warm * (0.05 + 0.95 * 0.5 * (1.0 + math.cos(math.pi * done)))


@pytest.mark.parametrize(("warmup", "decay"), [(0, None), (0, 30), (1, None), (1, 5), (10, None), (10, 40), (2, 3)])
def test_warm_up_and_decay(warmup: int, decay: int | None) -> None:
  rate = learning_rate(OptimizerConfig(learning_rate=3e-3, warmup_steps=warmup, decay_steps=decay))
  found = jax.jit(jax.vmap(lambda count: jnp.asarray(rate(count), jnp.float32)))(jnp.arange(60))
  want = [expected(count, 3e-3, warmup, decay) for count in range(60)]
  np.testing.assert_allclose(found, want, rtol=2e-6)
