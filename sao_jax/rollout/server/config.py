"""Settings of the completions server."""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
  """Settings of `CompletionServer`; checked when made."""

  host: str = "127.0.0.1"
  """Address to bind to. Loopback, unless everyone on the network may use the model and change its weights."""
  port: int = 8000
  """0: any free one."""
  weights_root: pathlib.Path | None = None
  """Weights are loaded only from folders below it; None: weights cannot be changed."""
  max_body_bytes: int = 4 * 1024 * 1024
  """A larger body is refused (413)."""
  body_timeout_s: float = 30.0
  """A body that takes longer to arrive is refused (408); a connection without a whole head of a request is closed."""
  max_requests: int = 1024
  """Completions that may wait or run; more are refused (503)."""

  def __post_init__(self) -> None:
    if not 0 <= self.port < 2**16:
      raise ValueError(f"ServerConfig.port must be in [0, 65536); received {self.port}.")
    for name in ("max_body_bytes", "max_requests", "body_timeout_s"):
      if not getattr(self, name) > 0:
        raise ValueError(f"ServerConfig.{name} must be > 0; received {getattr(self, name)}.")
    if self.weights_root is not None and not self.weights_root.is_dir():
      raise ValueError(f"ServerConfig.weights_root must be a directory; received {self.weights_root}.")
