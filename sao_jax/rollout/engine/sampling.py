"""Sampling from logits, with noise that depends only on the episode and the position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

_MAX_UNIFORM = 1.0 - 2.0**-20  # keeps a sampled threshold below the total, so that no token of weight 0 is chosen
_BLOCK = 32


def sample_tokens(logits: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Samples from softmax(logits) by inverting its cumulative sum.

    a = min{ i : Σ_{j ≤ i} p_j > u },   logp = log p_a

  Needs one uniform number per row and one exponential per logit, which the log-prob shares. The cumulative sum has two
  levels, over blocks and inside the chosen block: on a CPU a plain one costs more than everything else.

  Args:
    logits: `[S, V]` float32, already divided by the temperature.
    uniform: `[S]` float32 in [0, 1).

  Returns:
    Tokens `[S]` int32 and their log-probs `[S]` float32, <= 0.

  >>> sample_tokens(jnp.log(jnp.array([[0.2, 0.8], [0.2, 0.8]])), jnp.array([0.1, 0.3]))[0]
  Array([0, 1], dtype=int32)
  """
  size = logits.shape[-1]
  top = jnp.max(logits, axis=-1, keepdims=True)
  weights = jnp.exp(logits - top)
  blocks = jnp.pad(weights, ((0, 0), (0, -size % _BLOCK))).reshape(weights.shape[0], -1, _BLOCK)
  upto_block = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
  total = upto_block[:, -1]
  threshold = jnp.minimum(uniform, _MAX_UNIFORM) * total
  block = jnp.sum(upto_block <= threshold[:, None], axis=-1)
  previous = jnp.take_along_axis(upto_block, jnp.maximum(block - 1, 0)[:, None], axis=-1)[:, 0]
  before = jnp.where(block > 0, previous, 0.0)
  inside = jnp.cumsum(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0], axis=-1)
  # The two sums of a block may differ in the last bit: the clamp keeps the choice inside it, on a token of weight > 0.
  rest = jnp.minimum(threshold - before, inside[:, -1] * _MAX_UNIFORM)
  tokens = block * _BLOCK + jnp.sum(inside <= rest[:, None], axis=-1)
  chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
  logp = jnp.minimum(chosen - top[:, 0] - jnp.log(total), 0.0)
  return tokens.astype(jnp.int32), logp


def slot_noise(key: jax.Array, episode: jax.Array, position: jax.Array, *, steps: int) -> jax.Array:
  """Returns uniform numbers for the tokens at positions `position + 1 + i` of each episode.

    u = threefry(key, (episode, position)) / 2³², to 24 bits

  One call per chunk of the block cipher behind `jax.random`, with (episode, position) as its counter. So the samples of
  an episode depend neither on its slot nor on other episodes, and no two tokens under one key share a number.

  Args:
    key: a threefry key; not consumed, since the counter makes each draw unique.
    episode: `[S]` int32 episode ids.
    position: `[S]` int32: position of the last token of each context.
    steps: tokens per slot.

  Returns:
    `[steps, S]` float32 in [0, 1).
  """
  at = position[None, :] + jnp.arange(1, steps + 1)[:, None]
  counter = jnp.stack([jnp.broadcast_to(episode, at.shape), at]).astype(jnp.uint32)
  bits: jax.Array = threefry_2x32(jax.random.key_data(key), counter)[0]
  return (bits >> 8).astype(jnp.float32) * 2.0**-24
