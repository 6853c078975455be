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
  wait_s: float = 600.0
  """Seconds for which a server may fail or be absent, since the first failed attempt at one request or update. After
  that the run ends with an error. A server that compiles its model takes minutes to start. The waits between attempts
  double, from 0.25 to 8 s."""
  max_attempts: int | None = None
  """The run also ends after this many failed attempts at one request or update; None: only `wait_s` counts."""
  send_seed: bool | None = None
  """Whether requests have a sampling seed. None: yes, except for vLLM's CPU build with chunked prefill, which ends at a
  request with a seed. (Its flag `--no-enable-chunked-prefill` makes seeds possible.)"""
  reload_method: str = "reload_weights"
  """vLLM only: the method of its workers that loads new weights, called with `weights_path`. A worker extension
  (vLLM's `--worker-extension-cls`) can bring its own where vLLM's fails for a model."""
  untie_embeddings: bool = False
  """Whether the weights of a model with tied embeddings are sent with an output head of their own. The server must have
  been started with such a checkpoint (see `models.untied`). Needed with vLLM's CPU build, whose tied head keeps its
  first weights."""

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
    if not self.wait_s >= 0:
      raise ValueError(f"RemoteConfig.wait_s must be >= 0; received {self.wait_s}.")
    if self.max_attempts is not None and self.max_attempts < 1:
      raise ValueError(f"RemoteConfig.max_attempts must be >= 1 or None; received {self.max_attempts}.")
    if not self.reload_method.isidentifier():
      raise ValueError(f"RemoteConfig.reload_method must be the name of a method; received {self.reload_method!r}.")
