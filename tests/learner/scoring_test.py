"""Log-probs of whole sequences against the oracle of the tiny policy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from sao_jax.learner.scoring import make_scorer
from tests.learner import tiny


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_token_but_the_first_is_scored(temperature):
  policy = tiny.init(1)
  tokens = np.random.default_rng(0).integers(0, tiny.VOCAB, (3, 8)).astype(np.int32)
  logp = jax.jit(make_scorer(tiny.policy_apply, temperature=temperature, chunk_size=4))(policy, tokens)
  for row, found in zip(tokens, np.asarray(logp), strict=True):
    expected = tiny.Oracle.of(policy).logps(row, temperature)[np.arange(8), row]
    np.testing.assert_allclose(found[1:], expected[1:], atol=1e-4)
  assert logp.dtype == np.float32 and not logp[:, 0].any()
