"""Settings of rollouts from an HTTP server."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

ProtocolName = Literal["sglang", "vllm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemoteConfig:
  """Validated settings of `RemoteEngine`; `ValueError` if a field is out of range."""

  url: str | None = None
  """URL of the server, `http://host:port`; None: the embedded engine, in the learner's process."""
  protocol: ProtocolName = "sglang"
  """Protocol of the server, "sglang" or "vllm"; this library's own server supports both."""
  weights_dir: str | None = None
  """Folder for new weights; the server must see it under the same path. Required with a `url`."""
  request_timeout_s: float = 600.0
  """Seconds after which a completion or a weight update counts as a failed attempt."""
  max_attempts: int = 20
  """The run ends with an error after this many failed attempts at one request or update. The waits between attempts
  double, from 0.25 to 8 s."""

  def __post_init__(self) -> None:
    if self.protocol not in get_args(ProtocolName):
      names = " or ".join(get_args(ProtocolName))
      raise ValueError(f"RemoteConfig.protocol must be {names}; received {self.protocol!r}.")
    if self.url is not None:
      if not self.url.startswith(("http://", "https://")):
        raise ValueError(f"RemoteConfig.url must begin with http:// or https://; received {self.url!r}.")
      if self.weights_dir is None:
        raise ValueError("RemoteConfig.weights_dir must be a folder when a url is given; received None.")
    if not self.request_timeout_s > 0:
      raise ValueError(f"RemoteConfig.request_timeout_s must be > 0; received {self.request_timeout_s}.")
    if self.max_attempts < 1:
      raise ValueError(f"RemoteConfig.max_attempts must be >= 1; received {self.max_attempts}.")
