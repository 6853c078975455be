"""Client of one server: requests, retries, weight updates, and the policy version of each completion."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import pathlib
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp

from sao_jax.rollout.episodes import EpisodeFailure
from sao_jax.rollout.remote.config import RemoteConfig
from sao_jax.rollout.remote.protocols import (
  BadResponseError,
  Call,
  EmptyResponseError,
  Generated,
  Sampling,
  ServerProtocol,
)
from sao_jax.rollout.remote.server_info import TOKENS_PATH, ServerInfo, read_server_info

_log = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_LONGEST_RETRY_AFTER_S = 60.0
_MAX_RESPONSE_BYTES = 256 * 1024 * 1024
_MAX_EMPTY = 100
"""Number of updates in a row that may abort a request before its first token. After that its episode fails."""
_IDLE_S = 2.0
"""Seconds for which an idle connection is kept: less than a server keeps it (vLLM's default is 5)."""
_DRAIN_S = 1.0
"""Seconds to wait for the completions that a pause aborted, before new weights are loaded."""


class ServerError(RuntimeError):
  """The server cannot be used: no attempt succeeded, or it responds in an unexpected way."""


class _RetryLaterError(Exception):
  """An attempt failed, but a later one may succeed.

  Args:
    message: the cause.
    wait_s: seconds to wait at least, if the server said so.
    by_server: whether the server responded, with an error.
  """

  def __init__(self, message: str, *, wait_s: float = 0.0, by_server: bool = False):
    super().__init__(message)
    self.wait_s, self.by_server = wait_s, by_server


class _Attempts:
  """Failed attempts at one request or update, up to the limits of the config."""

  def __init__(self, config: RemoteConfig, url: str):
    self._config, self._url = config, url
    self._count = 0
    self._began: float | None = None

  def next_wait(self, failure: _RetryLaterError) -> float:
    """Counts a failure, and returns the seconds until the next attempt.

    Raises:
      ServerError: a limit is reached.
    """
    config, now = self._config, time.monotonic()
    self._began = now if self._began is None else self._began
    self._count += 1
    if self._count == config.max_attempts:
      limit = f"RemoteConfig.max_attempts = {config.max_attempts} times in a row"
      raise ServerError(f"{self._url} failed {limit}; the last time: {failure}")
    if now - self._began >= config.wait_s:
      raise ServerError(f"{self._url} failed for RemoteConfig.wait_s = {config.wait_s} s; the last time: {failure}")
    # Jitter, so that requests to a server that comes back do not all arrive at once.
    wait = min(_FIRST_WAIT_S * 2.0 ** min(self._count - 1, 10), _LONGEST_WAIT_S) * random.uniform(0.75, 1.25)
    return max(min(wait, self._began + config.wait_s - now), failure.wait_s)


class ServerClient:
  """Client for completions and weight updates of a server. Use it within one event loop.

  Every update has a unique label (the version and a random part), which the server reports. A completion is accepted
  only if its label is one of this client's. A server that restarted, or was used by another run, or returned to older
  weights, is sent the newest weights again.

  A completion never mixes versions: an update aborts running requests, and loads the weights when all of them have
  returned; the caller continues with a new request.

  Args:
    config: the server.
    protocol: its protocol.
    sampling: sampling settings of every request.
    check_server: called with the server's settings before its first update, and after a restart; may raise.
  """

  def __init__(
    self,
    config: RemoteConfig,
    protocol: ServerProtocol,
    sampling: Sampling,
    check_server: Callable[[ServerInfo], None] = lambda info: None,
  ):
    assert config.url is not None
    self.url = config.url.rstrip("/")
    self._config = config
    self._protocol = protocol
    self._sampling = sampling
    self._check_server = check_server
    self.info: ServerInfo | None = None
    """The server's settings; None: not read since it started."""
    self._session: aiohttp.ClientSession | None = None
    self._versions: dict[str, int] = {}
    self._newest: tuple[pathlib.Path, str] | None = None
    """Folder and label of the newest weights."""
    self._updating = asyncio.Lock()
    self._up_to_date = False
    """Whether the server has the newest weights, as far as this client knows."""
    self._pauses = 0
    self._loads = 0
    """Number of times that the server was told to load weights."""
    self._running = 0
    self._all_returned = asyncio.Event()
    self._tickets = itertools.count()
    self._asking = asyncio.Lock()
    self._answer: tuple[int, str | None] = -1, None
    """Ticket and result of the last question for the label."""
    self._failing = False
    self.counts = collections.Counter[str]()

  async def generate(
    self, prompt: Sequence[int], *, max_tokens: int, seed: int, any_id: bool = False
  ) -> tuple[Generated, int]:
    """Generates a completion of at least one token.

    A request that an update aborts before its first token is sent again after the update.

    Args:
      prompt: token ids.
      max_tokens: maximum tokens of the completion, >= 1.
      seed: sampling seed; not sent if the config or the server forbids it.
      any_id: whether to accept ids beyond the tokenizer's.

    Returns:
      The completion, and the policy version that generated it.

    Raises:
      EpisodeFailure: the server rejected the request, or returned a bad response, or updates aborted every request.
      ServerError: no attempt succeeded.
    """
    sampling = dataclasses.replace(self._sampling, vocab_size=2**31) if any_id else self._sampling
    for _ in range(_MAX_EMPTY):
      completion = await self._try_generate(prompt, max_tokens, seed, sampling)
      if completion is not None:
        return completion
    message = f"{_MAX_EMPTY} weight updates in a row aborted the request before its first token."
    raise EpisodeFailure("aborted", f"{self.url}: {message}")

  async def _try_generate(
    self, prompt: Sequence[int], max_tokens: int, seed: int, sampling: Sampling
  ) -> tuple[Generated, int] | None:
    """Returns what `generate` does; None if an update aborted the request before its first token."""
    attempts = _Attempts(self._config, self.url)
    while True:
      await self._ensure_weights()
      send_seed = self._config.send_seed
      if send_seed is None:
        send_seed = self.info is None or not self.info.ends_at_seeds
      call = self._protocol.generate_call(
        prompt, max_tokens=max_tokens, seed=seed if send_seed else None, sampling=sampling
      )
      label, pauses, loads = self._newest_label(), self._pauses, self._loads
      try:
        async with self._counted():
          response = await self._post(call)
        done = self._protocol.parse_response(response, prompt, max_tokens=max_tokens, sampling=sampling)
        if not done.tokens.size:
          if self._pauses == pauses:
            raise _RetryLaterError("the server aborted the request.")
          return None
        actual = done.label or await self._label_of(label, loads)
        if actual is None:
          return None
        if actual not in self._versions:
          raise _RetryLaterError(f"the completion has the label {actual!r:.80}, which this run has not sent.")
        if actual != label and self._pauses == pauses:
          raise _RetryLaterError(f"the completion has the label {actual!r:.80}; the newest weights have {label!r}.")
        self._failing = False
        return done, self._versions[actual]
      except BadResponseError as error:
        if isinstance(error, EmptyResponseError) and self._pauses != pauses:
          return None  # aborted by the update
        raise EpisodeFailure("bad_response", f"{self.url}{call[0]}: {error}") from error
      except _RetryLaterError as error:
        if self._pauses != pauses and error.by_server:
          return None  # some versions of vLLM answer so when an update aborts a request before its first token
        failure = error
      await self._after_failure(attempts, failure)

  @contextlib.asynccontextmanager
  async def _counted(self) -> AsyncIterator[None]:
    """Counts a running request, for `_drain`."""
    self._running += 1
    self._all_returned.clear()
    try:
      yield
    finally:
      self._running -= 1
      if not self._running:
        self._all_returned.set()

  async def _drain(self) -> None:
    """Waits until every aborted request has returned, so that all of its tokens are known to be of the old weights.

    Responses that name their weights need no wait. A request that reached the server during the pause is held by it,
    and returns with the new weights.
    """
    if self._running and not self._protocol.names_weights:
      with contextlib.suppress(TimeoutError):  # `_label_of` gives up on such completions
        async with asyncio.timeout(_DRAIN_S):
          await self._all_returned.wait()

  async def publish(self, directory: pathlib.Path, version: int) -> None:
    """Makes the server use the weights in `directory` for every later completion.

    Args:
      directory: Hugging Face checkpoint, which the server sees under the same path.
      version: policy version, for the completions.

    Raises:
      ServerError: no attempt succeeded.
    """
    label = f"{version}-{secrets.token_hex(4)}"
    async with self._updating:
      self._versions[label] = version
      self._newest = directory, label
      await self._update(directory, label)

  async def close(self) -> None:
    """Closes the connections."""
    if self._session is not None:
      await self._session.close()

  async def _ensure_weights(self) -> None:
    """Waits for the current update. Repeats the last update if it was cancelled or ran out of attempts."""
    if not self._up_to_date:
      async with self._updating:
        if not self._up_to_date and self._newest is not None:
          await self._update(*self._newest)

  def _newest_label(self) -> str:
    assert self._newest is not None, "publish() comes first"
    return self._newest[1]

  async def _update(self, directory: pathlib.Path, label: str) -> None:
    """Pauses the server, loads the weights and resumes it, with retries. The caller holds `_updating`."""
    self._up_to_date = False
    attempts = _Attempts(self._config, self.url)
    while True:
      self._pauses += 1
      try:
        if self.info is None:
          info = await read_server_info(self._ask, self._config.protocol)
          self._check_server(info)
          self._protocol.use(info)
          self.info = info
        pause, *load_and_resume = self._protocol.update_calls(directory, label)
        await self._post(pause)
        await self._drain()
        self._loads += 1
        for call in load_and_resume:
          await self._post(call)
        self._up_to_date = True
        return
      except _RetryLaterError as error:
        failure = error
      await self._wait(attempts, failure)

  async def _after_failure(self, attempts: _Attempts, failure: _RetryLaterError) -> None:
    """Waits, then sends the newest weights again if the server does not have them (it may have restarted)."""
    await self._wait(attempts, failure)
    async with self._updating:
      if self._newest is None:
        return
      directory, label = self._newest
      try:
        found = await self._label()
      except _RetryLaterError as error:
        _log.info("%s: %s", self.url, error)  # the next attempt meets the same problem and counts it
        return
      if found != label:
        _log.warning("%s has weights %.80r; sending %s again", self.url, found, directory)
        self.info = None  # it may be another server now
        await self._update(directory, label)

  async def _wait(self, attempts: _Attempts, failure: _RetryLaterError) -> None:
    self.counts["failed_attempts"] += 1
    wait = attempts.next_wait(failure)
    if not self._failing:  # logged once per outage, not once per request
      _log.warning("%s: %s; retrying", self.url, failure)
    self._failing = True
    await asyncio.sleep(wait)

  async def _label_of(self, sent_with: str, loads: int) -> str | None:
    """Returns the label of a completion whose response has none; None if its weights are unknown.

    If no weights were loaded since the request was sent, they are those that it was sent with, unless the server has
    restarted or serves another run. One question for the server's label answers for all completions before it.

    Args:
      sent_with: label of the newest weights when the request was sent.
      loads: number of loads then.

    Raises:
      _RetryLaterError: the server has other weights.
    """
    if self._loads != loads:
      return None
    arrived = next(self._tickets)
    async with self._asking:
      if self._answer[0] < arrived:
        asked = next(self._tickets)
        self._answer = asked, await self._label()
    now = self._answer[1]
    if now != sent_with and (now not in self._versions or self._loads == loads):
      raise _RetryLaterError(f"the server has weights {now!r:.80}; the completion was sent with {sent_with!r}.")
    return sent_with

  async def _label(self) -> str | None:
    """Returns the label that the server reports now."""
    response = await self._request("GET", self._protocol.label_path, None)
    label = response.get("weight_version") if isinstance(response, dict) else None
    return label if isinstance(label, str) else None

  async def _post(self, call: Call) -> Any:
    return await self._request("POST", *call)

  async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any]:
    """Sends a request that may be unknown to the server; returns its status and JSON.

    Raises:
      _RetryLaterError: a later attempt may succeed.
    """
    status, data = await self._send(method, path, body)
    try:
      return status, json.loads(data)
    except (ValueError, RecursionError):
      return status, None

  async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """Sends a request and returns the JSON of the response; None for a POST of which only the status matters.

    Raises:
      _RetryLaterError: a later attempt may succeed (timeout, broken connection, server error).
      EpisodeFailure: the server rejected a generate request.
      BadResponseError: the response to a generate request is too large.
      ServerError: any other unexpected response.
    """
    what = f"{method} {path}"
    status, data = await self._send(method, path, body)
    text = data[:400].decode("utf-8", "replace")
    if status in (400, 413, 422) and path in _GENERATE_PATHS:
      raise EpisodeFailure("request_refused", f"{self.url}, {what}: status {status}: {text}")
    if status != 200:
      raise ServerError(f"{self.url}, {what}: status {status}: {text}")
    if path not in _GENERATE_PATHS and method == "POST":
      return None
    try:
      return json.loads(data)
    except (ValueError, RecursionError) as error:
      raise _RetryLaterError(f"{what}: the response is not JSON: {text[:100]!r}") from error

  async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
    """Sends a request and returns the status and the body of the response.

    Raises:
      _RetryLaterError: a later attempt may succeed.
      BadResponseError, ServerError: the response is too large.
    """
    if self._session is None:
      timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s, connect=30.0)
      connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
      self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
    what = f"{method} {path}"
    try:
      # Redirects are not followed: they could send prompts anywhere.
      async with self._session.request(method, self.url + path, json=body, allow_redirects=False) as response:
        data = bytearray()
        async for part in response.content.iter_any():
          data += part
          if len(data) > _MAX_RESPONSE_BYTES:
            kind = BadResponseError if path in _GENERATE_PATHS else ServerError
            raise kind(f"{what}: the response has more than {_MAX_RESPONSE_BYTES} bytes.")
    except TimeoutError as error:
      raise _RetryLaterError(f"{what}: no response within {self._config.request_timeout_s} s.") from error
    except aiohttp.ClientError as error:
      raise _RetryLaterError(f"{what}: {type(error).__name__}: {error}") from error
    if response.status >= 500 or response.status in (408, 409, 429):
      text, wait_s = data[:400].decode("utf-8", "replace"), _seconds(response.headers.get("Retry-After"))
      raise _RetryLaterError(f"{what}: status {response.status}: {text}", wait_s=wait_s, by_server=True)
    return response.status, bytes(data)


def _seconds(retry_after: str | None) -> float:
  """Parses a `Retry-After` header in seconds, up to 60; 0 if it is missing or a date."""
  if retry_after is None or not retry_after.strip().isdecimal():
    return 0.0
  return min(float(retry_after), _LONGEST_RETRY_AFTER_S)


_GENERATE_PATHS = frozenset({"/v1/completions", "/generate", TOKENS_PATH})
