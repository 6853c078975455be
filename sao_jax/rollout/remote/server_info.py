"""Settings of a server that decide whether its completions can be trained on, read before the first request."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

from sao_jax.rollout.remote.config import ProtocolName

Send = Callable[[str, str, dict[str, Any] | None], Awaitable[tuple[int, Any]]]
"""`(method, path, JSON body) -> (status, JSON)`; the JSON is None if the response has none."""

TOKENS_PATH = "/inference/v1/generate"
"""vLLM's endpoint whose responses name the weights of each token. Its flag is `--enable-scale-out`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerInfo:
  """A server's answers about its own settings. None: it does not say."""

  max_model_len: int | None = None
  """Maximum tokens of a prompt and its completion."""
  logprobs_mode: str | None = None
  """vLLM: "raw_logprobs" are those before the temperature, "processed_logprobs" those after it."""
  ends_at_seeds: bool = False
  """Whether a request with a seed ends the server: vLLM's CPU build with chunked prefill ("CPU Generator does not use
  offset")."""
  has_tokens_endpoint: bool = False
  """Whether the server answers at `TOKENS_PATH`."""


async def read_server_info(send: Send, protocol: ProtocolName) -> ServerInfo:
  """Asks a server for its settings. Endpoints that it lacks leave their fields at the defaults."""
  _, models = await send("GET", "/v1/models", None)
  listed = _at(models, "data")
  length = _at(listed[0], "max_model_len") if isinstance(listed, list) and listed else None
  if protocol != "vllm":
    return ServerInfo(max_model_len=_integer(length))
  _, found = await send("GET", "/server_info?config_format=json", None)
  mode = _at(found, "vllm_config", "model_config", "logprobs_mode")
  on_cpu = _at(found, "vllm_config", "device_config", "device") == "cpu"
  chunked = bool(_at(found, "vllm_config", "scheduler_config", "enable_chunked_prefill"))
  # An empty request: refused as incomplete where the endpoint is served, and otherwise as forbidden or unknown.
  status, _ = await send("POST", TOKENS_PATH, {})
  return ServerInfo(
    max_model_len=_integer(length),
    logprobs_mode=mode if isinstance(mode, str) else None,
    ends_at_seeds=on_cpu and chunked,
    has_tokens_endpoint=status in (400, 422),
  )


def check_server_info(
  info: ServerInfo, *, protocol: ProtocolName, max_len: int, temperature: float, send_seed: bool | None
) -> None:
  """Checks that a server can generate what the engine's settings ask for.

  Raises:
    ValueError: its context is too short, its log-probs are of another distribution, or a seed would end it.
  """
  if info.max_model_len is not None and info.max_model_len < max_len:
    raise ValueError(
      f"The server's max_model_len must be at least EngineConfig.max_len = {max_len}; received {info.max_model_len}."
    )
  if protocol == "vllm" and temperature != 1.0 and info.logprobs_mode != "processed_logprobs":
    raise ValueError(
      "EngineConfig.temperature must be 1 with a vLLM server unless it runs with --logprobs-mode processed_logprobs: "
      f"its mode is {info.logprobs_mode or 'unknown'}, whose log-probs are those before the temperature; received "
      f"{temperature}."
    )
  if send_seed and info.ends_at_seeds:
    raise ValueError(
      "RemoteConfig.send_seed must be None or False with this server, which a seed would end: vLLM's CPU build takes "
      "seeds only with --no-enable-chunked-prefill; received True."
    )


def _at(value: Any, *names: str) -> Any:
  for name in names:
    value = value.get(name) if isinstance(value, dict) else None
  return value


def _integer(value: Any) -> int | None:
  return value if type(value) is int else None
