"""The step of the model runner on a CPU: it gathers pages into contiguous rows, and works on these.

A model's own cached functions (`types.CachedPolicy`) know nothing of pages. A page is a slot of a cache whose slots
have `page_size` tokens. The pages of a sequence, joined along the axis of time, are a slot of a longer cache. Gathering
costs little if many tokens are decoded at once, and a CPU reads contiguous keys faster than scattered ones.

Prompt tokens are computed in blocks of up to `BLOCK` tokens of one page, several blocks of any sequences at a time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from sao_jax.ops.logprobs import exclude_padding
from sao_jax.rollout.engine.cache_manager import NULL_PAGE
from sao_jax.rollout.engine.nucleus import nucleus
from sao_jax.rollout.engine.sampling import sample_tokens, slot_noise
from sao_jax.rollout.engine.step_spec import Row, StepSpec
from sao_jax.types import Cache, CachedPolicy, Params, Window

BLOCK = 16
_BLOCK_HEADER = 4
_ROW_HEADER = 4

_Carry: TypeAlias = "tuple[jax.Array, Window, DecodeState, jax.Array, jax.Array]"


class DecodeState(NamedTuple):
  """State of the rows of a decode loop; `[S]` each."""

  token: jax.Array
  """int32: the last token of the context. Its keys and values are not in the cache yet."""
  position: jax.Array
  """int32: position of `token`."""
  budget: jax.Array
  """int32: number of tokens that may still be sampled; 0: the row is idle."""


class Block(NamedTuple):
  """Tokens of one page to prefill."""

  row: int
  """Index of the sequence's row in the step."""
  start: int
  """Position of the first token."""
  size: int


def blocks_of(rows: Sequence[Row], width: int) -> list[Block]:
  """Splits the tokens to prefill at multiples of `width`. The last token of a row that decodes is not prefilled.

  Blocks that end early in their contexts come first, so that few programs read far back. Those of a row keep the order
  of their tokens.
  """
  blocks = []
  for i, row in enumerate(rows):
    end = row.start + row.num_prefilled
    cuts = [row.start, *range((row.start // width + 1) * width, end, width), end]
    blocks += [Block(i, a, b - a) for a, b in itertools.pairwise(cuts) if a < b]
  return sorted(blocks, key=lambda block: (block.start + block.size, block.row))


def pack_blocks(
  rows: Sequence[Row], blocks: Sequence[Block], *, num_blocks: int, num_pages: int, width: int, page_size: int
) -> np.ndarray:
  """Packs blocks for `prefill`: `[num_blocks, 4 + num_pages + width]` int32.

  A line holds the block's slot, start, count and page, then the pages of the sequence in slot number `line`, then the
  block's tokens. A slot is a sequence's number among those with blocks.
  """
  packed = np.zeros((num_blocks, _BLOCK_HEADER + num_pages + width), np.int32)
  packed[:, 0], packed[:, 3] = num_blocks, NULL_PAGE  # no such slot: padding blocks are ignored
  slots: dict[int, int] = {}
  for line, block in enumerate(blocks):
    row = rows[block.row]
    slot = slots.setdefault(block.row, len(slots))
    tokens = row.tokens[block.start - row.start :][: block.size]
    packed[line, :_BLOCK_HEADER] = slot, block.start, block.size, row.pages[block.start // page_size]
    packed[line, _BLOCK_HEADER + num_pages :][: block.size] = tokens
    pages = row.pages[:num_pages]
    packed[slot, _BLOCK_HEADER : _BLOCK_HEADER + len(pages)] = pages
  return packed


def pack_rows(rows: Sequence[Row], *, num_slots: int, num_pages: int) -> np.ndarray:
  """Packs rows for `decode`: `[num_slots, 4 + num_pages]` int32: token, position, budget, episode, pages."""
  packed = np.zeros((num_slots, _ROW_HEADER + num_pages), np.int32)
  for i, row in enumerate(rows):
    packed[i, :_ROW_HEADER] = row.tokens[-1], row.start + len(row.tokens) - 1, row.budget, row.episode
    pages = row.pages[:num_pages]
    packed[i, _ROW_HEADER : _ROW_HEADER + len(pages)] = pages
  return packed


def time_axes(model: CachedPolicy, num_pages: int, page_size: int) -> tuple[int, ...]:
  """Returns the axis of time of each leaf of the model's cache: the one that grows with the length of a slot.

  Raises:
    ValueError: a leaf has no such axis, or several.
  """
  short, long = (jax.eval_shape(lambda n=n: model.init_cache(num_pages, n)) for n in (page_size, 2 * page_size))
  axes = []
  for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(short)[0], jax.tree.leaves(long), strict=True):
    grown = [i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    if len(grown) != 1 or grown[0] == 0 or b.shape[grown[0]] != 2 * page_size:
      raise ValueError(
        f"every leaf of a cache must have a leading axis of slots and one axis of max_len positions; "
        f"{jax.tree_util.keystr(path)} has shape {a.shape} for max_len {page_size} and {b.shape} for {2 * page_size}."
      )
    axes.append(grown[0])
  return tuple(axes)


@functools.partial(jax.jit, static_argnames=("model", "axes", "num_pages"), donate_argnums=1)
def prefill(
  params: Params, cache: Cache, packed: jax.Array, *, model: CachedPolicy, axes: tuple[int, ...], num_pages: int
) -> Cache:
  """Computes the keys and values of packed blocks (`pack_blocks`), and writes them to their pages."""
  slots, start, count, page = packed[:, :_BLOCK_HEADER].T
  tables, tokens = jnp.split(packed[:, _BLOCK_HEADER:], [num_pages], axis=1)
  page_size = jax.tree.leaves(cache)[0].shape[axes[0]]
  contexts = _gather(cache, tables, axes)
  _, contexts = model.extend(params, contexts, tokens, slots, start, count, live_len=num_pages * page_size)
  return _write_pages(cache, contexts, slots, start // page_size, page, axes)


@functools.partial(jax.jit, static_argnames=("spec", "axes", "live_lens"), donate_argnums=1)
def decode(
  prepared: Params,
  cache: Cache,
  packed: jax.Array,
  key: jax.Array,
  *,
  spec: StepSpec,
  axes: tuple[int, ...],
  live_lens: tuple[int, ...],
) -> tuple[Cache, jax.Array]:
  """Decodes up to `chunk_steps` tokens of each packed row (`pack_rows`), and writes keys and values to the pages.

  Returns:
    The cache, and `[2 * chunk_steps + 1, S]` int32: the tokens, their log-probs (the bits of float32), and the number
    of tokens of each row.
  """
  model, steps = spec.model, spec.chunk_steps
  token, position, budget, episode = packed[:, :_ROW_HEADER].T
  tables = packed[:, _ROW_HEADER:]
  num_rows = packed.shape[0]
  lm_head = model.lm_head(prepared)
  noise = slot_noise(key, episode, position, steps=steps)
  contexts = _gather(cache, tables, axes)
  window = model.window(contexts, np.arange(num_rows, dtype=np.int32), position, steps=steps, live_lens=live_lens)

  def body(carry: _Carry) -> _Carry:
    i, window, state, tokens_out, logp_out = carry
    hidden, window = model.step(prepared, window, state.token, i)
    tokens, logp, state = sample_step(spec, hidden, lm_head, noise[i], state)
    return i + 1, window, state, tokens_out.at[i].set(tokens), logp_out.at[i].set(logp)

  state = DecodeState(token, position, budget)
  outputs = jnp.zeros((steps, num_rows), jnp.int32), jnp.zeros((steps, num_rows), jnp.float32)
  # A while loop rather than a scan: it ends early when no row is active.
  _, window, state, tokens, logp = jax.lax.while_loop(
    lambda carry: (carry[0] < steps) & (carry[2].budget > 0).any(), body, (jnp.int32(0), window, state, *outputs)
  )
  count = state.position - position
  contexts = model.merge(contexts, window, count)
  page_size = jax.tree.leaves(cache)[0].shape[axes[0]]
  touched = (steps + page_size - 2) // page_size + 1
  blocks = position[:, None] // page_size + jnp.arange(touched)
  pages = jnp.take_along_axis(tables, jnp.minimum(blocks, tables.shape[1] - 1), axis=1)
  pages = jnp.where(blocks * page_size < (position + count)[:, None], pages, NULL_PAGE)
  cache = _write_pages(
    cache, contexts, jnp.repeat(jnp.arange(num_rows), touched), blocks.reshape(-1), pages.reshape(-1), axes
  )
  return cache, pack_output(spec, tokens, logp, count)


def sample_step(
  spec: StepSpec, hidden: jax.Array, lm_head: jax.Array, uniform: jax.Array, state: DecodeState
) -> tuple[jax.Array, jax.Array, DecodeState]:
  """Samples a token for each row from its hidden state; rows that are idle keep their state."""
  logits = jnp.dot(hidden, lm_head, preferred_element_type=jnp.float32) / spec.temperature
  logits = exclude_padding(logits, spec.model.num_tokens)
  if spec.model.placement is not None:
    logits = spec.model.placement.logits(logits)
  if spec.top_p < 1.0:
    logits = nucleus(logits, top_p=spec.top_p)
  tokens, logp = sample_tokens(logits, uniform)
  active = state.budget > 0
  stopped = (tokens[:, None] == jnp.asarray(spec.stop_ids, jnp.int32)).any(-1)
  return tokens, logp, DecodeState(
    jnp.where(active, tokens, state.token),
    state.position + active,
    jnp.where(stopped, 0, state.budget - active),
  )  # fmt: skip


def pack_output(spec: StepSpec, tokens: jax.Array, logp: jax.Array, count: jax.Array) -> jax.Array:
  """Packs the results of a step into one array, so that there is one transfer to the host."""
  out = jnp.concatenate([tokens, jax.lax.bitcast_convert_type(logp, jnp.int32), count[None]])
  placement = spec.model.placement
  return out if placement is None else jax.lax.with_sharding_constraint(out, placement.whole)


def _gather(cache: Cache, tables: jax.Array, axes: tuple[int, ...]) -> Cache:
  """Joins the pages `[S, n]` of each row: a cache of S slots of n pages."""

  def join(x: jax.Array, axis: int) -> jax.Array:
    pages = jnp.moveaxis(x[tables], 1, axis)
    return pages.reshape(*pages.shape[:axis], -1, *pages.shape[axis + 2 :])

  return _map(join, cache, axes=axes)


def _write_pages(
  cache: Cache, contexts: Cache, slots: jax.Array, blocks: jax.Array, pages: jax.Array, axes: tuple[int, ...]
) -> Cache:
  """Copies page number `blocks[i]` of context `slots[i]` to page `pages[i]`, for each i."""

  def one(i: jax.Array, cache: Cache) -> Cache:
    def copy(x: jax.Array, context: jax.Array, axis: int) -> jax.Array:
      size = x.shape[axis]
      at: list[Any] = [slots[i]] + [0] * (x.ndim - 1)
      at[axis] = blocks[i] * size
      content = jax.lax.dynamic_slice(context, at, (1, *x.shape[1:]))
      return jax.lax.dynamic_update_slice(x, content, [pages[i]] + [0] * (x.ndim - 1))

    return _map(copy, cache, contexts, axes=axes)

  written: Cache = jax.lax.fori_loop(0, slots.shape[0], one, cache)
  return written


def _map(function: Any, *trees: Any, axes: tuple[int, ...]) -> Any:
  """`jax.tree.map` with the axis of time as a further argument."""
  leaves = zip(*(jax.tree.leaves(tree) for tree in trees), axes, strict=True)
  return jax.tree.unflatten(jax.tree.structure(trees[0]), [function(*arguments) for arguments in leaves])
