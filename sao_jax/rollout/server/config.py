"""Settings of the completions server."""

from __future__ import annotations

import dataclasses
import pathlib

from sao_jax.rollout.server.hosts import parse_host


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
  """Settings of `CompletionServer`; checked when made."""

  host: str = "127.0.0.1"
  """Address to bind to. Loopback, unless everyone on the network may use the model and change its weights."""
  port: int = 8000
  """0: any free one."""
  weights_root: pathlib.Path | None = None
  """Weights are loaded only from folders below it; None: weights cannot be changed."""
  allowed_hosts: tuple[str, ...] = ()
  """Besides its own names, hosts that a request may name (`Host`): `name`, with any port, or `name:port`; others are
  refused (403). For tunnels and proxies. Empty on another address than loopback: any host."""
  max_body_bytes: int = 4 * 1024 * 1024
  """A larger body is refused (413)."""
  max_control_body_bytes: int = 64 * 1024
  """The same for requests that ask for no completion: pauses, updates, aborts, information."""
  body_timeout_s: float = 30.0
  """A body that takes longer to arrive is refused (408); a connection without a whole head of a request is closed."""
  max_requests: int = 1024
  """Completions that may wait or run, and as many requests of other kinds; more are refused (503)."""

  def __post_init__(self) -> None:
    if not 0 <= self.port < 2**16:
      raise ValueError(f"ServerConfig.port must be in [0, 65536); received {self.port}.")
    for name in ("max_body_bytes", "max_control_body_bytes", "max_requests", "body_timeout_s"):
      if not getattr(self, name) > 0:
        raise ValueError(f"ServerConfig.{name} must be > 0; received {getattr(self, name)}.")
    for entry in self.allowed_hosts:
      if parse_host(entry) is None:
        raise ValueError(f"ServerConfig.allowed_hosts must hold names, or name:port; received {entry!r}.")
    if self.weights_root is not None and not self.weights_root.is_dir():
      raise ValueError(f"ServerConfig.weights_root must be a directory; received {self.weights_root}.")
