"""What servers of vLLM and SGLang are asked, and what their answers must hold to be believed.

Both return the sampled ids and the log-prob of each. Two things cannot be seen in an answer and are the server's
settings: SGLang's log-probs are those of the tempered distribution unless SGLANG_RETURN_ORIGINAL_LOGPROB is set; vLLM's
are so only with `--logprobs-mode processed_logprobs`, and its endpoints for weights need VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from sao_jax.types import LOGP_ROUNDING

Call: TypeAlias = tuple[str, dict[str, Any]]
"""`(path, JSON body)` of a POST."""


class BadResponseError(Exception):
  """An answer that is refused; the message says what is wrong with it."""


class EmptyResponseError(BadResponseError):
  """An answer without a token and without a reason for that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """What every request asks for."""

  vocab_size: int
  stop_ids: tuple[int, ...]
  temperature: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generated:
  """An answer, checked."""

  tokens: np.ndarray
  """`[n]` int32; empty only if `finish` is "abort"."""
  logp: np.ndarray
  """`[n]` float32, finite and <= 0."""
  finish: Literal["stop", "length", "abort"]
  """"stop": the last token is a stop id. "abort": the server gave up, for an update of weights say."""
  label: str | None
  """Of the weights, if the answer says so."""

  @classmethod
  def nothing(cls) -> Generated:
    """The answer to a request that was aborted before its first token."""
    return cls(tokens=np.zeros(0, np.int32), logp=np.zeros(0, np.float32), finish="abort", label=None)


class ServerProtocol(Protocol):
  """How one kind of server is spoken to."""

  label_path: str
  """GET: `{"weight_version": label}`."""

  def generate(self, prompt: Sequence[int], *, max_tokens: int, seed: int, sampling: Sampling) -> Call:
    """Asks for one answer."""
    ...

  def read(self, answer: Any, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling) -> Generated:
    """Checks the answer; `BadResponseError` if it does not hold all that a trajectory needs."""
    ...

  def update(self, directory: pathlib.Path, label: str) -> list[Call]:
    """Stops what runs, loads weights, names them, goes on: each call when the one before has succeeded."""
    ...


class VLLM:
  """vLLM's completions endpoint, and its development endpoints for weights."""

  label_path = "/weight_info"

  def generate(self, prompt: Sequence[int], *, max_tokens: int, seed: int, sampling: Sampling) -> Call:
    # Every setting that the server could have a default of its own for (generation_config.json) is named.
    return "/v1/completions", {
      "prompt": list(prompt), "max_tokens": max_tokens, "temperature": sampling.temperature, "seed": seed, "n": 1,
      "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
      "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logprobs": 0,
      "return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False,
    }  # fmt: skip

  def read(self, answer: Any, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling) -> Generated:
    if _nothing_written(*_vllm_parts(answer)):
      return Generated.nothing()
    choices = _field(answer, "choices", list)
    if len(choices) != 1:
      raise BadResponseError(f"the answer must have one choice; received {len(choices)}.")
    choice = choices[0]
    if (echo := _field(choice, "prompt_token_ids", list, optional=True)) is not None and echo != list(prompt):
      raise BadResponseError(f"the server answered another prompt, of {len(echo)} tokens; sent were {len(prompt)}.")
    logprobs = _field(choice, "logprobs", dict, optional=True)
    logp = None if logprobs is None else _field(logprobs, "token_logprobs", list, optional=True)
    tokens = _field(choice, "token_ids", list)
    finish = _field(choice, "finish_reason", str)
    return _checked(tokens, logp, finish, None, max_tokens=max_tokens, sampling=sampling)

  def update(self, directory: pathlib.Path, label: str) -> list[Call]:
    return [
      ("/pause?mode=abort", {}),
      ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}),
      ("/update_weight_version", {"new_version": label}),
      ("/resume", {}),
    ]


class SGLang:
  """SGLang's native endpoints."""

  label_path = "/model_info"

  def generate(self, prompt: Sequence[int], *, max_tokens: int, seed: int, sampling: Sampling) -> Call:
    return "/generate", {
      "input_ids": list(prompt), "return_logprob": True, "stream": False,
      "sampling_params": {
        "max_new_tokens": max_tokens, "temperature": sampling.temperature, "sampling_seed": seed, "n": 1,
        "stop_token_ids": list(sampling.stop_ids), "ignore_eos": True, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "no_stop_trim": True,
        "skip_special_tokens": False,
      },
    }  # fmt: skip

  def read(self, answer: Any, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling) -> Generated:
    if _nothing_written(*_sglang_parts(answer)):
      return Generated.nothing()
    meta = _field(answer, "meta_info", dict)
    if (length := _field(meta, "prompt_tokens", int, optional=True)) is not None and length != len(prompt):
      raise BadResponseError(f"the server answered a prompt of {length} tokens; sent were {len(prompt)}.")
    finish = _field(_field(meta, "finish_reason", dict), "type", str)
    label = _field(meta, "weight_version", str)
    tokens = _field(answer, "output_ids", list)
    entries = _field(meta, "output_token_logprobs", list, optional=True)
    logp = None
    if entries is not None:
      if any(not isinstance(entry, list) or len(entry) < 2 for entry in entries):
        raise BadResponseError("output_token_logprobs must be a list of [log-prob, id, text].")
      logp = [entry[0] for entry in entries]
    done = _checked(tokens, logp, finish, label, max_tokens=max_tokens, sampling=sampling)
    if [entry[1] for entry in entries or ()] != tokens:
      raise BadResponseError("output_token_logprobs and output_ids name different tokens.")
    return done

  def update(self, directory: pathlib.Path, label: str) -> list[Call]:
    return [
      ("/pause_generation", {"mode": "abort"}),
      ("/update_weights_from_disk", {"model_path": str(directory), "weight_version": label, "flush_cache": True}),
      ("/continue_generation", {}),
    ]


def _get(container: Any, name: str) -> Any:
  return container.get(name) if isinstance(container, dict) else None


def _vllm_parts(answer: Any) -> tuple[Any, list[Any]]:
  """Reason for the end of an answer, and everything in it that is not empty if something was written."""
  choices = _get(answer, "choices")
  choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
  logprobs = _get(_get(choice, "logprobs"), "token_logprobs")
  count = _get(_get(answer, "usage"), "completion_tokens")
  written = choices if choice is None else _get(choice, "token_ids")
  return _get(choice, "finish_reason"), [written, _get(choice, "text"), logprobs, count]


def _sglang_parts(answer: Any) -> tuple[Any, list[Any]]:
  """As `_vllm_parts`."""
  meta = _get(answer, "meta_info")
  reason = _get(meta, "finish_reason")
  written = [_get(answer, "output_ids"), _get(answer, "text")]
  return _get(reason, "type"), [*written, _get(meta, "output_token_logprobs"), _get(meta, "completion_tokens")]


def _nothing_written(reason: Any, written: list[Any]) -> bool:
  """Whether the server gave up before the first token.

  A request that still waits when weights are updated is aborted. Servers fill in the answer as they please then:
  depending on the version label, ids, log-probs, length of the prompt or the reason are missing, null, empty or 0.
  Nothing was sampled, so nothing of that is needed.

  Raises:
    EmptyResponseError: the answer is empty and does not say that it was aborted.
  """
  if any(written) or reason not in (None, "abort"):
    return False
  if reason is None:
    raise EmptyResponseError("the answer has neither tokens nor a finish reason.")
  return True


def _field(container: Any, name: str, kind: type, *, optional: bool = False) -> Any:
  if not isinstance(container, dict):
    raise BadResponseError(f"an object with {name} was expected; received {type(container).__name__}.")
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
  """Refuses what a trajectory could not be built from, or what was not sampled as asked."""
  if finish not in ("stop", "length", "abort"):
    raise BadResponseError(f"finish reason must be stop, length or abort; received {finish!r:.80}.")
  outside = [i for i in tokens if type(i) is not int or not 0 <= i < sampling.vocab_size]
  if outside:
    raise BadResponseError(f"token ids must be in [0, {sampling.vocab_size}); received {outside[:5]!r:.200}.")
  if logp is None:
    raise BadResponseError(f"the answer has {len(tokens)} tokens and no log-probs.")
  if len(logp) != len(tokens):
    raise BadResponseError(f"the answer has {len(tokens)} tokens and {len(logp)} log-probs.")
  # Compared before they become float32, which overflows to -inf.
  wrong = [x for x in logp if type(x) not in (int, float) or not -3e38 < x <= LOGP_ROUNDING]
  if wrong:
    received = f"received {wrong[:5]!r:.200}; above 0 by {LOGP_ROUNDING} or less is rounding"
    raise BadResponseError(f"log-probs must be finite and <= 0; {received}.")
  if len(tokens) > max_tokens or (not tokens and finish != "abort"):
    raise BadResponseError(f"the answer must have 1 to {max_tokens} tokens; received {len(tokens)} ({finish}).")
  early = [i for i in tokens[:-1] if i in sampling.stop_ids]
  ends = bool(tokens) and tokens[-1] in sampling.stop_ids
  if early or (finish == "stop" and not ends):
    raise BadResponseError(
      f"the answer must end with its first stop id, one of {list(sampling.stop_ids)}; it ends with {tokens[-1:]} and "
      f"has {len(early)} of them before."
    )
  return Generated(
    tokens=np.array(tokens, np.int32),
    logp=np.minimum(np.array(logp, np.float32), np.float32(0)),
    finish="stop" if ends else finish,  # type: ignore[arg-type]
    label=label,
  )
