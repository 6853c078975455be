"""Limits on the number of concurrent HTTP requests of a kind, and on the size of their bodies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web

from sao_jax.rollout.server.request_fields import BadRequestError


class Admission:
  """Admission control: requests beyond a limit are rejected before their bodies are read.

  Args:
    max_requests: maximum number of concurrent requests; more are rejected (503).
    max_body_bytes: a larger body is rejected (413), before it is read if its length is known.
    body_timeout_s: seconds for a body to arrive; a slower one is rejected (408).
  """

  def __init__(self, *, max_requests: int, max_body_bytes: int, body_timeout_s: float):
    self._max_requests = max_requests
    self._max_body_bytes = max_body_bytes
    self._body_timeout_s = body_timeout_s
    self._active = 0

  @contextlib.asynccontextmanager
  async def admit(self, request: web.Request) -> AsyncIterator[bytes]:
    """Yields the body of a request, which counts as active inside the block.

    Raises:
      BadRequestError: the request is rejected.
    """
    if self._active >= self._max_requests:
      raise BadRequestError(f"{self._active} requests are running already; try again later.", status=503)
    self._active += 1
    try:
      yield await self._body(request)
    finally:
      self._active -= 1

  async def _body(self, request: web.Request) -> bytes:
    if not request.body_exists:
      return b""
    if request.method != "GET" and request.content_type != "application/json":
      raise BadRequestError(f"Content-Type must be application/json; received {request.content_type}.", status=415)
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
      raise BadRequestError(f"Content-Encoding must be identity or missing; received {encoding}.", status=415)
    if (request.content_length or 0) > self._max_body_bytes:
      raise self._too_large(f"{request.content_length} bytes")
    body = bytearray()
    try:
      async with asyncio.timeout(self._body_timeout_s):
        async for part in request.content.iter_any():
          body += part
          if len(body) > self._max_body_bytes:
            raise self._too_large("more")
    except TimeoutError as error:
      raise BadRequestError(f"the body did not arrive within {self._body_timeout_s} s.", status=408) from error
    return bytes(body)

  def _too_large(self, received: str) -> BadRequestError:
    allowed = f"at most {self._max_body_bytes} bytes are allowed at this path"
    return BadRequestError(f"the body is too large: {allowed}; received {received}.", status=413)
