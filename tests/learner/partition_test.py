"""Freezing by exact path component, and the report."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sao_jax.learner import partition


def params():
  layer = {
    "attention": {
      "q_proj": {"kernel": jnp.ones((4, 4))},
      "q_norm": {"scale": jnp.ones(2)},
      "k_norm": {"scale": jnp.ones(2)},
    },
    "post_attention_norm": {"scale": jnp.ones(4)},
    "input_norm": {"scale": jnp.ones(4)},
    "moe": {"router": {"kernel": jnp.ones((4, 2))}, "up_proj": {"kernel": jnp.ones((2, 4, 8))}},
  }
  return {
    "embed": {"embedding": jnp.ones((10, 4))},
    "layers_0": layer,
    "layers_1": jax.tree.map(lambda x: x + 1.0, layer),
    "final_norm": {"scale": jnp.ones(4)},
    "value_head": {"kernel": jnp.zeros((4, 1))},
  }


def paths(tree):
  return {"/".join(partition.path_components(path)) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_pitfall_21_exactly_the_attention_modules_are_frozen():
  trainable, frozen = partition.split(params(), ("attention",))
  names = ("attention/q_proj/kernel", "attention/q_norm/scale", "attention/k_norm/scale")
  assert paths(frozen) == {f"layers_{i}/{name}" for i in range(2) for name in names}
  assert paths(trainable) == paths(params()) - paths(frozen)
  assert "layers_0/post_attention_norm/scale" in paths(trainable)


def test_merge_undoes_split():
  for frozen in ((), ("attention",), ("moe", "embed")):
    merged = partition.merge(*partition.split(params(), frozen))
    assert jax.tree.structure(merged) == jax.tree.structure(params())
    jax.tree.map(np.testing.assert_array_equal, merged, params())


@pytest.mark.parametrize("name", ["attn", "attentio", "layers_0/attention", "Attention"])
def test_pitfall_21_zero_matches_are_an_error(name):
  with pytest.raises(ValueError, match=r"matches no parameter; the components of the paths are .*'attention'"):
    partition.split(params(), (name,))


def test_the_papers_form_trains_the_projections_and_the_head():
  trainable, _ = partition.split(params(), partition.PROJECTIONS_AND_HEAD)
  assert paths(trainable) == {
    "layers_0/moe/up_proj/kernel", "layers_1/moe/up_proj/kernel", "value_head/kernel",
  }  # fmt: skip
  rows = {row.name: row for row in partition.parameter_counts(params(), partition.PROJECTIONS_AND_HEAD)}
  assert {name for name, row in rows.items() if row.trainable} == {"total", "MoE/MLP", "head"}


def test_a_dense_model_lacks_routers_but_no_model_lacks_attention():
  dense = {"attention": {"kernel": jnp.ones(2)}, "mlp": {"up_proj": {"kernel": jnp.ones(3)}}}
  trainable, _ = partition.split(dense, partition.PROJECTIONS_AND_HEAD)
  assert paths(trainable) == {"mlp/up_proj/kernel"}
  with pytest.raises(ValueError, match="frozen = 'attention' matches no parameter"):
    partition.split({"mlp": dense["mlp"]}, partition.PROJECTIONS_AND_HEAD)
  with pytest.raises(ValueError, match="frozen = 'router' matches no parameter"):
    partition.split(dense, ("router",))


def test_nothing_left_to_train_is_an_error():
  with pytest.raises(ValueError, match="leaves no parameter to train"):
    partition.split({"attention": {"kernel": jnp.ones(3)}}, ("attention",))


def test_report_counts_by_module():
  rows = {row.name: row for row in partition.parameter_counts(params(), ("attention",))}
  assert rows["attention"].total == 2 * (16 + 2 + 2) and rows["attention"].trainable == 0
  assert rows["MoE/MLP"].total == rows["MoE/MLP"].trainable == 2 * 64
  assert rows["routers"].total == rows["routers"].trainable == 2 * 8
  assert rows["embeddings"].total == 40 and rows["head"].total == 4
  assert rows["norms"].total == 2 * 8 + 4
  assert rows["total"].total == sum(leaf.size for leaf in jax.tree.leaves(params()))
  assert rows["total"].frozen == 40
  text = partition.parameter_report(params(), ("attention",), title="critic")
  assert text.splitlines()[0].startswith("critic") and len(text.splitlines()) == 1 + len(rows)
  assert "248" in text and "83.9%" in text


def test_report_takes_shapes_alone():
  shapes = jax.eval_shape(params)
  assert partition.parameter_counts(shapes, ("attention",)) == partition.parameter_counts(params(), ("attention",))
