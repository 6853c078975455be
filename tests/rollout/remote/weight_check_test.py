"""Servers that take a weight update and sample with other weights."""

from __future__ import annotations

import numpy as np
import pytest

from sao_jax.rollout.remote.client import ServerError
from sao_jax.rollout.remote.weight_check import LogprobMismatchError, WeightCheck
from tests.rollout.engine.engine_test import config, requests
from tests.rollout.fakes import assert_logps_true, log_softmax, reference_logits
from tests.rollout.http_server import save_table, serving
from tests.rollout.remote.engine_test import BOTH, PARAMS, FakeServer, good_sglang, remote


def score(params, tokens):
  """Log-probs of the fake policy; 0 at index 0."""
  rows = [
    [0.0, *(log_softmax(reference_logits(params, row[:t]))[row[t]] for t in range(1, len(row)))] for row in tokens
  ]
  return np.array(rows, np.float32)


CHECK = WeightCheck(score=score, max_error=1e-3, max_len=config().max_len, max_action_tokens=20)


@BOTH
def test_every_version_is_checked_and_a_server_that_keeps_old_weights_ends_the_run(tmp_path, protocol):
  def save(params, folder):
    stale = int(params["id"]) == 3
    save_table(PARAMS[2] if stale else params, folder)

  done = []
  settings = {"protocol": protocol, "save": save, "check": CHECK}
  with serving(weights_root=tmp_path) as url, remote(url, tmp_path, **settings) as engine:
    for version in range(3):
      done += engine.generate(lambda _, v=version: (PARAMS[v], v), requests(4))
      assert engine.counters["checked_versions"] == version + 1
    files = [path for folder in tmp_path.iterdir() for path in (folder, *folder.iterdir())]
    assert files and all(path.stat().st_mode & 0o444 == 0o444 for path in files)  # for a server of another user
    message = r"weights of version 3: its log-probs of \d+ tokens differ .* allowed on average: 0\.001 \(max_logprob"
    with pytest.raises(LogprobMismatchError, match=message):
      list(engine.generate(lambda _: (PARAMS[3], 3), requests(4)))
    assert engine.counters["failed_attempts"] == 0
  assert len(done) == 12
  for x in done:
    assert_logps_true(x, PARAMS)


def test_wrong_log_probs_end_the_run_before_any_trajectory(tmp_path):
  def wrong(count, body, label):
    return 200, good_sglang(body, label)

  with FakeServer(wrong) as fake, remote(fake.url, tmp_path, num_slots=2, check=CHECK) as engine:
    with pytest.raises(LogprobMismatchError, match="log-probs of 8 tokens differ"):
      next(engine.generate(lambda _: (PARAMS[0], 0), requests(4)))
    assert len(fake.requests) == 4 and engine.counters["episodes_started"] == 0


def test_a_server_that_rejects_the_prompts_cannot_be_checked(tmp_path):
  with (
    FakeServer(lambda *_: (400, {"error": "no"})) as fake,
    remote(fake.url, tmp_path, check=CHECK) as engine,
    pytest.raises(ServerError, match=r"weights cannot be checked: .*status 400"),
  ):
    next(engine.generate(lambda _: (PARAMS[0], 0), requests(1)))
