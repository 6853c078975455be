"""Every implementation of packed attention against the plain one, gradients included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import splash
from sao_jax.models.attention import packed_attention

LENGTH = 256
SEGMENTS = jnp.asarray(np.repeat([[1, 1, 2, 2, 2, 3, 3, 0]], LENGTH // 8, axis=1), jnp.int32)


def outputs(impl, interpret=False):
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(rng.normal(size=(1, LENGTH, heads, 128)), jnp.float32) for heads in (2, 1, 1))
  real = (SEGMENTS > 0)[..., None, None]

  def fn(q, k, v):
    y = jnp.where(real, packed_attention(q, k, v, SEGMENTS, 0.1, impl, interpret=interpret), 0.0)
    return jnp.sum(jnp.sin(y)), y

  return jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2), has_aux=True))(q, k, v)


@pytest.mark.parametrize(
  ("impl", "interpret"), [("chunked", False), ("heads_first", False), ("splash", True), ("auto", False)]
)
def test_implementations_agree(impl, interpret):
  for got, wanted in zip(jax.tree.leaves(outputs(impl, interpret)), jax.tree.leaves(outputs("xla")), strict=True):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_unknown_and_unfit_are_refused():
  x = jnp.zeros((1, 8, 1, 8))
  with pytest.raises(ValueError, match="received 'flash'"):
    packed_attention(x, x, x, jnp.ones((1, 8), jnp.int32), 1.0, "flash")
  with pytest.raises(ValueError, match="multiple of 128 tokens"):
    packed_attention(x, x, x, jnp.ones((1, 8), jnp.int32), 1.0, "splash")


@pytest.mark.parametrize("query_shards", [1, 4])
def test_blocks_of_the_causal_mask_are_jaxs(query_shards, monkeypatch):
  def arrays():
    kernel = splash.make_kernel(4, 2048, head_shards=2, query_shards=query_shards, interpret=False)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(kernel)]

  ours = arrays()
  monkeypatch.setattr(splash, "CausalMask", splash.masks.CausalMask)
  for a, b in zip(ours, arrays(), strict=True):
    np.testing.assert_array_equal(a, b)
