"""Log-probs of tokens, from logits or from hidden states. The latter never hold the logits of all tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, ArrayLike, Bool, Float, Float32, Int32, Integer

from sao_jax.ops import _checks

_Pair: TypeAlias = tuple[jax.Array, jax.Array]

MIN_CHUNKS = 8
"""Least number of chunks per row in `masked_token_logprobs`: with fewer, fewer could be skipped."""


def token_logprobs(
  logits: Float[ArrayLike, "*shape V"], tokens: Integer[ArrayLike, "*shape"], *, temperature: float = 1.0
) -> Float32[Array, "*shape"]:
  """Log-prob of each token under the tempered distribution.

  log π(a) = z_a / τ − logsumexp(z / τ).

  Args:
    logits: `[..., V]`, any float dtype (cast to float32 first), already aligned: `logits[t]` predicts `tokens[t]`.
    tokens: `[...]` int ids in [0, V).
    temperature: τ > 0, the one the engine samples with.

  Returns:
    `[...]` float32.

  Raises:
    ValueError: the shapes do not fit, or τ ≤ 0. TypeError: the tokens are not integers.

  >>> round(float(token_logprobs(jnp.zeros(4), jnp.array(2))), 4)
  -1.3863
  """
  _checks.interval("temperature", temperature, 0.0, open_low=True)
  z, ids = _checks.float32(logits), _token_ids(tokens)
  if z.ndim == 0 or z.shape[:-1] != ids.shape:
    raise ValueError(f"logits must be tokens' shape plus V; received logits {z.shape}, tokens {ids.shape}.")
  z = z / temperature
  return jnp.take_along_axis(z, ids[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(z, axis=-1)


def exclude_padding(logits: Float32[Array, "*shape V"], num_tokens: int | None) -> Float32[Array, "*shape V"]:
  """Gives the ids from `num_tokens` on, which pad the vocabulary to a round size, probability 0.

  The rollout engine and the learner call it on the same logits, so that they score the same distribution.

  Args:
    logits: `[..., V]` float32.
    num_tokens: size of the tokenizer's vocabulary, in [1, V]; None excludes nothing.

  >>> exclude_padding(jnp.zeros(3), 2)
  Array([ 0.e+00,  0.e+00, -1.e+30], dtype=float32)
  """
  if num_tokens is None or num_tokens >= logits.shape[-1]:
    return logits
  # Finite: a probability of 0 times -inf would be NaN in the entropy.
  return jnp.where(lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < num_tokens, logits, -1e30)


def chunked_token_logprobs(
  hidden: Float[ArrayLike, "*shape D"],
  lm_head: Float[ArrayLike, "D V"],
  tokens: Integer[ArrayLike, "*shape"],
  *,
  temperature: float = 1.0,
  chunk_size: int,
) -> tuple[Float32[Array, "*shape"], Float32[Array, "*shape"]]:
  """Log-prob of each token and entropy of its distribution, from hidden states, one chunk of logits at a time.

  z = h W / τ,  log π(a) = z_a − logsumexp(z),  H = −Σ_v π_v log π_v.

  The backward pass (a custom gradient) computes each chunk's logits again, so that neither pass holds `[T, V]`. Both
  outputs are differentiable with respect to `hidden` and `lm_head`. Products accumulate in float32; the gradient of
  `lm_head` is summed over chunks in float32. With bfloat16 inputs, the logits' cotangents are rounded to bfloat16
  before their matmuls, as in plain autodiff of a bfloat16 model.

  A chunk takes a slice of time from every row, so that rows which are sharded over devices stay sharded.

  Args:
    hidden: `[..., D]`, any float dtype, aligned: `hidden[t]` predicts `tokens[t]` (`masking.align_predictions`).
    lm_head: `[D, V]`.
    tokens: `[...]` int ids in [0, V).
    temperature: τ > 0, the one the engine samples with.
    chunk_size: ≥ 1, number of tokens whose logits may exist at once; `chunk_size` · V floats are held. There is no loop
      if it is at least the number of tokens.

  Returns:
    `(logp, entropy)`, both `[...]` float32.

  Raises:
    ValueError: the shapes do not fit, τ ≤ 0 or chunk_size < 1. TypeError: the tokens are not integers.

  >>> logp, entropy = chunked_token_logprobs(jnp.zeros((3, 2)), jnp.ones((2, 4)), jnp.array([0, 1, 2]), chunk_size=2)
  >>> round(float(logp[2]), 4), round(float(entropy[2]), 4)
  (-1.3863, 1.3863)
  """
  h, w, ids = _head_inputs(hidden, lm_head, tokens, temperature, chunk_size)
  chunks, restore = _split(h, ids, chunk_size)
  logp, entropy = _chunked(float(temperature), *chunks, w)
  return restore(logp), restore(entropy)


def masked_token_logprobs(
  hidden: Float[ArrayLike, "*rows T D"],
  lm_head: Float[ArrayLike, "D V"],
  tokens: Integer[ArrayLike, "*rows T"],
  mask: Bool[ArrayLike, "*rows T"],
  *,
  temperature: float = 1.0,
  chunk_size: int,
  axis_names: Sequence[str] = (),
  num_tokens: int | None = None,
) -> tuple[Float32[Array, "*rows T"], Float32[Array, "*rows T"]]:
  """`chunked_token_logprobs` of the tokens where the mask is True; 0 at other tokens, which cost nothing.

  Chunks hold masked tokens only, and the loop ends after the last of them, forward and backward. The work of the one
  compiled program thus follows the number of masked tokens, rounded up to chunks. A chunk takes as many tokens of every
  row, so that rows which are sharded over devices stay sharded; the fullest row decides the number of chunks. With one
  long row, only the last chunk is rounded up. Hidden states off the mask are never read: NaN there reaches neither the
  results nor a gradient.

  Args:
    hidden: `[..., D]`, any float dtype, aligned: `hidden[t]` predicts `tokens[t]` (`masking.align_predictions`).
    lm_head: `[D, V]`.
    tokens: `[...]` int ids in [0, V).
    mask: `[...]` bool, True on the tokens to score.
    temperature: τ > 0, the one the engine samples with.
    chunk_size: ≥ 1, number of tokens whose logits may exist at once; a row has at least `MIN_CHUNKS` chunks.
    axis_names: inside `jax.shard_map`, the axes along which devices hold different tokens. All devices then run the
      same number of chunks, since the loop may hold collectives over other axes.
    num_tokens: ids from here on have probability 0, see `exclude_padding`.

  Returns:
    `(logp, entropy)`, both `[...]` float32.

  Raises:
    ValueError: the shapes do not fit, τ ≤ 0 or chunk_size < 1. TypeError: the tokens are not integers, or the mask is
      not bool.
  """
  h, w, ids = _head_inputs(hidden, lm_head, tokens, temperature, chunk_size)
  chosen = _checks.boolean("mask", mask)
  if chosen.shape != ids.shape or not ids.ndim:
    raise ValueError(f"mask must have tokens' shape, at least one axis; received {chosen.shape}, tokens {ids.shape}.")
  rows, columns = math.prod(ids.shape[:-1]), ids.shape[-1]
  settings = _Settings(float(temperature), _masked_width(rows, columns, chunk_size), tuple(axis_names), num_tokens)
  arguments = (h.reshape(rows, columns, h.shape[-1]), ids.reshape(rows, columns), chosen.reshape(rows, columns), w)
  logp, entropy = _masked(settings, *arguments)
  return logp.reshape(ids.shape), entropy.reshape(ids.shape)


def masked_chunks(mask: Bool[ArrayLike, "*rows T"], *, chunk_size: int) -> tuple[Int32[Array, ""], int, int]:
  """Amount of work of `masked_token_logprobs`: `(chunks that it runs, chunks of a full mask, tokens per chunk)`.

  >>> used, full, tokens = masked_chunks(jnp.arange(16) < 3, chunk_size=4)
  >>> int(used), full, tokens
  (2, 8, 2)
  """
  chosen = _checks.boolean("mask", mask)
  rows, columns = math.prod(chosen.shape[:-1]), chosen.shape[-1]
  width = _masked_width(rows, columns, chunk_size)
  return _used_chunks(chosen.reshape(rows, columns), width, ()), math.ceil(columns / width), rows * width


def _head_inputs(
  hidden: ArrayLike, lm_head: ArrayLike, tokens: ArrayLike, temperature: float, chunk_size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns `(hidden, lm_head, tokens)` after the checks."""
  _checks.interval("temperature", temperature, 0.0, open_low=True)
  if not isinstance(chunk_size, int) or chunk_size < 1:
    raise ValueError(f"chunk_size must be an int >= 1; received {chunk_size!r}.")
  h, w, ids = jnp.asarray(hidden), jnp.asarray(lm_head), _token_ids(tokens)
  if w.ndim != 2 or h.ndim == 0 or h.shape[:-1] != ids.shape or h.shape[-1] != w.shape[0]:
    raise ValueError(
      "hidden must be tokens' shape plus D, and lm_head [D, V]; "
      f"received hidden {h.shape}, lm_head {w.shape}, tokens {ids.shape}."
    )
  if not (jnp.issubdtype(h.dtype, jnp.floating) and jnp.issubdtype(w.dtype, jnp.floating)):
    raise TypeError(f"hidden and lm_head must be floats; received {h.dtype.name} and {w.dtype.name}.")
  return h, w, ids


def _token_ids(tokens: ArrayLike) -> jax.Array:
  ids = jnp.asarray(tokens)
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise TypeError(f"tokens must be integer ids; received dtype {ids.dtype.name}.")
  return ids


class _Restore(NamedTuple):
  """Undoes `_split` on `[n, R, c]` per-token results."""

  shape: tuple[int, ...]
  rows: int
  columns: int

  def __call__(self, x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, 0, 2).reshape(self.rows, -1)[:, : self.columns].reshape(self.shape)


def _split(h: jax.Array, ids: jax.Array, chunk_size: int) -> tuple[tuple[jax.Array, jax.Array], _Restore]:
  """Splits `[..., D]`, `[...]` into n chunks `[n, R, c, D]`, `[n, R, c]` of R · c ≤ chunk_size tokens; pads with 0."""
  shape = ids.shape
  rows = math.prod(shape[:-1])
  if rows > chunk_size or not shape:  # a chunk cannot hold a token of each row: make them one long row
    rows = 1
  columns = math.prod(shape) // max(rows, 1)
  count = max(1, math.ceil(columns / max(1, chunk_size // max(rows, 1))))
  width = math.ceil(columns / count)  # even chunks: the least padding
  padding = count * width - columns
  h = jnp.pad(h.reshape(rows, columns, h.shape[-1]), ((0, 0), (0, padding), (0, 0)))
  ids = jnp.pad(ids.reshape(rows, columns), ((0, 0), (0, padding)))
  # A chunk takes every count-th token, so that it is spread evenly over the devices that share a row.
  h = jnp.moveaxis(h.reshape(rows, width, count, h.shape[-1]), 2, 0)
  return (h, jnp.moveaxis(ids.reshape(rows, width, count), 2, 0)), _Restore(shape, rows, columns)


def _logits(h: jax.Array, w: jax.Array, temperature: float, num_tokens: int | None) -> jax.Array:
  dtype = jnp.promote_types(h.dtype, w.dtype)
  z = lax.dot_general(
    h.astype(dtype), w.astype(dtype), (((h.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
  )
  return exclude_padding(z if temperature == 1.0 else z * (1.0 / temperature), num_tokens)


def _forward_chunk(
  h: jax.Array, ids: jax.Array, w: jax.Array, temperature: float, num_tokens: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`(logp, entropy, logsumexp)` of one chunk."""
  z = _logits(h, w, temperature, num_tokens)
  largest = jnp.max(z, axis=-1)
  weights = jnp.exp(z - largest[..., None])
  total = jnp.sum(weights, axis=-1)
  logsumexp = largest + jnp.log(total)
  chosen = jnp.take_along_axis(z, ids[..., None], axis=-1)[..., 0]
  # From z itself, not z - largest, which would be one more array of the chunk's size. H may round below 0.
  entropy = jnp.maximum(logsumexp - jnp.sum(weights * z, axis=-1) / total, 0.0)
  return chosen - logsumexp, entropy, logsumexp


def _backward_chunk(
  h: jax.Array,
  ids: jax.Array,
  w: jax.Array,
  temperature: float,
  num_tokens: int | None,
  logsumexp: jax.Array,
  entropy: jax.Array,
  logp_bar: jax.Array,
  entropy_bar: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Cotangent of one chunk's hidden states, and the chunk's float32 share of that of lm_head.

  ∂logp/∂z_v = 1[v = a] − π_v,  ∂H/∂z_v = −π_v (log π_v + H).
  """
  log_probs = _logits(h, w, temperature, num_tokens) - logsumexp[..., None]
  chosen = ids[..., None] == lax.broadcasted_iota(ids.dtype, log_probs.shape, log_probs.ndim - 1)
  z_bar = jnp.where(chosen, logp_bar[..., None], 0.0) - jnp.exp(log_probs) * (
    logp_bar[..., None] + entropy_bar[..., None] * (log_probs + entropy[..., None])
  )
  z_bar = (z_bar * (1.0 / temperature)).astype(jnp.promote_types(h.dtype, w.dtype))
  batch = tuple(range(h.ndim - 1))
  h_bar = lax.dot_general(
    z_bar, w.astype(z_bar.dtype), (((h.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
  )
  w_bar = lax.dot_general(h.astype(z_bar.dtype), z_bar, ((batch, batch), ((), ())), preferred_element_type=jnp.float32)
  return h_bar.astype(h.dtype), w_bar


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(temperature: float, h: jax.Array, ids: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
  return _chunked_forward(temperature, h, ids, w)[0]


def _chunked_forward(
  temperature: float, h: jax.Array, ids: jax.Array, w: jax.Array
) -> tuple[_Pair, tuple[jax.Array, ...]]:
  if h.shape[0] == 1:
    logp, entropy, logsumexp = (x[None] for x in _forward_chunk(h[0], ids[0], w, temperature))
  else:
    logp, entropy, logsumexp = lax.map(lambda x: _forward_chunk(x[0], x[1], w, temperature), (h, ids))
  return (logp, entropy), (h, ids, w, logsumexp, entropy)


def _chunked_backward(
  temperature: float, residuals: tuple[jax.Array, ...], cotangents: _Pair
) -> tuple[jax.Array, None, jax.Array]:
  h, ids, w, logsumexp, entropy = residuals
  per_chunk = (h, ids, logsumexp, entropy, *cotangents)

  def one(chunk: tuple[jax.Array, ...]) -> _Pair:
    h_i, ids_i, *rest = chunk
    return _backward_chunk(h_i, ids_i, w, temperature, None, *rest)

  if h.shape[0] == 1:
    h_bar, w_bar = one(tuple(x[0] for x in per_chunk))
    return h_bar[None], None, w_bar.astype(w.dtype)

  def step(total: jax.Array, chunk: tuple[jax.Array, ...]) -> _Pair:
    h_bar, w_bar = one(chunk)
    return total + w_bar, h_bar

  w_bar, h_bar = lax.scan(step, jnp.zeros(w.shape, jnp.float32), per_chunk)
  return h_bar, None, w_bar.astype(w.dtype)


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _masked_width(rows: int, columns: int, chunk_size: int) -> int:
  """Tokens of each row in one chunk."""
  return max(1, min(chunk_size // max(rows, 1), math.ceil(columns / MIN_CHUNKS)))


def _used_chunks(mask: jax.Array, width: int, axis_names: tuple[str, ...]) -> jax.Array:
  """Number of chunks that hold a masked token, the largest over the rows and over devices along the axes."""
  used = -(-jnp.max(jnp.sum(mask, axis=-1), initial=0) // width)
  return lax.pmax(used, axis_names) if axis_names else used


class _Settings(NamedTuple):
  """Static argument of `_masked`."""

  temperature: float
  width: int
  """Tokens of each row in one chunk."""
  axis_names: tuple[str, ...]
  num_tokens: int | None


class _Order(NamedTuple):
  """Assignment of tokens `[R, T]` to n chunks: masked tokens first, in their order."""

  column: jax.Array
  """`[R, n, width]`: index of the token at each place; places past T repeat the last token."""
  valid: jax.Array
  """`[R, n, width]` bool: the place holds a masked token."""
  place: jax.Array
  """`[R, T]`: place of each masked token among all n * width."""
  used: jax.Array
  """Number of chunks that hold a masked token."""


def _order(mask: jax.Array, settings: _Settings) -> _Order:
  rows, columns = mask.shape
  padding = -columns % settings.width
  first = jnp.pad(jnp.argsort(~mask, axis=-1, stable=True), ((0, 0), (0, padding)), mode="edge")
  valid = jnp.arange(columns + padding) < jnp.sum(mask, axis=-1, keepdims=True)
  return _Order(
    column=first.reshape(rows, -1, settings.width),
    valid=valid.reshape(rows, -1, settings.width),
    place=jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0),
    used=_used_chunks(mask, settings.width, settings.axis_names),
  )


def _chunk_of(x: jax.Array, i: jax.Array) -> jax.Array:
  """Takes chunk i, `[R, width, ...]`, of `[R, n, width, ...]`."""
  return lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)


def _with_chunk(x: jax.Array, i: jax.Array, chunk: jax.Array) -> jax.Array:
  """Replaces chunk i of `x`."""
  return lax.dynamic_update_index_in_dim(x, chunk, i, axis=1)


def _take(x: jax.Array, order: _Order, i: jax.Array) -> jax.Array:
  """Gathers chunk i, `[R, width, ...]`, from `[R, T, ...]`; 0 where a place holds no masked token."""
  column, valid = _chunk_of(order.column, i), _chunk_of(order.valid, i)
  extra = (1,) * (x.ndim - 2)
  taken = jnp.take_along_axis(x, column.reshape(*column.shape, *extra), axis=1)
  return jnp.where(valid.reshape(*valid.shape, *extra), taken, jnp.zeros((), x.dtype))


def _put_back(x: jax.Array, order: _Order, mask: jax.Array) -> jax.Array:
  """Undoes `_take` for all chunks: `[R, n, width, ...]` to `[R, T, ...]`, 0 off the mask."""
  extra = (1,) * (x.ndim - 3)
  x = x.reshape(x.shape[0], -1, *x.shape[3:])
  placed = jnp.take_along_axis(x, order.place.reshape(*mask.shape, *extra), axis=1)
  return jnp.where(mask.reshape(*mask.shape, *extra), placed, jnp.zeros((), x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _masked(settings: _Settings, h: jax.Array, ids: jax.Array, mask: jax.Array, w: jax.Array) -> _Pair:
  return _masked_forward(settings, h, ids, mask, w)[0]


def _masked_forward(
  settings: _Settings, h: jax.Array, ids: jax.Array, mask: jax.Array, w: jax.Array
) -> tuple[_Pair, tuple[Any, ...]]:
  order = _order(mask, settings)

  def chunk(i: jax.Array, written: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    rows = _take(h, order, i), _take(ids, order, i)
    results = _forward_chunk(*rows, w, settings.temperature, settings.num_tokens)
    return tuple(_with_chunk(a, i, x) for a, x in zip(written, results, strict=True))

  empty = jnp.zeros(order.column.shape, jnp.float32)
  logp, entropy, logsumexp = lax.fori_loop(0, order.used, chunk, (empty, empty, empty))
  outputs = (_put_back(logp, order, mask), _put_back(entropy, order, mask))
  return outputs, (h, ids, mask, w, order, logsumexp, entropy)


def _masked_backward(
  settings: _Settings, residuals: tuple[Any, ...], cotangents: _Pair
) -> tuple[jax.Array, None, None, jax.Array]:
  h, ids, mask, w, order, logsumexp, entropy = residuals

  def chunk(i: jax.Array, sums: _Pair) -> _Pair:
    h_bars, w_bar = sums
    seen, bars = (_chunk_of(x, i) for x in (logsumexp, entropy)), (_take(x, order, i) for x in cotangents)
    rows = _take(h, order, i), _take(ids, order, i)
    h_bar, w_share = _backward_chunk(*rows, w, settings.temperature, settings.num_tokens, *seen, *bars)
    return _with_chunk(h_bars, i, h_bar), w_bar + w_share

  empty = jnp.zeros((*order.column.shape, h.shape[-1]), h.dtype)
  h_bars, w_bar = lax.fori_loop(0, order.used, chunk, (empty, jnp.zeros(w.shape, jnp.float32)))
  return _put_back(h_bars, order, mask), None, None, w_bar.astype(w.dtype)


_masked.defvjp(_masked_forward, _masked_backward)
