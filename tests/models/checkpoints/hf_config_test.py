from __future__ import annotations

import dataclasses

import pytest

from sao_jax.models import RopeScaling
from tests.models import tiny


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_kv_heads": 3}, "num_kv_heads must be a divisor of num_heads = 4; received 3"),
    ({"dtype": "float8"}, "dtype must be one of"),
    ({"moe_impl": "fast"}, "moe_impl must be one of"),
    ({"remat": "some"}, "remat must be one of"),
    ({"hidden_size": 0}, "hidden_size must be a positive int; received 0"),
    ({"partial_rotary_factor": 0.1}, "partial_rotary_factor"),
    ({"num_experts": 4}, "num_experts_per_tok must be in 1 .. num_experts = 4; received 0"),
    ({"num_experts": 4, "num_experts_per_tok": 2}, "moe_intermediate_size must be positive; received 0"),
    ({"model_type": "gpt2"}, "model_type must be one of"),
  ],
)
def test_a_wrong_field_is_named(change: dict[str, object], message: str) -> None:
  with pytest.raises(ValueError, match=message.replace("(", r"\(")):
    tiny.dense(**change)


def test_expert_groups_are_checked() -> None:
  with pytest.raises(ValueError, match="n_group must be a divisor"):
    tiny.sparse(n_group=3)
  with pytest.raises(ValueError, match="n_group must be 1 with the softmax router"):
    tiny.sparse(router="softmax")
  with pytest.raises(ValueError, match="at most the 2 experts"):
    tiny.sparse(num_experts_per_tok=3)


def test_rope_scaling_is_checked() -> None:
  with pytest.raises(ValueError, match="rope_type must be one of"):
    RopeScaling(rope_type="dynamic")
  with pytest.raises(ValueError, match="original_max_position_embeddings must be positive"):
    RopeScaling(rope_type="llama3", factor=8.0)


def test_sparse_layers_follow_every_switch() -> None:
  base = {"num_layers": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
  config = tiny.dense(**base, first_dense_layers=3, decoder_sparse_step=2, mlp_only_layers=(5,))
  assert [i for i in range(8) if config.is_sparse(i)] == [3, 7]
  assert not any(tiny.dense(num_layers=8).is_sparse(i) for i in range(8))


def test_configs_are_hashable_and_frozen() -> None:
  assert hash(tiny.dense()) == hash(tiny.dense())
  with pytest.raises(dataclasses.FrozenInstanceError):
    tiny.dense().hidden_size = 3  # type: ignore[misc]
