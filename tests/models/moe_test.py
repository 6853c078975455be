"""Routing and expert implementations against a per-token loop."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.models import moe
from tests.models import tiny

N, E, K, D, F = 150, 6, 2, 8, 12
IMPLEMENTATIONS = ("ragged", "blocks", "dense", "auto")


def _oracle(x: np.ndarray, weights: np.ndarray, experts: np.ndarray, kernels: moe.ExpertKernels) -> np.ndarray:
  out = np.zeros(x.shape, np.float64)
  for n in range(x.shape[0]):
    for weight, e in zip(weights[n], experts[n], strict=True):
      gate, up, down = (np.asarray(kernel[e], np.float64) for kernel in kernels)
      out[n] += weight * ((tiny.silu(x[n] @ gate) * (x[n] @ up)) @ down)
  return out


def _route_oracle(scores: np.ndarray, bias: np.ndarray, *, top_k: int, groups: int, kept: int) -> np.ndarray:
  choice = (scores + bias).reshape(groups, -1)
  best = np.argsort(-np.sort(choice, axis=-1)[:, -2:].sum(-1), kind="stable")[:kept]
  masked = np.full_like(choice, -np.inf)
  masked[best] = choice[best]
  return np.argsort(-masked.reshape(-1), kind="stable")[:top_k]


def _inputs(experts_per_token: np.ndarray | None = None) -> tuple[jax.Array, jax.Array, jax.Array, moe.ExpertKernels]:
  rng = np.random.default_rng(0)
  x = rng.normal(size=(N, D)).astype(np.float32)
  weights = rng.uniform(0.1, 1.0, size=(N, K)).astype(np.float32)
  if experts_per_token is None:
    experts_per_token = np.stack([rng.permutation(E)[:K] for _ in range(N)])
  kernels = moe.ExpertKernels(
    *(rng.normal(size=shape).astype(np.float32) * 0.3 for shape in ((E, D, F), (E, D, F), (E, F, D)))
  )
  experts = jnp.asarray(experts_per_token, jnp.int32)
  return jnp.asarray(x), jnp.asarray(weights), experts, jax.tree.map(jnp.asarray, kernels)


CHOICES = {
  "balanced": None,
  "experts without tokens": np.tile([1, 4], (N, 1)),
  "all in one, the last": np.tile([5, 0], (N, 1)),
  "one token elsewhere": np.concatenate([np.tile([2, 3], (N - 1, 1)), [[0, 5]]]),
}


def _loop(x: jax.Array, weights: jax.Array, kernels: moe.ExpertKernels, experts: jax.Array) -> jax.Array:
  """The definition, token by token, for JAX to differentiate."""

  def pair(x_n: jax.Array, e: jax.Array) -> jax.Array:
    gate, up, down = (kernel[e] for kernel in kernels)
    return (jax.nn.silu(x_n @ gate) * (x_n @ up)) @ down

  def token(x_n: jax.Array, w_n: jax.Array, e_n: jax.Array) -> jax.Array:
    return sum(w_n[j] * pair(x_n, e_n[j]) for j in range(K))

  return jax.vmap(token)(x, weights, experts)


@functools.cache
def _forward(impl: str) -> Callable[..., jax.Array]:
  """Compiled once for all cases."""
  return jax.jit(functools.partial(moe.expert_mlp, impl=impl))


@functools.cache
def _gradient(impl: str) -> Callable[..., tuple[jax.Array, jax.Array, moe.ExpertKernels]]:
  def loss(x: jax.Array, weights: jax.Array, kernels: moe.ExpertKernels, experts: jax.Array) -> jax.Array:
    if impl == "loop":
      y = _loop(x, weights, kernels, experts)
    else:
      y = moe.expert_mlp(x, weights, experts, kernels, impl=impl)
    return jnp.sum(jnp.sin(y))

  return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("choice", CHOICES)
def test_no_token_is_dropped_at_any_imbalance(impl: str, choice: str) -> None:
  x, weights, experts, kernels = _inputs(CHOICES[choice])
  y = _forward(impl)(x, weights, experts, kernels)
  np.testing.assert_allclose(y, _oracle(np.asarray(x), weights, experts, kernels), atol=1e-5)


@pytest.mark.parametrize("choice", ["balanced", "experts without tokens"])
def test_gradients_equal_the_definition(choice: str) -> None:
  x, weights, experts, kernels = _inputs(CHOICES[choice])
  want = _gradient("loop")(x, weights, kernels, experts)
  for impl in IMPLEMENTATIONS[:-1]:  # "auto" is one of the others
    got = _gradient(impl)(x, weights, kernels, experts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)  # sums of up to 150 terms


def test_fewer_tokens_than_experts() -> None:
  tokens = 3
  x, weights, experts, kernels = _inputs()
  want = _oracle(np.asarray(x[:tokens]), weights, experts, kernels)
  for impl in IMPLEMENTATIONS:
    y = _forward(impl)(x[:tokens], weights[:tokens], experts[:tokens], kernels)
    np.testing.assert_allclose(y, want, atol=1e-5)


def test_unknown_implementation() -> None:
  with pytest.raises(ValueError, match="impl must be one of"):
    moe.expert_mlp(*_inputs(), impl="fast")


def test_softmax_routing() -> None:
  logits = jnp.asarray([[0.0, 2.0, 1.0, -1.0]])
  config = tiny.sparse(router="softmax", n_group=1, routed_scaling_factor=1.0, norm_topk_prob=False)
  weights, experts = moe.route(logits, None, config)
  np.testing.assert_array_equal(experts, [[1, 2]])
  probabilities = np.exp([2.0, 1.0]) / np.exp([0.0, 2.0, 1.0, -1.0]).sum()
  np.testing.assert_allclose(weights[0], probabilities, rtol=1e-6)
  weights, _ = moe.route(logits, None, tiny.sparse(router="softmax", n_group=1, routed_scaling_factor=1.0))
  np.testing.assert_allclose(weights[0], probabilities / probabilities.sum(), rtol=1e-6)


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (4, 1), (3, 3)])
def test_sigmoid_routing_with_groups_and_a_bias(groups: int, kept: int) -> None:
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(64, 12)).astype(np.float32)
  bias = rng.normal(size=12).astype(np.float32)  # as large as the scores: a negative choice must not lose to a masked 0
  config = tiny.sparse(
    num_experts=12, num_experts_per_tok=3, n_group=groups, topk_group=kept, routed_scaling_factor=2.5
  )
  weights, experts = jax.jit(lambda *args: moe.route(*args, config))(logits, bias)
  scores = 1.0 / (1.0 + np.exp(-logits.astype(np.float64)))
  for n in range(64):
    want = _route_oracle(scores[n], bias, top_k=3, groups=groups, kept=kept)
    np.testing.assert_array_equal(np.sort(experts[n]), np.sort(want))
    picked = scores[n][np.asarray(experts[n])]  # the bias takes no part in the weights
    np.testing.assert_allclose(weights[n], 2.5 * picked / picked.sum(), rtol=1e-5)


def test_correction_bias_gets_no_gradient() -> None:
  config = tiny.sparse()
  layer = moe.MoE(config)
  x = jax.random.normal(jax.random.key(0), (5, config.hidden_size))
  params = jax.jit(layer.init)(jax.random.key(1), x)["params"]
  grads = jax.jit(jax.grad(lambda p: jnp.sum(layer.apply({"params": p}, x) ** 2)))(params)
  assert not np.any(grads["router"]["correction_bias"])
  assert np.any(grads["router"]["kernel"])
