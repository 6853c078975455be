"""Rollouts from an HTTP server. Only `RemoteEngine` and `ServerError` import aiohttp, from the extra `serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sao_jax.rollout.remote.config import RemoteConfig
from sao_jax.utils.extras import require_extra

if TYPE_CHECKING:
  from sao_jax.rollout.remote.client import ServerError
  from sao_jax.rollout.remote.engine import RemoteEngine

__all__ = ["RemoteConfig", "RemoteEngine", "ServerError"]


def __getattr__(name: str) -> Any:
  if name not in ("RemoteEngine", "ServerError"):
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  with require_extra("serve"):
    from sao_jax.rollout.remote import client, engine
  return client.ServerError if name == "ServerError" else engine.RemoteEngine
