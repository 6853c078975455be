"""The benchmarks of sampler and engine run, at a tiny size, and print the keys that others read."""

from __future__ import annotations

import dataclasses
import sys
import warnings

import numpy as np
import pytest

from experiments.benchmarks import decoding, engine, kv_cache, sampler
from sao_jax.models import cached_policy


@pytest.fixture
def small_model(monkeypatch):
  """A layer instead of four: what takes the time here is compiling."""
  model = dataclasses.replace(decoding.MODEL, num_layers=1)
  monkeypatch.setattr(decoding, "MODEL", model)
  monkeypatch.setattr(decoding, "POLICY", cached_policy(model))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Tunix's calls, where it is installed
def test_sampler(small_model):
  result = sampler.run(slots=2, new_tokens=8, chunk_steps=4, streams=2, repeats=1)
  assert set(result) == {
    "tokens_per_s",
    "tunix_tokens_per_s",
    "ratio_to_tunix",
    "matmul_gflops",
    "share_of_limit",
    "share_of_bare_matmuls",
    "share_of_bare_step",
  }
  assert result["tokens_per_s"] > 0 and 0 < result["share_of_limit"] < 1
  assert result["share_of_bare_step"] > 0 and result["share_of_bare_matmuls"] > 0


def test_what_tunix_warns_of_when_it_is_imported_and_made_is_no_error(tmp_path, monkeypatch):
  """Here, where warnings are errors; those of everything else stay so."""
  folder = tmp_path / "tunix" / "models" / "qwen3"
  folder.mkdir(parents=True)
  for package in (folder, folder.parent, folder.parent.parent):
    (package / "__init__.py").touch()
  warns = "warnings.warn('old', DeprecationWarning)\n"
  model = f"class Qwen3:\n  def __init__(self, config, rngs):\n    self.config = config\n    {warns}"
  (folder / "model.py").write_text(f"import warnings\n{warns}ModelConfig = dict\n{model}", encoding="utf-8")
  monkeypatch.syspath_prepend(tmp_path)
  names = ["tunix", "tunix.models", "tunix.models.qwen3", "tunix.models.qwen3.model"]
  for name in names:
    monkeypatch.delitem(sys.modules, name, raising=False)
  try:
    assert decoding.tunix_model().config["vocab_size"] == decoding.MODEL.vocab_size
  finally:
    for name in names:
      sys.modules.pop(name, None)
  with pytest.raises(DeprecationWarning):
    warnings.warn("ours", DeprecationWarning, stacklevel=1)


def test_engine(small_model):
  result = engine.run(slots=2, max_len=256, chunk_steps=16, streams=1, env_workers=0, seconds=0.1, repeats=1, warmup=1)
  assert set(result) == {"tokens_per_s", "sampler_tokens_per_s", "ratio"}
  assert result["tokens_per_s"] >= 0 and result["sampler_tokens_per_s"] > 0
  assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["sampler_tokens_per_s"])


def test_flops_are_those_of_the_weights():
  dense = 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384) + 128 * 1024
  np.testing.assert_allclose(decoding.flops_per_token(decoding.MODEL, 0), 2 * dense)


def test_kv_cache(small_model, capsys):
  result = kv_cache.run(max_len=32, repeats=1)
  assert result["lengths"] == [16, 32]
  assert min(result["ms_to_prefill"]) > 0 and min(result["ms_to_swap"]) > 0
  assert result["swap_from_by_rule"] is None  # a swap costs more than the prefill of so few tokens
  assert "a swap is cheaper from" in capsys.readouterr().out
