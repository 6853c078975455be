"""The step of the model runner over the pages themselves, on TPUs: one ragged batch of prompt and decode tokens.

The first pass of a step feeds the tokens of all rows together, those of prompts included, and samples a token for each
row whose context is complete. The other passes feed one token per row. There is one program, whatever the lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.rollout.engine.cache_manager import NULL_PAGE
from sao_jax.rollout.engine.sampling import slot_noise
from sao_jax.rollout.engine.step_spec import Row, StepSpec
from sao_jax.rollout.engine.windows import DecodeState, pack_output, sample_step
from sao_jax.types import Cache, Params, RaggedBatch

_HEADER = 4


def pack(rows: Sequence[Row], *, num_slots: int, num_tokens: int, max_pages: int, page_size: int) -> tuple[
  np.ndarray, np.ndarray
]:  # fmt: skip
  """Packs rows for `step`.

  Returns:
    `[3, num_tokens]` int32: tokens, positions, and where each is stored. `[num_slots + 1, 4 + max_pages]` int32: by row
    its length, the end of its tokens, budget, episode and pages; then a line that begins with the number of rows.
  """
  tokens = np.zeros((3, num_tokens), np.int32)
  packed = np.zeros((num_slots + 1, _HEADER + max_pages), np.int32)
  packed[:, 0] = 1
  end = 0
  for i, row in enumerate(rows):
    count = len(row.tokens)
    positions = np.arange(row.start, row.start + count)
    pages = np.asarray(row.pages, np.int32)
    targets = pages[positions // page_size] * page_size + positions % page_size
    tokens[:, end : end + count] = row.tokens, positions, targets
    end += count
    packed[i, :_HEADER] = row.start + count, end, row.budget, row.episode
    packed[i, _HEADER : _HEADER + len(pages)] = pages
  packed[len(rows) :, 1] = end
  packed[-1, 0] = len(rows)
  return tokens, packed


@functools.partial(jax.jit, static_argnames="spec", donate_argnums=1)
def step(
  params: Params, pages: Cache, tokens: jax.Array, packed: jax.Array, key: jax.Array, *, spec: StepSpec
) -> tuple[Cache, jax.Array]:
  """Feeds packed rows (`pack`), and decodes up to `chunk_steps` tokens of each row with a budget.

  Args:
    params: weights.
    pages: the cache.
    tokens: `[3, T]` int32, and
    packed: `[S + 1, 4 + N]` int32, from `pack`.
    key: threefry key of the sampling noise.
    spec: model and sampling settings.

  Returns:
    The pages, and `[2 * chunk_steps + 1, S]` int32 as in `windows.decode`.
  """
  model, steps = spec.model.paged, spec.chunk_steps
  assert model is not None
  length, end, budget, episode = packed[:-1, :_HEADER].T
  tables, num_rows = packed[:-1, _HEADER:], packed.shape[0] - 1
  page_size = jax.tree.leaves(pages)[0].shape[1]
  lm_head = model.lm_head(params)
  noise = slot_noise(key, episode, length - 1, steps=steps)
  starts = jnp.concatenate([jnp.zeros(1, jnp.int32), end])
  batch = RaggedBatch(tokens[1], tokens[2], length, tables, starts, packed[-1, :1])
  hidden, pages = model.step(params, pages, tokens[0], batch)
  state = DecodeState(tokens[0, end - 1], length - 1, budget)
  first, first_logp, state = sample_step(spec, hidden[end - 1], lm_head, noise[0], state)

  def body(carry: tuple[jax.Array, Cache, DecodeState, jax.Array, jax.Array]) -> tuple[
    jax.Array, Cache, DecodeState, jax.Array, jax.Array
  ]:  # fmt: skip
    i, pages, state, tokens_out, logp_out = carry
    active = state.budget > 0
    position = jnp.where(active, state.position, 0)
    page = jnp.take_along_axis(tables, (position // page_size)[:, None], axis=1)[:, 0]
    targets = jnp.where(active, page, NULL_PAGE) * page_size + position % page_size
    batch = RaggedBatch(
      position, targets, position + 1, tables, jnp.arange(num_rows + 1, dtype=jnp.int32),
      jnp.full(1, num_rows, jnp.int32),
    )  # fmt: skip
    hidden, pages = model.step(params, pages, state.token, batch)
    sampled, logp, state = sample_step(spec, hidden, lm_head, noise[i], state)
    return i + 1, pages, state, tokens_out.at[i].set(sampled), logp_out.at[i].set(logp)

  tokens_out = jnp.zeros((steps, num_rows), jnp.int32).at[0].set(first)
  logp_out = jnp.zeros((steps, num_rows), jnp.float32).at[0].set(first_logp)
  _, pages, state, tokens_out, logp_out = jax.lax.while_loop(
    lambda carry: (carry[0] < steps) & (carry[2].budget > 0).any(),
    body,
    (jnp.int32(1), pages, state, tokens_out, logp_out),
  )
  return pages, pack_output(spec, tokens_out, logp_out, state.position - (length - 1))
