"""The state machine of the engine: which live episode does what, and what is fed to the device for it.

A seat goes FREE -> ENV (reset) -> FEED -> DECODE -> ENV (step) -> FEED -> ... -> FREE. In every state but FREE it holds
a request; from its first FEED on it holds an `Episode`, of which the cache holds the first `fed` tokens. `Residency`
decides who has a slot of the cache: seats that are being fed and that decode do.
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
from sao_jax.rollout.engine.env_wait_policy import Patience
from sao_jax.rollout.engine.kv_cache_manager import Residency, Seat, State
from sao_jax.rollout.engine.prefill import Piece, plan_calls
from sao_jax.rollout.engine.sampler import PrefillRow, RowState, RunningChunk, Sampler
from sao_jax.rollout.environment_runner import EnvironmentHolder
from sao_jax.rollout.episodes import Answer, Episode, EpisodeFailure, EpisodeRequest
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


class SlotTable:
  """All live episodes of an engine, with their environments and the sampler; used from one thread."""

  def __init__(self, *, config: EngineConfig, make_env: EnvironmentFactory, tokenizer: Tokenizer, sampler: Sampler):
    self._config = config
    self._new_holder = functools.partial(EnvironmentHolder, make_env, tokenizer, config)
    self._sampler = sampler
    self._decode = tokenizer.decode
    self._stop_ids = frozenset(tokenizer.stop_ids)
    self._live_lengths = config.live_lengths()
    self._window_lengths = config.window_lengths()
    self._workers = Workers(config.env_workers)
    self._patience = Patience()
    self._chunk_s = 0.0
    """Seconds that the last chunk took, in whatever lane."""
    self._absorbed_at = 0.0
    self._running: dict[int, _Running] = {}
    """By lane."""
    self._tasks: dict[Task, Seat | None] = {}
    """Running environment calls; None: closing one that nobody waits for."""
    self._seats = [Seat(i, self._new_holder()) for i in range(config.live_episodes)]
    self._clock = itertools.count()
    self._version = -1
    self._ended: list[tuple[Episode, Ended]] = []
    self._failures: list[tuple[EpisodeRequest, EpisodeFailure]] = []
    self.counts = Counter[str]()
    self._residency = Residency(config, sampler, self.counts)

  @property
  def waiting(self) -> bool:
    """Whether an environment call is running that a seat waits for."""
    return any(seat is not None for seat in self._tasks.values())

  @property
  def num_lanes(self) -> int:
    return self._sampler.num_lanes

  @property
  def decoding(self) -> bool:
    """Whether a chunk is running in any lane."""
    return bool(self._running)

  @property
  def to_feed(self) -> bool:
    """Whether a context waits to be fed, in any lane."""
    return any(seat.state is State.FEED for seat in self._seats)

  def reset(self) -> None:
    """Frees all slots; unfinished episodes are forgotten."""
    self.abandon_all()
    self._version = -1
    self._sampler.reset()
    self._residency.reset()

  def abandon_all(self) -> None:
    """Frees all slots and gives up running environment calls (their threads close the environments)."""
    for task, seat in self._tasks.items():
      if self._workers.abandon(task) and seat is not None:
        seat.holder = self._new_holder()
    self._tasks.clear()
    self._workers.poll()
    self._running.clear()
    self._sampler.settle()
    self._ended.clear()
    self._failures.clear()
    for seat in self._seats:
      self._free(seat)

  def close(self) -> None:
    """Gives up running calls, closes idle environments and ends the threads."""
    self.abandon_all()
    for seat in self._seats:
      self._dispose(seat)
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    while self._tasks and time.monotonic() < deadline:
      for task in self._workers.poll(_POLL_S):
        self._tasks.pop(task, None)
    self._workers.close()
    self._sampler.close()

  def set_version(self, version: int) -> None:
    """New weights, for the chunks that are dispatched from now on."""
    self._version = version
    self._residency.set_version(version)

  def refill(self, next_request: Callable[[], EpisodeRequest | None]) -> int:
    """Hands requests to free slots until there are no more of either; returns how many."""
    started = 0
    for seat in self._seats:
      if seat.state is not State.FREE:
        continue
      request = next_request()
      if request is None:
        break
      started += 1
      seat.begin(request)
      self._call(seat, functools.partial(seat.holder.reset, request.task_index))
    self.counts["episodes_started"] += started
    return started

  def collect(
    self,
    *,
    lane: int | None = None,
    wait_all: bool = False,
    wait_s: float = 0.0,
    stop: threading.Event | None = None,
  ) -> None:
    """Takes in what environments answered, in the seats' order; gives up those that hang.

    Args:
      lane: the lane whose next chunk comes: answers for it are waited for as far as that pays, see `Patience`.
      wait_all: wait for every running call.
      wait_s: wait this long for the first answer.
      stop: ends the wait for every call.
    """
    done = self._workers.poll(wait_s)
    self._give_up_hanging()
    if lane is not None and not wait_all:
      done += self._wait_for_fresh(lane, done)
    while wait_all and len(done) < len(self._tasks) and not (stop is not None and stop.is_set()):
      done += self._workers.poll(_POLL_S)
      self._give_up_hanging()
    answers = [(seat, task) for task in done if (seat := self._tasks.pop(task, None)) is not None]
    for _, task in answers:
      assert task.finished_at is not None
      self._patience.answered(task.finished_at - task.submitted_at)
    for seat, task in sorted(answers, key=lambda x: x[0].index):
      if task.error is not None:
        self._fail(seat, task.error)
      elif seat.episode is None:
        assert seat.request is not None
        self.counts["reset_retries"] += task.result.retries
        seat.episode = Episode(seat.request, task.result)
        self._feed(seat)
      else:
        self._take_answer(seat, *task.result)

  def _wait_for_fresh(self, lane: int, done: Collection[Task]) -> list[Task]:
    """More calls that finished, for as long as it pays to wait for those made since the last chunk."""
    lanes = (lane, None)
    fresh = [
      task
      for task, seat in self._tasks.items()
      if seat is not None and task.submitted_at >= self._absorbed_at and self._residency.lane(seat) in lanes
      if task not in done
    ]
    states = (State.FEED, State.DECODE)
    ready = sum(seat.state in states and self._residency.lane(seat) in lanes for seat in self._seats) + len(done)
    limit = self._patience.limit(fresh=len(fresh), ready=ready, chunk_s=self._chunk_s)
    more: list[Task] = []
    while limit:
      left = [task.submitted_at + limit - time.monotonic() for task in fresh if task not in more]
      if not left or max(left) <= 0:
        break
      more += self._workers.poll(max(left))
    return more

  def cut(self, requests: Collection[EpisodeRequest]) -> set[EpisodeRequest]:
    """Ends the episodes of `requests` where they are: 'truncated', or failed if nothing was sampled yet.

    Returns:
      Those whose environment is at work, or that decode at this moment: they cannot be ended now.
    """
    waiting = set()
    for seat in self._seats:
      if seat.request is None or seat.request not in requests:
        continue
      if seat.state is State.ENV or (seat.state is State.DECODE and self._residency.lane(seat) in self._running):
        waiting.add(seat.request)
      elif seat.episode is None or not (seat.episode.num_turns or seat.episode.action_length):
        self._failures.append((seat.request, EpisodeFailure("cut", "cut before its first token.")))
        self._free(seat)
      else:
        if seat.episode.action_length:
          seat.episode.cut_action = seat.episode.end_action()
        self._end(seat, "truncated")
    return waiting

  def prefill(self, params: Params, lane: int) -> int:
    """Dispatches a piece of every context that a lane must be fed; returns how many there were."""
    if self._config.recompute_cache_on_update:
      for seat in self._decoding_in(lane):
        if seat.cache_version != self._version:
          seat.feed()
    placed = self._residency.place(self._seats, params, lane=lane)
    self._feed_all(params, placed)
    return len(placed)

  def dispatch(self, params: Params, key: jax.Array, lane: int) -> bool:
    """Dispatches a decode chunk of a lane; False if none of its seats is decoding."""
    needs = [seat.context_length - 1 + self._config.chunk_steps for seat in self._decoding_in(lane)]
    if not needs:
      return False
    self.counts["chunks"] += 1
    began = time.monotonic()
    chunk = self._sampler.decode(params, key, lane=lane, live_lens=self._windows(needs))
    self._running[lane] = _Running(chunk, self._version, began)
    return True

  def absorb(self, lane: int) -> None:
    """Waits for a lane's chunk, if there is one, and takes it in; finished actions go to their environments."""
    running = self._running.pop(lane, None)
    if running is None:
      return
    chunk = self._sampler.fetch(running.chunk)
    self._absorbed_at = time.monotonic()
    self._chunk_s = self._absorbed_at - running.began
    for seat in self._decoding_in(lane):
      episode, slot = seat.episode, seat.slot
      assert episode is not None and slot is not None
      row = slot // self._sampler.num_lanes
      count = int(chunk.num_sampled[row])
      tokens = chunk.tokens[:count, row].copy()
      episode.add_sampled(tokens, chunk.logp[:count, row].copy(), running.version)
      seat.fed += count
      self.counts["tokens_generated"] += count
      if chunk.active[row]:
        continue
      action = episode.end_action()
      if int(tokens[-1]) in self._stop_ids:
        self._call(seat, functools.partial(seat.holder.step, action))
      else:
        episode.cut_action = action
        self._end(seat, "truncated")

  def take_finished(self) -> tuple[list[Trajectory], list[tuple[EpisodeRequest, EpisodeFailure]]]:
    """Builds the trajectories of ended episodes; returns them and what failed since the last call."""
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

  def _decoding_in(self, lane: int) -> list[Seat]:
    return [x for x in self._seats if x.state is State.DECODE and self._residency.lane(x) == lane]

  def _windows(self, needs: list[int]) -> tuple[int, ...]:
    """Window lengths of a lane's groups, from what its decoding seats need."""
    needs = sorted(needs, reverse=True)
    size = self._config.num_slots // self._sampler.num_lanes // self._sampler.num_groups
    starts = range(0, size * self._sampler.num_groups, size)
    lengths = tuple(bucket(self._window_lengths, max(needs[i : i + 1], default=0)) for i in starts)
    return lengths if len(set(lengths)) > 1 else lengths[:1]

  def _feed_all(self, params: Params, feeding: list[Seat]) -> None:
    """Dispatches a piece of the context of each of some seats of one lane."""
    config = self._config
    widest = config.prefill_tokens[-1]
    calls = plan_calls(
      [seat.fed for seat in feeding],
      [min(len(seat.pending) - 1, widest) for seat in feeding],
      rows=config.prefill_rows,
      widths=config.prefill_tokens,
    )
    for call in calls:
      rows = [self._feed_piece(feeding[piece.context], piece) for piece in call.pieces]
      live_len = bucket(self._live_lengths, max(row.start + len(row.tokens) for row in rows))
      self._sampler.prefill(params, rows, num_rows=call.num_rows, width=call.width, live_len=live_len)
      self.counts["prefills"] += 1
      self.counts["prefill_tokens"] += sum(len(row.tokens) for row in rows)

  def _feed_piece(self, seat: Seat, piece: Piece) -> PrefillRow:
    """The next tokens to feed to a seat; it decodes once nothing is left."""
    episode = seat.episode
    assert episode is not None and seat.slot is not None
    seat.cache_version = self._version
    start = seat.fed
    tokens = seat.pending[: piece.size]
    seat.fed += piece.size
    seat.pending = seat.pending[piece.size :]
    complete = len(seat.pending) == 1
    if complete:
      seat.state = State.DECODE
    state = RowState(int(seat.pending[0]), episode.budget(self._config), complete, episode.request.episode_id)
    return PrefillRow(seat.slot, start, tokens, state if piece.last else None)

  def _take_answer(self, seat: Seat, action_text: str, answer: Answer) -> None:
    """An environment answered an action: the episode ends or goes on."""
    episode = seat.episode
    assert episode is not None
    ended = episode.take_answer(action_text, answer, self._config)
    if ended is None:
      self._feed(seat)
    else:
      self._end(seat, ended)

  def _end(self, seat: Seat, how: Ended) -> None:
    assert seat.episode is not None
    self._ended.append((seat.episode, how))
    self._free(seat)

  def _fail(self, seat: Seat, error: BaseException) -> None:
    """The seat's episode fails alone; the seat gets a fresh environment, since this one's state is unknown."""
    assert seat.request is not None
    failure = error if isinstance(error, EpisodeFailure) else EpisodeFailure("engine_error", describe(error))
    self._failures.append((seat.request, failure))
    self._dispose(seat)
    self._free(seat)

  def _call(self, seat: Seat, call: Callable[[], object]) -> None:
    seat.state = State.ENV
    seat.since = next(self._clock)
    task = Task(call, seat.holder.close)
    self._tasks[task] = seat
    self._workers.submit(task)

  def _feed(self, seat: Seat) -> None:
    seat.since = next(self._clock)
    seat.feed()

  def _free(self, seat: Seat) -> None:
    self._residency.release(seat)
    seat.state = State.FREE
    seat.request = None
    seat.episode = None

  def _dispose(self, seat: Seat) -> None:
    holder, seat.holder = seat.holder, self._new_holder()
    task = Task(holder.close, lambda _: None)
    self._tasks[task] = None
    self._workers.submit(task)

  def _give_up_hanging(self) -> None:
    limit = self._config.env_timeout_s
    if limit is None:
      return
    now = time.monotonic()
    hanging = [t for t in self._tasks if t.started_at is not None and now - t.started_at > limit]
    for task in hanging:
      if not self._workers.abandon(task):
        continue  # done meanwhile: its answer is taken
      seat = self._tasks.pop(task)
      if seat is not None:
        assert seat.request is not None
        seat.holder = self._new_holder()
        what = f"task {seat.request.task_index}: the environment did not answer within env_timeout_s = {limit}"
        self._failures.append((seat.request, EpisodeFailure("timeout", what)))
        self._free(seat)
