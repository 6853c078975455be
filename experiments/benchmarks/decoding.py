"""Shared parts of the decoding benchmarks: the model, the raw sampler's loop, and the machine's matmul limit."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.models import ModelConfig, cached_policy
from sao_jax.rollout import ModelRunner, Row, StepSpec
from sao_jax.rollout.engine.model_runner import PreparedWeights
from sao_jax.types import Params
from sao_jax.utils.extras import require_extra

MODEL = ModelConfig(
  vocab_size=1024,
  hidden_size=128,
  num_layers=4,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  intermediate_size=384,
  rope_theta=1_000_000.0,
)
POLICY = cached_policy(MODEL)
PROMPT_TOKENS = 32


def flops_per_token(config: ModelConfig, length: float) -> float:
  """Returns the FLOPs of one decoded token at a context of `length` tokens: projections, head and attention."""
  heads = config.num_heads * config.head_dim
  key_value_heads = config.num_kv_heads * config.head_dim
  per_layer = config.hidden_size * (2 * heads + 2 * key_value_heads + 3 * config.intermediate_size)
  dense = config.num_layers * per_layer + config.hidden_size * config.vocab_size
  return 2.0 * dense + 4.0 * config.num_layers * heads * length


def quiet() -> contextlib.AbstractContextManager[object]:
  """Ignores warnings of Tunix's imports and model, which would be errors in tests."""
  return warnings.catch_warnings(action="ignore")


def tunix_model(model: ModelConfig | None = None) -> Any:
  """Makes a model as Tunix's Qwen3, with random weights; None: `MODEL`.

  Raises:
    ImportError: google-tunix is not installed.
  """
  from flax import nnx

  with require_extra("bench"), quiet():
    from tunix.models.qwen3 import model as tunix_qwen3

  model = MODEL if model is None else model
  config = tunix_qwen3.ModelConfig(
    num_layers=model.num_layers,
    vocab_size=model.vocab_size,
    embed_dim=model.hidden_size,
    hidden_dim=model.intermediate_size,
    num_heads=model.num_heads,
    head_dim=model.head_dim,
    num_kv_heads=model.num_kv_heads,
    rope_theta=int(model.rope_theta),
    norm_eps=model.norm_eps,
    use_tied_embedding=model.tie_word_embeddings,
  )
  with quiet():
    return tunix_qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def matmul_gflops(size: int = 1024, seconds: float = 0.3) -> float:
  """Measures the best rate of square float32 matmuls, in GFLOP/s.

  Args:
    size: rows and columns.
    seconds: duration of the measurement.
  """
  multiply = jax.jit(jnp.dot)
  a = jnp.ones((size, size), jnp.float32)
  jax.block_until_ready(multiply(a, a))
  best, deadline = float("inf"), time.perf_counter() + seconds
  while time.perf_counter() < deadline:
    began = time.perf_counter()
    jax.block_until_ready(multiply(a, a))
    best = min(best, time.perf_counter() - began)
  return 2.0 * size**3 / best / 1e9


def bare_step_seconds(*, slots: int, streams: int, length: int, attention: bool, seconds: float = 0.5) -> float:
  """Measures the best time, in seconds, of a decode step that consists only of matmuls.

  There are no norms, rotation, softmax, cache writes or sampling. Every stream runs on its own thread.

  Args:
    slots: rows of all streams together.
    streams: number of streams.
    length: context length.
    attention: whether to include the matmuls with the cached keys and values.
    seconds: duration of the measurement.
  """
  config, rows, steps = MODEL, slots // streams, 16
  heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads
  shapes = [
    (config.hidden_size, heads + 2 * kv_heads * config.head_dim), (heads, config.hidden_size),
    (config.hidden_size, config.intermediate_size), (config.hidden_size, config.intermediate_size),
    (config.intermediate_size, config.hidden_size),
  ]  # fmt: skip
  kernels = [[jnp.zeros(shape) for shape in shapes] for _ in range(config.num_layers)]
  lm_head = jnp.zeros((config.hidden_size, config.vocab_size))

  def step(_: jax.Array, x: jax.Array, caches: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
    for (qkv, out, gate, up, down), (key, value) in zip(kernels, caches, strict=True):
      q = (x @ qkv)[:, :heads]
      if attention:
        grouped = q.reshape(rows, kv_heads, -1, config.head_dim)
        q = jnp.einsum("skgt,sktd->skgd", jnp.einsum("skgd,skdt->skgt", grouped, key), value).reshape(rows, heads)
      x = x + q @ out
      x = x + (x @ gate * (x @ up)) @ down
    return x + (x @ lm_head)[:, : config.hidden_size]

  run = jax.jit(lambda x, caches: jax.lax.fori_loop(0, steps, lambda i, x: step(i, x, caches), x))
  cache = (rows, kv_heads, config.head_dim, length)
  stream_caches = [
    [(jnp.zeros(cache), jnp.zeros((*cache[:2], length, config.head_dim))) for _ in kernels] for _ in range(streams)
  ]
  x = jnp.zeros((rows, config.hidden_size))
  best = float("inf")
  with futures.ThreadPoolExecutor(streams) as threads:
    deadline = None
    while deadline is None or time.perf_counter() < deadline:
      began = time.perf_counter()
      list(threads.map(lambda caches: jax.block_until_ready(run(x, caches)), stream_caches))
      if deadline is None:  # compiled
        deadline = time.perf_counter() + seconds
      else:
        best = min(best, time.perf_counter() - began)
  return best / steps


def num_cores() -> int:
  """Returns the largest power of two that is at most the number of cores of this process."""
  return 1 << (len(os.sched_getaffinity(0)).bit_length() - 1)


def num_streams() -> int:
  """Returns the number of decode streams for this machine: one per core on a CPU, one on an accelerator."""
  return num_cores() if jax.default_backend() == "cpu" else 1


def raw_decoder(
  params: Params, *, slots: int, new_tokens: int, chunk_steps: int, bucket_tokens: int, streams: int
) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
  """Returns `f(seed)`, which prefills random prompts and decodes `new_tokens` tokens for each.

  `f` returns tokens `[new_tokens, slots]` int32 and their log-probs, float32 of the same shape. Programs are compiled
  for contexts of each multiple of `bucket_tokens`.
  """
  spec = StepSpec(model=POLICY, chunk_steps=chunk_steps, temperature=1.0, stop_ids=())
  rows, page_size = slots // streams, 16
  max_pages = -(-(PROMPT_TOKENS + new_tokens) // page_size)
  step_pages = -(-bucket_tokens // page_size)
  prepared = PreparedWeights(spec)
  runners = [
    ModelRunner(
      spec,
      num_slots=rows,
      num_pages=rows * max_pages,
      page_size=page_size,
      max_pages=max_pages,
      token_budget=rows * PROMPT_TOKENS,
      prepared=prepared,
      threaded=streams > 1,
      buckets=(*range(step_pages, max_pages, step_pages), max_pages),
    )
    for _ in range(streams)
  ]
  prompts = np.random.default_rng(0).integers(1, MODEL.vocab_size, (slots, PROMPT_TOKENS)).astype(np.int32)
  pages = np.arange(1, rows * max_pages + 1, dtype=np.int32).reshape(rows, max_pages)
  base = jax.random.key(0, impl="threefry2x32")

  def generate(seed: int) -> tuple[np.ndarray, np.ndarray]:
    key = jax.random.fold_in(base, seed)
    # A stream has every `streams`-th slot.
    next_tokens, starts = list(prompts), 0
    chunks = []
    for done in range(0, new_tokens, chunk_steps):
      running = []
      for stream, runner in enumerate(runners):
        inputs = next_tokens[stream::streams]
        running.append(
          runner.step(
            params,
            [Row(stream + i * streams, starts, x, new_tokens - done, pages[i]) for i, x in enumerate(inputs)],
            key,
          )
        )
      outputs = [runner.fetch(step) for runner, step in zip(runners, running, strict=True)]
      chunk = [np.stack([getattr(x, name) for x in outputs], -1).reshape(-1, slots) for name in ("tokens", "logp")]
      starts += len(next_tokens[0]) - 1 + min(chunk_steps, new_tokens - done)
      next_tokens = list(chunk[0][min(chunk_steps, new_tokens - done) - 1][:, None])
      chunks.append(chunk)
    tokens, logp = (np.concatenate(x)[:new_tokens] for x in zip(*chunks, strict=True))
    return tokens, logp

  return generate
