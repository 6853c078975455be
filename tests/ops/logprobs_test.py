"""sao_jax.ops.logprobs: values, exact gradients, memory (PITFALLS 6, 9)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.ops import logprobs
from tests.ops import oracles

D, V = 6, 11


def problem(shape, dtype=np.float32, seed=0):
  rng = np.random.default_rng(seed)
  hidden = rng.normal(size=(*shape, D)).astype(dtype)
  return hidden, rng.normal(size=(D, V)).astype(dtype), rng.integers(V, size=shape)


def plain(hidden, lm_head, tokens, temperature):
  """Autodiff through full logits."""
  log_probs = jax.nn.log_softmax((hidden @ lm_head).astype(jnp.float32) / temperature)
  entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
  return jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0], entropy


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_the_definition(temperature):
  hidden, lm_head, tokens = problem((5,))
  logits = hidden @ lm_head
  expected = [oracles.token_logprob(z, a, temperature)[0] for z, a in zip(logits, tokens, strict=True)]
  actual = logprobs.token_logprobs(logits, tokens, temperature=temperature)
  np.testing.assert_allclose(actual, expected, rtol=1e-5)
  half = logprobs.token_logprobs(jnp.asarray(logits, jnp.bfloat16), tokens)
  assert half.dtype == jnp.float32
  assert logprobs.token_logprobs(jnp.array([1e4, 0.0, -jnp.inf]), jnp.array(0)) == 0.0


@pytest.mark.parametrize(("shape", "chunk_size"), [((7,), 3), ((2, 5), 4), ((5, 2), 3), ((), 1), ((2, 3, 2), 12)])
def test_chunked_values_and_gradients_are_exact(shape, chunk_size):
  hidden, lm_head, tokens = problem(shape)
  weights = np.random.default_rng(1).normal(size=(2, *shape)).astype(np.float32)

  def total(f, h, w):
    outputs = f(h, w, tokens, temperature=0.7)
    return sum((weight * out).sum() for weight, out in zip(weights, outputs, strict=True)), outputs

  def run(f):
    return jax.jit(jax.grad(partial(total, f), argnums=(0, 1), has_aux=True))(hidden, lm_head)

  actual, (logp, entropy) = run(partial(logprobs.chunked_token_logprobs, chunk_size=chunk_size))
  assert logp.shape == entropy.shape == shape
  assert logp.dtype == entropy.dtype == jnp.float32
  logits = (hidden.astype(np.float64) @ lm_head).reshape(-1, V)
  expected = [oracles.token_logprob(z, a, 0.7) for z, a in zip(logits, tokens.reshape(-1), strict=True)]
  np.testing.assert_allclose(np.stack([logp, entropy], -1).reshape(-1, 2), expected, rtol=2e-5, atol=1e-5)
  for a, b in zip(actual, run(plain)[0], strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


def test_gradient_against_float64_differences():
  hidden, lm_head, tokens = problem((4,))
  weight = np.array([1.0, -2.0, 0.5, 0.0])
  grad = jax.jit(
    jax.grad(
      lambda h, w: (weight * logprobs.chunked_token_logprobs(h, w, tokens, chunk_size=3)[0]).sum(), argnums=(0, 1)
    )
  )(hidden, lm_head)

  def total(h, w):
    return sum(c * oracles.token_logprob(z, a)[0] for c, z, a in zip(weight, h @ w, tokens, strict=True))

  arrays = [hidden.astype(np.float64), lm_head.astype(np.float64)]
  for which, index in ((0, (0, 2)), (0, (3, 1)), (1, (2, int(tokens[1]))), (1, (5, 0))):
    ends = []
    for step in (1e-5, -1e-5):
      moved = [x.copy() for x in arrays]
      moved[which][index] += step
      ends.append(total(*moved))
    assert float(grad[which][index]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-5)


def test_half_precision_accumulates_in_float32():
  hidden, lm_head, tokens = (jnp.asarray(x) for x in problem((64,), seed=3))
  hidden, lm_head = hidden.astype(jnp.bfloat16), lm_head.astype(jnp.bfloat16)
  f = jax.jit(
    jax.value_and_grad(
      lambda h, w: logprobs.chunked_token_logprobs(h, w, tokens, chunk_size=10)[0].sum(), argnums=(0, 1)
    )
  )
  value, grads = f(hidden, lm_head)
  exact = (hidden.astype(jnp.float32), lm_head.astype(jnp.float32))
  wanted, wanted_grads = f(*exact)
  assert float(value) == pytest.approx(float(wanted), rel=1e-6)
  for g, b in zip(grads, wanted_grads, strict=True):
    assert g.dtype == jnp.bfloat16
    np.testing.assert_allclose(g.astype(jnp.float32), b, rtol=2e-2, atol=2e-2)


def test_vmap_and_zero_cotangents():
  hidden, lm_head, tokens = problem((2, 5))
  f = partial(logprobs.chunked_token_logprobs, chunk_size=2)
  rows = jax.jit(jax.vmap(f, in_axes=(0, None, 0)))(hidden, lm_head, tokens)
  for a, b in zip(rows, jax.jit(f)(hidden, lm_head, tokens), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
  g = jax.jit(jax.grad(lambda w: 0.0 * f(hidden, w, tokens)[0].sum()))(lm_head)
  np.testing.assert_array_equal(g, np.zeros((D, V)))


def test_one_chunk_does_not_loop():
  hidden, lm_head, tokens = problem((2, 5))
  for chunk_size, loops in ((10, False), (4, True)):
    f = lambda h, w, c=chunk_size: logprobs.chunked_token_logprobs(h, w, tokens, chunk_size=c)[0].sum()  # noqa: E731
    text = jax.jit(jax.grad(f, argnums=(0, 1))).lower(hidden, lm_head).as_text()
    assert ("while" in text) == loops


@pytest.mark.parametrize("shape", [(4096,), (4, 1024)])
def test_temporaries_are_a_fraction_of_full_logits(shape):
  """Forward and backward at 4,096 tokens x 32,768 words: temporaries at most 15 % of [T, V] float32 (issue 6)."""
  d, v = 64, 32_768
  abstract = [jax.ShapeDtypeStruct(s, t) for s, t in (((*shape, d), "float32"), ((d, v), "float32"), (shape, "int32"))]

  def loss(hidden, lm_head, tokens):
    logp, entropy = logprobs.chunked_token_logprobs(hidden, lm_head, tokens, chunk_size=256)
    return logp.sum() + entropy.sum()

  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*abstract).compile()
  assert compiled.memory_analysis().temp_size_in_bytes <= 0.15 * 4096 * v * 4


def test_bad_input(own_checks):
  hidden, lm_head, tokens = problem((4,))
  f = logprobs.chunked_token_logprobs
  with pytest.raises(ValueError, match="chunk_size must be an int >= 1; received 0"):
    f(hidden, lm_head, tokens, chunk_size=0)
  with pytest.raises(ValueError, match=r"hidden \(4, 6\), lm_head \(11, 6\)"):
    f(hidden, lm_head.T, tokens, chunk_size=2)
  with pytest.raises(TypeError, match="tokens must be integer ids"):
    f(hidden, lm_head, tokens.astype(np.float32), chunk_size=2)
  with pytest.raises(ValueError, match=r"temperature must be in \(0, inf\); received 0"):
    f(hidden, lm_head, tokens, temperature=0, chunk_size=2)
  with pytest.raises(ValueError, match=r"logits \(4, 11\), tokens \(3,\)"):
    logprobs.token_logprobs(hidden @ lm_head, tokens[:3])
  with pytest.raises(TypeError, match="chunk_size"):
    f(hidden, lm_head, tokens)  # type: ignore[call-arg]


def masks(shape):
  """Edges: none, all, one, and random ones with rows of very unequal counts."""
  rng = np.random.default_rng(3)
  ragged = rng.random(shape) < np.linspace(0.0, 0.9, shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
  one = np.zeros(shape, bool)
  one[(-1,) * len(shape)] = True
  return {"none": np.zeros(shape, bool), "all": np.ones(shape, bool), "one": one, "ragged": ragged}


# XLA's own settings: the cheap compilation of the other tests rounds sums differently, beyond the bound below.
ORDINARY = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}


@pytest.mark.parametrize(("shape", "chunk_size"), [((37,), 5), ((4, 19), 8), ((4, 19), 1_000), ((6, 3), 2), ((1,), 1)])
def test_masked_values_and_gradients_are_those_of_the_masked_tokens(shape, chunk_size):
  hidden, lm_head, tokens = problem(shape)
  weights = np.random.default_rng(1).normal(size=(2, *shape)).astype(np.float32)

  @partial(jax.jit, compiler_options=ORDINARY)
  def full(h, w, mask):
    def total(h, w):
      every = logprobs.chunked_token_logprobs(h, w, tokens, temperature=0.7, chunk_size=chunk_size)
      outputs = [jnp.where(mask, out, 0.0) for out in every]
      return sum((weight * out).sum() for weight, out in zip(weights, outputs, strict=True)), outputs

    return jax.grad(total, argnums=(0, 1), has_aux=True)(h, w)

  traces = []

  @partial(jax.jit, compiler_options=ORDINARY)
  def masked(h, w, mask):
    traces.append(1)

    def total(h, w):
      outputs = logprobs.masked_token_logprobs(h, w, tokens, mask, temperature=0.7, chunk_size=chunk_size)
      return sum((weight * out).sum() for weight, out in zip(weights, outputs, strict=True)), outputs

    return jax.grad(total, argnums=(0, 1), has_aux=True)(h, w)

  for name, mask in masks(shape).items():
    broken = np.where(mask[..., None], hidden, np.nan)
    gradients, outputs = masked(broken, lm_head, mask)
    wanted = jax.tree.leaves(full(hidden, lm_head, mask))
    for actual, expected in zip(jax.tree.leaves((gradients, list(outputs))), wanted, strict=True):
      np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6, err_msg=name)
    for out in outputs:
      assert out.shape == shape and out.dtype == jnp.float32 and not np.asarray(out)[~mask].any()
  assert len(traces) == 1  # one program for every mask


def test_masked_chunks_follow_the_fullest_row():
  mask = np.zeros((2, 64), bool)
  assert [int(x) for x in logprobs.masked_chunks(mask, chunk_size=1_000)] == [0, 8, 16]
  mask[0, ::4] = True
  assert int(logprobs.masked_chunks(mask, chunk_size=1_000)[0]) == 2
  mask[1] = True
  assert int(logprobs.masked_chunks(mask, chunk_size=1_000)[0]) == 8
  assert [int(x) for x in logprobs.masked_chunks(mask.reshape(-1), chunk_size=10)] == [8, 13, 10]


def test_masked_refuses_what_does_not_fit(own_checks):
  hidden, lm_head, tokens = problem((2, 5))
  with pytest.raises(ValueError, match=r"mask must have tokens' shape.*\(2, 4\), tokens \(2, 5\)"):
    logprobs.masked_token_logprobs(hidden, lm_head, tokens, np.ones((2, 4), bool), chunk_size=4)
  with pytest.raises(TypeError, match="mask"):
    logprobs.masked_token_logprobs(hidden, lm_head, tokens, np.ones((2, 5)), chunk_size=4)


def test_padding_ids_have_no_probability_and_no_gradient():
  """The same values and gradients as with a head that is cut off."""
  hidden, lm_head, tokens = problem((3, 7))
  size = lm_head.shape[1] - 3
  tokens = np.minimum(tokens, size - 1)
  mask = np.ones((3, 7), bool)

  def total(h, w, **padding):
    outputs = logprobs.masked_token_logprobs(h, w, tokens, mask, temperature=0.7, chunk_size=8, **padding)
    return sum(out.sum() for out in outputs), outputs

  gradients, outputs = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, lm_head, num_tokens=size)
  wanted, expected = jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, lm_head[:, :size])
  np.testing.assert_allclose(np.array(outputs), np.array(expected), rtol=1e-5, atol=2e-6)
  np.testing.assert_allclose(gradients[0], wanted[0], rtol=1e-5, atol=2e-6)
  np.testing.assert_allclose(gradients[1][:, :size], wanted[1], rtol=1e-5, atol=2e-6)
  assert not np.asarray(gradients[1])[:, size:].any()
