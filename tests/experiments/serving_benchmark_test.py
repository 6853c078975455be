"""The serving benchmark at a tiny size, without vLLM."""

from __future__ import annotations

from experiments.benchmarks import serving
from sao_jax.models import ModelConfig


def test_serving_reports_its_keys():
  model = ModelConfig(
    vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16
  )
  result = serving.run(
    requests=[2], prompt_tokens=4, new_tokens=8, streams=1, repeats=1, vllm_compiled=False, python=None, model=model
  )
  assert result["tokens_per_s"]["2"] > 0
  assert result["vllm_tokens_per_s"] == result["ratio_to_vllm"] == {"2": None}
