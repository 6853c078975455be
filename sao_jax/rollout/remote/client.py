"""Client of one server: requests, retries, weight updates, and the policy version of each completion."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import pathlib
import random
import secrets
from collections.abc import Sequence
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

_log = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 8.0
_LONGEST_RETRY_AFTER_S = 60.0
_MAX_RESPONSE_BYTES = 256 * 1024 * 1024
_MAX_EMPTY = 100
"""Number of updates in a row that may abort a request before its first token. After that its episode fails."""


class ServerError(RuntimeError):
  """The server cannot be used: no attempt succeeded, or it responds in an unexpected way."""


class _RetryLaterError(Exception):
  """An attempt failed, but a later one may succeed.

  Args:
    message: the cause.
    wait_s: seconds to wait at least, if the server said so.
  """

  def __init__(self, message: str, *, wait_s: float = 0.0):
    super().__init__(message)
    self.wait_s = wait_s


class ServerClient:
  """Client for completions and weight updates of a server. Use it within one event loop.

  Every update has a unique label (the version and a random part), which the server reports. A completion is accepted
  only if its label is one of this client's. A server that restarted, or was used by another run, or returned to older
  weights, is sent the newest weights again.

  A completion never mixes versions: an update aborts running requests, and the caller continues with a new request.

  Args:
    config: the server.
    protocol: its protocol.
    sampling: sampling settings of every request.
  """

  def __init__(self, config: RemoteConfig, protocol: ServerProtocol, sampling: Sampling):
    assert config.url is not None
    self._url = config.url.rstrip("/")
    self._config = config
    self._protocol = protocol
    self._sampling = sampling
    self._session: aiohttp.ClientSession | None = None
    self._versions: dict[str, int] = {}
    self._newest: tuple[pathlib.Path, str] | None = None
    """Folder and label of the newest weights."""
    self._updating = asyncio.Lock()
    self._up_to_date = False
    """Whether the server has the newest weights, as far as this client knows."""
    self._pauses = 0
    self._failing = False
    self.counts = collections.Counter[str]()

  async def generate(self, prompt: Sequence[int], *, max_tokens: int, seed: int) -> tuple[Generated, int]:
    """Generates a completion of at least one token.

    A request that an update aborts before its first token is sent again after the update.

    Args:
      prompt: token ids.
      max_tokens: maximum tokens of the completion, >= 1.
      seed: sampling seed.

    Returns:
      The completion, and the policy version that generated it.

    Raises:
      EpisodeFailure: the server rejected the request, or returned a bad response, or updates aborted every request.
      ServerError: no attempt succeeded.
    """
    for _ in range(_MAX_EMPTY):
      completion = await self._try_generate(prompt, max_tokens=max_tokens, seed=seed)
      if completion is not None:
        return completion
    message = f"{_MAX_EMPTY} weight updates in a row aborted the request before its first token."
    raise EpisodeFailure("aborted", f"{self._url}: {message}")

  async def _try_generate(self, prompt: Sequence[int], *, max_tokens: int, seed: int) -> tuple[Generated, int] | None:
    """Returns what `generate` does; None if an update aborted the request before its first token."""
    call = self._protocol.generate_call(prompt, max_tokens=max_tokens, seed=seed, sampling=self._sampling)
    for attempt in range(self._config.max_attempts):
      await self._ensure_weights()
      label, pauses = self._newest_label(), self._pauses
      try:
        response = await self._post(call)
        done = self._protocol.parse_response(response, prompt, max_tokens=max_tokens, sampling=self._sampling)
        if not done.tokens.size:
          if self._pauses == pauses:
            raise _RetryLaterError("the server aborted the request.")
          return None
        actual = done.label or await self._label_of(done, label, self._pauses - pauses)
        if actual not in self._versions:
          raise _RetryLaterError(f"the completion has the label {actual!r:.80}, which this run has not sent.")
        if actual != label and self._pauses == pauses:
          raise _RetryLaterError(f"the completion has the label {actual!r:.80}; the newest weights have {label!r}.")
        self._failing = False
        return done, self._versions[actual]
      except BadResponseError as error:
        if isinstance(error, EmptyResponseError) and self._pauses != pauses:
          return None  # aborted by the update
        raise EpisodeFailure("bad_response", f"{self._url}{call[0]}: {error}") from error
      except _RetryLaterError as error:
        failure = error
      await self._after_failure(attempt, failure)
    raise self._out_of_attempts(failure)

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
    for attempt in range(self._config.max_attempts):
      self._pauses += 1
      try:
        for call in self._protocol.update_calls(directory, label):
          await self._post(call)
        self._up_to_date = True
        return
      except _RetryLaterError as error:
        failure = error
      await self._wait(attempt, failure)
    raise self._out_of_attempts(failure)

  async def _after_failure(self, attempt: int, failure: _RetryLaterError) -> None:
    """Waits, then sends the newest weights again if the server does not have them (it may have restarted)."""
    await self._wait(attempt, failure)
    async with self._updating:
      if self._newest is None:
        return
      directory, label = self._newest
      try:
        found = await self._label()
      except _RetryLaterError as error:
        _log.info("%s: %s", self._url, error)  # the next attempt meets the same problem and counts it
        return
      if found != label:
        _log.warning("%s has weights %.80r; sending %s again", self._url, found, directory)
        await self._update(directory, label)

  async def _wait(self, attempt: int, failure: _RetryLaterError) -> None:
    self.counts["failed_attempts"] += 1
    if not self._failing:  # logged once per outage, not once per request
      _log.warning("%s: %s; retrying", self._url, failure)
    self._failing = True
    if attempt + 1 < self._config.max_attempts:
      # Jitter, so that requests to a server that comes back do not all arrive at once.
      wait = min(_FIRST_WAIT_S * 2.0**attempt, _LONGEST_WAIT_S) * random.uniform(0.75, 1.25)
      await asyncio.sleep(max(wait, failure.wait_s))

  def _out_of_attempts(self, failure: Exception) -> ServerError:
    return ServerError(
      f"{self._url} failed RemoteConfig.max_attempts = {self._config.max_attempts} times in a row; the last time: "
      f"{failure}"
    )

  async def _label_of(self, done: Generated, sent_with: str, pauses: int) -> str:
    """Returns the label of a completion whose response has none.

    If there was no pause since the request, the weights are those that it was sent with. The same holds if the first
    pause aborted it, unless the server has restarted since. In other cases the weights are unknown.

    Args:
      done: the completion.
      sent_with: label of the newest weights when the request was sent.
      pauses: number of pauses since then.

    Raises:
      _RetryLaterError: the weights are unknown.
    """
    now = await self._label()
    if now not in self._versions or (now != sent_with and not pauses) or pauses > (done.finish == "abort"):
      raise _RetryLaterError("weights changed during the request.")
    return sent_with

  async def _label(self) -> str | None:
    """Returns the label that the server reports now."""
    response = await self._request("GET", self._protocol.label_path, None)
    label = response.get("weight_version") if isinstance(response, dict) else None
    return label if isinstance(label, str) else None

  async def _post(self, call: Call) -> Any:
    return await self._request("POST", *call)

  async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """Sends a request and returns the JSON of the response; None for a POST of which only the status matters.

    Raises:
      _RetryLaterError: a later attempt may succeed (timeout, broken connection, server error).
      EpisodeFailure: the server rejected a generate request.
      BadResponseError: the response to a generate request is too large.
      ServerError: any other unexpected response.
    """
    if self._session is None:
      timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s, connect=30.0)
      self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
    what = f"{method} {path}"
    try:
      # Redirects are not followed: they could send prompts anywhere.
      async with self._session.request(method, self._url + path, json=body, allow_redirects=False) as response:
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
    text = data[:400].decode("utf-8", "replace")
    if response.status >= 500 or response.status in (408, 409, 429):
      wait_s = _seconds(response.headers.get("Retry-After"))
      raise _RetryLaterError(f"{what}: status {response.status}: {text}", wait_s=wait_s)
    if response.status in (400, 413, 422) and path in _GENERATE_PATHS:
      raise EpisodeFailure("request_refused", f"{self._url}, {what}: status {response.status}: {text}")
    if response.status != 200:
      raise ServerError(f"{self._url}, {what}: status {response.status}: {text}")
    if path not in _GENERATE_PATHS and method == "POST":
      return None
    try:
      return json.loads(data)
    except (ValueError, RecursionError) as error:
      raise _RetryLaterError(f"{what}: the response is not JSON: {text[:100]!r}") from error


def _seconds(retry_after: str | None) -> float:
  """Parses a `Retry-After` header in seconds, up to 60; 0 if it is missing or a date."""
  if retry_after is None or not retry_after.strip().isdecimal():
    return 0.0
  return min(float(retry_after), _LONGEST_RETRY_AFTER_S)


_GENERATE_PATHS = frozenset({"/v1/completions", "/generate"})
