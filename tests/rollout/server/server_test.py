"""The server: completions in both protocols, weight updates, aborts, limits, and rejected requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
import urllib.parse

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import serve
from sao_jax import models
from sao_jax.rollout import EngineConfig
from sao_jax.rollout.server import server
from sao_jax.rollout.server.completions import Completions
from sao_jax.rollout.server.config import ServerConfig
from tests.models.tiny import dense, policy_params
from tests.rollout.fakes import POLICY, STOP, VOCAB, CharTokenizer, log_softmax, make_params, reference_logits
from tests.rollout.http_server import ENGINE, Process, call, save_table, serving
from tests.waiting import LONG_S, until

PARAMS = [make_params(i) for i in range(3)]
ENDLESS = make_params(0, stop_bias=-99.0)
PROMPT = [3, 4, 5]


@pytest.fixture(scope="module")
def weights_root(tmp_path_factory):
  root = tmp_path_factory.mktemp("weights")
  for i, params in enumerate(PARAMS):
    save_table(params, root / f"v{i}")
  return root


@pytest.fixture(scope="module")
def url(weights_root):
  with serving(weights_root=weights_root, max_body_bytes=20_000) as address:
    yield address


@pytest.fixture(scope="module")
def endless(weights_root):
  with serving(params=ENDLESS, weights_root=weights_root, max_requests=8) as address:
    yield address


def assert_true(params, prompt, tokens, logp):
  for i, token in enumerate(tokens):
    context = np.array([*prompt, *tokens[:i]])
    np.testing.assert_allclose(logp[i], log_softmax(reference_logits(params, context))[token], atol=1e-4)


def sglang(url, prompt=PROMPT, **sampling):
  return call(f"{url}/generate", {"input_ids": prompt, "return_logprob": True, "sampling_params": sampling})


def openai(url, prompt=PROMPT, **fields):
  return call(f"{url}/v1/completions", {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **fields})


def test_both_protocols_return_ids_log_probs_and_the_label(url):
  status, response = openai(url, max_tokens=9, seed=5, temperature=1.0, stop_token_ids=[STOP], user="me")
  assert status == 200
  choice = response["choices"][0]
  assert choice["prompt_token_ids"] == PROMPT and 1 <= len(choice["token_ids"]) <= 9
  assert response["usage"] == {
    "prompt_tokens": 3,
    "completion_tokens": len(choice["token_ids"]),
    "total_tokens": 3 + len(choice["token_ids"]),
  }
  assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] == STOP else "length")
  assert_true(PARAMS[0], PROMPT, choice["token_ids"], choice["logprobs"]["token_logprobs"])
  assert choice["logprobs"]["tokens"][0] == f"token_id:{choice['token_ids'][0]}"

  status, other = sglang(url, max_new_tokens=9, sampling_seed=5)
  meta = other["meta_info"]
  assert status == 200 and other["output_ids"] == choice["token_ids"]  # the same seed, prompt and weights
  assert [x[0] for x in meta["output_token_logprobs"]] == choice["logprobs"]["token_logprobs"]
  assert [x[1] for x in meta["output_token_logprobs"]] == other["output_ids"]
  assert meta["finish_reason"]["type"] == choice["finish_reason"] and meta["weight_version"] == "default"
  assert meta["prompt_tokens"] == 3 and meta["completion_tokens"] == len(other["output_ids"])

  plain = call(f"{url}/v1/completions", {"prompt": PROMPT})[1]["choices"][0]
  assert plain["logprobs"] is None and plain["token_ids"] is None
  assert len({json.dumps(sglang(url, max_new_tokens=9)[1]["output_ids"]) for _ in range(8)}) > 1  # no seed


def test_concurrent_completions_are_independent(url):
  prompts = [[2 + i % 15, 3, 4 + i % 7] for i in range(24)]
  with concurrent.futures.ThreadPoolExecutor(24) as pool:
    responses = list(pool.map(lambda i: sglang(url, prompts[i], max_new_tokens=3 + i, sampling_seed=i), range(24)))
  for i, (status, response) in enumerate(responses):
    assert status == 200 and len(response["output_ids"]) <= 3 + i
    assert_true(
      PARAMS[0], prompts[i], response["output_ids"], [x[0] for x in response["meta_info"]["output_token_logprobs"]]
    )


def test_text_in_and_out():
  with serving(tokenizer=CharTokenizer()) as url:
    status, response = openai(url, "cdef", max_tokens=7, seed=3)
    choice = response["choices"][0]
    assert status == 200 and choice["prompt_token_ids"] == [2, 3, 4, 5]
    assert choice["text"] == CharTokenizer().decode(choice["token_ids"]) == "".join(choice["logprobs"]["tokens"])
    body = {"text": "cdef", "sampling_params": {"max_new_tokens": 7, "sampling_seed": 3}}
    other = call(f"{url}/generate", body)[1]
    assert other["text"] == choice["text"] and other["output_ids"] == choice["token_ids"]
    assert "output_token_logprobs" not in other["meta_info"]


def test_information(url):
  assert call(f"{url}/health") == (200, None)
  models_ = call(f"{url}/v1/models")[1]
  assert [x["id"] for x in models_["data"]] == ["tiny"] and models_["data"][0]["max_model_len"] == 256
  assert call(f"{url}/model_info")[1]["weight_version"] == "default"
  assert call(f"{url}/weight_info")[1]["weight_version"] == "default"


@contextlib.contextmanager
def resumed(url):
  """Resumes the server at the end of the block, since other tests use it."""
  try:
    yield
  finally:
    call(f"{url}/resume", {})


def moments():
  """Yields waits (s) from before a completion starts to after it ends, on any machine; for two minutes."""
  deadline = time.monotonic() + LONG_S
  while time.monotonic() < deadline:
    yield from np.geomspace(0.002, 2.0, 16)


def test_an_abort_returns_the_tokens_so_far(endless):
  body = {"input_ids": PROMPT, "rid": "one", "return_logprob": True, "sampling_params": {"max_new_tokens": 240}}
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    for moment in moments():
      running = pool.submit(call, f"{endless}/generate", body)
      time.sleep(moment)
      assert call(f"{endless}/abort_request", {"rid": "another"})[0] == 200
      assert call(f"{endless}/abort_request", {"rid": "one"})[0] == 200
      status, response = running.result(LONG_S)
      reason, length = response["meta_info"]["finish_reason"]["type"], len(response["output_ids"])
      assert status == 200 and length == len(response["meta_info"]["output_token_logprobs"])
      if reason == "abort" and length:  # neither before it started nor after it ended
        break
      assert length in (0, 240)
    else:
      raise AssertionError("never aborted while it ran")
  assert length < 240
  assert call(f"{endless}/abort_request", {"abort_all": True})[0] == 200
  assert len(sglang(endless, max_new_tokens=5)[1]["output_ids"]) == 5


def test_pause_aborts_running_completions_and_holds_back_new_ones(endless):
  with concurrent.futures.ThreadPoolExecutor(8) as pool, resumed(endless):
    for moment in moments():
      before = [pool.submit(openai, endless, max_tokens=253, seed=i) for i in range(6)]
      time.sleep(moment)
      assert call(f"{endless}/pause?mode=abort", {})[0] == 200
      assert call(f"{endless}/resume", {})[0] == 200  # for requests that arrived after the pause
      responses = [x.result(LONG_S)[1]["choices"][0] for x in before]
      assert {x["finish_reason"] for x in responses} <= {"abort", "length"}
      if any(x["finish_reason"] == "abort" and x["token_ids"] for x in responses):
        break
    else:
      raise AssertionError("never paused while something ran")
    assert call(f"{endless}/pause?mode=abort", {})[0] == 200
    after = pool.submit(openai, endless, max_tokens=3)
    time.sleep(0.2)
    assert not after.done()
    assert call(f"{endless}/resume", {})[0] == 200
    assert after.result(LONG_S)[1]["choices"][0]["finish_reason"] == "length"
    assert call(f"{endless}/pause_generation", {"mode": "abort"})[0] == 200
    assert call(f"{endless}/continue_generation", {})[0] == 200
    assert "mode must be abort or wait; received keep" in call(f"{endless}/pause?mode=keep", {})[1]["error"]["message"]
    assert call(f"{endless}/pause?hurry=1", {})[0] == 400


def test_a_client_that_disconnects_frees_its_slot(endless):
  parts = urllib.parse.urlsplit(endless)
  body = json.dumps({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 250}}).encode()
  for _ in range(12):  # more than `max_requests`
    with socket.create_connection((parts.hostname, parts.port), timeout=LONG_S) as connection:
      head = ["POST /generate HTTP/1.1", f"Host: {parts.netloc}", "Content-Type: application/json"]
      connection.sendall("\r\n".join([*head, f"Content-Length: {len(body)}", "", ""]).encode() + body)
  until(lambda: sglang(endless, max_new_tokens=2)[0] == 200)


def test_weights_change_between_completions_never_within_one(weights_root):
  done = []
  with serving(weights_root=weights_root) as url, concurrent.futures.ThreadPoolExecutor(6) as pool:
    stop = threading.Event()

    def keep_requesting(seed):
      while not stop.is_set():
        done.append(sglang(url, max_new_tokens=250, sampling_seed=seed)[1])

    def written_by(label):
      return any(x["meta_info"]["weight_version"] == label for x in list(done))

    clients = [pool.submit(keep_requesting, i) for i in range(6)]
    try:
      until(lambda: written_by("default") or any(x.done() for x in clients))
      for i in (1, 2, 0, 1):
        body = {"model_path": f"v{i}", "weight_version": f"w{i}", "abort_all_requests": i % 2 == 0}
        status, response = call(f"{url}/update_weights_from_disk", body)
        assert (status, response["success"]) == (200, True)
        assert call(f"{url}/model_info")[1]["weight_version"] == f"w{i}"
        until(lambda i=i: written_by(f"w{i}") or any(x.done() for x in clients))
    finally:
      stop.set()
    for x in clients:
      x.result(LONG_S)
    # vLLM's way: load, then set the label.
    for path, body in (
      ("/pause?mode=wait", {}),
      ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights_root / "v2")}}),
      ("/update_weight_version", {"new_version": "w2"}),
      ("/resume", {}),
    ):
      assert call(f"{url}{path}", body)[0] == 200
    done.append(sglang(url, max_new_tokens=9)[1])
  assert {x["meta_info"]["weight_version"] for x in done} >= {"default", "w1", "w2"}
  by_label = {"default": PARAMS[0], "w0": PARAMS[0], "w1": PARAMS[1], "w2": PARAMS[2]}
  for x in done:
    logp = [entry[0] for entry in x["meta_info"]["output_token_logprobs"]]
    assert_true(by_label[x["meta_info"]["weight_version"]], PROMPT, x["output_ids"], logp)


class Busy:
  """Fake engine with one completion, which runs until `running` is set to 0."""

  def __init__(self):
    self.paused, self.running, self.label, self.aborted = False, 1, "a", threading.Event()

  def abort_all(self):
    self.aborted.set()
    return 1

  def set_weights(self, params, label):
    assert self.paused and not self.running

  def check(self):
    pass

  def __enter__(self):
    return self

  def __exit__(self, *_):
    pass


def test_a_pause_during_an_update_stays_in_effect(tmp_path):
  busy = Busy()
  with (
    serving(completions=busy, weights_root=tmp_path, load=lambda _: {}) as url,
    concurrent.futures.ThreadPoolExecutor(2) as pool,
  ):
    update = pool.submit(call, f"{url}/update_weights_from_disk", {"model_path": "."})
    until(lambda: busy.paused)
    pause = pool.submit(call, f"{url}/pause", {})
    assert busy.aborted.wait(LONG_S)
    busy.running = 0
    assert update.result(LONG_S)[0] == pause.result(LONG_S)[0] == 200
    assert busy.paused
    assert call(f"{url}/resume", {})[0] == 200
    assert not busy.paused


def test_shutdown_does_not_wait_for_running_completions(monkeypatch):
  monkeypatch.setattr(server, "_SHUTDOWN_S", 1000.0)
  made = Completions(model=POLICY, params=ENDLESS, label="a", vocab_size=VOCAB, stop_ids=(STOP,), config=ENGINE)
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    with serving(completions=made) as url:
      assert call(f"{url}/pause", {})[0] == 200
      held = pool.submit(sglang, url, max_new_tokens=250)  # paused: it would never end
      until(lambda: made.outstanding)
    status, response = held.result(LONG_S)
  assert status == 200 and response["meta_info"]["finish_reason"]["type"] == "abort"


REJECTED = {
  "no_prompt": ("/v1/completions", {}, 400, "prompt is required"),
  "empty_prompt": ("/generate", {"input_ids": []}, 400, "1 to 255 tokens; received 0"),
  "long_prompt": ("/generate", {"input_ids": [3] * 256}, 400, "1 to 255 tokens; received 256"),
  "id_too_large": ("/generate", {"input_ids": [3, VOCAB]}, 400, f"ids in [0, {VOCAB}); received [{VOCAB}]"),
  "id_negative": ("/v1/completions", {"prompt": [-1]}, 400, "received [-1]"),
  "id_bool": ("/v1/completions", {"prompt": [True]}, 400, "prompt must be a list of token ids"),
  "id_float": ("/v1/completions", {"prompt": [1.0]}, 400, "prompt must be a list of token ids"),
  "batch": ("/v1/completions", {"prompt": [[3], [4]]}, 400, "prompt must be a list of token ids"),
  "text": ("/v1/completions", {"prompt": "hello"}, 400, "this server has no tokenizer"),
  "unknown": ("/v1/completions", {"prompt": [3], "guided_regex": "a"}, 400, "unknown field guided_regex"),
  "unknown_nested": ("/generate", {"input_ids": [3], "sampling_params": {"beams": 2}}, 400, "sampling_params.beams"),
  "n": ("/v1/completions", {"prompt": [3], "n": 2}, 400, "n must be 1; received 2"),
  "stream": ("/v1/completions", {"prompt": [3], "stream": True}, 400, "stream must be false; received true"),
  "top_p": ("/v1/completions", {"prompt": [3], "top_p": 0.8}, 400, "top_p must be 1"),
  "stop_text": ("/v1/completions", {"prompt": [3], "stop": ["x"]}, 400, "stop must be []"),
  "temperature": ("/v1/completions", {"prompt": [3], "temperature": 0.7}, 400, "temperature must be 1.0"),
  "hot": ("/v1/completions", b'{"prompt": [3], "temperature": NaN}', 400, "NaN is not valid JSON"),
  "cold": ("/v1/completions", b'{"prompt": [3], "temperature": 1' + b"0" * 400 + b"}", 400, "must be a finite number"),
  "surrogate": ("/v1/completions", b'{"prompt": [3], "request_id": "\\ud800"}', 400, "without lone surrogates"),
  "no_end": ("/v1/completions", {"prompt": [3], "ignore_eos": True}, 400, "ignore_eos must come with stop_token_ids"),
  "no_end_sglang": (
    "/generate", {"input_ids": [3], "sampling_params": {"ignore_eos": True}}, 400, "must come with stop_token_ids",
  ),
  "bos": ("/v1/completions", {"prompt": [3], "add_special_tokens": True}, 400, "add_special_tokens must be false"),
  "trimmed": (
    "/generate", {"input_ids": [3], "sampling_params": {"no_stop_trim": False}}, 400, "no_stop_trim must be true",
  ),
  "stop_ids": ("/v1/completions", {"prompt": [3], "stop_token_ids": [7]}, 400, "stop_token_ids must be [1]"),
  "zero_tokens": ("/v1/completions", {"prompt": [3], "max_tokens": 0}, 400, "max_tokens must be an integer in [1,"),
  "many_tokens": ("/v1/completions", {"prompt": [3], "max_tokens": 257}, 400, "max_tokens must be in [1, 256]"),
  "seed": ("/v1/completions", {"prompt": [3], "seed": 2**64}, 400, "seed must be an integer"),
  "model": ("/v1/completions", {"prompt": [3], "model": "gpt"}, 404, "model must be tiny; received gpt"),
  "logprobs": ("/v1/completions", {"prompt": [3], "logprobs": 5}, 400, "logprobs must be an integer in [0, 0]"),
  "not_an_object": ("/generate", [1, 2], 400, "must be a JSON object; received list"),
  "twice": ("/generate", b'{"input_ids": [3], "input_ids": [4]}', 400, "key input_ids occurs twice"),
  "not_json": ("/generate", b"{", 400, "the body must be JSON"),
  "not_utf8": ("/generate", b"\xff\xfe{", 400, "the body must be JSON"),
  "deep": ("/generate", b"[" * 10_000, 400, "the body must be JSON"),
  "digits": ("/generate", b"1" * 9_000, 400, "the body must be JSON"),
  "huge": ("/generate", {"input_ids": [3] * 10_000}, 413, "too large"),
  "escape": ("/update_weights_from_disk", {"model_path": "../x"}, 403, "must lie below"),
  "elsewhere": ("/update_weights_from_disk", {"model_path": "/etc"}, 403, "must lie below"),
  "null": ("/update_weights_from_disk", {"model_path": "a\0b"}, 400, "must be a folder"),
  "long_path": ("/update_weights_from_disk", {"model_path": "a" * 4000}, 400, "must be a folder"),
  "odd_path": ("/update_weights_from_disk", b'{"model_path": "\\ud800"}', 400, "without lone surrogates"),
  "no_path": ("/update_weights_from_disk", {}, 400, "model_path is required"),
  "no_folder": ("/update_weights_from_disk", {"model_path": "v9"}, 400, "must be a folder; received v9"),
  "format": ("/update_weights_from_disk", {"model_path": "v1", "load_format": "pt"}, 400, 'load_format must be "auto"'),
  "rpc": ("/collective_rpc", {"method": "__reduce__"}, 400, "method must be reload_weights; received __reduce__"),
  "rpc_args": ("/collective_rpc", {"method": "reload_weights", "args": ["x"]}, 400, "args must be []"),
  "get_only": ("/health", {}, 405, "POST /health"),
  "nowhere": ("/v1/chat/completions", {}, 404, "POST /v1/chat/completions"),
}  # fmt: skip


@pytest.mark.parametrize("case", REJECTED)
def test_bad_requests_are_rejected_with_a_message(url, case):
  path, body, status, message = REJECTED[case]
  received, response = call(f"{url}{path}", body)
  assert received == status, response
  assert message in (response["message"] if path == "/update_weights_from_disk" and "message" in response
                     else response["error"]["message"])  # fmt: skip


def test_requests_that_are_rejected_before_their_body_is_read(url, weights_root):
  assert call(f"{url}/nothing", method="GET") == call(f"{url}/nothing")
  assert call(f"{url}/nothing")[0] == 404
  assert call(f"{url}/generate")[0] == 405
  status, response = call(f"{url}/generate", {"input_ids": [3]}, headers={"Content-Type": "text/plain"})
  assert status == 415 and "application/json" in response["error"]["message"]
  for encoding in ("gzip", "lzma"):
    status, response = call(f"{url}/generate", {"input_ids": [3]}, headers={"Content-Encoding": encoding})
    assert status == 415 and f"Content-Encoding must be identity or missing; received {encoding}" in str(response)
  status, response = call(f"{url}/pause", method="POST", headers={"Origin": "http://example.com"})
  assert status == 403 and "web pages" in response["error"]["message"]
  assert sglang(url, max_new_tokens=2)[0] == 200
  outside = weights_root.parent / "outside"
  save_table(PARAMS[1], outside)
  (weights_root / "link").symlink_to(outside)
  assert call(f"{url}/update_weights_from_disk", {"model_path": "link"})[0] == 403
  (weights_root / "bad").mkdir()
  (weights_root / "bad" / "params.npz").write_bytes(b"not a file of numbers")
  status, response = call(f"{url}/update_weights_from_disk", {"model_path": "bad"})
  assert status == 400 and not response["success"] and "cannot be loaded" in response["message"]
  assert call(f"{url}/model_info")[1]["weight_version"] == "default"
  assert sglang(url, max_new_tokens=2)[0] == 200


def test_without_a_root_weights_cannot_be_changed():
  with serving() as url:
    status, response = call(f"{url}/update_weights_from_disk", {"model_path": "/tmp"})
  assert status == 403 and "started without a weights_root" in response["message"]


def test_too_many_completions_are_rejected_but_control_requests_are_not():
  with serving(max_requests=8) as url, concurrent.futures.ThreadPoolExecutor(12) as pool:
    assert call(f"{url}/pause", {})[0] == 200
    with resumed(url):
      responses = [pool.submit(sglang, url, max_new_tokens=2) for _ in range(12)]
      until(lambda: sum(x.done() for x in responses) >= 4)
      done = [x for x in responses if x.done()]
      assert len(done) == 4
      for x in done:
        status, response = x.result()
        assert status == 503 and "8 requests are running already" in response["error"]["message"]
    assert [x.result(LONG_S)[0] for x in responses if x not in done] == [200] * 8


CONTROL = {
  "/pause": {}, "/resume": {}, "/collective_rpc": {"method": "reload_weights"}, "/pause_generation": {},
  "/update_weight_version": {"new_version": "a"}, "/continue_generation": {}, "/abort_request": {"rid": "a"},
  "/update_weights_from_disk": {"model_path": "v0"},
}  # fmt: skip


@pytest.mark.parametrize("path", [*CONTROL, "/health", "/v1/models", "/model_info", "/weight_info"])
def test_other_requests_accept_small_bodies_only(url, path):
  """The fixture's limit for completions is 20,000 bytes; the limit of other requests is never larger."""
  fields, method = CONTROL.get(path, {}), "POST" if path in CONTROL else "GET"
  padded = json.dumps(fields).encode() + b" " * 20_000
  status, response = call(f"{url}{path}", padded, method=method)
  assert status == 413 and "too large: at most 20000 bytes are allowed at this path" in response["error"]["message"]
  parts = urllib.parse.urlsplit(url)
  with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=LONG_S)) as connection:
    headers = {"Content-Type": "application/json"}
    connection.request(method, path, iter([b" " * 15_000] * 2), headers, encode_chunked=True)  # of unknown length
    assert connection.getresponse().status == 413
  assert sglang(url, max_new_tokens=2)[0] == 200  # neither paused nor changed


def test_the_limit_for_control_does_not_depend_on_that_for_completions():
  with serving(max_body_bytes=10**6, max_control_body_bytes=1000) as url:
    body = {"prompt": PROMPT, "request_id": "a" * 2000}
    assert call(f"{url}/v1/completions", body)[0] == 200
    assert call(f"{url}/abort_request", {"rid": "a" * 2000})[0] == 413
    assert call(f"{url}/abort_request", {"rid": "a" * 900})[0] == 200


def test_control_requests_are_limited_in_number_and_leave_completions_alone():
  busy = Busy()
  with (
    serving(completions=busy, max_requests=4) as url,
    concurrent.futures.ThreadPoolExecutor(9) as pool,
  ):
    responses = [pool.submit(call, f"{url}/pause?mode=wait", {}) for _ in range(9)]
    until(lambda: sum(x.done() for x in responses) >= 5)
    rejected = [x.result() for x in responses if x.done()]
    assert [status for status, _ in rejected] == [503] * 5
    assert "4 requests are running already; try again later" in rejected[0][1]["error"]["message"]
    assert call(f"{url}/health")[0] == 503
    assert call(f"{url}/generate", {})[1]["error"]["message"] == "input_ids is required."  # admitted
    busy.running = 0
    assert sorted(x.result(LONG_S)[0] for x in responses) == [200] * 4 + [503] * 5
    assert call(f"{url}/health") == (200, None)


def raw(url, head, body=b"{}"):
  """Sends a request with this exact head; returns the status and text of the response."""
  parts = urllib.parse.urlsplit(url)
  lines = [*head, "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close", "", ""]
  with socket.create_connection((parts.hostname, parts.port), timeout=LONG_S) as connection:
    connection.sendall("\r\n".join(lines).encode() + body)
    response = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
  return int(response.split(" ")[1]), response


def test_requests_after_dns_rebinding_are_rejected_on_every_path(url):
  port = urllib.parse.urlsplit(url).port
  posts = [*CONTROL, "/v1/completions", "/generate", "/nowhere"]
  for path in [*posts, "/health", "/model_info"]:
    method = "POST" if path in posts else "GET"
    status, response = raw(url, [f"{method} {path} HTTP/1.1", f"Host: rebound.example:{port}"])
    assert status == 403 and f"ServerConfig.allowed_hosts; received rebound.example:{port}" in response, path
  assert call(f"{url}/model_info")[1]["weight_version"] == "default"


def test_hosts_over_http(url):
  port = urllib.parse.urlsplit(url).port
  for host in (f"localhost:{port}", f"LOCALHOST.:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
    assert raw(url, ["GET /health HTTP/1.1", f"Host: {host}"])[0] == 200, host
  for host in ("localhost", f"localhost:{port + 1}", f"a@localhost:{port}", f"127.1:{port}", ""):
    assert raw(url, ["GET /health HTTP/1.1", f"Host: {host}"])[0] == 403, host
  status, response = raw(url, ["GET /health HTTP/1.0"])
  assert status == 403 and "received none" in response
  assert raw(url, ["GET /health HTTP/1.1"])[0] in (400, 403)
  two = [f"Host: localhost:{port}", "Host: rebound.example"]
  assert raw(url, ["GET /health HTTP/1.1", *two])[0] in (400, 403)  # the HTTP parser may reject it first
  status, _ = raw(url, [f"GET http://rebound.example:{port}/health HTTP/1.1", f"Host: localhost:{port}"])
  assert status == 400
  # X-Forwarded-Host is ignored.
  assert raw(url, ["GET /health HTTP/1.1", f"Host: localhost:{port}", "X-Forwarded-Host: rebound.example"])[0] == 200
  assert raw(url, ["GET /health HTTP/1.1", "Host: rebound.example", f"X-Forwarded-Host: localhost:{port}"])[0] == 403


def test_the_name_of_a_proxy_can_be_allowed():
  with serving(allowed_hosts=("model.example",)) as url:
    assert raw(url, ["GET /health HTTP/1.1", "Host: Model.example"])[0] == 200
    assert raw(url, ["GET /health HTTP/1.1", "Host: rebound.example"])[0] == 403
    assert call(f"{url}/health") == (200, None)


def test_a_body_that_does_not_arrive_times_out():
  with serving(body_timeout_s=1.0) as url:
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=LONG_S)
    connection.putrequest("POST", "/generate")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", "100")
    connection.endheaders(b'{"input_ids"')
    response = connection.getresponse()
    assert response.status == 408
    connection.close()


@pytest.mark.parametrize("head", [b"", b"POST /generate HTTP/1.1\r\nHost: x\r\n"])
def test_a_connection_on_which_no_request_arrives_is_closed(head):
  with serving(body_timeout_s=1.0) as url:
    parts = urllib.parse.urlsplit(url)
    began = time.monotonic()
    with socket.create_connection((parts.hostname, parts.port), timeout=LONG_S) as connection:
      connection.sendall(head)
      for _ in range(1200):  # an occasional line does not keep it open
        try:
          connection.settimeout(0.1)
          if connection.recv(1) == b"":
            break
        except TimeoutError:
          if head:
            connection.sendall(b"X: y\r\n")
        except ConnectionError:
          break
      else:
        raise AssertionError("the connection stays open")
      assert time.monotonic() - began > 0.9
    assert call(f"{url}/health") == (200, None)


def test_loopback_by_default_and_bad_settings(url, tmp_path):
  assert ServerConfig().host == "127.0.0.1"
  assert urllib.parse.urlsplit(url).hostname == "127.0.0.1"
  limits = ("max_body_bytes", "max_control_body_bytes", "max_requests", "body_timeout_s")
  for changes in ({"port": -1}, *({name: 0} for name in limits), {"weights_root": tmp_path / "none"}):
    with pytest.raises(ValueError, match="received"):
      ServerConfig(**changes)


def test_a_failure_of_the_engine_is_a_server_error():
  broken = {**PARAMS[0], "table": PARAMS[0]["table"] * jnp.nan}
  with serving(params=broken) as url:
    status, response = sglang(url, max_new_tokens=4)
  assert status == 500 and "RuntimeError" in response["error"]["message"]


def test_set_weights_needs_a_pause_and_closing_fails_unfinished_jobs():
  with Completions(
    model=POLICY, params=ENDLESS, label="a", vocab_size=VOCAB, stop_ids=(STOP,), config=ENGINE
  ) as completions:
    with pytest.raises(RuntimeError, match="only while paused and idle; paused is False"):
      completions.set_weights(PARAMS[1], "b")
    jobs = [completions.submit(PROMPT, max_tokens=250) for _ in range(1000)]  # more than it can have completed
  assert all(x.result.done() for x in jobs)
  with pytest.raises(RuntimeError, match="the engine was stopped"):
    jobs[-1].result.result()


def test_top_p_is_that_of_the_server():
  config = dataclasses.replace(ENGINE, top_p=0.5)
  made = Completions(model=POLICY, params=PARAMS[0], label="a", vocab_size=VOCAB, stop_ids=(STOP,), config=config)
  with serving(completions=made) as url:
    for complete in (sglang, openai):
      assert complete(url)[0] == complete(url, top_p=0.5)[0] == 200
      status, response = complete(url, top_p=1.0)
      assert status == 400 and "top_p must be 0.5, as set when the server started; received 1.0" in str(response)
    tokens = openai(url, max_tokens=8, seed=1)[1]["choices"][0]
  for i, (token, logp) in enumerate(zip(tokens["token_ids"], tokens["logprobs"]["token_logprobs"], strict=True)):
    whole = log_softmax(reference_logits(PARAMS[0], np.array([*PROMPT, *tokens["token_ids"][:i]])))
    kept = whole[[whole[whole > x].size == 0 or np.exp(whole[whole > x]).sum() < 0.5 for x in whole]]
    assert logp == pytest.approx(whole[token] - np.log(np.exp(kept).sum()), abs=1e-4)


def test_the_command_serves_a_checkpoint(tmp_path):
  config = dense()
  params = policy_params(config)
  other = jax.tree.map(lambda x: x + 0.05, params)
  models.save_hf(tmp_path / "checkpoint", config, params)
  models.save_hf(tmp_path / "weights" / "other", config, other)
  models.save_hf(tmp_path / "weights" / "kind", dataclasses.replace(config, rope_theta=7.0), params)
  common = [f"--checkpoint={tmp_path / 'checkpoint'}", "--port=0", "--num_slots=2", "--max_len=64"]
  with pytest.raises(SystemExit, match=r"--stop_ids must be ids below 40, comma-separated; received \(\)"):
    serve.main(common)
  for wrong, message in (
    ("--stop_ids=7,x", "comma-separated; received 7,x"), ("--temperature=0", "temperature must be finite and > 0"),
    ("--top_p=0", r"top_p must be in \(0, 1\]; received 0.0"),
    ("--checkpoint=/nowhere", "FileNotFoundError.*nowhere"), ("--port=-1", "port must be in"),
  ):  # fmt: skip
    with pytest.raises(SystemExit, match=message):
      serve.main([*common, "--stop_ids=7", wrong])
  server = Process(*common, "--stop_ids=7", f"--weights_root={tmp_path / 'weights'}", log=tmp_path / "log")
  try:
    assert urllib.parse.urlsplit(server.url).hostname == "127.0.0.1"
    logits = jax.jit(models.policy_logits(config))
    for label, weights in (("default", params), ("new", other)):
      status, response = sglang(server.url, [3, 9, 11], max_new_tokens=12, stop_token_ids=[7])
      assert status == 200 and response["meta_info"]["weight_version"] == label
      tokens = [3, 9, 11, *response["output_ids"]]
      padded = jnp.array([tokens + [0] * (15 - len(tokens))])
      logp = jax.nn.log_softmax(logits(weights, padded)[0])
      expected = [float(logp[2 + i, token]) for i, token in enumerate(response["output_ids"])]
      received = [x[0] for x in response["meta_info"]["output_token_logprobs"]]
      np.testing.assert_allclose(received, expected, atol=1e-4)
      if label == "default":
        status, response = call(f"{server.url}/update_weights_from_disk", {"model_path": "kind"})
        assert status == 400 and "must be of the served model" in response["message"]
        body = {"model_path": str(tmp_path / "weights" / "other"), "weight_version": "new"}
        assert call(f"{server.url}/update_weights_from_disk", body)[0] == 200
    assert server.stop() == 0
  finally:
    server.kill()


def test_stop_ids_come_from_the_checkpoint(tmp_path):
  assert serve.stop_ids_of(tmp_path) == ()
  (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
  assert serve.stop_ids_of(tmp_path) == (5,)
  (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 7]}')
  assert serve.stop_ids_of(tmp_path) == (6, 7)


def test_completions_keep_the_engine_settings_for_the_device():
  config = EngineConfig(num_slots=3, max_len=100, temperature=0.5)
  completions = Completions(
    model=POLICY, params=PARAMS[0], label="a", vocab_size=VOCAB, stop_ids=(STOP,), config=config
  )
  assert (completions.config.num_slots, completions.config.temperature) == (3, 0.5)
  assert completions.config.max_turns == 1 and completions.config.env_workers == 0
