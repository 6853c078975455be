"""One server seen from a client: attempts, waits, and which weights wrote an answer."""

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
_MAX_ANSWER_BYTES = 256 * 1024 * 1024
_MAX_UNWRITTEN = 100
"""Updates in a row that may abort a request before its first token; then it fails its episode."""


class ServerError(RuntimeError):
  """The server cannot be used: it is dead, or is not what it should be."""


class _TryAgainError(Exception):
  """An attempt failed in a way that may pass, after `wait_s` seconds if the server has said so."""

  def __init__(self, message: str, *, wait_s: float = 0.0):
    super().__init__(message)
    self.wait_s = wait_s


class ServerClient:
  """Asks a server for answers, and gives it weights; to be used within one event loop.

  Every publication has a label of its own (version and a random part), which the server reports. So an answer is
  believed only if it comes from weights that this object has published: a server that restarted, that another run used
  before, or that went back to older ones without being told, is given the newest weights again.

  An answer never mixes weights: an update aborts what runs, and whoever asked goes on from there with a new request.

  Args:
    config: the server.
    protocol: what it speaks.
    sampling: what is asked for.
  """

  def __init__(self, config: RemoteConfig, protocol: ServerProtocol, sampling: Sampling):
    assert config.url is not None
    self._url = config.url.rstrip("/")
    self._config = config
    self._protocol = protocol
    self._sampling = sampling
    self._session: aiohttp.ClientSession | None = None
    self._versions: dict[str, int] = {}
    self._published: tuple[pathlib.Path, str] | None = None
    self._updating = asyncio.Lock()
    self._open = False
    """Whether the server has the published weights, as far as is known."""
    self._pauses = 0
    self._failing = False
    self.counts = collections.Counter[str]()

  async def generate(self, prompt: Sequence[int], *, max_tokens: int, seed: int) -> tuple[Generated, int]:
    """One answer with at least one token, and the version of the weights that wrote it.

    A request that an update aborts before its first token is sent again when the server has the new weights.

    Raises:
      EpisodeFailure: the server refuses the request, or its answer is refused, or no update lets it begin.
      ServerError: no attempt succeeded.
    """
    for _ in range(_MAX_UNWRITTEN):
      answer = await self._answer(prompt, max_tokens=max_tokens, seed=seed)
      if answer is not None:
        return answer
    message = f"{_MAX_UNWRITTEN} weight updates in a row aborted the request before its first token."
    raise EpisodeFailure("aborted", f"{self._url}: {message}")

  async def _answer(self, prompt: Sequence[int], *, max_tokens: int, seed: int) -> tuple[Generated, int] | None:
    """As `generate`; None if an update aborted the request before its first token."""
    call = self._protocol.generate(prompt, max_tokens=max_tokens, seed=seed, sampling=self._sampling)
    for attempt in range(self._config.max_attempts):
      await self._have_weights_there()
      label, pauses = self._current(), self._pauses
      try:
        answer = await self._post(call)
        done = self._protocol.read(answer, prompt, max_tokens=max_tokens, sampling=self._sampling)
        if not done.tokens.size:
          if self._pauses == pauses:
            raise _TryAgainError("the server aborted the request.")
          return None
        written = done.label or await self._label_of(done, label, self._pauses - pauses)
        if written not in self._versions:
          raise _TryAgainError(f"the answer comes from weights {written!r:.80}, which this run has not published.")
        if written != label and self._pauses == pauses:
          raise _TryAgainError(f"the answer comes from weights {written!r:.80}; the server was given {label!r}.")
        self._failing = False
        return done, self._versions[written]
      except BadResponseError as error:
        if isinstance(error, EmptyResponseError) and self._pauses != pauses:
          return None  # the update explains it
        raise EpisodeFailure("bad_response", f"{self._url}{call[0]}: {error}") from error
      except _TryAgainError as error:
        failure = error
      await self._after_failure(attempt, failure)
    raise self._dead(failure)

  async def publish(self, directory: pathlib.Path, version: int) -> None:
    """Makes the weights in `directory` those of every answer from now on.

    Raises:
      ServerError: no attempt succeeded.
    """
    label = f"{version}-{secrets.token_hex(4)}"
    async with self._updating:
      self._versions[label] = version
      self._published = directory, label
      await self._update(directory, label)

  async def close(self) -> None:
    """Closes the connections."""
    if self._session is not None:
      await self._session.close()

  async def _have_weights_there(self) -> None:
    """Waits while weights change; an update that was given up (cancelled, or out of attempts) is begun again."""
    if not self._open:
      async with self._updating:
        if not self._open and self._published is not None:
          await self._update(*self._published)

  def _current(self) -> str:
    assert self._published is not None  # or requests would not be let through
    return self._published[1]

  async def _update(self, directory: pathlib.Path, label: str) -> None:
    """Pauses, loads, goes on, as often as it takes; requests wait meanwhile. The caller holds `_updating`."""
    self._open = False
    for attempt in range(self._config.max_attempts):
      self._pauses += 1
      try:
        for call in self._protocol.update(directory, label):
          await self._post(call)
        self._open = True
        return
      except _TryAgainError as error:
        failure = error
      await self._wait(attempt, failure)
    raise self._dead(failure)

  async def _after_failure(self, attempt: int, failure: _TryAgainError) -> None:
    """Waits; then gives the server its weights again if it does not have them (it may have restarted)."""
    await self._wait(attempt, failure)
    async with self._updating:
      if self._published is None:
        return
      directory, label = self._published
      try:
        found = await self._label()
      except _TryAgainError as error:
        _log.info("%s: %s", self._url, error)  # the next attempt will meet it again, and is counted
        return
      if found != label:
        _log.warning("%s has weights %.80r; it is given %s again", self._url, found, directory)
        await self._update(directory, label)

  async def _wait(self, attempt: int, failure: _TryAgainError) -> None:
    self.counts["failed_attempts"] += 1
    if not self._failing:  # once per outage, not once per request
      _log.warning("%s: %s; trying again", self._url, failure)
    self._failing = True
    if attempt + 1 < self._config.max_attempts:
      # A random part, so that the requests of a server that comes back do not all arrive at once.
      wait = min(_FIRST_WAIT_S * 2.0**attempt, _LONGEST_WAIT_S) * random.uniform(0.75, 1.25)
      await asyncio.sleep(max(wait, failure.wait_s))

  def _dead(self, failure: Exception) -> ServerError:
    return ServerError(
      f"{self._url} failed RemoteConfig.max_attempts = {self._config.max_attempts} times in a row; the last time: "
      f"{failure}"
    )

  async def _label_of(self, done: Generated, sent_with: str, pauses: int) -> str:
    """Which weights wrote an answer that does not say so itself, from what is known when it arrives.

    An answer without a pause in between was written by the weights that it was asked of, and one that the first pause
    aborted too, if the server has not restarted since. Of others nothing is certain.
    """
    now = await self._label()
    if now not in self._versions or (now != sent_with and not pauses) or pauses > (done.finish == "abort"):
      raise _TryAgainError("weights changed while the server answered.")
    return sent_with

  async def _label(self) -> str | None:
    answer = await self._request("GET", self._protocol.label_path, None)
    label = answer.get("weight_version") if isinstance(answer, dict) else None
    return label if isinstance(label, str) else None

  async def _post(self, call: Call) -> Any:
    return await self._request("POST", *call)

  async def _request(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
    """The answer's JSON (None if it is empty); `_TryAgainError` for what may pass."""
    if self._session is None:
      timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s, connect=30.0)
      self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
    what = f"{method} {path}"
    try:
      # A redirection could send prompts anywhere; it is a status that is not 200.
      async with self._session.request(method, self._url + path, json=body, allow_redirects=False) as response:
        data = bytearray()
        async for part in response.content.iter_any():
          data += part
          if len(data) > _MAX_ANSWER_BYTES:
            kind = BadResponseError if path in _GENERATE_PATHS else ServerError
            raise kind(f"{what}: an answer of more than {_MAX_ANSWER_BYTES} bytes.")
    except TimeoutError as error:
      raise _TryAgainError(f"{what}: no answer within {self._config.request_timeout_s} s.") from error
    except aiohttp.ClientError as error:
      raise _TryAgainError(f"{what}: {type(error).__name__}: {error}") from error
    text = data[:400].decode("utf-8", "replace")
    if response.status >= 500 or response.status in (408, 409, 429):
      wait_s = _seconds(response.headers.get("Retry-After"))
      raise _TryAgainError(f"{what}: status {response.status}: {text}", wait_s=wait_s)
    if response.status in (400, 413, 422) and path in _GENERATE_PATHS:
      raise EpisodeFailure("request_refused", f"{self._url}, {what}: status {response.status}: {text}")
    if response.status != 200:
      raise ServerError(f"{self._url}, {what}: status {response.status}: {text}")
    if path not in _GENERATE_PATHS and method == "POST":
      return None  # only the status matters
    try:
      return json.loads(data)
    except (ValueError, RecursionError) as error:
      raise _TryAgainError(f"{what}: the answer is not JSON: {text[:100]!r}") from error


def _seconds(retry_after: str | None) -> float:
  """Of a header that gives seconds, up to a minute; 0 where it gives a date, or nothing."""
  if retry_after is None or not retry_after.strip().isdecimal():
    return 0.0
  return min(float(retry_after), _LONGEST_RETRY_AFTER_S)


_GENERATE_PATHS = frozenset({"/v1/completions", "/generate"})
