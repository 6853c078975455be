"""Latent attention: the expanded and the absorbed form against the definition, and what the indexer may do."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.learner import partition
from sao_jax.learner.state import init_state
from sao_jax.learner.update import make_update_step
from sao_jax.models import (
  cached_policy,
  init_critic,
  init_policy,
  latent_attention,
  layers,
  policy_apply,
  value_apply,
)
from sao_jax.models.latent_attention import LatentAttention
from tests.models import tiny
from tests.parallel import tiny as learner_tiny

LENGTH = 12
CONFIG = tiny.indexed()
TOKENS = np.random.default_rng(3).integers(0, tiny.VOCAB, size=(2, LENGTH)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), TOKENS.shape)
WEIGHTS = np.random.default_rng(5).normal(size=(2, LENGTH, 24)).astype(np.float32)


def _turned(x: np.ndarray, position: int, dims: int) -> np.ndarray:
  """Rotates neighbouring dimensions, as the published models do."""
  out = x.copy()
  for pair in range(dims // 2):
    angle = position * CONFIG.rope_theta ** (-2 * pair / CONFIG.head_dim)
    a, b = x[2 * pair], x[2 * pair + 1]
    out[2 * pair], out[2 * pair + 1] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
  return out


def _definition(weights: Any, x: np.ndarray) -> np.ndarray:
  """Attention of one row `[T, D]` in float64, with expanded heads and plain loops."""
  weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), weights)
  nope, rot, rank = CONFIG.qk_nope_head_dim, CONFIG.head_dim, CONFIG.kv_lora_rank

  def linear(name: str, y: np.ndarray, inside: Any = weights) -> np.ndarray:
    return y @ inside[name]["kernel"] + inside[name].get("bias", 0.0)

  def norm(name: str, y: np.ndarray) -> np.ndarray:
    return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6) * weights[name]["scale"]

  indexer = weights["indexer"]
  q_latent = norm("q_a_norm", linear("q_a_proj", x))
  queries = linear("q_b_proj", q_latent).reshape(len(x), CONFIG.num_heads, -1)
  compressed = linear("kv_a_proj", x)
  expanded = linear("kv_b_proj", norm("kv_a_norm", compressed[:, :rank])).reshape(len(x), CONFIG.num_heads, -1)
  index_q = linear("wq_b", q_latent, indexer).reshape(len(x), CONFIG.index_n_heads, -1)
  index_k = linear("wk", x, indexer)
  index_k = index_k - index_k.mean(-1, keepdims=True)
  index_k = index_k / np.sqrt((index_k**2).mean(-1, keepdims=True) + 1e-6)
  index_k = index_k * indexer["k_norm"]["scale"] + indexer["k_norm"]["bias"]
  index_w = linear("weights_proj", x, indexer)
  turned_k = [_turned(k, s, rot) for s, k in enumerate(index_k)]
  out = np.zeros((len(x), CONFIG.num_heads, CONFIG.v_head_dim))
  for t in range(len(x)):
    scores = [
      sum(w * max(_turned(q, t, rot) @ turned_k[s], 0.0) for w, q in zip(index_w[t], index_q[t], strict=True))
      for s in range(t + 1)
    ]
    seen = sorted(range(t + 1), key=lambda s: (-scores[s], s))[: CONFIG.index_topk]
    for h in range(CONFIG.num_heads):
      rotary = _turned(queries[t, h, nope:], t, rot)
      logits = np.asarray(
        [queries[t, h, :nope] @ expanded[s, h, :nope] + rotary @ _turned(compressed[s, rank:], s, rot) for s in seen]
      )
      logits = np.exp((logits - logits.max()) / np.sqrt(nope + rot))
      out[t, h] = logits / logits.sum() @ expanded[seen, h, nope:]
  return linear("o_proj", out.reshape(len(x), -1))


def test_both_forms_equal_the_definition() -> None:
  module = LatentAttention(CONFIG, 0)
  params = tiny.policy_params(CONFIG)["layers_0"]["attention"]
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, LENGTH, 24)), jnp.float32)
  want = _definition(params, np.asarray(x[0], np.float64))
  rope = layers.rope_tables(CONFIG, jnp.arange(LENGTH)[None])
  expanded, _ = jax.jit(lambda p: module.apply({"params": p}, x, rope, jnp.ones((1, LENGTH), jnp.int32), None))(params)
  np.testing.assert_allclose(expanded[0], want, atol=1e-5)

  def extend(params: Any) -> Any:
    cache = latent_attention.init_cache(CONFIG, 0, 1, LENGTH)
    zero, count = jnp.zeros(1, jnp.int32), jnp.full(1, LENGTH)
    return module.apply({"params": params}, x, rope, cache, zero, zero, count, LENGTH, None, method="extend")[0]

  np.testing.assert_allclose(jax.jit(extend)(params)[0], want, atol=1e-5)


def test_a_layer_caches_one_latent_per_token_and_a_full_layer_one_key_of_its_indexer() -> None:
  cache = jax.eval_shape(lambda: cached_policy(CONFIG).init_cache(2, 16))
  shapes = {layer: {name: array.shape for name, array in arrays.items()} for layer, arrays in cache.items()}
  full = {"latent": (2, 16, 14), "index_key": (2, 16, 8)}  # 10 of the latent and 4 rotated: fewer than 4 heads of 6 + 4
  assert shapes == {"layers_0": full, "layers_1": {"latent": (2, 16, 14)}, "layers_2": full}


def test_a_decode_step_reads_chosen_tokens_only() -> None:
  """The latents of all others may hold anything, in the layer that chooses and in the one that shares its choice."""
  model, params = cached_policy(CONFIG), tiny.policy_params(CONFIG)
  slots, start, tokens = jnp.arange(2), jnp.zeros(2, jnp.int32), jnp.asarray(TOKENS)
  _, cache = model.extend(params, model.init_cache(2, LENGTH), tokens, slots, start, jnp.full(2, 11), live_len=LENGTH)
  seen: list[Any] = []

  def step(cache: Any) -> Any:
    window = model.window(cache, slots, jnp.full(2, 11), steps=1, live_lens=(LENGTH,))
    return model.step(model.prepare(params), window, tokens[:, 11], jnp.int32(0))[0]

  choose = latent_attention.choose_columns

  def spy(*args: Any, **kwargs: Any) -> Any:
    seen.append(choose(*args, **kwargs))
    return seen[-1]

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(latent_attention, "choose_columns", spy)
    want = step(cache)
  assert len(seen) == 2  # full layers: 0 and 2; with one step, column c is position c
  for layer, chosen in (("layers_0", seen[0]), ("layers_1", seen[0]), ("layers_2", seen[1])):
    read = np.zeros((2, LENGTH, 1), bool)
    np.put_along_axis(read[..., 0], np.asarray(chosen.columns), True, axis=1)
    assert read.sum() == 2 * CONFIG.index_topk
    latent = cache[layer]["latent"]
    poisoned = {**cache, layer: {**cache[layer], "latent": jnp.where(read, latent, jnp.nan)}}
    np.testing.assert_array_equal(step(poisoned), want)
    poisoned = {**cache, layer: {**cache[layer], "latent": jnp.where(read, jnp.nan, latent)}}
    assert np.isnan(step(poisoned)).all()


@functools.cache
def _gradient(config: Any) -> Any:
  apply = policy_apply(config)

  def loss(params: Any) -> jax.Array:
    return jnp.sum(apply(params, TOKENS, POSITIONS, np.ones_like(TOKENS)).hidden * WEIGHTS)

  return jax.jit(jax.value_and_grad(loss))(tiny.policy_params(CONFIG))


def test_the_indexer_receives_no_gradient_and_everything_else_does() -> None:
  _, gradient = _gradient(CONFIG)
  for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
    name = jax.tree_util.keystr(path)
    none = "indexer" in name or "correction_bias" in name or "lm_head" in name
    assert bool(np.any(leaf)) != none, name


def test_the_indexer_decides() -> None:
  """Other weights of the indexer give other outputs, which is why its lack of a gradient matters."""
  params = tiny.policy_params(CONFIG)
  indexer = params["layers_0"]["attention"]["indexer"]
  negated = {**indexer, "weights_proj": {"kernel": -indexer["weights_proj"]["kernel"]}}
  attention = {**params["layers_0"]["attention"], "indexer": negated}
  changed = {**params, "layers_0": {**params["layers_0"], "attention": attention}}
  apply = jax.jit(policy_apply(CONFIG))
  ones = np.ones_like(TOKENS)
  a, b = (np.asarray(apply(p, TOKENS, POSITIONS, ones).hidden) for p in (params, changed))
  np.testing.assert_allclose(a[:, : CONFIG.index_topk], b[:, : CONFIG.index_topk], atol=1e-6)
  assert np.abs(a - b)[:, CONFIG.index_topk :].max() > 1e-2


def test_remat_changes_no_number() -> None:
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
    _gradient(dataclasses.replace(CONFIG, remat="full")),
    _gradient(CONFIG),
  )


def test_bfloat16_computes_in_bfloat16() -> None:
  config = dataclasses.replace(CONFIG, dtype="bfloat16", index_topk=LENGTH)  # without choices, which rounding changes
  wide = dataclasses.replace(CONFIG, index_topk=LENGTH)
  params, ones = tiny.policy_params(CONFIG), np.ones_like(TOKENS)
  half, full = (jax.jit(policy_apply(c))(params, TOKENS, POSITIONS, ones).hidden for c in (config, wide))
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(half.astype(jnp.float32), full, atol=0.1)
  cache = jax.eval_shape(lambda: cached_policy(config).init_cache(2, 16))
  assert {array.dtype for array in jax.tree.leaves(cache)} == {jnp.dtype("bfloat16")}


def test_a_learner_step_moves_everything_but_the_indexer_and_the_frozen_attention() -> None:
  config = tiny.indexed(num_layers=2, indexer_types=("full", "shared"), vocab_size=64, remat="full")
  rng = np.random.default_rng(1)
  policy, critic = (learner_tiny.fill(config, init, rng) for init in (init_policy, init_critic))
  settings = dataclasses.replace(learner_tiny.LEARNER, critic_updates=1, frozen_critic=("attention",))
  state = init_state(settings, policy, critic)
  step = make_update_step(settings, policy_apply(config), value_apply(config), jit=False)
  count = jnp.asarray(learner_tiny.MICROBATCHES, jnp.int32)
  new, metrics = jax.jit(step)(state, learner_tiny.make_batch(), count)
  assert all(np.isfinite(x) or np.isnan(x) for x in metrics.values())

  def moved(before: Any, after: Any) -> dict[tuple[str, ...], bool]:
    flat = jax.tree_util.tree_flatten_with_path(jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after))[0]
    return {partition.path_components(path): value for path, value in flat}

  for path, value in moved(policy, new.policy).items():
    assert value != bool({"indexer", "correction_bias"} & set(path)), path
  for path, value in moved(critic, new.critic).items():
    assert value != bool({"attention", "correction_bias"} & set(path)), path


def test_the_critic_freezes_latents_and_indexer_with_its_attention() -> None:
  params = jax.tree.map(np.shape, tiny.policy_params(CONFIG), is_leaf=lambda x: hasattr(x, "shape"))
  shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), params, is_leaf=lambda x: isinstance(x, tuple))
  trainable, frozen = partition.split(shapes, ("attention",))
  paths = ["/".join(partition.path_components(p)) for p, _ in jax.tree_util.tree_flatten_with_path(frozen)[0]]
  assert all("/attention/" in path for path in paths)
  assert {path.split("/attention/")[1].split("/")[0] for path in paths} == {
    "q_a_proj", "q_a_norm", "q_b_proj", "kv_a_proj", "kv_a_norm", "kv_b_proj", "o_proj", "indexer",
  }  # fmt: skip
  assert not any(
    "attention" in partition.path_components(p) for p, _ in jax.tree_util.tree_flatten_with_path(trainable)[0]
  )
  rows = {row.name: row for row in partition.parameter_counts(shapes, ("attention",))}
  assert rows["attention"].trainable == 0 < rows["attention"].total
  assert "other" not in rows
