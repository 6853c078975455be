"""Protocols of vLLM and SGLang servers: requests, and checks of the responses.

Both return the sampled ids and the log-prob of each. A response does not show under which distribution: that depends on
the server's settings. SGLang's log-probs are those of the tempered distribution, unless SGLANG_RETURN_ORIGINAL_LOGPROB
is set. vLLM's are so only with `--logprobs-mode processed_logprobs`. Its endpoints for weights need
VLLM_SERVER_DEV_MODE=1; its endpoint for token ids, whose responses name the weights, needs `--enable-scale-out`.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from sao_jax.rollout.remote.server_info import TOKENS_PATH, ServerInfo
from sao_jax.types import LOGP_ROUNDING

Call: TypeAlias = tuple[str, dict[str, Any]]
"""`(path, JSON body)` of a POST."""


class BadResponseError(Exception):
  """A response is rejected; the message names the problem."""


class EmptyResponseError(BadResponseError):
  """A response has neither tokens nor a finish reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """Sampling settings of every request."""

  vocab_size: int
  """Upper bound (exclusive) on token ids."""
  stop_ids: tuple[int, ...]
  """Ids that end a completion."""
  temperature: float
  """Sampling temperature, > 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """Checked completion of a server."""

  tokens: np.ndarray
  """`[n]` int32; empty only if `finish` is "abort"."""
  logp: np.ndarray
  """`[n]` float32, finite and <= 0."""
  finish: Literal["stop", "length", "abort"]
  """"stop": the last token is a stop id. "abort": the server aborted the request, for a weight update say."""
  label: str | None
  """Label of the weights; None if the response has none."""

  @classmethod
  def empty(cls) -> Generated:
    """Returns the completion of a request that was aborted before its first token."""
    return cls(tokens=np.zeros(0, np.int32), logp=np.zeros(0, np.float32), finish="abort", label=None)


class ServerProtocol(Protocol):
  """Requests and responses of one kind of server."""

  label_path: str
  """Path whose GET returns `{"weight_version": label}`."""

  @property
  def names_weights(self) -> bool:
    """Whether responses have the label of their weights."""
    ...

  def use(self, info: ServerInfo) -> None:
    """Chooses the endpoints that the server has."""
    ...

  def generate_call(self, prompt: Sequence[int], *, max_tokens: int, seed: int | None, sampling: Sampling) -> Call:
    """Returns the call that generates one completion; without a `seed`, the server's noise decides."""
    ...

  def parse_response(self, response: Any, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling) -> Generated:
    """Checks the JSON response to `generate_call`.

    Raises:
      BadResponseError: a field that a trajectory needs is missing or wrong.
    """
    ...

  def update_calls(self, directory: pathlib.Path, label: str) -> list[Call]:
    """Returns the call that pauses the server, then those that load and label weights and resume it."""
    ...


class VLLM:
  """vLLM's endpoints for completions, and its development endpoints for weights.

  Args:
    reload_method: method of the workers that loads weights.
  """

  label_path = "/weight_info"

  def __init__(self, reload_method: str = "reload_weights"):
    self._reload_method = reload_method
    self._has_tokens_endpoint = False

  @property
  def names_weights(self) -> bool:
    return self._has_tokens_endpoint

  def use(self, info: ServerInfo) -> None:
    self._has_tokens_endpoint = info.has_tokens_endpoint

  def generate_call(self, prompt: Sequence[int], *, max_tokens: int, seed: int | None, sampling: Sampling) -> Call:
    # Names every setting for which the server may have its own default (from generation_config.json).
    settings = {
      "max_tokens": max_tokens, "temperature": sampling.temperature, "n": 1, "logprobs": 0,
      "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
      "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0,
    } | ({} if seed is None else {"seed": seed})  # fmt: skip
    if self._has_tokens_endpoint:
      return TOKENS_PATH, {"token_ids": list(prompt), "sampling_params": {**settings, "detokenize": False}}
    as_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}
    return "/v1/completions", {"prompt": list(prompt), **settings, **as_ids}

  def parse_response(self, response: Any, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling) -> Generated:
    if _is_empty_abort(*_vllm_parts(response)):
      return Generated.empty()
    choices = _field(response, "choices", list)
    if len(choices) != 1:
      raise BadResponseError(f"the response must have one choice; received {len(choices)}.")
    choice = choices[0]
    if (echo := _field(choice, "prompt_token_ids", list, optional=True)) is not None and echo != list(prompt):
      raise BadResponseError(f"prompt_token_ids must be the {len(prompt)} ids sent; received {len(echo)} other ids.")
    logprobs = _field(choice, "logprobs", dict, optional=True)
    tokens = _field(choice, "token_ids", list)
    finish = _field(choice, "finish_reason", str)
    label = _vllm_label(choice)
    if logprobs is None or "content" not in logprobs:
      logp = None if logprobs is None else _field(logprobs, "token_logprobs", list, optional=True)
      return _checked(tokens, logp, finish, label, max_tokens=max_tokens, sampling=sampling)
    # The response of the endpoint for token ids.
    usage = _field(response, "usage", dict, optional=True)
    if (length := _get(usage, "prompt_tokens")) is not None and length != len(prompt):
      raise BadResponseError(f"prompt_tokens must be {len(prompt)}, as sent; received {length!r:.80}.")
    entries = _field(logprobs, "content", list)
    done = _checked(
      tokens, [_get(x, "logprob") for x in entries], finish, label, max_tokens=max_tokens, sampling=sampling
    )
    if [_get(x, "token_id") for x in entries] != tokens:
      raise BadResponseError("logprobs.content and token_ids must have the same token ids; they differ.")
    return done

  def update_calls(self, directory: pathlib.Path, label: str) -> list[Call]:
    return [
      ("/pause?mode=abort", {}),
      ("/collective_rpc", {"method": self._reload_method, "kwargs": {"weights_path": str(directory)}}),
      ("/update_weight_version", {"new_version": label}),
      ("/resume", {}),
    ]


class SGLang:
  """SGLang's native endpoints."""

  label_path = "/model_info"
  names_weights = True

  def use(self, info: ServerInfo) -> None:
    del info  # there is one endpoint

  def generate_call(self, prompt: Sequence[int], *, max_tokens: int, seed: int | None, sampling: Sampling) -> Call:
    settings = {
      "max_new_tokens": max_tokens, "temperature": sampling.temperature, "n": 1,
      "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
      "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "no_stop_trim": True,
      "skip_special_tokens": False,
    } | ({} if seed is None else {"sampling_seed": seed})  # fmt: skip
    return "/generate", {
      "input_ids": list(prompt), "return_logprob": True, "stream": False, "sampling_params": settings,
    }  # fmt: skip

  def parse_response(self, response: Any, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling) -> Generated:
    if _is_empty_abort(*_sglang_parts(response)):
      return Generated.empty()
    meta = _field(response, "meta_info", dict)
    if (length := _field(meta, "prompt_tokens", int, optional=True)) is not None and length != len(prompt):
      raise BadResponseError(f"prompt_tokens must be {len(prompt)}, as sent; received {length}.")
    finish = _field(_field(meta, "finish_reason", dict), "type", str)
    label = _field(meta, "weight_version", str)
    tokens = _field(response, "output_ids", list)
    entries = _field(meta, "output_token_logprobs", list, optional=True)
    logp = None
    if entries is not None:
      if any(not isinstance(entry, list) or len(entry) < 2 for entry in entries):
        raise BadResponseError("output_token_logprobs must be a list of [log-prob, id, text].")
      logp = [entry[0] for entry in entries]
    done = _checked(tokens, logp, finish, label, max_tokens=max_tokens, sampling=sampling)
    if [entry[1] for entry in entries or ()] != tokens:
      raise BadResponseError("output_token_logprobs and output_ids must have the same token ids; they differ.")
    return done

  def update_calls(self, directory: pathlib.Path, label: str) -> list[Call]:
    return [
      ("/pause_generation", {"mode": "abort"}),
      ("/update_weights_from_disk", {"model_path": str(directory), "weight_version": label, "flush_cache": True}),
      ("/continue_generation", {}),
    ]


def _get(container: Any, name: str) -> Any:
  return container.get(name) if isinstance(container, dict) else None


def _vllm_label(choice: Any) -> str | None:
  """Returns the label of a choice's tokens, or all of them in one text if there are several; None: it has none."""
  spans = _field(choice, "weight_versions", list, optional=True)
  if not spans:
    return None
  return " and ".join(dict.fromkeys(_field(span, "version", str) for span in spans))


def _vllm_parts(response: Any) -> tuple[Any, list[Any]]:
  """Returns the finish reason, and the fields of which at least one is not empty if a token was sampled."""
  choices = _get(response, "choices")
  choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
  logprobs = _get(_get(choice, "logprobs"), "token_logprobs") or _get(_get(choice, "logprobs"), "content")
  count = _get(_get(response, "usage"), "completion_tokens")
  tokens = choices if choice is None else _get(choice, "token_ids")
  return _get(choice, "finish_reason"), [tokens, _get(choice, "text"), logprobs, count]


def _sglang_parts(response: Any) -> tuple[Any, list[Any]]:
  """See `_vllm_parts`."""
  meta = _get(response, "meta_info")
  reason = _get(meta, "finish_reason")
  output = [_get(response, "output_ids"), _get(response, "text")]
  return _get(reason, "type"), [*output, _get(meta, "output_token_logprobs"), _get(meta, "completion_tokens")]


def _is_empty_abort(reason: Any, output: list[Any]) -> bool:
  """Whether the server aborted the request before its first token.

  A weight update aborts requests that still wait in the server's queue. Versions of the servers differ in the response:
  the label, ids, log-probs, length of the prompt or the reason may be missing, null, empty or 0. Nothing was sampled,
  so none of these fields is needed.

  Raises:
    EmptyResponseError: the response is empty and has no finish reason.
  """
  if any(output) or reason not in (None, "abort"):
    return False
  if reason is None:
    raise EmptyResponseError("the response has neither tokens nor a finish reason.")
  return True


def _field(container: Any, name: str, kind: type, *, optional: bool = False) -> Any:
  if not isinstance(container, dict):
    raise BadResponseError(f"the parent of {name} must be an object; received {type(container).__name__}.")
  value = container.get(name)
  if value is None and optional:
    return None
  if not isinstance(value, kind):
    received = "nothing" if value is None else repr(value)[:80]
    raise BadResponseError(f"{name} must be a {kind.__name__}; received {received}.")
  return value


def _checked(
  tokens: list[Any], logp: list[Any] | None, finish: str, label: str | None, *, max_tokens: int, sampling: Sampling
) -> Generated:
  """Checks tokens, log-probs and finish reason against the request and the needs of a trajectory."""
  if finish not in ("stop", "length", "abort"):
    raise BadResponseError(f"finish reason must be stop, length or abort; received {finish!r:.80}.")
  outside = [i for i in tokens if type(i) is not int or not 0 <= i < sampling.vocab_size]
  if outside:
    raise BadResponseError(f"token ids must be in [0, {sampling.vocab_size}); received {outside[:5]!r:.200}.")
  if logp is None:
    raise BadResponseError(f"log-probs are required; received {len(tokens)} tokens and no log-probs.")
  if len(logp) != len(tokens):
    raise BadResponseError(f"each token must have a log-prob; received {len(tokens)} tokens, {len(logp)} log-probs.")
  # Compared before the conversion to float32, which overflows to -inf.
  wrong = [x for x in logp if type(x) not in (int, float) or not -3e38 < x <= LOGP_ROUNDING]
  if wrong:
    received = f"received {wrong[:5]!r:.200}; above 0 by {LOGP_ROUNDING} or less is rounding"
    raise BadResponseError(f"log-probs must be finite and <= 0; {received}.")
  if len(tokens) > max_tokens or (not tokens and finish != "abort"):
    raise BadResponseError(f"the response must have 1 to {max_tokens} tokens; received {len(tokens)} ({finish}).")
  early = [i for i in tokens[:-1] if i in sampling.stop_ids]
  ends = bool(tokens) and tokens[-1] in sampling.stop_ids
  if early or (finish == "stop" and not ends):
    raise BadResponseError(
      f"the completion must end with its first stop id, one of {list(sampling.stop_ids)}; it ends with {tokens[-1:]}, "
      f"and {len(early)} stop ids come before."
    )
  return Generated(
    tokens=np.array(tokens, np.int32),
    logp=np.minimum(np.array(logp, np.float32), np.float32(0)),
    finish="stop" if ends else finish,  # type: ignore[arg-type]
    label=label,
  )
