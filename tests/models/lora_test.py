"""Low-rank adapters against W + (α / r) A B, computed in NumPy; what they leave alone, and what is refused."""

from __future__ import annotations

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax import models
from sao_jax.models import lora
from sao_jax.models.lora import LoraConfig
from tests.models import tiny

LORA = LoraConfig(rank=2, alpha=3.0)
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
POSITIONS = jnp.tile(jnp.arange(6), (2, 1))
ONES = jnp.ones_like(TOKENS)


def moved(adapters):
  """Adapters whose B is not zero."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(size=x.shape) * 0.2, x.dtype), adapters)


def paths(tree):
  return {"/".join(key.key for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}


def hidden(config, params, *, adapted=True):
  apply = models.policy_apply(config)
  apply = lora.with_adapters(LORA, apply) if adapted else apply
  return jax.jit(lambda params: apply(params, TOKENS, POSITIONS, ONES).hidden)(params)


@pytest.mark.parametrize("make", [tiny.dense, tiny.sparse])
def test_new_adapters_change_nothing_and_others_act_like_merged_kernels(make):
  config = make(remat="full")
  base = tiny.policy_params(config)
  adapters = lora.init_adapters(config, LORA, jax.random.key(1))
  plain = hidden(config, base, adapted=False)
  np.testing.assert_array_equal(hidden(config, lora.join(base, adapters)), plain)

  adapters = moved(adapters)
  merged = lora.merge_all(LORA, base, adapters)
  assert paths(merged) == paths(base)
  for module in lora_modules(adapters):
    w, a, b = (np.asarray(at(tree, module)[name], np.float64) for tree, name in (
      (base, "kernel"), (adapters, lora.A), (adapters, lora.B)
    ))  # fmt: skip
    np.testing.assert_allclose(at(merged, module)["kernel"], w + 1.5 * a @ b, rtol=1e-6, atol=1e-6)
  unchanged = lora.without(base, lora.merge(LORA, base, adapters))
  assert paths(unchanged) == {path for path in paths(base) if path.rpartition("/")[0] not in lora_modules(adapters)} | {
    path for path in paths(base) if path.endswith("bias") and path.rpartition("/")[0] in lora_modules(adapters)
  }
  result = hidden(config, lora.join(base, adapters))
  assert np.max(np.abs(result - plain)) > 0.1
  np.testing.assert_allclose(result, hidden(config, merged, adapted=False), rtol=1e-4, atol=1e-5)


def lora_modules(adapters):
  return {path.rpartition("/")[0] for path in paths(adapters)}


def at(tree, module):
  for name in module.split("/"):
    tree = tree[name]
  return tree


def test_gradients_are_those_of_the_explicit_sum():
  config = tiny.dense(remat="full")
  base = tiny.policy_params(config)
  adapters = moved(lora.init_adapters(config, LORA, jax.random.key(1)))
  plain = models.value_apply(config)
  head = {"kernel": jnp.linspace(-1.0, 1.0, config.hidden_size)[:, None], "bias": jnp.ones(1)}
  adapted = lora.with_adapters(LORA, plain)

  def loss(trained):
    return jnp.sum(jnp.square(adapted(lora.join(base, trained), TOKENS, POSITIONS, ONES)))

  def explicit(trained):
    head = {"value_head": trained["value_head"]}
    adapters = {name: value for name, value in trained.items() if name != "value_head"}
    return jnp.sum(jnp.square(plain({**lora.merge_all(LORA, base, adapters), **head}, TOKENS, POSITIONS, ONES)))

  trained = {**adapters, "value_head": head}
  found, wanted = (jax.jit(jax.grad(fn))(trained) for fn in (loss, explicit))
  assert all(float(jnp.max(jnp.abs(x))) > 1e-3 for x in jax.tree.leaves(wanted))
  chex.assert_trees_all_close(found, wanted, rtol=2e-3, atol=2e-4)


def test_a_model_in_bfloat16_computes_in_bfloat16_and_its_adapters_train_in_float32():
  config = tiny.dense(dtype="bfloat16", param_dtype="bfloat16")
  base = tiny.policy_params(config)
  adapters = lora.init_adapters(config, LORA, jax.random.key(1))
  apply = lora.with_adapters(LORA, models.policy_apply(config))

  def loss(adapters):
    out = apply(lora.join(base, adapters), TOKENS, POSITIONS, ONES).hidden
    assert out.dtype == jnp.bfloat16
    return jnp.sum(jnp.square(out.astype(jnp.float32)))

  grads = jax.jit(jax.grad(loss))(adapters)
  assert {x.dtype.name for x in jax.tree.leaves((adapters, grads))} == {"float32"}
  assert {x.dtype.name for x in jax.tree.leaves(lora.merge(LORA, base, adapters))} == {"bfloat16"}


def test_modules_are_chosen_by_their_paths():
  def modules(config, pattern):
    chosen = dataclasses.replace(LORA, modules=pattern)
    return lora_modules(jax.eval_shape(lambda: lora.init_adapters(config, chosen, jax.random.key(0))))

  attention = {f"layers_{i}/attention/{x}_proj" for i in (0, 1) for x in "qkvo"}
  mlp = {f"layers_0/mlp/{x}_proj" for x in ("gate", "up", "down")}
  shared = {f"layers_1/moe/shared_experts/{x}_proj" for x in ("gate", "up", "down")}
  assert modules(tiny.sparse(), ".*_proj") == attention | mlp | shared
  assert modules(tiny.sparse(), r".*/[qv]_proj") == {path for path in attention if path[-6] in "qv"}
  assert modules(tiny.latent(), r".*(mlp|shared_experts)/.*") == mlp | shared


@pytest.mark.parametrize(
  ("make", "changes", "message"),
  [
    (tiny.dense, {"modules": "q_proj"}, "'q_proj' matches no module; these can have adapters: layers_*/attention/k_p"),
    (tiny.sparse, {"modules": ".*moe"}, "'.*moe' matches layers_1/moe, which cannot have adapters; these can: "),
    (tiny.sparse, {"modules": ".*router"}, "matches layers_1/moe/router, which cannot have adapters"),
    (tiny.sparse, {"modules": "lm_head"}, "matches lm_head, which cannot have adapters"),
    (tiny.latent, {}, "matches layers_0/attention/kv_a_proj, which cannot have adapters"),
    (tiny.dense, {"rank": 16}, "received 16 with layers_0/attention/k_proj, of 24 x 16"),
  ],
)
def test_what_cannot_be_adapted_is_refused(make, changes, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    lora.init_adapters(make(), dataclasses.replace(LORA, **changes), jax.random.key(0))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"rank": 0}, r"lora\.rank must be >= 1, or None for no adapters; received 0"),
    ({"alpha": 0.0}, r"lora\.alpha must be > 0 and finite; received 0\.0"),
    ({"alpha": float("inf")}, r"lora\.alpha must be > 0 and finite; received inf"),
    ({"modules": "("}, r"lora\.modules must be a regular expression; received '\('"),
  ],
)
def test_settings_are_checked(changes, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(LORA, **changes)
  with pytest.raises(ValueError, match="there are no adapters"):
    _ = LoraConfig().scale


def test_without_adapters_all_parameters_train():
  trained = jax.eval_shape(lambda: lora.init_trained(tiny.dense(), LoraConfig(), jax.random.key(0)))
  assert paths(trained) == paths(tiny.policy_params(tiny.dense()))
  apply = models.policy_apply(tiny.dense())
  assert lora.with_adapters(LoraConfig(), apply) is apply
