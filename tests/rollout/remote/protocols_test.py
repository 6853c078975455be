"""Responses of aborted requests, log-probs with rounding errors, and responses that are rejected."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from sao_jax.rollout.remote.protocols import VLLM, BadResponseError, EmptyResponseError, Sampling, SGLang
from sao_jax.types import LOGP_ROUNDING

PROMPT = [5, 6, 7]
SAMPLING = Sampling(vocab_size=100, stop_ids=(2,), temperature=1.0)
PROTOCOLS = {"sglang": SGLang(), "vllm": VLLM()}

SGLANG_META = {
  "id": "a", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}, "weight_version": "v",
  "prompt_tokens": 3, "completion_tokens": 0, "output_token_logprobs": [],
}  # fmt: skip
SGLANG = {"text": "", "output_ids": [], "meta_info": SGLANG_META}
VLLM_CHOICE = {
  "index": 0, "text": "", "token_ids": [], "prompt_token_ids": PROMPT, "finish_reason": "abort", "stop_reason": None,
  "logprobs": {"tokens": [], "token_logprobs": []},
}  # fmt: skip
VLLM_RESPONSE = {"choices": [VLLM_CHOICE], "usage": {"prompt_tokens": 3, "completion_tokens": 0}}


def parse(protocol, response):
  return PROTOCOLS[protocol].parse_response(response, PROMPT, max_tokens=4, sampling=SAMPLING)


def whole(protocol):
  return copy.deepcopy(SGLANG if protocol == "sglang" else VLLM_RESPONSE)


def parts(protocol, response):
  """Returns the objects of a response that have fields."""
  if protocol == "sglang":
    return [response, response["meta_info"]]
  return [response, response["usage"], response["choices"][0]]


FIELDS = {
  "sglang": ["text", "output_ids", "weight_version", "prompt_tokens", "completion_tokens", "output_token_logprobs"],
  "vllm": ["text", "token_ids", "prompt_token_ids", "logprobs", "stop_reason", "completion_tokens", "usage"],
}  # fmt: skip


def cases():
  for protocol, names in FIELDS.items():
    for names_ in [[], *([name] for name in names), [n for n in names if n != "usage"]]:
      for how in ("missing", "null", "zero"):
        yield pytest.param(protocol, names_, how, id=f"{protocol}-{how}-{'+'.join(names_) or 'nothing'}")


@pytest.mark.parametrize(("protocol", "names", "how"), list(cases()))
def test_an_abort_before_the_first_token_needs_only_its_reason(protocol, names, how):
  response = whole(protocol)
  for part in parts(protocol, response):
    for name in set(names) & set(part):
      if how == "missing":
        del part[name]
      else:
        part[name] = None if how == "null" else 0
  done = parse(protocol, response)
  assert (done.tokens.size, done.logp.size, done.finish) == (0, 0, "abort")
  assert done.tokens.dtype == np.int32 and done.logp.dtype == np.float32


@pytest.mark.parametrize(
  ("protocol", "response"),
  [
    ("sglang", {"text": "", "output_ids": [], "meta_info": None}),
    ("sglang", {"text": "", "output_ids": [], "meta_info": {"finish_reason": None}}),
    ("sglang", {"text": "", "meta_info": {"id": "a", "finish_reason": {"type": None}}}),
    ("sglang", {}),
    ("sglang", None),
    ("vllm", {"choices": []}),
    ("vllm", {"choices": None}),
    ("vllm", {"choices": [{"text": "", "token_ids": [], "finish_reason": None, "logprobs": None}]}),
  ],
)
def test_an_empty_response_without_a_reason_has_its_own_error(protocol, response):
  with pytest.raises(EmptyResponseError, match="neither tokens nor a finish reason"):
    parse(protocol, response)


def sglang(**changes):
  meta = {name: changes.pop(name, value) for name, value in SGLANG_META.items()}
  return {**SGLANG, **changes, "meta_info": meta}


def vllm(**changes):
  return {"choices": [{**VLLM_CHOICE, **changes}]}


@pytest.mark.parametrize(
  ("protocol", "response", "message"),
  [
    ("sglang", sglang(finish_reason={"type": "stop"}), "must have 1 to 4 tokens; received 0"),
    ("sglang", sglang(finish_reason={"type": "length"}), "must have 1 to 4 tokens; received 0"),
    ("sglang", sglang(output_ids=None, completion_tokens=3), "output_ids must be a list"),
    ("sglang", sglang(output_ids=None, output_token_logprobs=[[-1.0, 3, None]]), "output_ids must be a list"),
    ("sglang", sglang(output_ids=None, text="a"), "output_ids must be a list"),
    ("sglang", sglang(output_ids=[3], output_token_logprobs=None), "1 tokens and no log-probs"),
    ("sglang", sglang(output_ids=[3], output_token_logprobs=[[-1.0, 3, None]], weight_version=None), "weight_version"),
    ("sglang", sglang(output_ids=[3], output_token_logprobs=[[-1.0, 3, None]], prompt_tokens=0), "as sent; received 0"),
    ("vllm", vllm(finish_reason="stop"), "must have 1 to 4 tokens; received 0"),
    ("vllm", vllm(finish_reason="error"), "finish reason must be stop, length or abort; received 'error'"),
    ("vllm", vllm(token_ids=None, text="a"), "token_ids must be a list"),
    ("vllm", vllm(token_ids=[3], logprobs=None), "1 tokens and no log-probs"),
    ("vllm", {"choices": [VLLM_CHOICE] * 2}, "must have one choice; received 2"),
  ],
)
def test_tokens_are_checked_and_only_an_abort_may_be_empty(protocol, response, message):
  with pytest.raises(BadResponseError, match=message) as caught:
    parse(protocol, response)
  assert not isinstance(caught.value, EmptyResponseError)


def with_logp(protocol, *logp):
  ids = [3, 2][-len(logp) :]
  if protocol == "vllm":
    return vllm(token_ids=ids, finish_reason="stop", logprobs={"token_logprobs": list(logp)})
  entries = [[x, i, None] for x, i in zip(logp, ids, strict=True)]
  return sglang(output_ids=ids, finish_reason={"type": "stop"}, output_token_logprobs=entries)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("logp", [1e-7, 1.1920929e-07, 5e-5, LOGP_ROUNDING, 0, 0.0])
def test_a_log_prob_that_is_positive_by_rounding_becomes_0(protocol, logp):
  done = parse(protocol, with_logp(protocol, logp, -0.25))
  assert done.logp.tolist() == [0.0, -0.25] and done.tokens.tolist() == [3, 2]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("logp", [1.1e-4, 0.001, 0.5, 20.0, 1e300, float("inf"), float("nan"), True])
def test_a_log_prob_that_is_positive_by_more_than_rounding_is_rejected(protocol, logp):
  message = r"finite and <= 0; received \[.*\]; above 0 by 0\.0001 or less is rounding"
  with pytest.raises(BadResponseError, match=message):
    parse(protocol, with_logp(protocol, -0.25, logp))
