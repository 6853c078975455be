"""Decoding speed: `python -m experiments.benchmarks.sampler`.

A Qwen3 model with random weights (4 layers, d 128, 4 query and 2 key/value heads of 32, MLP 384, vocabulary 1,024,
float32), 32 slots, prompts of 32 tokens, 256 new tokens at temperature 1, log-probs returned. This library's sampler
and, if google-tunix is installed, its `tunix.generate.sampler.Sampler` take turns in one process. The best result of
each is kept, and the best rate of a large float32 matmul, so that other load on the machine affects all of them alike.

`share_of_limit` = tokens/s * FLOPs per token (projections, head, attention at the mean true length) / the rate of a
square matmul on all cores. Two more shares show the limit for a step of so few rows, measured in the same process.
`share_of_bare_matmuls` is that of steps with only the model's matmuls, in as many streams. (Weights are read for every
few rows, so memory and not arithmetic limits the rate.) `share_of_bare_step` is that of steps that also multiply with
the cached keys and values (one FLOP per byte read).

Predictions before any tuning (2 cores): Tunix 2,800 tokens/s, as measured before. A step of 32 tokens costs 1.5 ms for
its matmuls (32 rows reach about half of the limit), 0.5 ms for attention, 0.3 ms for sampling and 0.3 ms for the rest:
12,000 tokens/s, 4.4 times Tunix, 35 % of the limit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax
from absl import flags

from experiments.benchmarks import decoding
from experiments.support import command
from sao_jax.models import init_policy
from sao_jax.utils.extras import require_extra


class _NumberTokenizer:
  """Tokenizer for Tunix: token ids as decimal numbers."""

  def encode(self, text: str, **_: Any) -> list[int]:
    return [int(x) for x in text.split()]

  def decode(self, ids: list[int], **_: Any) -> str:
    return " ".join(map(str, ids))

  def bos_id(self) -> int:
    return 1

  def eos_id(self) -> int:
    return decoding.MODEL.vocab_size + 1  # never sampled, so that all sequences have full length, as in our sampler

  def pad_id(self) -> int:
    return 0


def tunix_decoder(slots: int, new_tokens: int) -> Callable[[int], int] | None:
  """Returns `f(seed)`: number of tokens that Tunix's sampler generates; None if Tunix is not installed."""
  try:
    with require_extra("bench"), decoding.quiet():
      from tunix.generate import sampler as tunix_sampler

    model = decoding.tunix_model()
  except ImportError as error:
    print(f"skipping google-tunix: {error}")
    return None
  config = decoding.MODEL
  length = decoding.PROMPT_TOKENS + new_tokens
  sampler = tunix_sampler.Sampler(
    model,
    _NumberTokenizer(),
    tunix_sampler.CacheConfig(
      cache_size=length, num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
    ),
  )
  # Tunix adds a first token to each prompt.
  prompts = [" ".join(str(1 + (s * 31 + i) % 1000) for i in range(decoding.PROMPT_TOKENS - 1)) for s in range(slots)]

  def generate(seed: int) -> int:
    out = sampler(
      prompts,
      max_generation_steps=new_tokens,
      max_prompt_length=decoding.PROMPT_TOKENS,
      return_logprobs=True,
      temperature=1.0,
      top_p=1.0,
      seed=seed,
    )
    return sum(len(x) for x in out.tokens)

  return generate


def run(*, slots: int, new_tokens: int, chunk_steps: int, streams: int, repeats: int) -> dict[str, float | None]:
  """Measures all samplers, prints rows and returns the object for the last line."""
  params = init_policy(decoding.MODEL, jax.random.key(0))
  ours = decoding.raw_decoder(
    params,
    slots=slots,
    new_tokens=new_tokens,
    chunk_steps=chunk_steps,
    bucket_tokens=32,
    streams=streams,
  )
  samplers: dict[str, Callable[[int], int]] = {"sao_jax": lambda seed: ours(seed)[0].size}
  if (tunix := tunix_decoder(slots, new_tokens)) is not None:
    samplers["tunix"] = tunix
  for generate in samplers.values():
    generate(0)  # compiles
  rates = dict.fromkeys(samplers, 0.0)
  gflops = 0.0
  for seed in range(1, repeats + 1):
    gflops = max(gflops, decoding.matmul_gflops())
    for name, generate in samplers.items():
      began = time.perf_counter()
      rates[name] = max(rates[name], generate(seed) / (time.perf_counter() - began))
  flops = decoding.flops_per_token(decoding.MODEL, decoding.PROMPT_TOKENS + new_tokens / 2)
  length_mean = int(decoding.PROMPT_TOKENS + new_tokens / 2)
  bare = {
    attention: slots / decoding.bare_step_seconds(slots=slots, streams=streams, length=length_mean, attention=attention)
    for attention in (False, True)
  }
  result = {
    "tokens_per_s": rates["sao_jax"],
    "tunix_tokens_per_s": rates.get("tunix"),
    "ratio_to_tunix": rates["sao_jax"] / rates["tunix"] if "tunix" in rates else None,
    "matmul_gflops": gflops,
    "share_of_limit": rates["sao_jax"] * flops / (gflops * 1e9),
    "share_of_bare_matmuls": bare[False] * decoding.flops_per_token(decoding.MODEL, 0) / (gflops * 1e9),
    "share_of_bare_step": bare[True] * flops / (gflops * 1e9),
  }
  print(f"{slots} slots, {new_tokens} new tokens, {flops / 1e6:.2f} MFLOP per token, on {jax.devices()[0].device_kind}")
  for name, rate in rates.items():
    print(f"  {name:<8} {rate:>9,.0f} tokens/s  {rate * flops / 1e9:>6.1f} GFLOP/s")
  print(f"  matmul   {gflops:>6.1f} GFLOP/s; share of it: {result['share_of_limit']:.1%}")
  matmuls, step = result["share_of_bare_matmuls"], result["share_of_bare_step"]
  print(f"  steps of nothing but its matmuls reach {matmuls:.1%}, with those over the cache {step:.1%}")
  return result


def define_flags() -> None:
  """Defines the command's flags (not at import: other commands have flags of the same names)."""
  flags.DEFINE_integer("slots", 32, "Sequences decoded at once.", lower_bound=1)
  flags.DEFINE_integer("new_tokens", 256, "New tokens of each sequence.", lower_bound=1)
  flags.DEFINE_integer("chunk_steps", 32, "Decode steps per jitted chunk.", lower_bound=1)
  streams = decoding.num_streams()
  flags.DEFINE_integer("streams", streams, "Decode streams of the sampler, a thread each.", lower_bound=1)
  flags.DEFINE_integer("repeats", 5, "Rounds; the best of each contender counts.", lower_bound=1)


def main(argv: list[str]) -> None:
  del argv
  names = ("slots", "new_tokens", "chunk_steps", "streams", "repeats")
  print(json.dumps(run(**{name: flags.FLAGS[name].value for name in names})))


if __name__ == "__main__":
  define_flags()
  command.run(main)
