"""Speed of the policy's loss and gradient: `python -m experiments.benchmarks.learner`.

The sampler benchmark's model (Qwen3, 4 layers, d 128, vocabulary 1,024, float32, random weights), 8 rows of 288
tokens, all but the first 32 of each actions. This library's DIS loss on chunked log-probs and, where google-tunix is
installed, its `compute_per_token_logps` with a PPO loss take turns in one process, as does a large float32 matmul;
the best of each is kept. Also timed: the same loss on a packed batch of long-tailed lengths, per real token.

`share_of_limit` = 3 x forward FLOPs (projections, head, causal attention) x tokens/s / the matmul rate.

Expected before the first measurement (2 CPU cores, matmul limit 60 to 125 GFLOP/s): 6.5 MFLOP per token forward and
backward, at half of the limit about 6,000 tokens/s; Tunix 3,800, as measured before; packing costs its padding, about
5 %.

Found, with two other processes at work: 9,650 tokens/s in microbatches of 2 rows (8,450 with 1, 8,900 with 4, 7,600
with 8: activations of 2 rows stay in the cache), the chunk size of the log-probs makes no difference at this
vocabulary, packing costs 2 %. Tunix was only timed next to heavier load: 3,100 against our 3,800.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.benchmarks import decoding
from sao_jax.learner import LearnerConfig, learner_config, pack
from sao_jax.learner.update import PolicyOutputs, policy_gradient
from sao_jax.models import init_policy, policy_apply
from sao_jax.types import TokenBatch, Trajectory

ROWS, LENGTH = 8, 288


def make_trajectory(rng: np.random.Generator, length: int, index: int) -> Trajectory:
  """A trajectory of random tokens whose prompt is `PROMPT_TOKENS` long, or half of it if it is short."""
  mask = np.arange(length) >= min(decoding.PROMPT_TOKENS, length // 2)
  return Trajectory(
    tokens=rng.integers(1, decoding.MODEL.vocab_size, length).astype(np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, -7.0, np.nan).astype(np.float32),
    versions=np.where(mask, 0, -1).astype(np.int32),
    rewards=np.zeros(length, np.float32),
    ended="terminal",
    task_index=index,
    episode_id=index,
    group_id=index,
    num_turns=1,
    success=False,
  )


def make_batches(seed: int, rows_per_microbatch: int) -> dict[str, tuple[TokenBatch, int]]:
  """`full`: rows without padding; `packed`: log-normal lengths in rows as long; each with its number of tokens."""
  rng = np.random.default_rng(seed)
  full = [make_trajectory(rng, LENGTH, i) for i in range(ROWS)]
  lengths = np.clip(rng.lognormal(np.log(80), 0.9, 10_000), 8, LENGTH).astype(int)
  count = int(np.searchsorted(np.cumsum(lengths), ROWS * LENGTH))
  tail = [make_trajectory(rng, int(n), i) for i, n in enumerate(lengths[:count])]
  batches = {}
  for name, trajectories in (("full", full), ("packed", tail)):
    batch, stats = pack(
      trajectories, row_length=LENGTH, rows_per_microbatch=rows_per_microbatch, alpha=1.5, microbatch_multiple=1
    )
    batches[name] = (jax.tree.map(jnp.asarray, batch), stats.tokens)
  return batches


def ours(config: LearnerConfig, params: Any) -> Callable[[TokenBatch], Any]:
  """`f(batch)`: the learner's loss and gradient, as its step computes them."""
  apply = policy_apply(decoding.MODEL)

  @jax.jit
  def gradient(params: Any, batch: TokenBatch) -> Any:
    zeros = jnp.zeros_like(batch.rewards)
    return policy_gradient(
      config, apply, params, batch, zeros + 1.0, 0, batch.tokens.shape[0],
      denominator=jnp.sum(batch.action_mask), written=PolicyOutputs(zeros, zeros),
    )  # fmt: skip

  return lambda batch: gradient(params, batch)


def tunix() -> Callable[[TokenBatch], Any] | None:
  """`f(batch)` for rows without padding: Tunix's log-probs and PPO loss, and their gradient; None if not installed."""
  try:
    from flax import nnx
    from tunix.rl import common

    graph, weights = nnx.split(decoding.tunix_model())
  except ImportError as error:
    print(f"google-tunix is not compared: {error}")
    return None

  @jax.jit
  def gradient(weights: Any, tokens: jax.Array) -> Any:
    prompt, completion = tokens[:, : decoding.PROMPT_TOKENS], tokens[:, decoding.PROMPT_TOKENS :]

    def loss(weights: Any) -> jax.Array:
      logp = common.compute_per_token_logps(
        graph, weights, prompt, completion, pad_id=0, eos_id=decoding.MODEL.vocab_size + 1, stop_gradient=False
      )
      ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
      return -jnp.mean(jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.28)))

    return jax.value_and_grad(loss)(weights)

  return lambda batch: gradient(weights, batch.tokens.reshape(ROWS, LENGTH))


def run(*, repeats: int, chunk_size: int, rows_per_microbatch: int) -> dict[str, float | None]:
  """Times all contenders in turn, prints rows and returns the last line's object."""
  params = init_policy(decoding.MODEL, jax.random.key(0))
  batches = make_batches(0, rows_per_microbatch)
  config = learner_config("sao", logprob_chunk_size=chunk_size)
  loss = ours(config, params)
  full = batches["full"][0]
  contenders: dict[str, Callable[[], Any]] = {name: lambda b=b: loss(b) for name, (b, _) in batches.items()}
  if (peer := tunix()) is not None:
    contenders["tunix"] = lambda: peer(full)
  for call in contenders.values():
    jax.block_until_ready(call())  # compiles
  best = dict.fromkeys(contenders, float("inf"))
  gflops = 0.0
  for _ in range(repeats):
    gflops = max(gflops, decoding.matmul_gflops(seconds=0.1))
    for name, call in contenders.items():
      began = time.perf_counter()
      jax.block_until_ready(call())
      best[name] = min(best[name], time.perf_counter() - began)
  tokens = {"full": batches["full"][1], "packed": batches["packed"][1], "tunix": batches["full"][1]}
  rates = {name: tokens[name] / seconds for name, seconds in best.items()}
  flops = 3.0 * decoding.flops_per_token(decoding.MODEL, LENGTH / 2)
  tunix_rate = rates.get("tunix")
  result = {
    "tokens_per_s": rates["full"],
    "tunix_tokens_per_s": tunix_rate,
    "ratio_to_tunix": None if tunix_rate is None else rates["full"] / tunix_rate,
    "share_of_limit": rates["full"] * flops / (gflops * 1e9),
    "matmul_gflops": gflops,
    "packed_tokens_per_s": rates["packed"],
    "packed_loss": 1.0 - rates["packed"] / rates["full"],
    "packed_fill": tokens["packed"] / batches["packed"][0].tokens.size,
  }
  print(f"policy loss and gradient, {ROWS} x {LENGTH} tokens, {flops / 1e6:.2f} MFLOP per token")
  for name, rate in rates.items():
    print(f"  {name:<8} {rate:>9,.0f} tokens/s  {rate * flops / 1e9:>6.1f} GFLOP/s")
  print(f"  matmul   {gflops:>6.1f} GFLOP/s; share of it: {result['share_of_limit']:.1%}")
  print(f"  packing costs {result['packed_loss']:.1%} per real token at a fill of {result['packed_fill']:.1%}")
  return result


def define_flags() -> None:
  """Defines the command's flags (not at import: other commands have flags of the same names)."""
  flags.DEFINE_integer("repeats", 10, "Rounds; the best of each contender counts.", lower_bound=1)
  flags.DEFINE_integer("rows_per_microbatch", 2, "Rows whose activations are alive at once.", lower_bound=1)
  flags.DEFINE_integer("chunk_size", 1_024, "Tokens whose logits are held at once.", lower_bound=1)


def main(argv: list[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  names = ("repeats", "chunk_size", "rows_per_microbatch")
  print(json.dumps(run(**{name: flags.FLAGS[name].value for name in names})))


if __name__ == "__main__":
  define_flags()
  app.run(main)
