"""Sampling from logits: distribution, log-probs, noise, nucleus."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from sao_jax.rollout.engine import sampling
from sao_jax.rollout.engine.nucleus import nucleus
from sao_jax.rollout.engine.sampling import sample_tokens

_sample = jax.jit(sample_tokens)


@pytest.mark.parametrize("size", [5, 32, 70, 257])
def test_chi_square(size):
  draws = 40_000
  logits = np.random.default_rng(size).normal(scale=1.5, size=size).astype(np.float32)
  uniform = jax.random.uniform(jax.random.key(size), (draws,))
  tokens, logp = _sample(jnp.broadcast_to(jnp.asarray(logits), (draws, size)), uniform)
  probabilities = np.exp(logits.astype(np.float64) - logits.max())
  probabilities /= probabilities.sum()
  counts = np.bincount(tokens, minlength=size)
  large = probabilities * draws >= 5
  observed = np.append(counts[large], counts[~large].sum())
  expected = np.append(probabilities[large], probabilities[~large].sum()) * draws
  keep = expected > 0
  assert stats.chisquare(observed[keep], expected[keep]).pvalue > 1e-4
  np.testing.assert_allclose(np.exp(logp), probabilities[tokens], rtol=1e-4)


@hypothesis.given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.0, 1.0, 30.0, 1e4]), masked=st.booleans())
def test_edges_never_choose_an_impossible_token(seed, scale, masked):
  # Fixed shapes: one compilation. Uniforms at the very ends of [0, 1), and logits of -inf.
  rng = np.random.default_rng(seed)
  logits = (rng.normal(size=(6, 70)) * scale).astype(np.float32)
  if masked:
    logits[:, rng.integers(0, 70, size=60)] = -np.inf
    logits[:, 3] = 0.0
  uniform = np.array([0.0, 1e-30, 0.5, 1 - 2**-24, 1 - 2**-23, rng.uniform()], np.float32)
  tokens, logp = _sample(logits, uniform)
  assert ((np.asarray(tokens) >= 0) & (np.asarray(tokens) < 70)).all()
  chosen = np.take_along_axis(logits, np.asarray(tokens)[:, None], -1)[:, 0]
  assert np.isfinite(chosen).all() and np.isfinite(logp).all() and (np.asarray(logp) <= 0).all()


def test_noise_is_a_function_of_episode_and_position():
  key = jax.random.key(0)
  slot_noise = jax.jit(sampling.slot_noise, static_argnames="steps")
  noise = slot_noise(key, jnp.array([7, 8, 9]), jnp.array([3, 3, 10]), steps=4)
  other = slot_noise(key, jnp.array([9, 7]), jnp.array([11, 5]), steps=2)
  np.testing.assert_array_equal(noise[1:3, 2], other[:, 0])
  np.testing.assert_array_equal(noise[2:4, 0], other[:, 1])
  assert len(np.unique(noise)) == 12
  assert not np.isin(slot_noise(jax.random.key(1), jnp.array([7]), jnp.array([3]), steps=4), noise).any()


def nucleus_oracle(logits: np.ndarray, top_p: float) -> np.ndarray:
  """Returns the truncated distribution in float64, from its definition; NaN if rounding decides its tokens."""
  p = np.exp(logits.astype(np.float64) - logits.max())
  p /= p.sum()
  before = np.array([p[p > x].sum() for x in p])
  if (abs(before - top_p) < 1e-5).any():
    return np.full_like(p, np.nan)
  kept = np.where(before < top_p, p, 0.0)
  return kept / kept.sum()


_nucleus = jax.jit(nucleus, static_argnames="top_p")


@hypothesis.given(
  seed=st.integers(0, 2**31),
  scale=st.sampled_from([0.0, 1.0, 30.0]),
  top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.95]),
  ties=st.booleans(),
)
def test_nucleus_matches_its_definition(seed, scale, top_p, ties):
  rng = np.random.default_rng(seed)
  logits = (rng.normal(size=(4, 37)) * scale).astype(np.float32)
  if ties:
    logits = np.round(logits)
  logits[0, 5:] = -np.inf
  found = np.asarray(jax.nn.softmax(_nucleus(logits, top_p=top_p)), np.float64)
  for row, kept in zip(logits, found, strict=True):
    expected = nucleus_oracle(row, top_p)
    assert kept[row == row.max()].min() > 0
    if np.isfinite(expected).all():
      np.testing.assert_array_equal(kept > 0, expected > 0)
      np.testing.assert_allclose(kept, expected, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize(("top_p", "left"), [(0.3, [0]), (0.4, [0]), (0.45, [0, 1, 2]), (0.85, [0, 1, 2, 3])])
def test_nucleus_of_a_row_with_ties(top_p, left):
  # The two of 0.2 are both in or both out; 0.4 is reached by the first token.
  logits = np.log(np.array([[0.402, 0.2, 0.2, 0.15, 0.048]], np.float32))
  assert np.flatnonzero(np.isfinite(np.asarray(_nucleus(logits, top_p=top_p))[0])).tolist() == left
