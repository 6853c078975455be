"""The choice of the axes that split a dimension. Other tests check it on devices."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AbstractMesh

from sao_jax.parallel import MeshConfig
from sao_jax.parallel.axes import AXES, EXPERT_SHARD, ROWS, SHARD, axes_for, axes_in_use, check_split

MESH = AbstractMesh((2, 1, 3, 2, 1), AXES)


def test_the_names_are_those_of_a_mesh() -> None:
  assert tuple(MeshConfig().axes()) == AXES
  assert {*ROWS, *SHARD, *EXPERT_SHARD} < {*AXES}


def test_axes_of_one_device_and_axes_that_are_not_there_split_nothing() -> None:
  assert axes_in_use(MESH, *AXES) == ("data", "tensor", "expert")
  assert axes_in_use(AbstractMesh((2,), ("data",)), *ROWS) == ("data",)
  assert axes_for(jax.sharding.get_abstract_mesh(), 8, *ROWS) == ()  # off a mesh


@pytest.mark.parametrize(("size", "axes"), [(8, ("data", "expert")), (4, ("data", "expert")), (6, ()), (1, ())])
def test_a_dimension_is_split_by_all_axes_or_by_none(size: int, axes: tuple[str, ...]) -> None:
  assert axes_for(MESH, size, *ROWS) == axes


def test_a_size_that_the_axes_cannot_split_is_refused_with_what_splits_it() -> None:
  check_split(MESH, "slots", 8, *ROWS)
  check_split(MESH, "slots", 7, "fsdp", "context")
  with pytest.raises(
    ValueError, match=r"slots must be a multiple of 4, since data=2 x expert=2 splits it; received 6\."
  ):
    check_split(MESH, "slots", 6, *ROWS)
