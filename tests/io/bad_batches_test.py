"""Kept batches of skipped updates: only the newest stay, and a damaged one is refused by name."""

from __future__ import annotations

import pathlib

import pytest

from sao_jax.io import bad_batches
from tests.io.trajectories_test import assert_same, make


def test_the_newest_bad_batches_stay(tmp_path: pathlib.Path) -> None:
  for step in range(1, bad_batches.KEPT + 4):
    bad_batches.write(tmp_path, step, [make(episode_id=step)], {"nonfinite": ["logp"]})
  assert bad_batches.steps(tmp_path) == list(range(4, bad_batches.KEPT + 4))
  assert len(list((tmp_path / "bad_batches").iterdir())) == 2 * bad_batches.KEPT
  report, (trajectory,) = bad_batches.read(tmp_path, 5)
  assert report == {"step": 5, "nonfinite": ["logp"]}
  assert_same(trajectory, make(episode_id=5))
  (tmp_path / "bad_batches/5.safetensors").write_bytes(b"x" * 100)
  with pytest.raises(ValueError, match=r"5\.safetensors"):
    bad_batches.read(tmp_path, 5)
  with pytest.raises(FileNotFoundError):
    bad_batches.read(tmp_path, 1)
