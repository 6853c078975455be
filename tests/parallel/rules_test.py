"""The table: every path of the models has a rule; paths without one and sizes that do not divide are errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from sao_jax.models import ModelConfig, cached_policy, init_critic, init_policy
from sao_jax.models.lora import LoraConfig, init_adapters
from sao_jax.parallel.axes import AXES
from sao_jax.parallel.rules import batch_shardings, cache_shardings, shardings_for, spec_for
from sao_jax.types import TokenBatch
from tests.models import tiny

CONFIG = ModelConfig(
  vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
  num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16, first_dense_layers=1, num_shared_experts=1,
  router="sigmoid", attention_bias=True, attention_out_bias=True, mlp_bias=True, tie_word_embeddings=False,
)  # fmt: skip


def mesh_of(**sizes):
  return AbstractMesh(tuple(sizes.get(a, 1) for a in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shapes_of(init):
  return jax.eval_shape(lambda: init(CONFIG, jax.random.key(0)))


def specs(tree, mesh):
  flat = jax.tree_util.tree_flatten_with_path(shardings_for(tree, mesh))[0]
  return {jax.tree_util.keystr(path, simple=True, separator="/"): sharding.spec for path, sharding in flat}


def test_every_parameter_of_both_models_has_a_row():
  mesh = mesh_of(data=2, fsdp=2, tensor=2, expert=2, context=2)
  policy, critic = specs(shapes_of(init_policy), mesh), specs(shapes_of(init_critic), mesh)
  shard = ("fsdp", "expert", "context")
  assert policy["embed/embedding"] == PartitionSpec("tensor", shard)
  assert policy["lm_head/kernel"] == PartitionSpec(shard, "tensor")
  assert policy["layers_0/attention/o_proj/kernel"] == PartitionSpec("tensor", shard)
  assert policy["layers_0/mlp/up_proj/kernel"] == PartitionSpec(shard, "tensor")
  assert policy["layers_1/moe/down_proj"] == PartitionSpec("expert", "tensor", ("fsdp", "context"))
  assert policy["layers_1/moe/shared_experts/down_proj/kernel"] == PartitionSpec("tensor", shard)
  assert critic["value_head/kernel"] == PartitionSpec(None, None)
  big = [path for path, spec in (policy | critic).items() if not any(spec)]
  assert all("norm" in p or "bias" in p or "value_head" in p for p in big), big


def test_adapters_are_split_as_their_kernels_are():
  mesh = mesh_of(data=2, fsdp=2, tensor=2, expert=2, context=2)
  adapters = specs(jax.eval_shape(lambda: init_adapters(CONFIG, LoraConfig(rank=4), jax.random.key(0))), mesh)
  kernels = specs(shapes_of(init_policy), mesh)
  assert len(adapters) == 2 * (8 + 3 + 3)
  for path, spec in adapters.items():
    rows, columns = kernels[path.replace("_lora_a", "").replace("_lora_b", "")]
    assert spec == (PartitionSpec(rows, None) if path.endswith("_a") else PartitionSpec(None, columns)), path


def test_latent_attention_splits_heads_and_nothing_that_heads_share():
  params = jax.eval_shape(lambda: init_policy(tiny.indexed(), jax.random.key(0)))
  policy = specs(params["layers_0"], mesh_of(fsdp=2, tensor=2))
  split = {name.split("attention/")[1]: spec for name, spec in policy.items() if "attention/" in name and any(spec)}
  assert split == {
    "kv_a_proj/kernel": PartitionSpec("fsdp", None), "kv_b_proj/kernel": PartitionSpec("fsdp", "tensor"),
    "q_a_proj/kernel": PartitionSpec("fsdp", None), "q_b_proj/kernel": PartitionSpec("fsdp", "tensor"),
    "o_proj/kernel": PartitionSpec("tensor", "fsdp"), "indexer/wk/kernel": PartitionSpec("fsdp", None),
    "indexer/wq_b/kernel": PartitionSpec("fsdp", None), "indexer/weights_proj/kernel": PartitionSpec("fsdp", None),
  }  # fmt: skip
  cache = cache_shardings(cached_policy(tiny.indexed()).init_cache(4, 8), mesh_of(fsdp=2, tensor=2, context=4))
  assert {a.spec for a in jax.tree.leaves(cache)} == {PartitionSpec("fsdp", "context", None)}


def test_unused_axes_are_left_out():
  policy = specs(shapes_of(init_policy), mesh_of(fsdp=4))
  assert policy["layers_1/moe/up_proj"] == PartitionSpec(None, "fsdp", None)
  assert policy["layers_1/attention/q_proj/kernel"] == PartitionSpec("fsdp", None)


def test_optimizer_states_follow_their_parameters():
  params = shapes_of(init_critic)
  frozen = jax.tree_util.tree_map_with_path(lambda path, x: None if "attention" in str(path) else x, params)
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  mesh = mesh_of(fsdp=2, tensor=2)
  state = specs(jax.eval_shape(optimizer.init, frozen), mesh)
  moments = {path: spec for path, spec in state.items() if "/mu/" in path or "/nu/" in path}
  wanted = specs(frozen, mesh)
  assert len(moments) == 2 * len(wanted)
  assert all(spec == wanted[path.split("u/", 1)[1]] for path, spec in moments.items())
  assert all(spec == PartitionSpec() for path, spec in state.items() if path not in moments)


def test_unmatched_path_is_named():
  with pytest.raises(ValueError, match="'layers_0/mixer/kernel' of shape"):
    shardings_for({"layers_0": {"mixer": {"kernel": jnp.zeros((4, 4))}}}, mesh_of())
  with pytest.raises(ValueError, match="'post_attention/q_proj/kernel'"):
    spec_for(("post_attention", "q_proj", "kernel"), (4, 4), mesh_of())


def test_other_rank_is_named():
  with pytest.raises(ValueError, match="'mlp/up_proj/kernel' has shape"):
    spec_for(("mlp", "up_proj", "kernel"), (4, 4, 4), mesh_of())


def test_indivisible_dimension_names_path_shape_and_axes():
  message = (
    r"dimension 0 of 'mlp/up_proj/kernel' \(shape \(30, 48\)\) must be a multiple of 4, since "
    r"fsdp=2 x context=2 splits it; received 30"
  )
  with pytest.raises(ValueError, match=message):
    spec_for(("mlp", "up_proj", "kernel"), (30, 48), mesh_of(fsdp=2, context=2))


def test_batches_split_rows_and_tokens():
  def batch(*shape):
    return TokenBatch(**{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in TokenBatch.__annotations__})

  mesh = mesh_of(data=2, fsdp=2, context=4)
  assert batch_shardings(batch(8, 16), mesh).tokens.spec == PartitionSpec(("data", "fsdp"), "context")
  assert batch_shardings(batch(3, 8, 16), mesh).rewards.spec == PartitionSpec(None, ("data", "fsdp"), "context")
  with pytest.raises(ValueError, match=r"dimension 1 of 'batch/.*data=2 x fsdp=2 splits it; received 6"):
    batch_shardings(batch(1, 6, 16), mesh)
  with pytest.raises(ValueError, match=r"leaves of a batch must be .* has shape \(8,\)"):
    batch_shardings(batch(8), mesh)


def test_caches_split_slots_heads_and_time():
  cache = jax.eval_shape(lambda: cached_policy(CONFIG).init_cache(8, 32))
  shardings = cache_shardings(cache, mesh_of(fsdp=4, tensor=2, context=2))
  assert shardings["layers_0"]["key"].spec == PartitionSpec("fsdp", "tensor", None, "context")
  assert shardings["layers_1"]["value"].spec == PartitionSpec("fsdp", "tensor", "context", None)
  few = cache_shardings(cache, mesh_of(fsdp=2, tensor=4))  # of two heads
  assert few["layers_0"]["key"].spec == PartitionSpec("fsdp", None, None, None)
  with pytest.raises(ValueError, match=r"dimension 0 of 'layers_0/key'.*fsdp=3 splits it; received 8"):
    cache_shardings(cache, mesh_of(fsdp=3))
