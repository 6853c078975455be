"""Architectures by the path of a checkpoint, without its weights."""

from __future__ import annotations

import shutil

import pytest

from sao_jax import models
from tests.models.checkpoints import gguf_test
from tests.models.checkpoints.huggingface_test import FIXTURES


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "glm4_moe"])
def test_a_directory_without_weights_has_the_config_of_one_with_them(name, tmp_path):
  shutil.copy(FIXTURES / name / "config.json", tmp_path)
  assert models.read_config(tmp_path, param_dtype="float32") == models.load_hf(FIXTURES / name)[0]
  assert models.read_config(tmp_path, dtype="bfloat16").dtype == "bfloat16"


def test_a_gguf_file(tmp_path):
  gguf_test._write(tmp_path / "x.gguf")
  assert models.read_config(tmp_path / "x.gguf") == models.load_gguf(tmp_path / "x.gguf")[0]


def test_what_is_no_checkpoint_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError):
    models.read_config(tmp_path)
  (tmp_path / "config.json").write_text('{"model_type": "gpt2", "num_hidden_layers": 1}')
  with pytest.raises(ValueError, match="model_type must be one of"):
    models.read_config(tmp_path)
