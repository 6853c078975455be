"""Latent attention with an indexer on meshes of 8 virtual devices and off a mesh, in a process of its own.

Arguments: meshes. Last line of output: JSON, per mesh the largest differences of the gradient of packed rows and of the
hidden states of incremental decoding, each relative to the largest number.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sao_jax.models import ModelConfig, cached_policy, policy_apply
from sao_jax.parallel import cached_on_mesh, constrain_params, make_mesh, on_mesh, parse_mesh, place
from sao_jax.types import CachedPolicy, Params
from tests.models import tiny

ROWS, LENGTH, PROMPT = 8, 16, 12
CONFIG: ModelConfig = tiny.indexed(
  vocab_size=64, hidden_size=32, num_layers=2, kv_lora_rank=16, q_lora_rank=16, moe_intermediate_size=16,
  indexer_types=("full", "shared"), intermediate_size=32,
)  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTH), dtype=np.int32)
# Two segments in every other row.
SEGMENTS = np.where(np.arange(LENGTH) < np.where(np.arange(ROWS) % 2, 16, 5)[:, None], 1, 2).astype(np.int32)
POSITIONS = np.where(SEGMENTS == 1, np.arange(LENGTH), np.arange(LENGTH) - 5).astype(np.int32)


def gradient(params: Params, mesh: Mesh | None) -> Any:
  apply = policy_apply(CONFIG) if mesh is None else constrain_params(policy_apply(CONFIG), mesh)

  def loss(params: Params) -> jax.Array:
    hidden = apply(params, jnp.asarray(TOKENS), jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS)).hidden
    return jnp.sum(jnp.sin(3.0 * hidden))

  function = jax.value_and_grad(loss)
  return jax.jit(function if mesh is None else on_mesh(function, mesh))(params)


def decode(params: Params, policy: CachedPolicy) -> jax.Array:
  """Hidden states `[steps, S, D]` of the tokens after the prompt, fed one at a time."""
  slots, start = jnp.arange(ROWS), jnp.full(ROWS, PROMPT)

  def run(params: Params) -> jax.Array:
    steps = LENGTH - PROMPT
    prompt, count = jnp.asarray(TOKENS[:, :PROMPT]), jnp.full(ROWS, PROMPT)
    _, cache = policy.extend(
      params, policy.init_cache(ROWS, LENGTH), prompt, slots, jnp.zeros_like(slots), count, live_len=PROMPT
    )
    window = policy.window(cache, slots, start, steps=steps, live_lens=(LENGTH,))
    prepared, rest = policy.prepare(params), jnp.asarray(TOKENS[:, PROMPT:])

    def body(window: Any, i: jax.Array) -> Any:
      hidden, window = policy.step(prepared, window, rest[:, i], i)
      return window, hidden

    return jax.lax.scan(body, window, jnp.arange(steps))[1]

  return jax.jit(run)(params)


def difference(got: Any, want: Any) -> float:
  pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
  scale = max(float(jnp.max(jnp.abs(y))) for _, y in pairs)
  return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs) / scale


def main(meshes: list[str]) -> None:
  params = tiny.policy_params(CONFIG)
  wanted_gradient = gradient(params, None)
  at = np.tile(np.arange(LENGTH), (ROWS, 1))
  full = jax.jit(policy_apply(CONFIG))(params, TOKENS, at, np.ones_like(TOKENS)).hidden
  wanted_hidden = jnp.swapaxes(full[:, PROMPT:], 0, 1)
  report = {"decode off a mesh": {"decode": difference(decode(params, cached_policy(CONFIG)), wanted_hidden)}}
  for text in meshes:
    mesh = make_mesh(parse_mesh(text))
    placed = place(params, mesh)
    on = cached_on_mesh(cached_policy(CONFIG), mesh, contextlib.nullcontext)
    report[text] = {
      "gradient": difference(gradient(placed, mesh), wanted_gradient),
      "decode": difference(decode(placed, on), wanted_hidden),
    }
  print(json.dumps(report))


if __name__ == "__main__":
  main(sys.argv[1:])
