"""A small NNX language model as a policy and as a value model, under jit and grad."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from sao_jax.models import nnx_policy, nnx_value
from sao_jax.types import PolicyOutput

VOCAB, DIM = 11, 8


class _Layer(nnx.Module):
  """Causal mean over the segment, then a linear map."""

  def __init__(self, rngs: nnx.Rngs):
    self.norm = nnx.RMSNorm(DIM, rngs=rngs)
    self.mix = nnx.Linear(DIM, DIM, rngs=rngs)

  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    mean = jnp.einsum("bts,bsd->btd", mask / mask.sum(-1, keepdims=True), self.norm(x))
    return x + jnp.tanh(self.mix(mean))


class _Model(nnx.Module):
  def __init__(self, rngs: nnx.Rngs):
    self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
    self.layers = nnx.List([_Layer(rngs) for _ in range(2)])
    self.frequencies = nnx.Variable(jnp.linspace(0.1, 1.0, DIM))  # state that is no parameter
    self.value = nnx.Linear(DIM, 1, rngs=rngs)

  def hidden(self, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
    x = self.embed(tokens) + jnp.sin(positions[..., None] * self.frequencies[...])
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    mask = (same & jnp.tri(tokens.shape[1], dtype=bool)).astype(jnp.float32)
    for layer in self.layers:
      x = layer(x, mask)
    return x


def _forward(model: _Model, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> PolicyOutput:
  return PolicyOutput(model.hidden(tokens, positions, segment_ids), model.embed.embedding[...].T)


def _values(model: _Model, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> jax.Array:
  return model.value(model.hidden(tokens, positions, segment_ids))[..., 0]


TOKENS = np.asarray([[3, 1, 4, 1, 5, 9]])
POSITIONS = np.asarray([[0, 1, 2, 0, 1, 2]])
SEGMENTS = np.asarray([[1, 1, 1, 2, 2, 2]])


def _loss(params: Any, apply: Any) -> jax.Array:
  out = apply(params, TOKENS, POSITIONS, SEGMENTS)
  return -jnp.mean(jax.nn.log_softmax(out.hidden @ out.lm_head)[..., 0])


def test_the_policy_equals_the_module_under_jit() -> None:
  module = _Model(nnx.Rngs(0))
  apply, params = nnx_policy(module, _forward)
  assert params["layers"]["1"]["mix"]["kernel"].shape == (DIM, DIM)
  assert set(params) == {"embed", "layers", "value"}
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
  out = jax.jit(apply)(params, TOKENS, POSITIONS, SEGMENTS)
  want = module.hidden(TOKENS, POSITIONS, SEGMENTS)
  np.testing.assert_allclose(out.hidden, want, atol=1e-6)
  np.testing.assert_array_equal(out.lm_head, params["embed"]["embedding"].T)


def test_gradients_equal_those_of_nnx() -> None:
  module = _Model(nnx.Rngs(0))
  apply, params = nnx_policy(module, _forward)
  grads = jax.jit(jax.grad(_loss), static_argnums=1)(params, apply)
  assert jax.tree.structure(grads) == jax.tree.structure(params)

  def module_loss(model: _Model) -> jax.Array:
    out = _forward(model, TOKENS, POSITIONS, SEGMENTS)
    return -jnp.mean(jax.nn.log_softmax(out.hidden @ out.lm_head)[..., 0])

  want = nnx.to_pure_dict(nnx.jit(nnx.grad(module_loss))(module))
  np.testing.assert_allclose(grads["embed"]["embedding"], want["embed"]["embedding"], atol=1e-6)
  for i in range(2):
    for name in ("kernel", "bias"):
      np.testing.assert_allclose(grads["layers"][str(i)]["mix"][name], want["layers"][i]["mix"][name], atol=1e-6)


def test_training_the_params_leaves_the_module_alone() -> None:
  module = _Model(nnx.Rngs(0))
  apply, params = nnx_policy(module, _forward)
  before = np.asarray(module.embed.embedding[...])
  step = jax.jit(lambda p: jax.tree.map(lambda x, g: x - 0.5 * g, p, jax.grad(_loss)(p, apply)))
  losses = []
  for _ in range(5):
    losses.append(float(_loss(params, apply)))
    params = step(params)
  assert losses[-1] < losses[0]
  np.testing.assert_array_equal(module.embed.embedding[...], before)


def test_a_value_model() -> None:
  apply, params = nnx_value(_Model(nnx.Rngs(0)), _values)
  values = jax.jit(apply)(params, TOKENS, POSITIONS, SEGMENTS)
  assert values.shape == TOKENS.shape


def test_wrong_input_is_named() -> None:
  apply, params = nnx_policy(_Model(nnx.Rngs(0)), _forward)
  with pytest.raises(ValueError, match="params must have the structure"):
    apply({"embed": params["embed"]}, TOKENS, POSITIONS, SEGMENTS)

  class Empty(nnx.Module):
    pass

  with pytest.raises(ValueError, match=r"Empty has no nnx\.Param"):
    nnx_policy(Empty(), _forward)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # its making and its calls use what JAX and Flax deprecate
def test_a_qwen3_of_google_tunix() -> None:
  """Trunk and embedding of a peer's model, taken apart by the adapter: its own logits, and a gradient for all of it."""
  with warnings.catch_warnings(action="ignore"):  # of its import's own
    qwen3 = pytest.importorskip("tunix.models.qwen3.model")
  config = qwen3.ModelConfig(
    num_layers=2, vocab_size=VOCAB, embed_dim=16, hidden_dim=24, num_heads=4, head_dim=8, num_kv_heads=2,
    rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=True,
  )  # fmt: skip
  model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))
  weights = nnx.state(model, nnx.Param)  # some of which start at zero
  nnx.update(model, jax.tree.map(lambda x: x + 0.3 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), weights))

  def mask_of(segment_ids: jax.Array) -> jax.Array:
    return (segment_ids[:, :, None] == segment_ids[:, None, :]) & jnp.tri(segment_ids.shape[1], dtype=bool)

  def forward(model: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array) -> PolicyOutput:
    x = model.embedder.encode(tokens)
    for layer in model.layers:
      _, x = layer(x, positions, None, mask_of(segment_ids))
    return PolicyOutput(model.final_norm(x), model.embedder.input_embedding[...].T)

  apply, params = nnx_policy(model, forward)
  out = jax.jit(apply)(params, TOKENS, POSITIONS, SEGMENTS)
  want, _ = model(jnp.asarray(TOKENS), jnp.asarray(POSITIONS), None, mask_of(jnp.asarray(SEGMENTS)))
  np.testing.assert_allclose(out.hidden @ out.lm_head, want, atol=1e-4)
  alone = apply(params, TOKENS[:, 3:], POSITIONS[:, 3:], SEGMENTS[:, 3:])
  np.testing.assert_allclose(out.hidden[:, 3:], alone.hidden, atol=1e-4)
  grads = jax.grad(_loss)(params, apply)
  flat = jax.tree_util.tree_leaves_with_path(grads)
  assert [jax.tree_util.keystr(path) for path, g in flat if not float(jnp.max(jnp.abs(g))) > 0.0] == []
