"""Rollouts from a server: true log-probs and versions, restarts, faults of server and environments."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.server
import itertools
import json
import logging
import re
import socket
import threading
import time

import jax
import numpy as np
import pytest

from sao_jax import models
from sao_jax.rollout import EngineThread, EpisodeRequest, TooManyFailuresError, TrajectoryQueue, WeightStore
from sao_jax.rollout.remote import client
from sao_jax.rollout.remote import engine as remote_module
from sao_jax.rollout.remote.client import ServerError
from sao_jax.rollout.remote.config import RemoteConfig
from sao_jax.rollout.remote.engine import RemoteEngine
from sao_jax.rollout.remote.weight_check import LogprobMismatchError
from sao_jax.rollout.requests import RequestStream
from sao_jax.rollout.schedules import AsyncSchedule
from sao_jax.rollout.server.completions import Completions
from sao_jax.training import evaluation
from sao_jax.training.components import Components
from tests.models.tiny import VOCAB as MODEL_VOCAB
from tests.models.tiny import dense, policy_params
from tests.rollout.engine.engine_test import config, requests
from tests.rollout.fakes import STOP, CharTokenizer, Echo, assert_logps_true, make_params
from tests.rollout.http_server import Process, save_table, serving
from tests.tiny_domain import TinyTokenizer, tiny_domain
from tests.training.loop_test import tiny_config
from tests.waiting import LONG_S, free_port, until

PARAMS = {v: make_params(v) for v in range(40)}
BOTH = pytest.mark.parametrize("protocol", ["sglang", "vllm"])


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch):
  monkeypatch.setattr(client, "_FIRST_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def url(root):
  with serving(weights_root=root) as address:
    yield address


def remote(url, root, *, make_env=Echo, protocol="sglang", tokenizer=None, save=save_table, attempts=6, timeout_s=60.0,
           check=None, send_seed=None, **changes):  # fmt: skip
  return RemoteEngine(
    remote=RemoteConfig(
      url=url, protocol=protocol, weights_dir=str(root), max_attempts=attempts, request_timeout_s=timeout_s,
      send_seed=send_seed,
    ),
    check=check,
    save_weights=save,
    make_env=make_env,
    tokenizer=tokenizer or CharTokenizer(),
    config=config(**{"num_slots": 6, "env_workers": 4, **changes}),
  )


def fixed(_chunk):
  return PARAMS[0], 0


@BOTH
def test_the_episodes_of_the_embedded_engine(url, root, protocol):
  made = []

  class Env(Echo):
    def __init__(self):
      super().__init__(3)
      made.append(self)

  with remote(url, root, make_env=Env, protocol=protocol) as engine:
    done = list(engine.generate(fixed, requests(25), seed=1))
    again = list(engine.generate(fixed, requests(25), seed=1))
    other = list(engine.generate(fixed, requests(25), seed=2))
    counters = engine.counters
  for batch in (done, again, other):
    assert sorted(x.episode_id for x in batch) == list(range(25))
  for x in done:
    assert_logps_true(x, PARAMS)
    assert x.ended == ("terminal" if x.num_turns == 3 and x.tokens[-1] == STOP else "truncated")
    assert x.text == CharTokenizer().decode(x.tokens) and len(x.tokens) <= 48
  assert any(x.num_turns > 1 for x in done)
  tokens = lambda batch: {x.episode_id: x.tokens.tolist() for x in batch}  # noqa: E731
  assert tokens(done) == tokens(again) != tokens(other)
  assert counters["episodes_finished"] == 75 and counters["failed_episodes"] == 0
  assert counters["tokens_generated"] == sum(x.num_actions for x in [*done, *again, *other])
  assert counters["busy_seconds"] > 0 and counters["weight_updates"] == 0
  assert len(made) <= 6 and [x.closed for x in made] == [1] * len(made)


@BOTH
def test_weights_change_within_a_trajectory(url, root, protocol, caplog):
  store = WeightStore()
  store.publish(PARAMS[0], 0)
  done, ids = [], itertools.count()
  changes = {"max_len": 250, "max_action_tokens": 200}
  with remote(url, root, make_env=lambda: Echo(6), protocol=protocol, **changes) as engine:
    thread = EngineThread(engine, weights=store, next_request=lambda: requests(1, next(ids))[0], emit=done.append)
    thread.start()
    version = tokens = 0
    deadline = time.monotonic() + 150
    while sum(x.mixed_versions for x in done) < 5 and time.monotonic() < deadline:
      thread.check()
      time.sleep(0.02)
      counters = engine.counters
      if version < 39 and counters["weight_updates"] == version and counters["tokens_generated"] > tokens:
        version, tokens = version + 1, counters["tokens_generated"]
        store.publish(PARAMS[version], version)
    thread.stop()
    assert engine.counters["failed_episodes"] == engine.counters["failed_attempts"] == 0
    assert not [x for x in caplog.records if x.name == client.__name__]  # an ordinary update is no fault
    assert len(list(root.iterdir())) <= 3
  assert sum(x.mixed_versions for x in done) >= 5
  # Within one action too, not only between turns.
  within = [np.diff(x.versions[a:b]) for x in done for a, b in actions(x)]
  assert any((steps > 0).any() for steps in within) and all((steps >= 0).all() for steps in within)
  for x in done:
    assert_logps_true(x, PARAMS)
  assert not list(root.iterdir())


def actions(trajectory):
  edges = np.flatnonzero(np.diff(np.concatenate([[0], trajectory.action_mask.astype(int), [0]])))
  return zip(edges[::2], edges[1::2], strict=True)


def test_a_schedule_trains_each_episode_once(url, root):
  queue = TrajectoryQueue(batch_size=4, group_size=1, max_staleness=3, capacity=8)
  with remote(url, root) as engine:
    requests, weights = RequestStream(num_tasks=9, group_size=1, seed=0), WeightStore()
    schedule = AsyncSchedule(engine=engine, requests=requests, queue=queue, weights=weights)
    weights.publish(PARAMS[0], 0)
    used = []
    for version in range(5):
      batch = schedule.next_batch(version)
      assert all(version - x.oldest_version <= 3 for x in batch)
      used += batch
      weights.publish(PARAMS[version + 1], version + 1)
    schedule.close()
  assert len({x.episode_id for x in used}) == len(used) == 20
  for x in used:
    assert_logps_true(x, PARAMS)


class WideTokenizer(CharTokenizer):
  vocab_size = MODEL_VOCAB


def test_a_server_that_is_killed_and_restarted_loses_nothing(tmp_path):
  killed = threading.Event()

  class LastOnesWait(Echo):
    """Two of the first eight episodes start only after the server was killed, so that not all can end before."""

    def reset(self, task_index):
      assert task_index not in (6, 7) or killed.wait(LONG_S)
      return super().reset(task_index)

  model = dense()
  versions = {0: policy_params(model), 1: jax.tree.map(lambda x: x * 1.5, policy_params(model))}
  save = lambda params, folder: models.save_hf(folder, model, params)  # noqa: E731
  save(versions[0], tmp_path / "checkpoint")
  (tmp_path / "weights").mkdir()
  arguments = [
    f"--checkpoint={tmp_path / 'checkpoint'}", f"--stop_ids={STOP}", "--num_slots=4",
    "--max_len=64", "--chunk_steps=2", f"--weights_root={tmp_path / 'weights'}",
  ]  # fmt: skip
  done = []
  with free_port() as port:
    server = Process(*arguments, f"--port={port}", log=tmp_path / "log")
    try:
      with remote(
        server.url,
        tmp_path / "weights",
        make_env=lambda: LastOnesWait(3),
        tokenizer=WideTokenizer(),
        save=save,
        attempts=1000,
        max_len=64,
      ) as engine:
        # The restarted server has the checkpoint's weights, not these.
        episodes = engine.generate(lambda _: (versions[1], 1), requests(16))
        done += itertools.islice(episodes, 3)
        server.kill()
        killed.set()
        until(lambda: engine.counters["failed_attempts"] >= 3)
        server = Process(*arguments, f"--port={port}", log=tmp_path / "log")
        done += episodes
        assert engine.counters["failed_episodes"] == 0
    finally:
      killed.set()
      server.kill()
  assert sorted(x.episode_id for x in done) == list(range(16))
  logits = jax.jit(models.policy_logits(model))
  for x in done:
    padded = np.zeros((1, 64), np.int32)
    padded[0, : x.tokens.size] = x.tokens
    logp = jax.nn.log_softmax(logits(versions[1], padded)[0])
    at = np.flatnonzero(x.action_mask)
    np.testing.assert_allclose(x.behavior_logp[at], logp[at - 1, x.tokens[at]], atol=1e-4)
    assert set(x.versions[at]) == {1}


class FakeServer:
  """Server whose `respond(count, body, label)` returns (status, JSON or bytes), or None for a broken connection."""

  def __init__(self, respond):
    fake = self
    self.requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = "HTTP/1.1"

      def do_POST(self):
        fake.serve(self, json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}"))

      def do_GET(self):
        fake.serve(self, None)

      def log_message(self, *_):
        pass

    self._respond = respond
    class Server(http.server.ThreadingHTTPServer):
      request_queue_size = 128  # With 5, clients that connect at once are let in after seconds.

    self._server = Server(("127.0.0.1", 0), Handler)
    self._server.daemon_threads = True
    self.url = f"http://127.0.0.1:{self._server.server_port}"
    self._label = "default"

  def serve(self, handler, body):
    path = handler.path
    if path in ("/model_info", "/weight_info"):
      response = 200, {"weight_version": self._label}
    elif path in ("/update_weights_from_disk", "/update_weight_version"):
      self._label = body.get("weight_version") or body["new_version"]
      response = 200, {}
    elif path in ("/generate", "/v1/completions"):
      self.requests.append(body)
      response = self._respond(len(self.requests), body, self._label)
    else:
      response = 200, {}
    if response is None:
      handler.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"text": ')
      handler.close_connection = True
      return
    self.reply(handler, *response)

  @staticmethod
  def reply(handler, status, content):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    with contextlib.suppress(OSError):  # the client may have disconnected
      handler.send_response(status)
      handler.send_header("Content-Length", str(len(data)))
      handler.end_headers()
      handler.wfile.write(data)

  def __enter__(self):
    threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
    return self

  def __exit__(self, *_):
    self._server.shutdown()
    self._server.server_close()


def good_sglang(body, label):
  return {
    "text": "", "output_ids": [3, STOP], "meta_info": {
      "finish_reason": {"type": "stop"}, "prompt_tokens": len(body["input_ids"]), "weight_version": label,
      "output_token_logprobs": [[-0.5, 3, None], [-0.25, STOP, None]],
    },
  }  # fmt: skip


def good_vllm(body, label):
  choice = {
    "finish_reason": "stop", "token_ids": [3, STOP], "prompt_token_ids": body["prompt"],
    "logprobs": {"token_logprobs": [-0.5, -0.25]},
  }  # fmt: skip
  return {"choices": [choice]}


def meta(**changes):
  return lambda response: response["meta_info"].update(changes)


def choice(**changes):
  return lambda response: response["choices"][0].update(changes)


def logprobs(*values):
  return meta(output_token_logprobs=[[x, i, None] for x, i in zip(values, [3, STOP], strict=False)])


MALFORMED = {
  "no_logprobs": (meta(output_token_logprobs=None), "2 tokens and no log-probs"),
  "fewer_logprobs": (logprobs(-0.5), "2 tokens, 1 log-probs"),
  "nan": (logprobs(-0.5, float("nan")), "finite and <= 0; received [nan]"),
  "inf": (logprobs(-float("inf"), -1.0), "finite and <= 0; received [-inf]"),
  "overflow": (logprobs(-1e300, -1.0), "finite and <= 0; received [-1e+300]"),
  "positive": (logprobs(0.001, -1.0), "finite and <= 0; received [0.001]"),
  "null": (logprobs(None, -1.0), "finite and <= 0; received [None]"),
  "text": (logprobs("-0.5", -1.0), "finite and <= 0"),
  "other_ids": (meta(output_token_logprobs=[[-0.5, 4, None], [-1.0, STOP, None]]), "must have the same token ids"),
  "not_triples": (meta(output_token_logprobs=[-0.5, -1.0]), "a list of [log-prob, id, text]"),
  "id_too_large": (lambda a: a.update(output_ids=[3, 20]), "ids must be in [0, 20); received [20]"),
  "id_negative": (lambda a: a.update(output_ids=[-1, STOP]), "received [-1]"),
  "id_text": (lambda a: a.update(output_ids=["3", STOP]), "received ['3']"),
  "id_long": (lambda a: a.update(output_ids=["x" * 10**6, STOP]), "received ['xxx"),
  "logprob_long": (logprobs("x" * 10**6, -1.0), "received ['xxx"),
  "reason_long": (meta(finish_reason={"type": "x" * 10**6}), "stop, length or abort; received 'xxx"),
  "no_ids": (lambda a: a.pop("output_ids"), "output_ids must be a list; received nothing"),
  "no_tokens": (lambda a: (a.update(output_ids=[]), logprobs()(a)), "must have 1 to 20 tokens; received 0"),
  "does_not_stop": (lambda a: (a.update(output_ids=[3, 4]), meta(output_token_logprobs=[[-1, 3, 0], [-1, 4, 0]])(a)),
                    "must end with its first stop id"),
  "goes_on": (lambda a: (a.update(output_ids=[STOP, 3]), meta(output_token_logprobs=[[-1, STOP, 0], [-1, 3, 0]])(a)),
              "must end with its first stop id"),
  "too_many": (lambda a: (a.update(output_ids=[3] * 21), meta(output_token_logprobs=[[-1, 3, 0]] * 21)(a)),
               "must have 1 to 20 tokens; received 21"),
  "reason": (meta(finish_reason={"type": "magic"}), "finish reason must be stop, length or abort; received 'magic'"),
  "other_prompt": (meta(prompt_tokens=999), "as sent; received 999"),
  "no_version": (meta(weight_version=None), "weight_version must be a str; received nothing"),
  "no_meta": (lambda a: a.pop("meta_info"), "meta_info must be a dict"),
  "vllm_no_logprobs": (choice(logprobs=None), "2 tokens and no log-probs"),
  "vllm_fewer": (choice(logprobs={"token_logprobs": [-1.0]}), "2 tokens, 1 log-probs"),
  "vllm_nan": (choice(logprobs={"token_logprobs": [-1.0, float("nan")]}), "received [nan]"),
  "vllm_no_ids": (choice(token_ids=None), "token_ids must be a list; received nothing"),
  "vllm_other_prompt": (choice(prompt_token_ids=[1, 2]), "ids sent; received 2 other ids"),
  "vllm_two": (lambda a: a.update(choices=a["choices"] * 2), "one choice; received 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_response_is_rejected_with_a_message(root, case, caplog):
  spoil, message = MALFORMED[case]
  protocol, good = ("vllm", good_vllm) if case.startswith("vllm") else ("sglang", good_sglang)

  def respond(count, body, label):
    response = good(body, label)
    if count == 2:
      spoil(response)
    return 200, response

  with FakeServer(respond) as fake, remote(fake.url, root, protocol=protocol, num_slots=1) as engine:
    with caplog.at_level(logging.WARNING):
      done = list(engine.generate(fixed, requests(4)))
    counters = engine.counters
  assert [x.episode_id for x in done] == [1, 2, 3]  # the second request is the second turn of episode 0
  assert counters["failed_by_kind"] == {"bad_response": 1}
  assert message in caplog.text and len(caplog.text) < 2000


PASSING = {
  "500": lambda count: (500, {"error": "out of memory"}),
  "503": lambda count: (503, {"error": "busy"}),
  "429": lambda count: (429, b"slow down"),
  "cut": lambda count: None,
  "not_json": lambda count: (200, b'{"meta_info": {"finish'),
  "html": lambda count: (502, b"<html>Bad Gateway</html>"),
  "hang": lambda count: time.sleep(8.0),
}


@pytest.mark.parametrize("case", PASSING)
def test_passing_errors_are_retried_and_then_end_the_run(root, case):
  healthy = threading.Event()

  def respond(count, body, label):
    if not healthy.is_set() and count > 1:
      if count == 3 and not broken:
        healthy.set()
      return PASSING[case](count)
    return 200, good_sglang(body, label)

  broken = False
  timeout_s = 4.0 if case == "hang" else LONG_S
  with FakeServer(respond) as fake, remote(fake.url, root, attempts=3, timeout_s=timeout_s, num_slots=1) as engine:
    done = list(engine.generate(fixed, requests(3)))
    assert sorted(x.episode_id for x in done) == [0, 1, 2] and engine.counters["failed_attempts"] == 2
    # The same request was sent again.
    assert [x["input_ids"] for x in fake.requests[1:4]] == [fake.requests[1]["input_ids"]] * 3
    for x in done:
      assert x.num_turns == 2 and (x.behavior_logp[x.action_mask] == [-0.5, -0.25] * 2).all()
    broken = True
    healthy.clear()
    with pytest.raises(ServerError, match=r"failed RemoteConfig\.max_attempts = 3 times in a row; the last time"):
      list(engine.generate(fixed, requests(3)))


class Forgetful(FakeServer):
  """Server that, while `ill`, loses its weights and rejects new ones; counts its rejections."""

  ill, rejected = False, 0

  def serve(self, handler, body):
    if self.ill:
      self._label = "default"
      if handler.path == "/update_weights_from_disk":
        self.rejected += 1
        handler.path = "/rejected"
        return handler.send_error(503)
    return super().serve(handler, body)


def test_the_next_call_repeats_an_update_that_failed(root):
  respond = lambda count, body, label: (200, good_sglang(body, label))  # noqa: E731
  with Forgetful(respond) as fake, remote(fake.url, root, attempts=3, num_slots=2) as engine:
    assert len(list(engine.generate(fixed, requests(3)))) == 3
    fake.ill = True
    with pytest.raises(ServerError, match="update_weights_from_disk: status 503"):
      list(engine.generate(fixed, requests(3)))
    fake.ill = False
    assert len(list(engine.generate(fixed, requests(3)))) == 3


def test_a_run_that_is_stopped_during_an_update_does_not_block_the_next_call(root):
  respond = lambda count, body, label: (200, good_sglang(body, label))  # noqa: E731
  with Forgetful(respond) as fake, remote(fake.url, root, attempts=1000, num_slots=2) as engine:
    store, numbers = WeightStore(), itertools.count()
    store.publish(PARAMS[0], 0)
    thread = EngineThread(
      engine, weights=store, next_request=lambda: requests(1, next(numbers))[0],
      emit=lambda _: setattr(fake, "ill", True),
    )  # fmt: skip
    thread.start()
    until(lambda: fake.rejected)
    thread.stop()
    fake.ill = False
    assert len(list(engine.generate(store, requests(3)))) == 3


@pytest.mark.parametrize("path", ["/generate", "/update_weights_from_disk"])
def test_an_endless_response_is_rejected(root, path, monkeypatch):
  monkeypatch.setattr(client, "_MAX_RESPONSE_BYTES", 100_000)

  class Endless(FakeServer):
    def serve(self, handler, body):
      if handler.path != path:
        return super().serve(handler, body)
      handler.send_response(200)
      handler.send_header("Transfer-Encoding", "chunked")
      handler.end_headers()
      with contextlib.suppress(OSError):
        while True:
          handler.wfile.write(b"1000\r\n" + b" " * 4096 + b"\r\n")

  error = TooManyFailuresError if path == "/generate" else ServerError
  with (
    Endless(None) as fake,
    remote(fake.url, root, num_slots=1) as engine,
    pytest.raises(error, match="more than 100000 bytes"),
  ):
    list(engine.generate(fixed, requests(200)))


def test_the_same_weights_under_a_new_version(url, root):
  with remote(url, root) as engine:
    for version in (3, 4):
      for x in engine.generate(lambda _, version=version: (PARAMS[0], version), requests(2)):
        assert set(x.versions[x.action_mask]) == {version}


def test_no_server_at_the_url(root):
  with socket.socket() as silent:
    silent.bind(("127.0.0.1", 0))  # and does not listen: connections are refused, and no other process gets the port
    url = f"http://127.0.0.1:{silent.getsockname()[1]}"
    message = rf"{re.escape(url)} failed RemoteConfig\.max_attempts = 3 times"
    with remote(url, root, attempts=3) as engine, pytest.raises(ServerError, match=message):
      list(engine.generate(fixed, requests(3)))


def test_permanent_errors_end_the_run_or_fail_the_episode_without_retries(root, caplog):
  with FakeServer(lambda *_: (404, {"detail": "Not Found"})) as fake, remote(fake.url, root) as engine:
    with pytest.raises(ServerError, match=r"POST /generate: status 404: .*Not Found"):
      list(engine.generate(fixed, requests(3)))
    assert len(fake.requests) <= 3
  respond = lambda count, body, label: (400, b"too long") if count == 1 else (200, good_sglang(body, label))  # noqa: E731
  with FakeServer(respond) as fake, remote(fake.url, root, num_slots=1) as engine:
    assert len(list(engine.generate(fixed, requests(3)))) == 2
    assert engine.counters["failed_by_kind"] == {"request_refused": 1} and "status 400: too long" in caplog.text
  with (
    FakeServer(lambda *_: (400, b"no")) as fake,
    remote(fake.url, root) as engine,
    pytest.raises(TooManyFailuresError, match="request_refused"),
  ):
    list(engine.generate(fixed, requests(200)))


@BOTH
def test_weights_of_unknown_origin_are_replaced_and_their_completions_rejected(root, protocol):
  """Another run, or a restart, changed the server's weights without this client."""
  good = good_sglang if protocol == "sglang" else good_vllm

  def respond(count, body, label):
    if count == 3:
      fake._label = label = "5"  # looks like a version, but is no label of this client
    return 200, good(body, label)

  with FakeServer(respond) as fake, remote(fake.url, root, protocol=protocol, num_slots=1) as engine:
    done = list(engine.generate(lambda _: (PARAMS[7], 7), requests(3)))
    assert fake._label.startswith("7-") and engine.counters["failed_attempts"] == 1
  assert [x.episode_id for x in done] == [0, 1, 2] and {v for x in done for v in x.versions[x.action_mask]} == {7}
  assert len(fake.requests) == 7  # six actions, one of them requested twice


@BOTH
def test_a_server_that_returns_to_older_weights_is_sent_the_newest_again(root, protocol):
  good = good_sglang if protocol == "sglang" else good_vllm
  labels = []

  def respond(count, body, label):
    if label not in labels:
      labels.append(label)
    if count == 8:  # in the second call
      fake._label = label = labels[0]  # a label of this client, but not the newest
    return 200, good(body, label)

  with FakeServer(respond) as fake, remote(fake.url, root, protocol=protocol, num_slots=1) as engine:
    for version in (3, 4):
      done = list(engine.generate(lambda _, version=version: (PARAMS[version], version), requests(3)))
      assert {v for x in done for v in x.versions[x.action_mask]} == {version}
    assert fake._label.startswith("4-") and engine.counters["failed_attempts"] == 1


@pytest.mark.parametrize(("header", "least"), [("1", 1.0), ("Wed, 21 Oct 2026 07:28:00 GMT", 0.0), ("-5", 0.0)])
def test_the_client_waits_as_long_as_retry_after_says(root, header, least):
  class Busy(FakeServer):
    rejected_at = 0

    def serve(self, handler, body):
      if handler.path != "/generate" or self.rejected_at:
        return super().serve(handler, body)
      self.rejected_at = time.monotonic()
      handler.send_response(429)
      handler.send_header("Retry-After", header)
      handler.send_header("Content-Length", "0")
      handler.end_headers()
      return None

  retried_at = []

  def respond(count, body, label):
    retried_at.append(time.monotonic())
    return 200, good_sglang(body, label)

  with Busy(respond) as fake, remote(fake.url, root, num_slots=1) as engine:
    assert len(list(engine.generate(fixed, requests(1)))) == 1
  assert least <= retried_at[0] - fake.rejected_at < 30


def test_redirects_are_not_followed(root):
  redirected = []

  class Elsewhere(FakeServer):
    def serve(self, handler, body):
      if handler.path == "/elsewhere":
        redirected.append(body)
      if handler.path != "/generate":
        return super().serve(handler, body)
      handler.send_response(307)
      handler.send_header("Location", f"{self.url}/elsewhere")
      handler.send_header("Content-Length", "0")
      handler.end_headers()
      return None

  with (
    Elsewhere(None) as fake,
    remote(fake.url, root, num_slots=1) as engine,
    pytest.raises(ServerError, match="POST /generate: status 307"),
  ):
    list(engine.generate(fixed, requests(1)))
  assert not redirected


RAW = {
  "no HTTP": b"\x00\x01\x02\r\n\r\n",
  "nothing": b"",
  "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
  "a header without end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000,
  "a chunk cut off": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
  "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
  "no gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nabcde",
  "brackets": b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n" + b"[" * 50_000,
}


@pytest.mark.parametrize("case", RAW)
def test_bytes_that_are_no_response_are_retried(root, case):
  with socket.create_server(("127.0.0.1", 0)) as listener:

    def respond():
      while True:
        try:
          connection, _ = listener.accept()
        except OSError:  # the end of the test
          return
        with connection, contextlib.suppress(OSError):  # the client may have closed the connection
          connection.recv(65536)
          connection.sendall(RAW[case])

    threading.Thread(target=respond, daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with remote(url, root, attempts=2, timeout_s=20.0) as engine, pytest.raises(ServerError) as caught:
      list(engine.generate(fixed, requests(1)))
    # Only the status of an update matters; a completion needs a valid body.
    assert "max_attempts = 2 times in a row" in str(caught.value) and engine.counters["failed_attempts"] >= 2


def test_faults_of_environments_fail_their_episode_alone(url, root):
  release = threading.Event()
  made = []

  class Env(Echo):
    def __init__(self):
      super().__init__(1)
      made.append(self)

    def reset(self, task_index):
      if task_index == 1:
        raise OSError("no such task")
      return super().reset(task_index)

    def step(self, action):
      if self.task == 2:
        release.wait(500)
      if self.task == 3:
        raise SystemExit(3)
      return super().step(action)

  failed = []
  eager = make_params(0, stop_bias=50.0)
  with remote(url, root, make_env=Env, env_timeout_s=3.0, reset_retries=1) as engine:
    done = list(engine.generate(lambda _: (eager, 0), requests(12), on_failure=failed.append))
    counters = engine.counters
    release.set()
  assert sorted(x.episode_id for x in done) == [0, *range(4, 12)]
  assert sorted(x.episode_id for x in failed) == [1, 2, 3]
  assert counters["failed_by_kind"] == {"reset_error": 1, "timeout": 1, "step_error": 1}
  until(lambda: all(x.closed for x in made))
  assert [x.closed for x in made] == [1] * len(made)


def test_actions_that_are_cut_do_not_hide_that_every_step_fails(url, root):
  class Broken(Echo):
    def step(self, action):
      raise NameError("a tool that never works")

  done = []
  broken = remote(url, root, make_env=Broken, max_action_tokens=3)
  with broken as engine, pytest.raises(TooManyFailuresError, match="16 of the last 16"):
    done.extend(engine.generate(fixed, requests(200)))
  assert done and engine.counters["episodes_answered"] == 0


def test_environments_whose_close_hangs_do_not_block(url, root):
  release = threading.Event()

  class Env(Echo):
    def step(self, action):
      if self.task % 3 == 1:
        raise RuntimeError("tool died")
      return super().step(action)

    def close(self):
      if not release.is_set():
        release.wait(500)

  eager = make_params(0, stop_bias=50.0)
  began = time.monotonic()
  with remote(url, root, make_env=lambda: Env(1), env_workers=2, env_timeout_s=3.0) as engine:
    done = list(engine.generate(lambda _: (eager, 0), requests(15)))
    assert engine.counters["failed_by_kind"] == {"step_error": 5}
    release.set()
  assert len(done) == 10 and time.monotonic() - began < LONG_S


@pytest.mark.parametrize("what", ["1 of the environments", "Connections to http"])
def test_what_does_not_close_is_left_behind_and_logged(url, root, what, monkeypatch, caplog):
  release = threading.Event()

  class Env(Echo):
    def close(self):
      super().close()
      if "environments" in what:
        release.wait(500)

  really_close = client.ServerClient.close

  async def close(client):
    await really_close(client)
    if "Connections" in what:
      await asyncio.sleep(500)

  monkeypatch.setattr(remote_module, "_CLOSE_S", 0.5)
  monkeypatch.setattr(client.ServerClient, "close", close)
  with remote(url, root, make_env=lambda: Env(1), num_slots=1) as engine:
    list(engine.generate(fixed, requests(2)))
    began = time.monotonic()
  assert time.monotonic() - began < LONG_S
  logged = [x.getMessage() for x in caplog.records if x.name == remote_module.__name__]
  assert sum(x.startswith(what) for x in logged) == 1  # A busy machine may leave the other behind, too.
  assert not list(root.iterdir())
  release.set()


def test_early_close_and_one_call_at_a_time(url, root):
  with remote(url, root) as engine:
    iterator = engine.generate(fixed, (requests(1, i)[0] for i in itertools.count()))
    got = [next(iterator) for _ in range(10)]
    with pytest.raises(RuntimeError, match="still running"):
      next(engine.generate(fixed, requests(1)))
    iterator.close()
    assert len({x.episode_id for x in got}) == 10
    assert len(list(engine.generate(fixed, requests(3)))) == 3
    assert list(engine.generate(fixed, [])) == []
    limited = [EpisodeRequest(task_index=i, episode_id=i, group_id=i, max_action_tokens=2) for i in range(9)]
    assert all((b - a) <= 2 for x in engine.generate(fixed, limited) for a, b in actions(x))


@pytest.mark.parametrize(
  "changes",
  [{"url": "localhost:8000"}, {"protocol": "tgi"}, {"weights_dir": None}, {"max_attempts": 0},
   {"wait_s": -1.0}, {"reload_method": "os.system"}, {"request_timeout_s": 0.0}],
)  # fmt: skip
def test_bad_settings(changes):
  with pytest.raises(ValueError, match="received"):
    RemoteConfig(**{"url": "http://localhost:8000", "weights_dir": "/tmp/w", **changes})


def test_log_probs_ignore_the_truncation(root):
  with pytest.raises(ValueError, match=r"top_p must be 1 .*received 0\.9"):
    remote("http://localhost:1", root, protocol="sglang", top_p=0.9)


def test_a_run_with_a_remote_config_gets_its_rollouts_from_the_server(tmp_path):
  config = tiny_config(schedule="async", batch_size=4)
  (tmp_path / "weights").mkdir()
  completions = Completions(
    model=models.cached_policy(config.policy),
    params=models.init_policy(config.policy, jax.random.key(9)),
    label="default",
    vocab_size=config.policy.vocab_size,
    stop_ids=TinyTokenizer.stop_ids,
    config=config.engine,
  )
  kept = []
  load = lambda folder: kept[0] if kept else models.load_hf(folder)[1]  # noqa: E731
  with serving(completions=completions, load=load, weights_root=tmp_path / "weights") as url:
    settings = RemoteConfig(url=url, weights_dir=str(tmp_path / "weights"))
    with Components(dataclasses.replace(config, remote=settings), tiny_domain()) as parts:
      policy = parts.init_policy()
      result = evaluation.evaluate(parts.engine, parts.domain, policy, num_episodes=4, version=0)
      schedule, weights = parts.make_schedule()
      with contextlib.closing(schedule):
        weights.publish(policy, 1)
        batch = schedule.next_batch(1)
      assert completions.label.startswith("1-") and parts.engine.counters["checked_versions"] == 2
      kept.append(policy)  # from now on the server keeps its weights
      moved = jax.tree.map(lambda x: x * 1.5, policy)
      with pytest.raises(LogprobMismatchError, match="weights of version 2"):
        evaluation.evaluate(parts.engine, parts.domain, moved, num_episodes=4, version=2)
  assert len(result.trajectories) == 4 and result.failed == 0
  logits = jax.jit(models.policy_logits(config.policy))
  for x in [*result.trajectories, *batch]:
    padded = np.zeros((1, 32), np.int32)
    padded[0, : x.tokens.size] = x.tokens
    logp = jax.nn.log_softmax(logits(policy, padded)[0])
    at = np.flatnonzero(x.action_mask)
    np.testing.assert_allclose(x.behavior_logp[at], logp[at - 1, x.tokens[at]], atol=1e-4)
  assert {v for x in batch for v in x.versions[x.action_mask]} == {1}
  with pytest.raises(ValueError, match=r"lag_switch_chunks must be None with a remote\.url"):
    tiny_config(schedule="lagged", lag=1, lag_switch_chunks=2, remote=settings)
