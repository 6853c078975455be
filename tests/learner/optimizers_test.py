"""The learning-rate schedule against its definition in float64, and what decays."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.learner.config import OptimizerConfig
from sao_jax.learner.optimizers import learning_rate, make_optimizer


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


def test_an_indexer_does_not_decay() -> None:
  """It has no gradient, so decay alone would wear it out."""
  config = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
  params = {"attention": {"indexer": {"wk": {"kernel": jnp.ones((2, 2))}}, "o_proj": {"kernel": jnp.ones((2, 2))}}}
  optimizer = make_optimizer(config)
  updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
  np.testing.assert_array_equal(updates["attention"]["indexer"]["wk"]["kernel"], 0.0)
  np.testing.assert_allclose(updates["attention"]["o_proj"]["kernel"], -1e-3, rtol=1e-5)
