"""Mesh configs: sizes, the axis that takes the rest, and errors."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

from sao_jax.parallel.axes import AXES
from sao_jax.parallel.mesh import MeshConfig, make_mesh, parse_mesh


def test_rest_axis_takes_the_devices_that_are_left():
  assert MeshConfig().sizes(8) == (8, 1, 1, 1, 1)
  assert MeshConfig(data=1, fsdp=2, tensor=2, context=-1).sizes(16) == (1, 2, 2, 1, 4)


@pytest.mark.parametrize("sizes", [{"fsdp": 0}, {"tensor": -2}, {"expert": 2.0}, {"context": True}, {"data": "8"}])
def test_bad_sizes_name_the_axis(sizes):
  with pytest.raises(ValueError, match=rf"MeshConfig\.{next(iter(sizes))} must be an int >= 1"):
    MeshConfig(**sizes)


def test_two_rest_axes_are_refused():
  with pytest.raises(ValueError, match="data, fsdp"):
    MeshConfig(data=-1, fsdp=-1)


@pytest.mark.parametrize("sizes", [{"data": 1, "fsdp": 4}, {"data": -1, "fsdp": 3}, {"data": -1, "fsdp": 16}])
def test_axes_must_cover_the_devices(sizes):
  with pytest.raises(ValueError, match=r"the product of the sizes must .*\b8; received"):
    MeshConfig(**sizes).sizes(8)


def test_parse_mesh():
  assert parse_mesh("") == MeshConfig(data=1)
  assert parse_mesh("fsdp=8,tensor=2, expert=-1") == MeshConfig(data=1, fsdp=8, tensor=2, expert=-1)
  with pytest.raises(ValueError, match="model=2"):
    parse_mesh("fsdp=8,model=2")
  with pytest.raises(ValueError, match="'two'"):
    parse_mesh("fsdp=two")
  with pytest.raises(ValueError, match="once at most; received ' fsdp=4'"):
    parse_mesh("fsdp=2, fsdp=4")


def test_mesh_names_its_axis_types():
  mesh = make_mesh(MeshConfig(), jax.devices()[:1])
  assert mesh.axis_names == AXES
  assert set(mesh.axis_types) == {AxisType.Auto}
