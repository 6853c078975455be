"""Jitted prefill and chunked decoding over slots, with sampling fused in."""

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

_HEADER = 8  # slot, start, count, slot whose state is set, and that state
_MAX_UNIFORM = 1.0 - 2.0**-20  # keeps a sampled threshold below the total, so that no token of weight 0 is chosen
_BLOCK = 32

_T = TypeVar("_T")

_Carry: TypeAlias = "tuple[jax.Array, Window, SlotState, jax.Array, jax.Array]"


class SlotState(NamedTuple):
  """What decoding needs to know about every slot; lives on the device, `[S]` each."""

  token: jax.Array
  """int32: the last token of the context; its keys and values are not written yet."""
  position: jax.Array
  """int32: position of `token`."""
  budget: jax.Array
  """int32: action tokens that may still be sampled."""
  active: jax.Array
  """bool: the slot is writing an action."""
  episode: jax.Array
  """int32: the episode's number; noise is derived from it and from the position."""


class Chunk(NamedTuple):
  """What a decode chunk of one stream sampled, on the host; row i is slot `stream + i * num_streams`."""

  tokens: np.ndarray
  """`[steps, S / num_streams]` int32: row i sampled `tokens[:num_sampled[i], i]`."""
  logp: np.ndarray
  """`[steps, S / num_streams]` float32."""
  num_sampled: np.ndarray
  """`[S / num_streams]` int32."""
  active: np.ndarray
  """`[S / num_streams]` bool: the slot goes on in the next chunk."""


_CPU_COPY: Mapping[str, tuple[float, float]] = {"host": (80e6, 40.0), "device": (40e6, 45.0)}
_ACCELERATOR_COPY: Mapping[str, tuple[float, float]] = {"host": (0.0, 15_000.0), "device": (0.0, 300.0)}
"""FLOPs that feeding does in the time of a copy, and in that of each byte of it."""


class RunningChunk(NamedTuple):
  """A dispatched decode chunk."""

  stream: int
  out: Future[jax.Array]


SavedRow: TypeAlias = "Future[Cache]"
"""One slot's part of a cache, taken out of it."""


class RowState(NamedTuple):
  """A slot's state after a row was fed to it."""

  next_token: int
  """The context's token after those that were fed; decoding starts by feeding it."""
  budget: int
  activate: bool
  episode: int


class PrefillRow(NamedTuple):
  """Tokens to feed to one slot."""

  slot: int
  start: int
  tokens: np.ndarray
  """`[n]` int32, to be written at `start, start + 1, ...`; may be empty."""
  state: RowState | None
  """None: the slot's state stays, because another row of the same slot sets it."""


def sample_tokens(logits: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Samples from softmax(logits) by inverting its cumulative sum.

  a = min{ i : sum_{j <= i} p_j > u },   logp = log p_a.

  One uniform number per row, and one exponential per logit which the log-prob shares. The cumulative sum is taken in
  two levels (blocks, then inside the chosen block): a plain one costs more than the rest on CPU.

  Args:
    logits: `[S, V]` float32, already divided by the temperature.
    uniform: `[S]` float32 in [0, 1).

  Returns:
    Tokens `[S]` int32 and their log-probs `[S]` float32.
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
  """Uniform numbers in [0, 1), `[steps, S]`, for the tokens at `position + 1 + i` of each episode.

  u = threefry(key, (episode, position)) / 2^32, to 24 bits.

  One call of the block cipher behind `jax.random` per chunk, with (episode, position) as its counter: what an episode
  samples depends neither on its slot nor on its neighbours, and no two tokens of a key share a number.

  Args:
    key: a threefry key; not consumed, since the counter makes each draw unique.
    episode: `[S]` int32.
    position: `[S]` int32: position of the last token of each context.
    steps: tokens per slot.
  """
  at = position[None, :] + jnp.arange(1, steps + 1)[:, None]
  counter = jnp.stack([jnp.broadcast_to(episode, at.shape), at]).astype(jnp.uint32)
  bits: jax.Array = threefry_2x32(jax.random.key_data(key), counter)[0]
  return (bits >> 8).astype(jnp.float32) * 2.0**-24


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerSpec:
  """What the compiled programs depend on besides shapes; samplers of equal specs share them."""

  model: CachedPolicy
  chunk_steps: int
  """Decode steps of a chunk."""
  temperature: float
  """Logits are divided by it, in float32; log-probs are those of the result."""
  stop_ids: tuple[int, ...]
  """Ids that end an action."""
  top_p: float = 1.0
  """Mass of the nucleus that is sampled from, in (0, 1]; log-probs are those inside it."""


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
  if len(live_lens) > 1:  # the longest active contexts first; from here on everything is by row, not by slot
    slots = jnp.argsort(jnp.where(state.active, state.position, -1), descending=True)
    state = jax.tree.map(lambda x: x[slots], state)
  noise = slot_noise(key, state.episode, state.position, steps=steps)
  first_position = state.position
  stop_ids = np.asarray(spec.stop_ids, np.int32)

  def body(carry: _Carry) -> _Carry:
    i, window, state, tokens_out, logp_out = carry
    hidden, window = model.step(prepared, window, state.token, i)
    logits = jnp.dot(hidden, lm_head, preferred_element_type=jnp.float32) / spec.temperature
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
  # A while loop rather than a scan: it ends when every slot waits.
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
  """A cache and slots without content, made where they live."""
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
  """Some of the slots: their cache and state, donated to every call, so that nothing is copied."""

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

  def save(self, slot: int, to_host: bool) -> Cache:
    with _dispatching(self._spec):
      row = _read_row(self.cache, jax.device_put(np.int32(slot)))
    return jax.device_get(row) if to_host else row

  def restore(self, slot: int, saved: SavedRow) -> None:
    # On the device already, or on its way there.
    row = jax.tree.map(jnp.asarray, saved.result())
    with _dispatching(self._spec):
      self.cache = _write_row(self.cache, row, jax.device_put(np.int32(slot)))


class Sampler:
  """Owns the cache and the slots' state.

  Slots are dealt out to streams (slot s is in stream s % num_streams), each with a program and, if there are several, a
  thread of its own: a CPU runs most operations of a small model on one core, so that as many streams as cores decode
  side by side, and what the host has to do for one stream it does while the others decode. Nothing that a slot samples
  depends on its stream.

  Args:
    spec: model and sampling.
    num_slots: slots.
    max_len: cache entries per slot.
    num_streams: a divisor of `num_slots`.
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
    # A thread per stream: what one thread dispatches, the CPU runs one after the other.
    self._threads = [ThreadPoolExecutor(1, f"sao_jax-stream{i}") for i in range(num_streams)] if num_streams > 1 else []
    self._pending: list[list[Future[Any]]] = [[] for _ in range(num_streams)]
    self._num_streams = num_streams
    self.reset()

  @property
  def num_streams(self) -> int:
    return self._num_streams

  @property
  def num_groups(self) -> int:
    """Groups of windows that suit a stream: halves, since the longest context is often twice as long as most.

    One where slots are on a mesh (rows would change their shard), or where they do not divide.
    """
    return 1 if self._spec.model.placement is not None or self._num_slots // self._num_streams % 2 else 2

  def reset(self) -> None:
    """Empties all slots."""
    self.settle()
    self._streams = []  # frees the old caches first
    per_stream = self._num_slots // self._num_streams
    self._streams = [_DecodeStream(self._spec, per_stream, self._max_len) for _ in range(self._num_streams)]

  def close(self) -> None:
    """Ends the streams' threads."""
    for thread in self._threads:
      thread.shutdown()

  def prefill(self, params: Params, rows: Sequence[PrefillRow], *, num_rows: int, width: int, live_len: int) -> None:
    """Feeds up to `num_rows` rows of up to `width` tokens; `live_len` bounds every row's last position + 1.

    Rows must have slots of one stream, and only one of the rows of a slot a state. Rows of one slot read each other's
    tokens, as far as they come before. Only dispatches.
    """
    (stream,) = {row.slot % self._num_streams for row in rows}
    packed = np.zeros((num_rows, _HEADER + width), np.int32)
    packed[:, [0, 3]] = self._num_slots  # what has no such slot is ignored
    for i, row in enumerate(rows):
      count = len(row.tokens)
      slot = row.slot // self._num_streams
      packed[i, :3] = (slot, row.start, count)
      if row.state is not None:
        packed[i, 3:_HEADER] = (slot, *row.state)
      packed[i, _HEADER : _HEADER + count] = row.tokens
    self._submit(stream, functools.partial(self._streams[stream].prefill, params, packed, live_len))

  def save(self, slot: int, *, to_host: bool) -> SavedRow:
    """Copies what the cache holds for a slot, as of the calls before, to the host or inside the device."""
    stream, row = slot % self._num_streams, slot // self._num_streams
    return self._submit(stream, functools.partial(self._streams[stream].save, row, to_host))

  def restore(self, slot: int, saved: SavedRow) -> None:
    """Puts what `save` took out into any slot."""
    stream, row = slot % self._num_streams, slot // self._num_streams
    self._submit(stream, functools.partial(self._streams[stream].restore, row, saved))

  def copy_pays(self, params: Params, length: int, *, to_host: bool) -> bool:
    """Whether copying a slot's row costs less than feeding its `length` tokens again.

    FLOPs in the time of a copy + bytes moved * (FLOPs in the time of a byte) < 2 * parameters * length.

    A row goes to the host and back, or once inside the device; it is moved whole. The figures of a CPU are those that
    `experiments.benchmarks.kv_cache` measures on two cores; those of an accelerator are estimates: 300 TFLOP/s beside
    20 GB/s to the host and 1 TB/s inside. Experts that a token does not pass are counted, so that mixtures copy
    somewhat early.
    """
    row_bytes = sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(self._streams[0].cache))
    parameters = sum(x.size for x in jax.tree.leaves(params))
    costs = _CPU_COPY if jax.default_backend() == "cpu" else _ACCELERATOR_COPY
    per_copy, per_byte = costs["host" if to_host else "device"]
    return per_copy + row_bytes * (2 if to_host else 1) * per_byte < 2.0 * parameters * length

  def decode(self, params: Params, key: jax.Array, *, stream: int, live_lens: tuple[int, ...]) -> RunningChunk:
    """Dispatches a chunk of one stream; give the result to `fetch`.

    Args:
      params: weights.
      key: base of the noise.
      stream: which stream.
      live_lens: bounds on every active slot's position + `chunk_steps`: one for all, or one for each of several groups
        of equal size, the longest active contexts being in the first.
    """
    if params is not self._params:
      with _dispatching(self._spec):
        self._params, self._prepared = params, _prepare(params, spec=self._spec)
    decode = functools.partial(self._streams[stream].decode, self._prepared, key, live_lens)
    return RunningChunk(stream, self._submit(stream, decode))

  def fetch(self, chunk: RunningChunk) -> Chunk:
    """Waits for a chunk: the one transfer from the stream's device."""
    self._settle(chunk.stream)
    steps = self._spec.chunk_steps
    host = jax.device_get(chunk.out.result())
    return Chunk(
      tokens=host[:steps],
      logp=host[steps : 2 * steps].view(np.float32),
      num_sampled=host[-2],
      active=host[-1].astype(bool),
    )

  def settle(self) -> None:
    """Waits for all submitted calls to be dispatched; raises what they raised."""
    for stream in range(self._num_streams):
      self._settle(stream)

  def _submit(self, stream: int, call: Callable[[], _T]) -> Future[_T]:
    """Runs `call` on the stream's thread, after what was submitted before; here and now if there is but one stream."""
    if self._threads:
      future = self._threads[stream].submit(call)
    else:
      future = Future[_T]()
      future.set_result(call())
    self._pending[stream].append(future)
    return future

  def _settle(self, stream: int) -> None:
    pending, self._pending[stream] = self._pending[stream], []
    for future in pending:
      future.result()
