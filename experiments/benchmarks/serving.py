"""Requests served at once, against vLLM: `python -m experiments.benchmarks.serving`.

The model has the shape of SmolLM2-135M (30 layers, d 576, 9 query and 3 KV heads, vocabulary 49,152) with random
weights, in float32. 16 requests, then 32, with prompts of 64 tokens and 128 new tokens each, at temperature 1 and with
log-probs. This library's engine runs in this process. vLLM, if `SAO_JAX_TEST_VLLM_PYTHON` is the python of an
environment that has it (docs/scaling.md), runs as its server in another process, with `--enforce-eager` unless
`--vllm_compiled`; its requests come over HTTP. The two take turns. The best time of each counts, from the first request
to the last token, prefill included.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures

import jax
import numpy as np
from absl import app, flags

from experiments.benchmarks import decoding
from experiments.presets.model_configs import smollm2_135m
from experiments.support import command
from experiments.support.vllm_server import PYTHON_VARIABLE, vllm_server
from sao_jax.models import ModelConfig, cached_policy, init_policy, save_hf
from sao_jax.rollout import Engine, EngineConfig, EpisodeRequest
from sao_jax.types import Params, Step

Serve = Callable[[int], int]
"""`f(seed)`: serves all requests, and returns the number of new tokens."""


class _NumberTokenizer:
  """Tokenizer for prompts of token ids as decimal numbers; no id ends a completion."""

  stop_ids: tuple[int, ...] = ()

  def __init__(self, vocab_size: int):
    self.vocab_size = vocab_size

  def encode(self, text: str) -> list[int]:
    return [int(x) for x in text.split()]

  def decode(self, ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


class _Prompt:
  """Environment of one action, whose prompt is that of its task's number."""

  def __init__(self, prompts: Sequence[Sequence[int]]):
    self._prompts = prompts

  def reset(self, task_index: int) -> str:
    return " ".join(map(str, self._prompts[task_index]))

  def step(self, action: str) -> Step:
    return Step(done=True)

  def close(self) -> None:
    """Does nothing: there are no resources."""


@contextlib.contextmanager
def own_engine(
  model: ModelConfig, params: Params, prompts: Sequence[Sequence[int]], *, new_tokens: int, streams: int
) -> Iterator[Serve]:
  """Yields the serving function of this library's engine, with a slot per prompt."""
  length = len(prompts[0])
  config = EngineConfig(
    num_slots=len(prompts), num_streams=streams, max_len=length + new_tokens, max_action_tokens=new_tokens, max_turns=1,
    chunk_steps=16, token_budget=length * len(prompts) // streams, env_workers=0,
  )  # fmt: skip

  def serve(seed: int) -> int:
    requests = [EpisodeRequest(task_index=i, episode_id=i, group_id=i) for i in range(len(prompts))]
    return sum(x.num_actions for x in engine.generate(lambda _: (params, 0), requests, seed=seed))

  tokenizer = _NumberTokenizer(model.vocab_size)
  with Engine(
    model=cached_policy(model), make_env=lambda: _Prompt(prompts), tokenizer=tokenizer, config=config
  ) as engine:
    yield serve


def vllm_client(url: str, prompts: Sequence[Sequence[int]], *, new_tokens: int) -> Serve:
  """Returns the serving function of a vLLM server."""

  def request(prompt: Sequence[int]) -> int:
    body = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True,
            "return_token_ids": True, "return_tokens_as_token_ids": True, "add_special_tokens": False}  # fmt: skip
    headers = {"Content-Type": "application/json"}
    call = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=600) as response:
      choice = json.loads(response.read())["choices"][0]
    assert len(choice["logprobs"]["token_logprobs"]) == len(choice["token_ids"])
    return len(choice["token_ids"])

  def serve(seed: int) -> int:
    del seed  # the server draws its own
    with futures.ThreadPoolExecutor(len(prompts)) as threads:
      return sum(threads.map(request, prompts))

  return serve


def measure(contenders: dict[str, Serve], repeats: int) -> dict[str, float]:
  """Lets the contenders take turns, after one call each to warm up; returns the best tokens per second of each."""
  best = dict.fromkeys(contenders, 0.0)
  for seed in range(repeats + 1):
    for name, serve in contenders.items():
      began = time.perf_counter()
      rate = serve(seed) / (time.perf_counter() - began)
      best[name] = max(best[name], rate if seed else 0.0)
  return best


def run(
  *, requests: Sequence[int], prompt_tokens: int, new_tokens: int, streams: int, repeats: int, vllm_compiled: bool,
  python: str | None, model: ModelConfig,
) -> dict[str, dict[str, float | None]]:  # fmt: skip
  """Measures every number of requests, prints rows and returns the object of the last line."""
  params = init_policy(model, jax.random.key(0))
  drawn = np.random.default_rng(0).integers(1, model.vocab_size, (max(requests), prompt_tokens)).tolist()
  rates: dict[str, dict[str, float]] = {}
  with contextlib.ExitStack() as stack:
    url = None
    if python is None:
      print(f"vLLM is not compared: {PYTHON_VARIABLE} is not set")
    else:
      folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model"
      save_hf(folder, model, params)
      eager = () if vllm_compiled else ("--enforce-eager",)
      length = f"--max-model-len={prompt_tokens + new_tokens}"
      url = stack.enter_context(vllm_server(python, folder, "--dtype=float32", length, *eager))
    for count in requests:
      prompts = drawn[:count]
      with own_engine(model, params, prompts, new_tokens=new_tokens, streams=streams) as serve:
        contenders = {"sao_jax": serve}
        if url is not None:
          contenders["vllm"] = vllm_client(url, prompts, new_tokens=new_tokens)
        found = rates[str(count)] = measure(contenders, repeats)
      row = "  ".join(f"{name} {rate:7.1f} tokens/s" for name, rate in found.items())
      print(f"{count:3d} requests: {row}")
  ratios = {count: found["sao_jax"] / found["vllm"] if "vllm" in found else None for count, found in rates.items()}
  return {
    "tokens_per_s": {count: found["sao_jax"] for count, found in rates.items()},
    "vllm_tokens_per_s": {count: found.get("vllm") for count, found in rates.items()},
    "ratio_to_vllm": ratios,
  }


def define_flags() -> None:
  """Defines the command's flags (not at import: other commands have flags of the same names)."""
  flags.DEFINE_list("requests", ["16", "32"], "Numbers of requests at once, multiples of --streams.")
  flags.DEFINE_integer("prompt_tokens", 64, "Tokens of each prompt.", lower_bound=1)
  flags.DEFINE_integer("new_tokens", 128, "New tokens of each request.", lower_bound=1)
  flags.DEFINE_integer("streams", 1, "Decode streams of this library's engine.", lower_bound=1)
  flags.DEFINE_integer("repeats", 3, "Rounds; the best of each contender counts.", lower_bound=1)
  flags.DEFINE_bool("vllm_compiled", False, "Whether vLLM compiles its model, which takes minutes.")


def main(argv: list[str]) -> None:
  del argv
  requests, streams = flags.FLAGS["requests"].value, flags.FLAGS["streams"].value
  if not requests or not all(x.isdecimal() and int(x) and int(x) % streams == 0 for x in requests):
    raise app.UsageError(f"--requests must be multiples of --streams = {streams}; received {','.join(requests)}.")
  names = ("prompt_tokens", "new_tokens", "streams", "repeats", "vllm_compiled")
  settings = {name: flags.FLAGS[name].value for name in names}
  python, model = os.environ.get(PYTHON_VARIABLE), smollm2_135m()
  print(f"SmolLM2-135M's shape in {model.dtype}, on {jax.devices()[0].device_kind}, {decoding.num_cores()} cores")
  print(json.dumps(run(requests=[int(x) for x in requests], python=python, model=model, **settings)))


if __name__ == "__main__":
  define_flags()
  command.run(main)
