"""Settings that a server reports: context length, log-probs, seeds, and the endpoint that names weights."""

from __future__ import annotations

import re

import pytest

from sao_jax.rollout.remote.client import ServerError
from sao_jax.rollout.remote.server_info import TOKENS_PATH
from tests.rollout.engine.engine_test import requests
from tests.rollout.fakes import STOP
from tests.rollout.http_server import serving
from tests.rollout.remote.engine_test import FakeServer, fixed, good_vllm, remote


def good_tokens(body, label):
  content = [{"token_id": 3, "logprob": -0.5}, {"token_id": STOP, "logprob": -0.25}]
  spans = [{"version": label, "start": 0, "end": 2}]
  choice = {
    "finish_reason": "stop", "token_ids": [3, STOP], "logprobs": {"content": content}, "weight_versions": spans,
  }  # fmt: skip
  return {"choices": [choice], "usage": {"prompt_tokens": len(body["token_ids"])}}


class FakeVLLM(FakeServer):
  """Server that reports settings, as vLLM does; `asked` holds the paths of GETs."""

  def __init__(self, *, max_len=64, mode="raw_logprobs", device="cuda", chunked=True, tokens_endpoint=False):
    good = good_tokens if tokens_endpoint else good_vllm
    super().__init__(lambda count, body, label: (200, good(body, label)))
    self.asked = []
    self._tokens_endpoint = tokens_endpoint
    self._models = {"data": [{"id": "m", "max_model_len": max_len}]}
    self._settings = {
      "vllm_config": {
        "model_config": {"logprobs_mode": mode, "max_model_len": max_len},
        "device_config": {"device": device},
        "scheduler_config": {"enable_chunked_prefill": chunked},
      }
    }

  def serve(self, handler, body):
    path, content = handler.path, None
    if body is None:
      self.asked.append(path)
    if path == "/v1/models":
      content = self._models
    elif path.startswith("/server_info"):
      content = self._settings
    elif path == TOKENS_PATH and not body:
      return handler.send_error(422 if self._tokens_endpoint else 403)
    elif path == TOKENS_PATH:
      self.requests.append(body)
      content = self._respond(len(self.requests), body, self._label)[1]
    if content is None:
      return super().serve(handler, body)
    return self.reply(handler, 200, content)


def run(fake, root, **changes):
  with fake, remote(fake.url, root, protocol="vllm", num_slots=1, **changes) as engine:
    return list(engine.generate(fixed, requests(2))), engine.counters


def test_a_context_that_is_too_short_is_an_error_before_the_first_request(tmp_path):
  fake = FakeVLLM(max_len=47)
  with pytest.raises(ValueError, match=r"max_model_len must be at least EngineConfig\.max_len = 48; received 47"):
    run(fake, tmp_path)
  assert not fake.requests
  done, _ = run(FakeVLLM(max_len=48), tmp_path)
  assert len(done) == 2


@pytest.mark.parametrize("mode", ["raw_logprobs", None])
def test_log_probs_before_the_temperature_are_refused(tmp_path, mode):
  with pytest.raises(ValueError, match=r"temperature must be 1 .* --logprobs-mode processed_logprobs.*received 0\.7"):
    run(FakeVLLM(mode=mode), tmp_path, temperature=0.7)


def test_log_probs_after_the_temperature_are_accepted(tmp_path):
  fake = FakeVLLM(mode="processed_logprobs")
  done, _ = run(fake, tmp_path, temperature=0.7)
  assert len(done) == 2 and fake.requests[0]["temperature"] == 0.7


def test_this_librarys_server_reports_its_log_probs(tmp_path):
  with serving(weights_root=tmp_path) as url, remote(url, tmp_path, protocol="vllm") as engine:
    assert len(list(engine.generate(fixed, requests(2)))) == 2
    assert engine.server_info.logprobs_mode == "processed_logprobs" and engine.server_info.max_model_len == 256


@pytest.mark.parametrize(
  ("settings", "send_seed", "sent"),
  [
    ({}, None, True),
    ({}, False, False),
    ({"device": "cpu"}, None, False),
    ({"device": "cpu", "chunked": False}, None, True),
  ],
)
def test_seeds_are_not_sent_to_a_server_that_they_end(tmp_path, settings, send_seed, sent):
  fake = FakeVLLM(**settings)
  run(fake, tmp_path, send_seed=send_seed)
  assert all(("seed" in x) == sent for x in fake.requests)


def test_seeds_that_were_asked_for_and_would_end_the_server_are_an_error(tmp_path):
  with pytest.raises(ValueError, match="--no-enable-chunked-prefill; received True"):
    run(FakeVLLM(device="cpu"), tmp_path, send_seed=True)


def test_responses_that_name_their_weights_need_no_further_question(tmp_path):
  fake = FakeVLLM(tokens_endpoint=True)
  done, counters = run(fake, tmp_path)
  assert [x.behavior_logp[x.action_mask].tolist() for x in done] == [[-0.5, -0.25] * 2] * 2
  assert {v for x in done for v in x.versions[x.action_mask]} == {0} and counters["failed_attempts"] == 0
  assert fake.requests[0]["sampling_params"]["logprobs"] == 0 and "/weight_info" not in fake.asked


@pytest.mark.parametrize(
  ("spoil", "message"),
  [
    (lambda x: x["choices"][0]["logprobs"]["content"].pop(), "2 tokens, 1 log-probs"),
    (lambda x: x["choices"][0]["logprobs"]["content"][0].update(token_id=4), "the same token ids; they differ"),
    (lambda x: x["usage"].update(prompt_tokens=1), "prompt_tokens must be .* as sent; received 1"),
  ],
)
def test_malformed_responses_of_the_tokens_endpoint_fail_their_episode(tmp_path, spoil, message, caplog):
  fake = FakeVLLM(tokens_endpoint=True)

  def respond(count, body, label):
    response = good_tokens(body, label)
    if count == 1:
      spoil(response)
    return 200, response

  fake._respond = respond
  done, counters = run(fake, tmp_path)
  assert len(done) == 1 and counters["failed_by_kind"] == {"bad_response": 1}
  assert re.search(message, caplog.text)


def test_tokens_of_two_sets_of_weights_are_not_accepted(tmp_path):
  fake = FakeVLLM(tokens_endpoint=True)

  def respond(count, body, label):
    response = good_tokens(body, label)
    response["choices"][0]["weight_versions"].insert(0, {"version": "other", "start": 0, "end": 1})
    return 200, response

  fake._respond = respond
  with pytest.raises(ServerError, match=r"label 'other and .*which this run has not sent"):
    run(fake, tmp_path, attempts=2)
