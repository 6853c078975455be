"""Weight updates that abort requests before their first token."""

from __future__ import annotations

import asyncio
import time

import pytest

from sao_jax.rollout.episodes import EpisodeFailure
from sao_jax.rollout.remote import client as server_client
from sao_jax.rollout.remote.client import ServerClient, ServerError
from sao_jax.rollout.remote.config import RemoteConfig
from sao_jax.rollout.remote.protocols import VLLM, Sampling, SGLang
from sao_jax.rollout.server.completions import Completions
from tests.rollout.fakes import POLICY, STOP, VOCAB, make_params
from tests.rollout.http_server import ENGINE, call, save_table, serving
from tests.rollout.remote.engine_test import FakeServer, good_sglang, good_vllm
from tests.waiting import LONG_S, free_port, until

PROMPT = [5, 6, 7]
GOOD = {"sglang": good_sglang, "vllm": good_vllm}
REASON = {"type": "abort", "message": "Abort in waiting queue"}
EMPTY = {
  "sglang-whole": {"text": "", "output_ids": [], "meta_info": {"finish_reason": REASON, "output_token_logprobs": []}},
  "sglang-no ids": {"text": "", "meta_info": {"finish_reason": REASON, "prompt_tokens": 0, "completion_tokens": 0}},
  "sglang-no meta": {"text": "", "output_ids": [], "meta_info": None},
  "vllm-whole": {"choices": [{"text": "", "token_ids": [], "finish_reason": "abort", "logprobs": None}]},
  "vllm-null": {"choices": [{"text": None, "token_ids": None, "finish_reason": "abort"}]},
  "vllm-no choice": {"choices": []},
}


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch):
  monkeypatch.setattr(server_client, "_FIRST_WAIT_S", 0.01)


class Queueing(FakeServer):
  """Holds request n, if `held(n)`, until the n-th update after the first, and then responds with `empty`."""

  def __init__(self, protocol, empty, held):
    self.pauses = 0

    def respond(count, body, label):
      if not held(count):
        return 200, GOOD[protocol](body, label)
      until(lambda: self.pauses > count)
      return 200, empty

    super().__init__(respond)

  def serve(self, handler, body):
    if "pause" in handler.path:
      self.pauses += 1
    return super().serve(handler, body)


def client_of(url, folder, protocol, attempts=3):
  config = RemoteConfig(url=url, protocol=protocol, weights_dir=str(folder), max_attempts=attempts)
  sampling = Sampling(vocab_size=VOCAB, stop_ids=(STOP,), temperature=1.0)
  return ServerClient(config, SGLang() if protocol == "sglang" else VLLM(), sampling)


async def updated_while_it_waits(fake, client, folder, updates):
  """A request that is in the server's queue during so many updates."""
  await client.publish(folder, 0)
  running = asyncio.create_task(client.generate(PROMPT, max_tokens=4, seed=1))
  try:
    for version in range(1, updates + 1):
      await asyncio.to_thread(until, lambda version=version: len(fake.requests) == version)
      await client.publish(folder, version)
    return await asyncio.wait_for(running, LONG_S)
  finally:
    running.cancel()
    await client.close()


@pytest.mark.parametrize("case", EMPTY)
def test_a_request_that_an_update_aborts_before_its_first_token_is_sent_again(case, tmp_path):
  protocol = case.partition("-")[0]
  with Queueing(protocol, EMPTY[case], lambda count: count <= 5) as fake:
    client = client_of(fake.url, tmp_path, protocol)
    done, version = asyncio.run(updated_while_it_waits(fake, client, tmp_path, updates=5))
    assert (done.tokens.tolist(), done.logp.tolist(), done.finish, version) == ([3, STOP], [-0.5, -0.25], "stop", 5)
    assert len(fake.requests) == 6 and all(x == fake.requests[0] for x in fake.requests)
    assert client.counts["failed_attempts"] == 0  # more updates than attempts, and none counts as a failure


@pytest.mark.parametrize("case", EMPTY)
def test_a_request_that_every_update_aborts_fails_its_episode(case, tmp_path, monkeypatch):
  monkeypatch.setattr(server_client, "_MAX_EMPTY", 4)
  protocol = case.partition("-")[0]
  with Queueing(protocol, EMPTY[case], lambda count: True) as fake:
    client = client_of(fake.url, tmp_path, protocol)
    with pytest.raises(EpisodeFailure, match="4 weight updates in a row aborted the request before") as caught:
      asyncio.run(updated_while_it_waits(fake, client, tmp_path, updates=4))
    assert caught.value.kind == "aborted" and len(fake.requests) == 4


@pytest.mark.parametrize("case", EMPTY)
def test_without_an_update_an_empty_response_is_a_failure(case, tmp_path):
  protocol = case.partition("-")[0]

  async def run(client):
    await client.publish(tmp_path, 0)
    try:
      await client.generate(PROMPT, max_tokens=4, seed=1)
    finally:
      await client.close()

  error, num_requests = (EpisodeFailure, 1) if case.endswith(("no meta", "no choice")) else (ServerError, 3)
  message = "neither tokens nor a finish reason" if num_requests == 1 else "3 times in a row.* the server aborted"
  with FakeServer(lambda *_: (200, EMPTY[case])) as fake:
    with pytest.raises(error, match=message):
      asyncio.run(run(client_of(fake.url, tmp_path, protocol)))
    assert len(fake.requests) == num_requests


def test_a_server_that_stays_away_ends_the_run_after_some_seconds(tmp_path):
  sampling = Sampling(vocab_size=VOCAB, stop_ids=(STOP,), temperature=1.0)

  async def publish(url):
    client = ServerClient(RemoteConfig(url=url, weights_dir=str(tmp_path), wait_s=0.5), SGLang(), sampling)
    try:
      await client.publish(tmp_path, 0)
    finally:
      await client.close()

  began = time.monotonic()
  match = r"failed for RemoteConfig\.wait_s = 0\.5 s; the last time: .*/v1/models"
  with free_port() as port, pytest.raises(ServerError, match=match):
    asyncio.run(publish(f"http://127.0.0.1:{port}"))
  assert time.monotonic() - began >= 0.5


def test_one_question_for_the_label_answers_for_many_completions(tmp_path):
  class Slow(FakeServer):
    asked = 0

    def serve(self, handler, body):
      if handler.path == "/weight_info":
        self.asked += 1
        until(lambda: len(self.requests) == 20)  # however slowly they arrive
        time.sleep(0.3)
      return super().serve(handler, body)

  async def run(client):
    await client.publish(tmp_path, 0)
    done = await asyncio.gather(*(client.generate(PROMPT, max_tokens=4, seed=i) for i in range(20)))
    await client.close()
    return done

  with Slow(lambda count, body, label: (200, good_vllm(body, label))) as fake:
    done = asyncio.run(run(client_of(fake.url, tmp_path, "vllm")))
  assert [version for _, version in done] == [0] * 20 and len(fake.requests) == 20 and fake.asked <= 5


@pytest.mark.parametrize("protocol", ["sglang", "vllm"])
def test_this_librarys_server_aborts_waiting_requests_and_receives_them_again(protocol, tmp_path):
  made = Completions(
    model=POLICY, params=make_params(0), label="default", vocab_size=VOCAB, stop_ids=(STOP,), config=ENGINE
  )
  for version in range(2):
    save_table(make_params(version), tmp_path / str(version))

  async def run(url):
    client = client_of(url, tmp_path, protocol)
    await client.publish(tmp_path / "0", 0)
    assert (await asyncio.to_thread(call, f"{url}/pause?mode=wait", {}))[0] == 200
    running = asyncio.create_task(client.generate(PROMPT, max_tokens=4, seed=1))
    await asyncio.to_thread(until, lambda: made.outstanding)
    await client.publish(tmp_path / "1", 1)
    done, version = await asyncio.wait_for(running, LONG_S)
    await client.close()
    assert done.tokens.size and version == 1 and client.counts["failed_attempts"] == 0

  with serving(completions=made, weights_root=tmp_path) as url:
    asyncio.run(run(url))
