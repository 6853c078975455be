"""Weights of two saves in one folder are refused, and a save removes the old ones."""

from __future__ import annotations

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy

from sao_jax import models
from sao_jax.models.checkpoints import shards
from sao_jax.types import Params
from tests.models import tiny

CONFIG = tiny.dense()
LIMITS = {1: 100_000, 3: 20_000, 4: 15_000}
"""Size limit of a file that splits the weights into a number of files."""
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@functools.cache
def _params(seed: int) -> Params:
  return models.init_policy(CONFIG, jax.random.key(seed))


def _save(folder: pathlib.Path, seed: int, count: int) -> None:
  """Saves the weights of a seed in `count` files."""
  models.save_hf(folder, CONFIG, _params(seed), max_shard_bytes=LIMITS[count])
  assert (folder / shards.shard_name(count, count)).exists()


def _holds(folder: pathlib.Path, seed: int) -> bool:
  """Whether all weights in a folder are those of a seed."""
  read = models.load_hf(folder)[1]
  return all(map(np.array_equal, jax.tree.leaves(read), jax.tree.leaves(_params(seed))))


@pytest.fixture
def folders(tmp_path: pathlib.Path) -> Callable[[int], pathlib.Path]:
  """Returns `folders(count)`: a new folder with weights in `count` files, with other weights for each count."""

  def make(count: int) -> pathlib.Path:
    _save(tmp_path / str(count), count, count)
    return tmp_path / str(count)

  return make


def _move_in(new: pathlib.Path, old: pathlib.Path, *, index: bool) -> None:
  """Copies the files of a new save over those of an old one, like a download that deletes nothing."""
  for path in new.iterdir():
    if index or path.name != INDEX:
      shutil.copy(path, old)


@pytest.mark.parametrize(
  ("old", "new", "index", "message"),
  [
    (3, 1, True, r"of two saves are there: model\.safetensors\.index\.json .* also holds model\.safetensors\."),
    (1, 3, True, r"of two saves are there: model\.safetensors\.index\.json .* also holds model\.safetensors\."),
    (1, 3, False, r"without an index needs model\.safetensors, but the folder also .* model-00001-of-00003"),
    (3, 4, False, r"the folder also holds model-00001-of-00004\.safetensors, .* and 1 more\. Remove the files"),
    (3, 4, True, r"the folder also holds model-00001-of-00003\.safetensors"),
  ],
)
def test_weights_of_two_saves_are_refused(
  old: int, new: int, index: bool, message: str, folders: Any
) -> None:
  folder = folders(old)
  _move_in(folders(new), folder, index=index)
  with pytest.raises(ValueError, match=f"{folder}.*{message}"):
    models.load_hf(folder)


def test_an_index_whose_shards_are_gone_is_refused(folders: Any) -> None:
  folder = folders(3)
  (folder / "model-00002-of-00003.safetensors").unlink()
  with pytest.raises(ValueError, match=r"files that are not there: model-00002-of-00003\.safetensors; found"):
    models.load_hf(folder)
  for name in shards.weight_files(folder):
    (folder / name).unlink()
  shutil.copy(folders(1) / SINGLE, folder)
  with pytest.raises(ValueError, match=r"not there: model-00001-of-00003.*found \['model\.safetensors'\]"):
    models.load_hf(folder)


def test_shards_without_an_index_are_refused(folders: Any) -> None:
  folder = folders(3)
  (folder / INDEX).unlink()
  with pytest.raises(ValueError, match=r"not there: model\.safetensors; found \['model-00001-of-00003"):
    models.load_hf(folder)


@pytest.mark.parametrize("change", ["moved", "doubled"])
def test_shards_under_the_names_of_another_split_are_refused(change: str, folders: Any) -> None:
  folder = folders(3)
  index = json.loads((folder / INDEX).read_text())
  first, second = (folder / shards.shard_name(i, 3) for i in (1, 2))
  tensors, others = (safetensors.numpy.load_file(path) for path in (first, second))
  name = next(iter(tensors))
  others[name] = tensors[name]
  if change == "moved":
    del tensors[name]
    safetensors.numpy.save_file(tensors, first)
  else:
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
  safetensors.numpy.save_file(others, second)
  with pytest.raises(ValueError, match=rf"of two saves are there.*{name}"):
    models.load_hf(folder)


def test_an_index_of_the_single_file_is_no_contradiction(folders: Any) -> None:
  folder = folders(1)
  names = safetensors.numpy.load_file(folder / SINGLE)
  (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE)}))
  assert _holds(folder, 1)


def test_other_files_are_left_alone(folders: Any) -> None:
  folder = folders(1)
  for name in ("adapter_model.safetensors", "consolidated.safetensors", "model_notes.safetensors"):
    (folder / name).write_bytes(b"x")
  assert _holds(folder, 1)
  _save(folder, 2, 3)
  assert (folder / "model_notes.safetensors").read_bytes() == b"x"


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (3, 4), (4, 3), (3, 3)])
def test_a_save_over_another_leaves_nothing_of_it(counts: tuple[int, int], tmp_path: pathlib.Path) -> None:
  for seed, count in enumerate(counts):
    _save(tmp_path, seed, count)
  (tmp_path / ".part-00007.safetensors").write_bytes(b"of a save that was killed")
  _save(tmp_path, 5, counts[1])
  expected = {shards.shard_name(i + 1, counts[1]) for i in range(counts[1])} | ({INDEX} if counts[1] > 1 else set())
  assert {path.name for path in tmp_path.iterdir()} == {*expected, "config.json"}
  assert _holds(tmp_path, 5)


@pytest.mark.parametrize("counts", [(1, 3), (3, 1), (3, 4), (3, 3)])
def test_a_save_that_is_cut_short_is_never_loaded_as_a_mixture(
  counts: tuple[int, int], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
  """A save is stopped at each of its renames. The folder then holds the weights of one save, or loading refuses it."""
  _save(tmp_path / "old", 1, counts[0])
  replace, refused = pathlib.Path.replace, 0
  renames = counts[1] + (counts[1] > 1) + 1  # the shards, the index and config.json
  for stop in range(renames):
    folder = tmp_path / f"stopped_{stop}"
    shutil.copytree(tmp_path / "old", folder)
    left = iter(range(stop))

    def limited(path: pathlib.Path, target: Any, left: Iterator[int] = left) -> Any:
      if next(left, None) is None:
        raise OSError("killed")
      return replace(path, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
      patch.setattr(pathlib.Path, "replace", limited)
      _save(folder, 2, counts[1])
    try:
      assert _holds(folder, 1) or _holds(folder, 2)
    except ValueError:
      refused += 1
  assert refused >= counts[1] - 1
