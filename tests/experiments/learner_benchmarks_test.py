"""The learner's benchmarks at sizes that take seconds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from experiments.benchmarks import learner, memory


@pytest.fixture
def small(monkeypatch):
  monkeypatch.setattr(learner, "ROWS", 2)
  monkeypatch.setattr(learner, "LENGTH", 64)
  monkeypatch.setattr(memory, "TOKENS", 512)
  monkeypatch.setattr(memory, "VOCABULARY", 4_096)


def test_learner_reports_its_keys(small, monkeypatch):
  monkeypatch.setattr(learner, "tunix", lambda: None)  # it takes long to compile
  result = learner.run(repeats=1, chunk_size=128, rows_per_microbatch=1)
  assert {"tokens_per_s", "tunix_tokens_per_s", "ratio_to_tunix", "share_of_limit"} <= set(result)
  assert result["devices"] == 1 and result["one_device_tokens_per_s"] > 0
  assert result["tokens_per_s"] > 0 and result["tunix_tokens_per_s"] is None
  assert result["packed_fill"] > 0.6


def test_learner_reports_the_shape_of_agents(monkeypatch):
  model = dataclasses.replace(learner.AGENT, num_layers=1, hidden_size=64, vocab_size=256)
  monkeypatch.setattr(learner, "AGENT", model)
  monkeypatch.setattr(learner, "AGENT_ROWS", 2)
  monkeypatch.setattr(learner, "AGENT_LENGTH", 128)
  monkeypatch.setattr(learner, "tunix", lambda *_: None)
  result = learner.agent(repeats=1, chunk_size=64)
  assert result["tokens_per_s"] > 0 and result["peak_bytes"] > 0
  assert result["tunix_tokens_per_s"] is result["ratio_to_tunix"] is result["share_of_tunix_peak"] is None
  mask = learner.make_agent_trajectory(np.random.default_rng(0), 0).action_mask
  assert 0.15 < mask.mean() < 0.35


def test_memory_reports_what_freezing_and_chunks_save(small):
  result = memory.run(chunk_size=32)
  whole, frozen = result["critic_bytes_full"], result["critic_bytes_frozen"]
  assert whole["parameters"] == frozen["parameters"]
  attention = whole["gradients"] - frozen["gradients"]
  assert attention > 0 and whole["optimizer"] - frozen["optimizer"] == 2 * attention
  assert result["logprob_ratio"] < 0.5
