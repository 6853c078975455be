"""Settings of the completion server."""

from __future__ import annotations

import dataclasses
import pathlib

from sao_jax.rollout.server.hosts import parse_host


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
  """Validated settings of `CompletionServer`; `ValueError` if a field is out of range."""

  host: str = "127.0.0.1"
  """Address to bind to. On any address but loopback, everyone on the network can use the model and change its weights.
  """
  port: int = 8000
  """TCP port, in [0, 65536); 0: any free port."""
  weights_root: pathlib.Path | None = None
  """Weights are loaded only from folders below this one; None: weights cannot be updated."""
  allowed_hosts: tuple[str, ...] = ()
  """Further values of the `Host` header to accept, for tunnels and proxies: `name` (any port) or `name:port`. Requests
  with other hosts are rejected (403). If empty, a server that is not on loopback accepts any host."""
  max_body_bytes: int = 4 * 1024 * 1024
  """Largest body of a completion request, in bytes; a larger one is rejected (413)."""
  max_control_body_bytes: int = 64 * 1024
  """Largest body of any other request (pause, weight update, abort, information), in bytes."""
  body_timeout_s: float = 30.0
  """Seconds for a body to arrive; a slower one is rejected (408). A connection that sends no complete request head
  within this time is closed."""
  max_requests: int = 1024
  """Maximum number of completion requests at a time, and of other requests; more are rejected (503)."""

  def __post_init__(self) -> None:
    if not 0 <= self.port < 2**16:
      raise ValueError(f"ServerConfig.port must be in [0, 65536); received {self.port}.")
    for name in ("max_body_bytes", "max_control_body_bytes", "max_requests", "body_timeout_s"):
      if not getattr(self, name) > 0:
        raise ValueError(f"ServerConfig.{name} must be > 0; received {getattr(self, name)}.")
    for entry in self.allowed_hosts:
      if parse_host(entry) is None:
        raise ValueError(f"ServerConfig.allowed_hosts must be names, or name:port; received {entry!r}.")
    if self.weights_root is not None and not self.weights_root.is_dir():
      raise ValueError(f"ServerConfig.weights_root must be a directory; received {self.weights_root}.")
