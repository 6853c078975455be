"""Jitted prefill and chunked decoding over slots, with sampling inside the decode loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from sao_jax.rollout.engine.nucleus import nucleus
from sao_jax.types import Cache, CachedPolicy, Params, Window

_HEADER = 8  # slot, start, count, slot whose state is set, and the four fields of that state
_MAX_UNIFORM = 1.0 - 2.0**-20  # keeps a sampled threshold below the total, so that no token of weight 0 is chosen
_BLOCK = 32

_T = TypeVar("_T")

_Carry: TypeAlias = "tuple[jax.Array, Window, SlotState, jax.Array, jax.Array]"


class SlotState(NamedTuple):
  """Decode state of all slots, on the device; `[S]` each."""

  token: jax.Array
  """int32: the last token of the context. Its keys and values are not in the cache yet."""
  position: jax.Array
  """int32: position of `token`."""
  budget: jax.Array
  """int32: number of action tokens that may still be sampled."""
  active: jax.Array
  """bool: the slot is decoding an action."""
  episode: jax.Array
  """int32: id of the episode; sampling noise is derived from it and from the position."""


class Chunk(NamedTuple):
  """Sampled tokens of one stream's decode chunk, on the host; row i is slot `stream + i * num_streams`."""

  tokens: np.ndarray
  """`[steps, S / num_streams]` int32: row i sampled `tokens[:num_sampled[i], i]`."""
  logp: np.ndarray
  """`[steps, S / num_streams]` float32: behaviour log-probs of `tokens`."""
  num_sampled: np.ndarray
  """`[S / num_streams]` int32: number of tokens sampled, in [0, steps]."""
  active: np.ndarray
  """`[S / num_streams]` bool: the slot continues its action in the next chunk."""


_CPU_COPY: Mapping[str, tuple[float, float]] = {"host": (80e6, 40.0), "device": (40e6, 45.0)}
_ACCELERATOR_COPY: Mapping[str, tuple[float, float]] = {"host": (0.0, 15_000.0), "device": (0.0, 300.0)}
"""Cost of a copy as FLOPs that prefill does in the same time: (fixed cost, cost per byte)."""


class RunningChunk(NamedTuple):
  """A dispatched decode chunk; `Sampler.fetch` waits for it."""

  stream: int
  out: Future[jax.Array]


CacheRow: TypeAlias = "Future[Cache]"
"""A copy of one slot's keys and values."""


class RowState(NamedTuple):
  """State of a slot after its prefill."""

  next_token: int
  """The last token of the context, which is not prefilled: the first decode step takes it as its input."""
  budget: int
  activate: bool
  """Whether the slot starts decoding."""
  episode: int


class PrefillRow(NamedTuple):
  """Tokens to prefill in one slot."""

  slot: int
  start: int
  """Position of the first token."""
  tokens: np.ndarray
  """`[n]` int32, for positions `start, start + 1, ...`; may be empty."""
  state: RowState | None
  """State of the slot afterwards; None if another row of the same slot sets it."""


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerSpec:
  """Static settings of the compiled programs. Samplers with equal specs share their programs."""

  model: CachedPolicy
  chunk_steps: int
  """Decode steps per chunk."""
  temperature: float
  """Sampling temperature, > 0. Logits are divided by it in float32, and log-probs are those of the result."""
  stop_ids: tuple[int, ...]
  """Token ids that end an action."""
  top_p: float = 1.0
  """Nucleus mass, in (0, 1]. Log-probs are those of the truncated distribution."""


@functools.partial(jax.jit, static_argnames=("spec", "live_len"), donate_argnums=(1, 2))
def _prefill(
  params: Params, cache: Cache, state: SlotState, packed: jax.Array, *, spec: SamplerSpec, live_len: int
) -> tuple[Cache, SlotState]:
  slots, start, count, state_of, token, budget, activate, episode = packed[:, :_HEADER].T
  _, cache = spec.model.extend(params, cache, packed[:, _HEADER:], slots, start, count, live_len=live_len)
  rows = SlotState(token, start + count, budget, activate.astype(bool), episode)
  state = jax.tree.map(lambda old, new: old.at[state_of].set(new, mode="drop"), state, rows)
  return cache, _constrain_slots(spec, state)


@functools.partial(jax.jit, static_argnames="spec")
def _prepare(params: Params, *, spec: SamplerSpec) -> Params:
  return spec.model.prepare(params)


@functools.partial(jax.jit, static_argnames=("spec", "live_lens"), donate_argnums=(1, 2))
def _decode(
  prepared: Params, cache: Cache, state: SlotState, key: jax.Array, *, spec: SamplerSpec, live_lens: tuple[int, ...]
) -> tuple[Cache, SlotState, jax.Array]:
  model, steps = spec.model, spec.chunk_steps
  lm_head = model.lm_head(prepared)
  slots = jnp.arange(state.token.shape[0])
  if len(live_lens) > 1:  # rows sorted by length, longest active contexts first, so that each group has one window
    slots = jnp.argsort(jnp.where(state.active, state.position, -1), descending=True)
    state = jax.tree.map(lambda x: x[slots], state)
  noise = slot_noise(key, state.episode, state.position, steps=steps)
  first_position = state.position
  stop_ids = np.asarray(spec.stop_ids, np.int32)

  def body(carry: _Carry) -> _Carry:
    i, window, state, tokens_out, logp_out = carry
    hidden, window = model.step(prepared, window, state.token, i)
    logits = jnp.dot(hidden, lm_head, preferred_element_type=jnp.float32) / spec.temperature
    if model.placement is not None:
      logits = model.placement.logits(logits)
    if spec.top_p < 1.0:
      logits = nucleus(logits, top_p=spec.top_p)
    tokens, logp = sample_tokens(logits, noise[i])
    budget = state.budget - state.active
    stopped = (tokens[:, None] == stop_ids).any(-1)
    new = SlotState(
      jnp.where(state.active, tokens, state.token),
      state.position + state.active,
      budget,
      state.active & ~stopped & (budget > 0),
      state.episode,
    )
    return i + 1, window, new, tokens_out.at[i].set(tokens), logp_out.at[i].set(logp)

  shape = (steps, state.token.shape[0])
  window = model.window(cache, slots, state.position, steps=steps, live_lens=live_lens)
  carry = (jnp.int32(0), window, state, jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
  # A while loop rather than a scan: it ends early when no slot is active.
  _, window, state, tokens, logp = jax.lax.while_loop(
    lambda carry: (carry[0] < steps) & carry[2].active.any(), body, carry
  )
  count = state.position - first_position
  out = jnp.concatenate(
    [
      tokens,
      jax.lax.bitcast_convert_type(logp, jnp.int32),
      count[None],
      state.active[None].astype(jnp.int32),
    ]
  )
  cache = model.merge(cache, window, count)
  if len(live_lens) > 1:
    rows = jnp.argsort(slots)
    state, out = jax.tree.map(lambda x: x[rows], state), out[:, rows]
  if model.placement is not None:
    out = jax.lax.with_sharding_constraint(out, model.placement.whole)
  return cache, _constrain_slots(spec, state), out


@functools.partial(jax.jit, static_argnames=("spec", "num_slots", "max_len"))
def _empty(*, spec: SamplerSpec, num_slots: int, max_len: int) -> tuple[Cache, SlotState]:
  """Makes an empty cache and empty slots, directly on their devices."""
  zeros = jnp.zeros((num_slots,), jnp.int32)
  state = SlotState(token=zeros, position=zeros, budget=zeros, active=zeros.astype(jnp.bool_), episode=zeros)
  return spec.model.init_cache(num_slots, max_len), _constrain_slots(spec, state)


def _constrain_slots(spec: SamplerSpec, state: SlotState) -> SlotState:
  placement = spec.model.placement
  return state if placement is None else jax.lax.with_sharding_constraint(state, placement.slots)


def _dispatching(spec: SamplerSpec) -> contextlib.AbstractContextManager[Any]:
  placement = spec.model.placement
  return contextlib.nullcontext() if placement is None else placement.dispatching()


@jax.jit
def _read_row(cache: Cache, slot: jax.Array) -> Cache:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, slot, keepdims=False), cache)


@functools.partial(jax.jit, donate_argnums=0)
def _write_row(cache: Cache, row: Cache, slot: jax.Array) -> Cache:
  return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, slot, axis=0), cache, row)


class _DecodeStream:
  """Cache and state of one stream's slots. They are donated to every call, so that nothing is copied."""

  def __init__(self, spec: SamplerSpec, num_slots: int, max_len: int):
    self._spec = spec
    with _dispatching(spec):
      self.cache, self.state = _empty(spec=spec, num_slots=num_slots, max_len=max_len)

  def prefill(self, params: Params, packed: np.ndarray, live_len: int) -> None:
    placement = self._spec.model.placement
    rows = jax.device_put(packed, None if placement is None else placement.whole)
    with _dispatching(self._spec):
      self.cache, self.state = _prefill(params, self.cache, self.state, rows, spec=self._spec, live_len=live_len)

  def decode(self, prepared: Params, key: jax.Array, live_lens: tuple[int, ...]) -> jax.Array:
    with _dispatching(self._spec):
      self.cache, self.state, out = _decode(prepared, self.cache, self.state, key, spec=self._spec, live_lens=live_lens)
    return out

  def read_row(self, slot: int, to_host: bool) -> Cache:
    with _dispatching(self._spec):
      row = _read_row(self.cache, jax.device_put(np.int32(slot)))
    return jax.device_get(row) if to_host else row

  def write_row(self, slot: int, source: CacheRow) -> None:
    # Either on the device already, or copied there now.
    row = jax.tree.map(jnp.asarray, source.result())
    with _dispatching(self._spec):
      self.cache = _write_row(self.cache, row, jax.device_put(np.int32(slot)))


class Sampler:
  """Prefills and decodes slots; owns the KV cache and the slots' state.

  Slot s belongs to decode stream s % num_streams. Several streams decode in parallel, each on a thread of its own. A
  CPU runs most operations of a small model on one core, so use as many streams as cores. Host work for one stream then
  overlaps with the decoding of the others. The samples of a slot do not depend on its stream.

  Args:
    spec: model and sampling settings.
    num_slots: number of slots, S.
    max_len: cache entries per slot.
    num_streams: number of decode streams; a divisor of `num_slots` (`ValueError` otherwise).
  """

  def __init__(self, spec: SamplerSpec, *, num_slots: int, max_len: int, num_streams: int = 1):
    if num_streams < 1 or num_slots % num_streams:
      raise ValueError(f"num_streams must be a divisor of num_slots = {num_slots}; received {num_streams}.")
    self._spec = spec
    self._num_slots = num_slots
    self._max_len = max_len
    self._params: Params = None
    self._prepared: Params = None
    self._streams: list[_DecodeStream] = []
    # One thread per stream: programs that one thread dispatches run one after the other on a CPU.
    self._threads = [ThreadPoolExecutor(1, f"sao_jax-stream{i}") for i in range(num_streams)] if num_streams > 1 else []
    self._pending: list[list[Future[Any]]] = [[] for _ in range(num_streams)]
    self._num_streams = num_streams
    self.reset()

  @property
  def num_streams(self) -> int:
    return self._num_streams

  @property
  def num_groups(self) -> int:
    """Number of window lengths per chunk of a stream: 2, since the longest context is often twice as long as most.

    It is 1 on a mesh, where sorting would move rows between shards, and for an odd number of slots.
    """
    return 1 if self._spec.model.placement is not None or self._num_slots // self._num_streams % 2 else 2

  def reset(self) -> None:
    """Empties all slots."""
    self.flush()
    self._streams = []  # frees the old caches first
    per_stream = self._num_slots // self._num_streams
    self._streams = [_DecodeStream(self._spec, per_stream, self._max_len) for _ in range(self._num_streams)]

  def close(self) -> None:
    """Ends the streams' threads."""
    for thread in self._threads:
      thread.shutdown()

  def prefill(self, params: Params, rows: Sequence[PrefillRow], *, num_rows: int, width: int, live_len: int) -> None:
    """Dispatches the prefill of some rows, without waiting.

    Args:
      params: weights.
      rows: at most `num_rows`, all of one stream. Rows of one slot see each other's earlier tokens. Only one of them
        may have a state.
      num_rows, width: shape of the compiled program; no row has more than `width` tokens.
      live_len: upper bound on every row's last position + 1.
    """
    (stream,) = {row.slot % self._num_streams for row in rows}
    packed = np.zeros((num_rows, _HEADER + width), np.int32)
    packed[:, [0, 3]] = self._num_slots  # no such slot: padding rows are ignored
    for i, row in enumerate(rows):
      count = len(row.tokens)
      slot = row.slot // self._num_streams
      packed[i, :3] = (slot, row.start, count)
      if row.state is not None:
        packed[i, 3:_HEADER] = (slot, *row.state)
      packed[i, _HEADER : _HEADER + count] = row.tokens
    self._submit(stream, functools.partial(self._streams[stream].prefill, params, packed, live_len))

  def read_row(self, slot: int, *, to_host: bool) -> CacheRow:
    """Copies a slot's keys and values, after all earlier calls, to the host or within the device."""
    stream, row = slot % self._num_streams, slot // self._num_streams
    return self._submit(stream, functools.partial(self._streams[stream].read_row, row, to_host))

  def write_row(self, slot: int, source: CacheRow) -> None:
    """Writes a row that `read_row` returned into any slot."""
    stream, row = slot % self._num_streams, slot // self._num_streams
    self._submit(stream, functools.partial(self._streams[stream].write_row, row, source))

  def copy_is_cheaper(self, params: Params, length: int, *, to_host: bool) -> bool:
    """Whether copying a slot's row is cheaper than another prefill of its `length` tokens.

      fixed cost + bytes · (cost per byte) < 2 · parameters · length   (all in FLOPs of prefill)

    A row is copied whole: to the host and back, or once within the device. The costs on a CPU were measured on two
    cores (benchmark `kv_cache`). Those of an accelerator are estimates: 300 TFLOP/s, 20 GB/s to the host and 1 TB/s
    within the device. Parameters include the experts that a token skips, so mixtures of experts copy somewhat early.
    """
    row_bytes = sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(self._streams[0].cache))
    parameters = sum(x.size for x in jax.tree.leaves(params))
    costs = _CPU_COPY if jax.default_backend() == "cpu" else _ACCELERATOR_COPY
    per_copy, per_byte = costs["host" if to_host else "device"]
    return per_copy + row_bytes * (2 if to_host else 1) * per_byte < 2.0 * parameters * length

  def decode(self, params: Params, key: jax.Array, *, stream: int, live_lens: tuple[int, ...]) -> RunningChunk:
    """Dispatches a decode chunk of one stream, without waiting; `fetch` returns its tokens.

    Args:
      params: weights.
      key: threefry key of the sampling noise.
      stream: index of the stream.
      live_lens: upper bounds on every active slot's position + `chunk_steps`. One for all slots, or one for each of
        several groups of equal size, where the first group has the longest active contexts.
    """
    if params is not self._params:
      with _dispatching(self._spec):
        self._params, self._prepared = params, _prepare(params, spec=self._spec)
    decode = functools.partial(self._streams[stream].decode, self._prepared, key, live_lens)
    return RunningChunk(stream, self._submit(stream, decode))

  def fetch(self, chunk: RunningChunk) -> Chunk:
    """Waits for a chunk and transfers it to the host."""
    self._flush(chunk.stream)
    steps = self._spec.chunk_steps
    host = jax.device_get(chunk.out.result())
    return Chunk(
      tokens=host[:steps],
      logp=host[steps : 2 * steps].view(np.float32),
      num_sampled=host[-2],
      active=host[-1].astype(bool),
    )

  def flush(self) -> None:
    """Waits until all submitted calls are dispatched, and raises their exceptions."""
    for stream in range(self._num_streams):
      self._flush(stream)

  def _submit(self, stream: int, call: Callable[[], _T]) -> Future[_T]:
    """Runs `call` on the stream's thread after earlier calls; with one stream, on the caller's thread."""
    if self._threads:
      future = self._threads[stream].submit(call)
    else:
      future = Future[_T]()
      future.set_result(call())
    self._pending[stream].append(future)
    return future

  def _flush(self, stream: int) -> None:
    pending, self._pending[stream] = self._pending[stream], []
    for future in pending:
      future.result()
