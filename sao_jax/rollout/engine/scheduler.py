"""Scheduler of live sequences: resets and steps of environments, prefill and decode chunks.

A sequence goes FREE -> ENV (reset) -> PREFILL -> DECODE -> ENV (step) -> PREFILL -> ... -> FREE. It has a request in
every phase but FREE. From its first PREFILL on it has an `Episode`, whose first `num_computed` tokens are in the cache.
`KVCacheManager` assigns the slots of the cache; sequences decode, and are prefilled, only in a slot.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax

from sao_jax.rollout.engine.config import EngineConfig, bucket
from sao_jax.rollout.engine.env_wait_policy import EnvWaitPolicy
from sao_jax.rollout.engine.kv_cache_manager import KVCacheManager, LiveSequence, Status
from sao_jax.rollout.engine.prefill import Piece, plan_calls
from sao_jax.rollout.engine.sampler import PrefillRow, RowState, RunningChunk, Sampler
from sao_jax.rollout.environment_runner import EnvironmentHolder
from sao_jax.rollout.episodes import EnvResponse, Episode, EpisodeFailure, EpisodeRequest
from sao_jax.rollout.user_errors import describe
from sao_jax.rollout.workers import Task, Workers
from sao_jax.types import Ended, EnvironmentFactory, Params, Tokenizer, Trajectory

_POLL_S = 0.02
_CLOSE_TIMEOUT_S = 10.0


class _Running(NamedTuple):
  """A dispatched chunk."""

  chunk: RunningChunk
  version: int
  began: float


class Scheduler:
  """Scheduler of an engine's live sequences, their environments and the sampler. Not thread-safe.

  Args:
    config: settings.
    make_env: makes environments.
    tokenizer: used on the environment threads.
    sampler: prefills and decodes; closed with this object.
  """

  def __init__(self, *, config: EngineConfig, make_env: EnvironmentFactory, tokenizer: Tokenizer, sampler: Sampler):
    self._config = config
    self._new_holder = functools.partial(EnvironmentHolder, make_env, tokenizer, config)
    self._sampler = sampler
    self._decode = tokenizer.decode
    self._stop_ids = frozenset(tokenizer.stop_ids)
    self._live_lengths = config.live_lengths()
    self._window_lengths = config.window_lengths()
    self._workers = Workers(config.env_workers)
    self._wait_policy = EnvWaitPolicy()
    self._chunk_s = 0.0
    """Duration of the last chunk of any stream, in seconds."""
    self._collected_at = 0.0
    """Time at which the tokens of the last chunk arrived."""
    self._running: dict[int, _Running] = {}
    """Dispatched chunks by decode stream."""
    self._tasks: dict[Task, LiveSequence | None] = {}
    """Running environment calls. None: an environment is being closed, and no sequence waits for it."""
    self._sequences = [LiveSequence(i, self._new_holder()) for i in range(config.live_episodes)]
    self._clock = itertools.count()
    self._version = -1
    self._ended: list[tuple[Episode, Ended]] = []
    self._failures: list[tuple[EpisodeRequest, EpisodeFailure]] = []
    self.counts = Counter[str]()
    self._cache = KVCacheManager(config, sampler, self.counts)

  @property
  def waiting(self) -> bool:
    """Whether a sequence waits for its environment."""
    return any(sequence is not None for sequence in self._tasks.values())

  @property
  def num_streams(self) -> int:
    return self._sampler.num_streams

  @property
  def decoding(self) -> bool:
    """Whether a chunk is running in any stream."""
    return bool(self._running)

  @property
  def to_prefill(self) -> bool:
    """Whether a sequence waits for prefill, in any stream."""
    return any(sequence.state is Status.PREFILL for sequence in self._sequences)

  def reset(self) -> None:
    """Frees all slots and drops unfinished episodes."""
    self.abandon_all()
    self._version = -1
    self._sampler.reset()
    self._cache.reset()

  def abandon_all(self) -> None:
    """Frees all slots and abandons running environment calls; their threads close the environments."""
    for task, sequence in self._tasks.items():
      if self._workers.abandon(task) and sequence is not None:
        sequence.holder = self._new_holder()
    self._tasks.clear()
    self._workers.poll()
    self._running.clear()
    self._sampler.flush()
    self._ended.clear()
    self._failures.clear()
    for sequence in self._sequences:
      self._free(sequence)

  def close(self) -> None:
    """Abandons running calls, closes idle environments and ends the threads."""
    self.abandon_all()
    for sequence in self._sequences:
      self._dispose(sequence)
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    while self._tasks and time.monotonic() < deadline:
      for task in self._workers.poll(_POLL_S):
        self._tasks.pop(task, None)
    self._workers.close()
    self._sampler.close()

  def set_version(self, version: int) -> None:
    """Records the policy version of the chunks that are dispatched from now on."""
    self._version = version
    self._cache.set_version(version)

  def start_episodes(self, next_request: Callable[[], EpisodeRequest | None]) -> int:
    """Starts episodes until there is no free sequence or no request. Returns the number of episodes started."""
    started = 0
    for sequence in self._sequences:
      if sequence.state is not Status.FREE:
        continue
      request = next_request()
      if request is None:
        break
      started += 1
      sequence.begin(request)
      self._call(sequence, functools.partial(sequence.holder.reset, request.task_index))
    self.counts["episodes_started"] += started
    return started

  def collect_responses(
    self,
    *,
    stream: int | None = None,
    wait_all: bool = False,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
  ) -> None:
    """Processes the responses of environments, in the order of the sequences, and abandons calls that hang.

    Args:
      stream: the stream that decodes next; `EnvWaitPolicy` limits the wait for its environments. None: no such wait.
      wait_all: wait for every running call.
      wait_s: seconds to wait for the first response.
      stop: ends the wait for every call.
    """
    done = self._workers.poll(wait_s)
    self._abandon_hanging()
    if stream is not None and not wait_all:
      done += self._wait_for_fresh(stream, done)
    while wait_all and len(done) < len(self._tasks) and not (stop is not None and stop.is_set()):
      done += self._workers.poll(_POLL_S)
      self._abandon_hanging()
    responses = [(sequence, task) for task in done if (sequence := self._tasks.pop(task, None)) is not None]
    for _, task in responses:
      assert task.finished_at is not None
      self._wait_policy.record(task.finished_at - task.submitted_at)
    for sequence, task in sorted(responses, key=lambda x: x[0].index):
      if task.error is not None:
        self._fail(sequence, task.error)
      elif sequence.episode is None:
        assert sequence.request is not None
        self.counts["reset_retries"] += task.result.retries
        sequence.episode = Episode(sequence.request, task.result)
        self._start_prefill(sequence)
      else:
        self._add_response(sequence, *task.result)

  def _wait_for_fresh(self, stream: int, done: Collection[Task]) -> list[Task]:
    """Waits for calls made since the last chunk, as long as `EnvWaitPolicy` allows; returns those that ended."""
    streams = (stream, None)
    fresh = [
      task
      for task, sequence in self._tasks.items()
      if sequence is not None and task.submitted_at >= self._collected_at and self._cache.stream(sequence) in streams
      if task not in done
    ]
    states = (Status.PREFILL, Status.DECODE)
    ready = sum(x.state in states and self._cache.stream(x) in streams for x in self._sequences) + len(done)
    limit = self._wait_policy.limit(fresh=len(fresh), ready=ready, chunk_s=self._chunk_s)
    more: list[Task] = []
    while limit:
      left = [task.submitted_at + limit - time.monotonic() for task in fresh if task not in more]
      if not left or max(left) <= 0:
        break
      more += self._workers.poll(max(left))
    return more

  def cut(self, requests: Collection[EpisodeRequest]) -> set[EpisodeRequest]:
    """Ends the episodes of `requests` now: 'truncated', or failed if nothing was sampled yet.

    Returns:
      Requests that cannot be ended now, because their environment is running or their chunk is in flight.
    """
    waiting = set()
    for sequence in self._sequences:
      if sequence.request is None or sequence.request not in requests:
        continue
      running = sequence.state is Status.DECODE and self._cache.stream(sequence) in self._running
      if sequence.state is Status.ENV or running:
        waiting.add(sequence.request)
      elif sequence.episode is None or not (sequence.episode.num_turns or sequence.episode.action_length):
        self._failures.append((sequence.request, EpisodeFailure("cut", "ended by Engine.cut before its first token.")))
        self._free(sequence)
      else:
        if sequence.episode.action_length:
          sequence.episode.unfinished_action = sequence.episode.end_action()
        self._end(sequence, "truncated")
    return waiting

  def dispatch_prefill(self, params: Params, stream: int) -> int:
    """Dispatches the prefill of a piece of each waiting context of a stream; returns the number of contexts."""
    if self._config.recompute_cache_on_update:
      for sequence in self._decoding_in(stream):
        if sequence.cache_version != self._version:
          sequence.start_prefill()
    placed = self._cache.allocate(self._sequences, params, stream=stream)
    self._prefill_all(params, placed)
    return len(placed)

  def dispatch_decode(self, params: Params, key: jax.Array, stream: int) -> bool:
    """Dispatches a decode chunk of a stream. Returns False if none of its sequences is decoding."""
    needs = [sequence.context_length - 1 + self._config.chunk_steps for sequence in self._decoding_in(stream)]
    if not needs:
      return False
    self.counts["chunks"] += 1
    began = time.monotonic()
    chunk = self._sampler.decode(params, key, stream=stream, live_lens=self._windows(needs))
    self._running[stream] = _Running(chunk, self._version, began)
    return True

  def collect_tokens(self, stream: int) -> None:
    """Waits for a stream's chunk, if any, and appends its tokens. Complete actions are passed to the environments."""
    running = self._running.pop(stream, None)
    if running is None:
      return
    chunk = self._sampler.fetch(running.chunk)
    self._collected_at = time.monotonic()
    self._chunk_s = self._collected_at - running.began
    for sequence in self._decoding_in(stream):
      episode, slot = sequence.episode, sequence.slot
      assert episode is not None and slot is not None
      row = slot // self._sampler.num_streams
      count = int(chunk.num_sampled[row])
      tokens = chunk.tokens[:count, row].copy()
      episode.add_sampled(tokens, chunk.logp[:count, row].copy(), running.version)
      sequence.num_computed += count
      self.counts["tokens_generated"] += count
      if chunk.active[row]:
        continue
      action = episode.end_action()
      if int(tokens[-1]) in self._stop_ids:
        self._call(sequence, functools.partial(sequence.holder.step, action))
      else:
        episode.unfinished_action = action
        self._end(sequence, "truncated")

  def take_finished(self) -> tuple[list[Trajectory], list[tuple[EpisodeRequest, EpisodeFailure]]]:
    """Returns the trajectories of episodes that ended, and the failures, since the last call."""
    ended, self._ended = self._ended, []
    trajectories = []
    for episode, how in ended:
      try:
        reward = self._config.truncated_reward
        trajectories.append(episode.finish(how, self._decode, truncated_reward=reward))
      except EpisodeFailure as failure:
        self._failures.append((episode.request, failure))
    failures, self._failures = self._failures, []
    self.counts["episodes_finished"] += len(trajectories)
    return trajectories, failures

  def _decoding_in(self, stream: int) -> list[LiveSequence]:
    return [x for x in self._sequences if x.state is Status.DECODE and self._cache.stream(x) == stream]

  def _windows(self, needs: list[int]) -> tuple[int, ...]:
    """Returns the window length of each group of a stream, from the lengths that its decoding sequences need."""
    needs = sorted(needs, reverse=True)
    size = self._config.num_slots // self._sampler.num_streams // self._sampler.num_groups
    starts = range(0, size * self._sampler.num_groups, size)
    lengths = tuple(bucket(self._window_lengths, max(needs[i : i + 1], default=0)) for i in starts)
    return lengths if len(set(lengths)) > 1 else lengths[:1]

  def _prefill_all(self, params: Params, waiting: list[LiveSequence]) -> None:
    """Dispatches the prefill of a piece of each of these contexts, all in one stream."""
    config = self._config
    widest = config.prefill_tokens[-1]
    calls = plan_calls(
      [sequence.num_computed for sequence in waiting],
      [min(len(sequence.pending) - 1, widest) for sequence in waiting],
      rows=config.prefill_rows,
      widths=config.prefill_tokens,
    )
    for call in calls:
      rows = [self._prefill_piece(waiting[piece.context], piece) for piece in call.pieces]
      live_len = bucket(self._live_lengths, max(row.start + len(row.tokens) for row in rows))
      self._sampler.prefill(params, rows, num_rows=call.num_rows, width=call.width, live_len=live_len)
      self.counts["prefills"] += 1
      self.counts["prefill_tokens"] += sum(len(row.tokens) for row in rows)

  def _prefill_piece(self, sequence: LiveSequence, piece: Piece) -> PrefillRow:
    """Takes the next tokens of a sequence to prefill. After the last piece it starts decoding."""
    episode = sequence.episode
    assert episode is not None and sequence.slot is not None
    sequence.cache_version = self._version
    start = sequence.num_computed
    tokens = sequence.pending[: piece.size]
    sequence.num_computed += piece.size
    sequence.pending = sequence.pending[piece.size :]
    complete = len(sequence.pending) == 1
    if complete:
      sequence.state = Status.DECODE
    state = RowState(int(sequence.pending[0]), episode.budget(self._config), complete, episode.request.episode_id)
    return PrefillRow(sequence.slot, start, tokens, state if piece.last else None)

  def _add_response(self, sequence: LiveSequence, action_text: str, response: EnvResponse) -> None:
    """Adds an environment's response to an episode, and ends or continues it."""
    episode = sequence.episode
    assert episode is not None
    ended = episode.add_response(action_text, response, self._config)
    if ended is None:
      self._start_prefill(sequence)
    else:
      self._end(sequence, ended)

  def _end(self, sequence: LiveSequence, how: Ended) -> None:
    assert sequence.episode is not None
    self._ended.append((sequence.episode, how))
    self._free(sequence)

  def _fail(self, sequence: LiveSequence, error: BaseException) -> None:
    """Fails the sequence's episode and gives it a fresh environment, since the state of the old one is unknown."""
    assert sequence.request is not None
    failure = error if isinstance(error, EpisodeFailure) else EpisodeFailure("engine_error", describe(error))
    self._failures.append((sequence.request, failure))
    self._dispose(sequence)
    self._free(sequence)

  def _call(self, sequence: LiveSequence, call: Callable[[], object]) -> None:
    sequence.state = Status.ENV
    sequence.since = next(self._clock)
    task = Task(call, sequence.holder.close)
    self._tasks[task] = sequence
    self._workers.submit(task)

  def _start_prefill(self, sequence: LiveSequence) -> None:
    sequence.since = next(self._clock)
    sequence.start_prefill()

  def _free(self, sequence: LiveSequence) -> None:
    self._cache.release(sequence)
    sequence.state = Status.FREE
    sequence.request = None
    sequence.episode = None

  def _dispose(self, sequence: LiveSequence) -> None:
    holder, sequence.holder = sequence.holder, self._new_holder()
    task = Task(holder.close, lambda _: None)
    self._tasks[task] = None
    self._workers.submit(task)

  def _abandon_hanging(self) -> None:
    limit = self._config.env_timeout_s
    if limit is None:
      return
    now = time.monotonic()
    hanging = [t for t in self._tasks if t.started_at is not None and now - t.started_at > limit]
    for task in hanging:
      if not self._workers.abandon(task):
        continue  # it has just ended: its response counts
      sequence = self._tasks.pop(task)
      if sequence is not None:
        assert sequence.request is not None
        sequence.holder = self._new_holder()
        what = f"task {sequence.request.task_index}: the environment did not respond within env_timeout_s = {limit}"
        self._failures.append((sequence.request, EpisodeFailure("timeout", what)))
        self._free(sequence)
