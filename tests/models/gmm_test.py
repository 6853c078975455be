"""The TPU's grouped matmul, interpreted on CPU, against the dense implementation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.models import moe

TOKENS, EXPERTS, DIM, WIDTH = 24, 4, 16, 8


def test_gmm_agrees_with_dense_and_skips_what_belongs_to_no_expert():
  rng = np.random.default_rng(0)
  shapes = ((EXPERTS, DIM, WIDTH), (EXPERTS, DIM, WIDTH), (EXPERTS, WIDTH, DIM))
  kernels = moe.ExpertKernels(*(jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for shape in shapes))
  x = jnp.asarray(rng.normal(size=(TOKENS, DIM)), jnp.float32)
  # Expert 1 has no token; id EXPERTS stands for an expert of another device, whose weight is 0 here.
  experts = jnp.asarray(rng.choice([0, 2, 3, EXPERTS], size=(TOKENS, 2)), jnp.int32)
  weights = jnp.where(experts < EXPERTS, jnp.asarray(rng.random((TOKENS, 2)), jnp.float32), 0.0)

  def outputs(mlp):
    def fn(x, weights, kernels):
      y = mlp(x, weights, experts, kernels)
      return jnp.sum(jnp.sin(y)), y

    (_, y), grads = jax.jit(jax.value_and_grad(fn, argnums=(0, 1, 2), has_aux=True))(x, weights, kernels)
    d_x, d_weights, d_kernels = grads
    return y, d_x, jnp.where(experts < EXPERTS, d_weights, 0.0), d_kernels

  wanted = outputs(functools.partial(moe.expert_mlp, impl="dense"))
  got = outputs(functools.partial(moe._gmm, interpret=True))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
