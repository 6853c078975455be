"""Speed of the policy's loss and gradient: `python -m experiments.benchmarks.learner`.

The model is that of the sampler benchmark (Qwen3, 4 layers, d 128, vocabulary 1,024, float32, random weights). The
batch has 8 rows of 288 tokens, of which all but the first 32 are actions. Three programs take turns in one process, and
the best time of each counts: this library's DIS loss on chunked log-probs; Tunix's `compute_per_token_logps` with a PPO
loss, if google-tunix is installed; and a large float32 matmul. Each loss runs on one CPU device, and again with its
rows split over one device per core (`mesh.data` in this library). `tokens_per_s` is this library on all devices;
`tunix_tokens_per_s` is the better of Tunix's two. The same loss is also timed on a packed batch with long-tailed
lengths, per real token.

`share_of_limit` = 3 x forward FLOPs (projections, head, causal attention) x tokens/s / the matmul rate.

Expected before the first measurement (2 CPU cores, matmul limit 60 to 125 GFLOP/s): 6.5 MFLOP per token forward and
backward, so about 6,000 tokens/s at half of the limit; 3,800 for Tunix, as measured before; packing costs its padding,
about 5 %. Before tuning, on a quiet machine: 8,200 tokens/s on one device, 17 % of a limit of 301 GFLOP/s. Attention
over contiguous heads and two devices were expected to make this 1.6 times as fast.

Measured (quiet, 2 cores): 12,700 tokens/s on two devices, 28 % of 285 GFLOP/s and 1.39 times Tunix's 9,100. On one
device, 10,100 against 6,900, 1.46 times. The goals of 2 times Tunix and 30 % are missed. Packing costs nothing per real
token. Microbatches of 1 and 4 rows per device give 11,300 and 9,800.

The limits: the matmuls alone, forward and backward, take 83 of the 230 ms that one device needs. With an inner
dimension of 128, they reach 60 % of the limit. Of the 67 ms of a microbatch's trunk, the matmuls of the layers take 26
and attention takes 11. Removing the norms saves 15 and removing the rotation saves 10: these are passes over small
arrays, each on one thread. Attention with `jax.nn.dot_product_attention` took 24 ms instead of 11.

`agent` is a shape that agents have: 6 layers, d 576, vocabulary 49,152, 2 rows of 1,024 tokens, of which 30 % are
actions, in turns. Only these have a loss. Tunix scores every token after the prompt and masks the others, as it does
for tool responses; this library evaluates the output head at action tokens only. `peak_bytes` are the temporary buffers
of each compiled program on one device. By FLOPs alone the ratio would be 1.5.

One row of 1,024, 4,096 and 8,192 tokens (`--row_lengths`, one device, every layer recomputed in the backward pass)
takes 0.21, 3.1 and 23 s. Attention's quadratic cost dominates from the start. The loop over blocks, which a CPU needs
from 8,192 tokens on, costs about twice as much per score. The run of 32,768 tokens was not completed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from experiments.benchmarks import decoding
from experiments.support import command
from sao_jax import parallel
from sao_jax.learner import LearnerConfig, learner_config, pack
from sao_jax.learner.update import PolicyOutputs, policy_gradient
from sao_jax.models import ModelConfig, init_policy, policy_apply
from sao_jax.types import TokenBatch, Trajectory
from sao_jax.utils.extras import require_extra

ROWS, LENGTH = 8, 288
AGENT = ModelConfig(
  vocab_size=49_152, hidden_size=576, num_layers=6, num_heads=9, num_kv_heads=3, head_dim=64, intermediate_size=1536,
  rope_theta=1_000_000.0,
)  # fmt: skip
AGENT_ROWS, AGENT_LENGTH, AGENT_PROMPT = 2, 1_024, 64


def make_trajectory(rng: np.random.Generator, length: int, index: int) -> Trajectory:
  """Makes a trajectory of random tokens. Its prompt has `PROMPT_TOKENS` tokens, or half of all if that is shorter."""
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


def make_agent_trajectory(rng: np.random.Generator, index: int) -> Trajectory:
  """Makes a trajectory of `AGENT_LENGTH` tokens: a prompt, and turns of 8 action tokens and 17 of the environment."""
  whole = make_trajectory(rng, AGENT_LENGTH, index)
  after = np.arange(AGENT_LENGTH) - AGENT_PROMPT
  mask = (after >= 0) & (after % 25 < 8)
  return dataclasses.replace(
    whole,
    tokens=rng.integers(1, AGENT.vocab_size, AGENT_LENGTH).astype(np.int32),
    action_mask=mask,
    behavior_logp=np.where(mask, -10.8, np.nan).astype(np.float32),
    versions=np.where(mask, 0, -1).astype(np.int32),
  )


def make_batches(seed: int, rows_per_microbatch: int) -> dict[str, tuple[TokenBatch, int]]:
  """Makes two batches: `full` has rows without padding, `packed` has log-normal lengths. Each has its token count."""
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


def ours(
  config: LearnerConfig, params: Any, mesh: Mesh, *, model: ModelConfig = decoding.MODEL
) -> Callable[[TokenBatch], Any]:
  """Returns `f(batch)`, jitted: the learner's loss and gradient as its step computes them on a mesh."""
  apply = parallel.constrain_params(policy_apply(model), mesh)
  params = parallel.place(params, mesh)

  def gradient(params: Any, batch: TokenBatch) -> Any:
    zeros = jnp.zeros_like(batch.rewards)
    return policy_gradient(
      config, apply, params, batch, zeros + 1.0, 0, batch.tokens.shape[0],
      denominator=jnp.sum(batch.action_mask), outputs=PolicyOutputs(zeros, zeros),
    )  # fmt: skip

  return functools.partial(jax.jit(parallel.on_mesh(gradient, mesh)), params)


def tunix(
  model: ModelConfig | None = None, prompt_tokens: int = decoding.PROMPT_TOKENS
) -> Callable[[TokenBatch, Mesh], Callable[[], Any]] | None:
  """Returns `f(batch, mesh)`, which prepares a call of Tunix's log-probs and PPO loss with their gradient.

  The rows must not be padded. Returns None if Tunix is not installed.

  Args:
    model: the policy; None: `decoding.MODEL`.
    prompt_tokens: tokens of every row that are not scored.
  """
  model = decoding.MODEL if model is None else model
  try:
    from flax import nnx

    with require_extra("bench"), decoding.quiet():
      from tunix.rl import common

    graph, weights = nnx.split(decoding.tunix_model(model))
  except ImportError as error:
    print(f"without google-tunix, there is no comparison: {error}")
    return None

  @jax.jit
  def gradient(weights: Any, tokens: jax.Array, mask: jax.Array) -> Any:
    prompt, completion = tokens[:, :prompt_tokens], tokens[:, prompt_tokens:]

    def loss(weights: Any) -> jax.Array:
      logp = common.compute_per_token_logps(
        graph, weights, prompt, completion, pad_id=0, eos_id=model.vocab_size + 1, stop_gradient=False
      )
      ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
      return -jnp.mean(jnp.minimum(ratio, jnp.clip(ratio, 0.8, 1.28)), where=mask[:, prompt_tokens:])

    return jax.value_and_grad(loss)(weights)

  def call(batch: TokenBatch, mesh: Mesh) -> Callable[[], Any]:
    """Splits the rows over all devices of the mesh and leaves the rest to the compiler, as in `ours`."""
    # Microbatches beyond the number of rows contain rows of padding, which are computed here as in `ours`.
    rows = (x.reshape(-1, x.shape[-1]) for x in (batch.tokens, batch.action_mask))
    tokens, mask = jax.device_put(tuple(rows), NamedSharding(mesh, PartitionSpec("data")))
    placed = jax.device_put(weights, parallel.replicated(mesh))
    return functools.partial(gradient, placed, tokens, mask)

  return call


def data_mesh(devices: Sequence[jax.Device]) -> Mesh:
  """Makes a mesh that splits rows over the devices."""
  return parallel.make_mesh(parallel.MeshConfig(data=len(devices)), devices)


def make_contenders(
  config: LearnerConfig, rows_per_microbatch: int
) -> dict[str, tuple[Callable[[], Any], float, float]]:
  """Returns for each name the call, its number of real tokens, and the share of real tokens among those computed."""
  params = init_policy(decoding.MODEL, jax.random.key(0))
  peer = tunix()
  contenders: dict[str, tuple[Callable[[], Any], float, float]] = {}
  for where, devices in (("", jax.devices()), (" on one device", jax.devices()[:1])):
    mesh = data_mesh(devices)
    loss = ours(config, params, mesh)
    batches = make_batches(0, rows_per_microbatch * len(devices))
    for name, (batch, tokens) in batches.items():
      placed = jax.device_put(batch, parallel.batch_shardings(batch, mesh))
      contenders[name + where] = (lambda loss=loss, placed=placed: loss(placed), tokens, tokens / batch.tokens.size)
    if peer is not None:
      contenders["tunix" + where] = (peer(batches["full"][0], mesh), batches["full"][1], 1.0)
  return contenders


def run(*, repeats: int, chunk_size: int, rows_per_microbatch: int) -> dict[str, float | None]:
  """Times all contenders in turns, prints rows and returns the object of the last line."""
  config = learner_config("sao", logprob_chunk_size=chunk_size)
  contenders = make_contenders(config, rows_per_microbatch)
  for call, _, _ in contenders.values():
    jax.block_until_ready(call())  # compiles
  best = dict.fromkeys(contenders, float("inf"))
  gflops = 0.0
  for _ in range(repeats):
    gflops = max(gflops, decoding.matmul_gflops(seconds=0.1))
    for name, (call, _, _) in contenders.items():
      began = time.perf_counter()
      jax.block_until_ready(call())
      best[name] = min(best[name], time.perf_counter() - began)
  rates = {name: contenders[name][1] / seconds for name, seconds in best.items()}
  flops = 3.0 * decoding.flops_per_token(decoding.MODEL, LENGTH / 2)
  tunix_rate = max((rate for name, rate in rates.items() if name.startswith("tunix")), default=None)
  result = {
    "tokens_per_s": rates["full"],
    "tunix_tokens_per_s": tunix_rate,
    "ratio_to_tunix": None if tunix_rate is None else rates["full"] / tunix_rate,
    "share_of_limit": rates["full"] * flops / (gflops * 1e9),
    "matmul_gflops": gflops,
    "devices": len(jax.devices()),
    "one_device_tokens_per_s": rates["full on one device"],
    "packed_tokens_per_s": rates["packed"],
    "packed_loss": 1.0 - rates["packed"] / rates["full"],
    "packed_fill": contenders["packed"][2],
  }
  print(f"policy loss and gradient, {ROWS} x {LENGTH} tokens, {flops / 1e6:.2f} MFLOP per token")
  for name, rate in rates.items():
    print(f"  {name:<22} {rate:>9,.0f} tokens/s  {rate * flops / 1e9:>6.1f} GFLOP/s")
  print(f"  matmul {gflops:>6.1f} GFLOP/s; share of it: {result['share_of_limit']:.1%}; {result['devices']} devices")
  print(f"  packing costs {result['packed_loss']:.1%} per real token; its fill is {result['packed_fill']:.1%}")
  return result


def agent(*, repeats: int, chunk_size: int) -> dict[str, float | None]:
  """Times both libraries on the agents' shape, in turns, and reads the peak memory of their programs."""
  config = learner_config("sao", logprob_chunk_size=chunk_size)
  rng = np.random.default_rng(0)
  trajectories = [make_agent_trajectory(rng, i) for i in range(AGENT_ROWS)]
  params, peer = init_policy(AGENT, jax.random.key(0)), tunix(AGENT, AGENT_PROMPT)
  calls: dict[str, Callable[[], Any]] = {}
  peaks: dict[str, float] = {}
  for where, devices in (("", jax.devices()), (" on one device", jax.devices()[:1])):
    mesh = data_mesh(devices)
    batch, _ = pack(trajectories, row_length=AGENT_LENGTH, rows_per_microbatch=len(devices), alpha=1.5)
    placed = jax.device_put(jax.tree.map(jnp.asarray, batch), parallel.batch_shardings(batch, mesh))
    pair = {"sao_jax": functools.partial(ours(config, params, mesh, model=AGENT), placed)}
    if peer is not None:
      pair["tunix"] = peer(batch, mesh)
    for name, call in pair.items():
      compiled = call.func.lower(*call.args).compile()
      calls[name + where] = functools.partial(compiled, *call.args)
      peaks[name + where] = compiled.memory_analysis().temp_size_in_bytes
      print(f"  {name + where:<22} {peaks[name + where] / 1e9:.2f} GB of temporary buffers per device", flush=True)
      jax.block_until_ready(calls[name + where]())
  best = dict.fromkeys(calls, float("inf"))
  for _ in range(repeats):
    for name, call in calls.items():
      began = time.perf_counter()
      jax.block_until_ready(call())
      best[name] = min(best[name], time.perf_counter() - began)
  rates = {name: AGENT_ROWS * AGENT_LENGTH / seconds for name, seconds in best.items()}
  print(f"agents' shape, {AGENT_ROWS} x {AGENT_LENGTH} tokens, 30 % of them actions")
  for name, rate in rates.items():
    print(f"  {name:<22} {rate:>9,.0f} tokens/s")
  found = {name: max(rates[name], rates[f"{name} on one device"]) for name in ("sao_jax", "tunix") if name in rates}
  memory = {name: peaks[f"{name} on one device"] for name in found}
  both = "tunix" in found
  return {
    "tokens_per_s": found["sao_jax"],
    "tunix_tokens_per_s": found.get("tunix"),
    "ratio_to_tunix": found["sao_jax"] / found["tunix"] if both else None,
    "peak_bytes": memory["sao_jax"],
    "tunix_peak_bytes": memory.get("tunix"),
    "share_of_tunix_peak": memory["sao_jax"] / memory["tunix"] if both else None,
  }


def row_growth(lengths: Sequence[int], chunk_size: int) -> dict[str, float]:
  """Times the loss and gradient on one row of each length, on one device; returns the seconds by length.

  The backward pass recomputes every layer.
  """
  mesh = data_mesh(jax.devices()[:1])
  model = dataclasses.replace(decoding.MODEL, remat="full")
  loss = ours(
    learner_config("sao", logprob_chunk_size=chunk_size), init_policy(model, jax.random.key(0)), mesh, model=model
  )
  seconds = {}
  for length in lengths:
    batch, _ = pack(
      [make_trajectory(np.random.default_rng(0), length, 0)], row_length=length, rows_per_microbatch=1, alpha=1.5
    )
    placed = jax.device_put(batch, parallel.batch_shardings(batch, mesh))
    jax.block_until_ready(loss(placed))
    began = time.perf_counter()
    jax.block_until_ready(loss(placed))
    seconds[str(length)] = time.perf_counter() - began
    print(
      f"one row of {length:>6,} tokens: {seconds[str(length)]:>7.2f} s, {length / seconds[str(length)]:>7,.0f} tokens/s"
    )
  return seconds


def define_flags() -> None:
  """Defines the command's flags. Importing the module does not, since other commands use the same names."""
  flags.DEFINE_integer("repeats", 10, "The number of rounds. The best time of each contender counts.", lower_bound=1)
  flags.DEFINE_integer(
    "rows_per_microbatch", 2, "The number of rows per device whose activations exist at a time.", lower_bound=1
  )
  flags.DEFINE_integer("agent_repeats", 3, "The number of rounds on the agents' shape; 0 leaves it out.", lower_bound=0)
  flags.DEFINE_list("row_lengths", [], "Also times one row of each of these lengths.")
  flags.DEFINE_integer("chunk_size", 1_024, "The number of tokens whose logits exist at a time.", lower_bound=1)


def main(argv: list[str]) -> None:
  del argv
  lengths = flags.FLAGS["row_lengths"].value
  if not all(length.isdecimal() for length in lengths):
    raise app.UsageError(f"--row_lengths must be numbers of tokens separated by commas; received {lengths}.")
  # One CPU device per core; no effect on a machine with an accelerator.
  jax.config.update("jax_num_cpu_devices", decoding.num_cores())
  names = ("repeats", "chunk_size", "rows_per_microbatch")
  result = run(**{name: flags.FLAGS[name].value for name in names})
  chunk_size, agent_repeats = flags.FLAGS["chunk_size"].value, flags.FLAGS["agent_repeats"].value
  agents = agent(repeats=agent_repeats, chunk_size=chunk_size) if agent_repeats else None
  seconds = row_growth([int(length) for length in lengths], chunk_size)
  print(json.dumps({**result, "agent": agents, "row_seconds": seconds}))


if __name__ == "__main__":
  define_flags()
  command.run(main)
