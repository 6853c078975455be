"""HTTP server over the rollout engine. Only `CompletionServer` imports aiohttp, from the extra `serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sao_jax.rollout.server.completions import Completion, Completions
from sao_jax.rollout.server.config import ServerConfig
from sao_jax.utils.extras import require_extra

if TYPE_CHECKING:
  from sao_jax.rollout.server.server import CompletionServer

__all__ = ["Completion", "CompletionServer", "Completions", "ServerConfig"]


def __getattr__(name: str) -> Any:
  if name != "CompletionServer":
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  with require_extra("serve"):
    from sao_jax.rollout.server.server import CompletionServer
  return CompletionServer
