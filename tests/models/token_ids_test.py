"""bos, eos and pad survive loading and saving, in both files that name them."""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import jax
import pytest

from sao_jax import models
from sao_jax.models import token_ids
from sao_jax.models.checkpoints.hf_config import config_from_hf, config_to_hf
from sao_jax.models.token_ids import TokenIds
from tests.models import tiny

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3", "glm_moe_dsa")
KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _publish(model_type: str, folder: pathlib.Path, ids: dict[str, Any], generation: dict[str, Any] | None) -> None:
  shutil.copytree(FIXTURES / model_type, folder, ignore=shutil.ignore_patterns("reference*", "generation*"))
  values = json.loads((folder / "config.json").read_text())
  values = {key: value for key, value in values.items() if key not in KEYS} | ids
  (folder / "config.json").write_text(json.dumps(values))
  if generation is not None:
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _ids(path: pathlib.Path) -> dict[str, Any]:
  values = json.loads(path.read_text())
  return {key: values[key] for key in KEYS if key in values}


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(
  ("ids", "generation"),
  [
    ({"bos_token_id": 3, "eos_token_id": [4, 5], "pad_token_id": 6}, None),
    ({"bos_token_id": None, "eos_token_id": 4, "pad_token_id": -1}, {"eos_token_id": [4, 7], "pad_token_id": 0}),
    ({"bos_token_id": 0, "eos_token_id": [4], "pad_token_id": None}, {"bos_token_id": 0, "eos_token_id": 7}),
  ],
)
def test_ids_survive(
  model_type: str, ids: dict[str, Any], generation: dict[str, Any] | None, tmp_path: pathlib.Path
) -> None:
  _publish(model_type, tmp_path / "published", ids, generation)
  models.save_hf(tmp_path / "exported", *models.load_hf(tmp_path / "published"))
  assert _ids(tmp_path / "exported" / "config.json") == ids
  written = tmp_path / "exported" / "generation_config.json"
  assert (_ids(written) if written.exists() else None) == generation
  config, params = models.load_hf(tmp_path / "exported")
  models.save_hf(tmp_path / "again", config, params)
  for path in (tmp_path / "exported").glob("*.json"):
    assert path.read_text() == (tmp_path / "again" / path.name).read_text()


def test_absent_ids_are_those_that_transformers_takes(tmp_path: pathlib.Path) -> None:
  _publish("llama", tmp_path / "llama", {}, None)
  _publish("qwen3", tmp_path / "qwen3", {}, None)
  assert models.load_hf(tmp_path / "llama")[0].token_ids == TokenIds(bos=1, eos=2)
  assert models.load_hf(tmp_path / "qwen3")[0].token_ids == TokenIds()
  # And none are written as none, so that no default comes into their place.
  assert config_to_hf(tiny.dense(model_type="llama", qk_norm=False))["eos_token_id"] is None


def test_a_generation_config_of_an_older_save_does_not_stay(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "generation_config.json"
  path.write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0, "temperature": 0.6}))
  params = tiny.policy_params(tiny.dense())
  models.save_hf(tmp_path, tiny.dense(), params)
  assert json.loads(path.read_text()) == {"eos_token_id": 2, "pad_token_id": 0, "temperature": 0.6}
  models.save_hf(tmp_path, tiny.dense(token_ids=TokenIds(eos=(5, 6))), params)
  assert json.loads(path.read_text()) == {"temperature": 0.6, "eos_token_id": [5, 6]}
  generation = TokenIds(bos=1, eos=7)
  models.save_hf(tmp_path, tiny.dense(token_ids=TokenIds(eos=5), generation_token_ids=generation), params)
  assert json.loads(path.read_text()) == {"temperature": 0.6, "bos_token_id": 1, "eos_token_id": 7}


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
  ("ids", "message"),
  [
    ({"eos_token_id": "2"}, "eos_token_id must be null or an id or a list of them, .* received '2'"),
    ({"eos_token_id": [[2]]}, "eos_token_id must be"),
    ({"eos_token_id": [2, None]}, "eos_token_id must be"),
    ({"eos_token_id": 2.0}, "eos_token_id must be"),
    ({"bos_token_id": [1]}, r"bos_token_id must be null or an id, an int below 2\*\*31; received \[1\]"),
    ({"bos_token_id": True}, "bos_token_id must be"),
    ({"pad_token_id": -2}, "pad_token_id must be"),
    ({"pad_token_id": 2**31}, "pad_token_id must be"),
    ({"pad_token_id": {}}, "pad_token_id must be"),
  ],
)
def test_ids_of_another_kind_are_refused_by_file(
  own_checks: None, file: str, ids: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
  _publish("qwen3", tmp_path / "x", ids if file == "config.json" else {}, None if file == "config.json" else ids)
  with pytest.raises(ValueError, match=rf"/{file}: {message}"):
    models.load_hf(tmp_path / "x")


def test_ids_make_no_other_model() -> None:
  """Weights from elsewhere fit, and nothing is compiled anew."""
  named = tiny.dense(token_ids=TokenIds(bos=1), generation_token_ids=TokenIds(eos=2))
  assert named == tiny.dense() and hash(named) == hash(tiny.dense())
  assert config_from_hf(config_to_hf(named)).token_ids == TokenIds(bos=1)


def test_a_list_as_json_has_it_is_the_same_ids() -> None:
  assert TokenIds(eos=[1, 2]) == TokenIds(eos=(1, 2))
  assert jax.tree.leaves(token_ids.to_hf(TokenIds(bos=0, eos=(1, 2)))) == [0, 1, 2]
