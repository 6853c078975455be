"""Model runner: the jitted step over a paged KV cache. It computes prompt tokens and decodes, for all rows together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from sao_jax.rollout.engine import ragged, windows
from sao_jax.rollout.engine.cache_manager import NULL_PAGE
from sao_jax.rollout.engine.config import bucket, context_buckets
from sao_jax.rollout.engine.step_spec import Row, StepSpec
from sao_jax.types import Cache, CachedPolicy, Params

_T = TypeVar("_T")

_COPY_COST: Mapping[str, tuple[float, float]] = {"cpu": (80e6, 40.0), "accelerator": (0.0, 15_000.0)}
"""Cost of a copy to the host as FLOPs that prefill does in the same time: (fixed cost, cost per byte)."""


class StepOutput(NamedTuple):
  """Tokens that a step has sampled, on the host."""

  tokens: np.ndarray
  """`[chunk_steps, rows]` int32: row i sampled `tokens[:num_sampled[i], i]`."""
  logp: np.ndarray
  """`[chunk_steps, rows]` float32: behaviour log-probs of `tokens`."""
  num_sampled: np.ndarray
  """`[rows]` int32, in [0, chunk_steps]. A row ends early at a stop id or at its budget."""


class RunningStep(NamedTuple):
  """A dispatched step; `ModelRunner.fetch` waits for it."""

  order: np.ndarray
  """`[rows]` int32: column of each row in `out`; -1: the row samples nothing."""
  out: Future[jax.Array] | None


class SwappedPages(NamedTuple):
  """Contents of pages, on the host."""

  num_pages: int
  contents: Future[Cache]


class PreparedWeights:
  """The weights in the form that decoding uses, made once per version and shared by all runners."""

  def __init__(self, spec: StepSpec):
    self._spec = spec
    self._params: Params = None
    self._prepared: Params = None

  def __call__(self, params: Params) -> Params:
    if params is not self._params:
      self._params = self._prepared = None  # frees the old ones before new ones are made
      with dispatching(self._spec.model):
        self._params, self._prepared = params, _prepare(params, self._spec.model)
    return self._prepared


def _prepare(params: Params, model: CachedPolicy) -> Params:
  """Returns the prepared weights. Those that need no conversion share their buffers with `params`."""
  given, structure = jax.tree.flatten(params)
  convert, sources = _converter(model)
  converted = iter(convert(params))
  return jax.tree.map(lambda i: next(converted) if i < 0 else given[i], sources[structure])


@functools.lru_cache(maxsize=64)
def _converter(model: CachedPolicy) -> tuple[Callable[[Params], list[jax.Array]], dict[Any, Any]]:
  """Returns a program that converts weights, and the numbers of the leaves that it passes on, by structure.

  The second holds, for each structure of weights that the program was called with, a tree of prepared weights: -1 for
  a converted leaf, otherwise the number of the leaf that it is.
  """
  sources: dict[Any, Any] = {}

  def convert(params: Params) -> list[jax.Array]:
    given, structure = jax.tree.flatten(params)
    numbers = {id(x): i for i, x in enumerate(given)}
    prepared = model.prepare(params)
    sources[structure] = jax.tree.map(lambda x: numbers.get(id(x), -1), prepared)
    return [x for x in jax.tree.leaves(prepared) if id(x) not in numbers]

  return jax.jit(convert), sources


@functools.partial(jax.jit, static_argnames=("spec", "num_pages", "page_size"))
def _empty(*, spec: StepSpec, num_pages: int, page_size: int) -> Cache:
  """Makes an empty cache, directly on its devices. For windows, a page is a slot of `page_size` tokens."""
  model = spec.model.paged if spec.reads_pages else spec.model
  assert model is not None
  return model.init_cache(num_pages, page_size)


@jax.jit
def _read_pages(cache: Cache, pages: jax.Array) -> Cache:
  return jax.tree.map(lambda x: x[pages], cache)


@functools.partial(jax.jit, donate_argnums=0)
def _write_pages(cache: Cache, contents: Cache, pages: jax.Array) -> Cache:
  return jax.tree.map(lambda x, y: x.at[pages].set(y), cache, contents)


def dispatching(model: CachedPolicy) -> contextlib.AbstractContextManager[Any]:
  """Context around the dispatch of every program; see `types.SlotPlacement`."""
  return contextlib.nullcontext() if model.placement is None else model.placement.dispatching()


class ModelRunner:
  """Runs the steps of one decode stream; owns its cache.

  The cache is donated to every program, so that nothing is copied. A CPU runs most operations of a small model on one
  core. There, an engine has a runner per core, each with a thread of its own. The samples of a row depend neither on
  its runner nor on the other rows.

  Args:
    spec: model and sampling settings.
    num_slots: maximum number of rows of a step.
    num_pages: pages of the cache, besides the null page.
    page_size: tokens per page.
    max_pages: maximum number of pages of a sequence.
    token_budget: tokens per prefill program; a step runs as many of them as it needs, usually one. Over pages, the
      largest number of prompt tokens of a step.
    prepared: converts the weights.
    threaded: whether to dispatch from a thread of its own.
    buckets: context lengths, in pages, that programs are compiled for, ascending up to `max_pages`; None: few, spread
      evenly on a scale of logarithms.
  """

  def __init__(
    self,
    spec: StepSpec,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    max_pages: int,
    token_budget: int,
    prepared: PreparedWeights | None = None,
    threaded: bool = False,
    buckets: tuple[int, ...] | None = None,
  ):
    self._spec = spec
    self._num_slots = num_slots
    multiple = 1 if spec.model.placement is None else spec.model.placement.row_multiple
    self._num_pages = _round_up(num_pages + 1, multiple)
    self._page_size = page_size
    self._prepared = prepared or PreparedWeights(spec)
    self._buckets = buckets or context_buckets(max_pages, page_size)
    self._max_pages = max_pages
    self._max_tokens = num_slots + token_budget
    self._time_axes = () if spec.reads_pages else windows.time_axes(spec.model, self._num_pages, page_size)
    self._width = min(page_size, windows.BLOCK)
    counts = {max(token_budget // self._width // n, 1) for n in (1, 4)}
    self._block_counts = tuple(sorted({_round_up(n, multiple) for n in counts}))
    self._thread = ThreadPoolExecutor(1, "sao_jax-stream") if threaded else None
    self._pending: list[Future[Any]] = []
    self._cache: Cache = None
    self.reset()

  def reset(self) -> None:
    """Makes an empty cache."""
    self.flush()
    self._cache = None  # frees the old one first
    with dispatching(self._spec.model):
      self._cache = _empty(spec=self._spec, num_pages=self._num_pages, page_size=self._page_size)

  def close(self) -> None:
    """Ends the thread."""
    if self._thread is not None:
      self._thread.shutdown()

  def step(self, params: Params, rows: Sequence[Row], key: jax.Array) -> RunningStep:
    """Dispatches a step, without waiting; `fetch` returns its tokens.

    It computes the keys and values of all given tokens. Then, for each row with a budget, it samples up to
    `chunk_steps` tokens.

    Args:
      params: weights.
      rows: at most `num_slots`, of different sequences. No page is written by one and read by another.
      key: threefry key of the sampling noise.
    """
    assert len(rows) <= self._num_slots
    if self._spec.reads_pages:
      columns = np.array([i if row.budget else -1 for i, row in enumerate(rows)], np.int32)
      return RunningStep(columns, self._ragged_step(params, rows, key))
    blocks = windows.blocks_of(rows, self._width)
    for i in range(0, len(blocks), self._block_counts[-1]):
      self._prefill(params, rows, blocks[i : i + self._block_counts[-1]])
    column = np.full(len(rows), -1, np.int32)
    decoding = [i for i, row in enumerate(rows) if row.budget]
    if not decoding:
      return RunningStep(column, None)
    if self._num_groups > 1:
      decoding.sort(key=lambda i: -rows[i].start - len(rows[i].tokens))
    column[decoding] = np.arange(len(decoding))
    return RunningStep(column, self._decode(params, [rows[i] for i in decoding], key))

  def fetch(self, running: RunningStep) -> StepOutput:
    """Waits for a step and transfers its tokens to the host."""
    self.flush()
    steps, columns = self._spec.chunk_steps, running.order
    if running.out is None:
      empty = np.zeros((steps, len(columns)))
      return StepOutput(empty.astype(np.int32), empty.astype(np.float32), np.zeros(len(columns), np.int32))
    host = jax.device_get(running.out.result())[:, columns]
    return StepOutput(
      tokens=host[:steps], logp=host[steps : 2 * steps].view(np.float32), num_sampled=np.where(columns < 0, 0, host[-1])
    )

  def read_pages(self, pages: Sequence[int]) -> SwappedPages:
    """Copies pages to the host, after all earlier steps."""
    ids = self._padded(pages)

    def read() -> Cache:
      with dispatching(self._spec.model):
        contents = _read_pages(self._cache, ids)
      return jax.device_get(contents)

    return SwappedPages(len(pages), self._submit(read))

  def write_pages(self, pages: Sequence[int], source: SwappedPages) -> None:
    """Writes contents that `read_pages` returned into as many pages."""
    assert len(pages) == source.num_pages
    ids = self._padded(pages)

    def write() -> None:
      with dispatching(self._spec.model):
        self._cache = _write_pages(self._cache, source.contents.result(), ids)

    self._submit(write)

  def swap_is_cheaper(self, params: Params, num_tokens: int) -> bool:
    """Whether swapping `num_tokens` tokens of the cache to the host and back is cheaper than recomputing them.

      fixed cost + 2 · bytes · (cost per byte) < 2 · parameters · num_tokens   (all in FLOPs of prefill)

    `bytes` is the size of the cached pages, `parameters` that of the model. The costs on a CPU were measured on two
    cores (benchmark `kv_cache`). Those of an accelerator are estimates: 300 TFLOP/s, and 20 GB/s to the host.
    Parameters include the experts that a token skips, so mixtures of experts are swapped too early.
    """
    page_bytes = sum(x.nbytes // x.shape[0] for x in jax.tree.leaves(self._cache))
    parameters = sum(x.size for x in jax.tree.leaves(params))
    per_copy, per_byte = _COPY_COST["cpu" if jax.default_backend() == "cpu" else "accelerator"]
    num_pages = -(-num_tokens // self._page_size)
    return per_copy + 2 * num_pages * page_bytes * per_byte < 2.0 * parameters * num_tokens

  def discard(self) -> None:
    """Waits until all submitted calls are dispatched, or have failed: whoever fetches their results gets the error."""
    pending, self._pending = self._pending, []
    wait(pending)

  def flush(self) -> None:
    """Waits until all submitted calls are dispatched, and raises their exceptions."""
    pending, self._pending = self._pending, []
    for future in pending:
      future.result()

  @property
  def _num_groups(self) -> int:
    """Number of window lengths per step: 2, since the longest context is often twice as long as most.

    It is 1 on a mesh, where sorting would move rows between shards, and for an odd number of slots.
    """
    return 1 if self._spec.model.placement is not None or self._num_slots % 2 else 2

  def _ragged_step(self, params: Params, rows: Sequence[Row], key: jax.Array) -> Future[jax.Array]:
    tokens, packed = ragged.pack(
      rows, num_slots=self._num_slots, num_tokens=self._max_tokens, max_pages=self._max_pages,
      page_size=self._page_size,
    )  # fmt: skip
    return self._run(
      lambda cache: ragged.step(params, cache, self._put(tokens), self._put(packed), key, spec=self._spec)
    )

  def _prefill(self, params: Params, rows: Sequence[Row], blocks: Sequence[windows.Block]) -> None:
    num_pages = bucket(self._buckets, max(-(-(block.start + block.size) // self._page_size) for block in blocks))
    packed = windows.pack_blocks(
      rows, blocks, num_blocks=bucket(self._block_counts, len(blocks)), num_pages=num_pages, width=self._width,
      page_size=self._page_size,
    )  # fmt: skip
    self._run(lambda cache: (windows.prefill(
      params, cache, self._put(packed), model=self._spec.model, axes=self._time_axes, num_pages=num_pages
    ), None))  # fmt: skip

  def _decode(self, params: Params, rows: Sequence[Row], key: jax.Array) -> Future[jax.Array]:
    """Dispatches the decode loop of rows. Where there are two groups, they are sorted by length, the longest first."""
    steps, size = self._spec.chunk_steps, self._num_slots // self._num_groups
    ends = [row.start + len(row.tokens) - 1 + steps for row in rows]
    needs = [max(ends[i * size : (i + 1) * size], default=0) for i in range(self._num_groups)]
    buckets = [bucket(self._buckets, -(-need // self._page_size)) for need in needs]
    # The last steps of a loop may pass the end of the longest contexts.
    lens = [n * self._page_size + (steps if n == self._buckets[-1] else 0) for n in buckets]
    live_lens = tuple(lens) if len(set(lens)) > 1 else (lens[0],)
    packed = windows.pack_rows(rows, num_slots=self._num_slots, num_pages=buckets[0])
    prepared = self._prepared(params)
    return self._run(lambda cache: windows.decode(
      prepared, cache, self._put(packed), key, spec=self._spec, axes=self._time_axes, live_lens=live_lens
    ))  # fmt: skip

  def _run(self, program: Callable[[Cache], tuple[Cache, Any]]) -> Future[Any]:
    """Dispatches a program that takes the cache and returns it with a result."""

    def run() -> Any:
      with dispatching(self._spec.model):
        self._cache, result = program(self._cache)
      return result

    return self._submit(run)

  def _put(self, packed: np.ndarray) -> jax.Array:
    placement = self._spec.model.placement
    return jax.device_put(packed, None if placement is None else placement.whole)

  def _padded(self, pages: Sequence[int]) -> np.ndarray:
    """Pads page numbers to a power of two, so that few programs are compiled."""
    ids = np.full(1 << (len(pages) - 1).bit_length(), NULL_PAGE, np.int32)
    ids[: len(pages)] = pages
    return ids

  def _submit(self, call: Callable[[], _T]) -> Future[_T]:
    """Runs `call` on the runner's thread after earlier calls; without a thread, at once."""
    if self._thread is not None:
      future = self._thread.submit(call)
    else:
      future = Future[_T]()
      future.set_result(call())
    self._pending.append(future)
    return future


def _round_up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple
