"""The slot machine of the engine: which slot does what, and what is fed to the device for it.

A slot goes FREE -> ENV (reset) -> FEED -> DECODE -> ENV (step) -> FEED -> ... -> FREE. In every state but FREE it holds
a request; from its first FEED on it holds an `Episode`, of which the cache holds the first `fed` tokens. While a slot
decodes, `fed` is all but the last token.
"""

from __future__ import annotations

import enum
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection

import jax
import numpy as np

from sao_jax.rollout.config import EngineConfig, bucket
from sao_jax.rollout.environments import EnvironmentHolder
from sao_jax.rollout.episodes import Answer, Episode, EpisodeFailure, EpisodeRequest
from sao_jax.rollout.sampler import PrefillRow, RunningChunk, Sampler
from sao_jax.rollout.workers import Task, Workers
from sao_jax.types import Ended, EnvironmentFactory, Params, Tokenizer, Trajectory

_POLL_S = 0.02
_CLOSE_TIMEOUT_S = 10.0


class _State(enum.Enum):
  FREE = enum.auto()
  ENV = enum.auto()
  FEED = enum.auto()
  DECODE = enum.auto()


class _Slot:
  def __init__(self, index: int, holder: EnvironmentHolder):
    self.index = index
    self.holder = holder
    self.state = _State.FREE
    self.request: EpisodeRequest | None = None
    self.episode: Episode | None = None
    self.fed = 0
    self.pending = np.zeros(0, np.int32)
    """Tokens from `fed` on; the last one is not fed but decoded from."""
    self.cache_version = -1

  def free(self) -> None:
    self.state = _State.FREE
    self.request = None
    self.episode = None

  def feed(self) -> None:
    assert self.episode is not None
    self.state = _State.FEED
    self.pending = self.episode.tokens()[self.fed :]


class SlotTable:
  """All slots of an engine, with their environments and the sampler; used from one thread."""

  def __init__(
    self, *, config: EngineConfig, make_env: EnvironmentFactory, tokenizer: Tokenizer, sampler: Sampler
  ):
    self._config = config
    self._new_holder = functools.partial(EnvironmentHolder, make_env, tokenizer, config)
    self._sampler = sampler
    self._decode = tokenizer.decode
    self._stop_ids = frozenset(tokenizer.stop_ids)
    self._live_lengths = config.live_lengths()
    self._window_lengths = config.window_lengths()
    self._workers = Workers(config.env_workers)
    self._tasks: dict[Task, _Slot | None] = {}
    """Running environment calls; None: closing one that nobody waits for."""
    self._slots = [_Slot(i, self._new_holder()) for i in range(config.num_slots)]
    self._version = -1
    self._ended: list[tuple[Episode, Ended]] = []
    self._failures: list[tuple[EpisodeRequest, EpisodeFailure]] = []
    self.counts = Counter[str]()

  @property
  def waiting(self) -> bool:
    """Whether an environment call is running that a slot waits for."""
    return any(slot is not None for slot in self._tasks.values())

  def reset(self) -> None:
    """Frees all slots; unfinished episodes are forgotten."""
    self.abandon_all()
    self._version = -1
    self._sampler.reset()

  def abandon_all(self) -> None:
    """Frees all slots and gives up running environment calls (their threads close the environments)."""
    for task, slot in self._tasks.items():
      if self._workers.abandon(task) and slot is not None:
        slot.holder = self._new_holder()
    self._tasks.clear()
    self._workers.poll()
    self._ended.clear()
    self._failures.clear()
    for slot in self._slots:
      slot.free()

  def close(self) -> None:
    """Gives up running calls, closes idle environments and ends the threads."""
    self.abandon_all()
    for slot in self._slots:
      self._dispose(slot)
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    while self._tasks and time.monotonic() < deadline:
      for task in self._workers.poll(_POLL_S):
        self._tasks.pop(task, None)
    self._workers.close()
    self._sampler.close()

  def set_version(self, version: int) -> None:
    """New weights: with `recompute_cache_on_update` decoding slots are fed anew (waiting ones when they go on)."""
    self._version = version
    if self._config.recompute_cache_on_update:
      for slot in self._slots:
        if slot.state is _State.DECODE:
          slot.feed()

  def refill(self, next_request: Callable[[], EpisodeRequest | None]) -> int:
    """Hands requests to free slots until there are no more of either; returns how many."""
    started = 0
    for slot in self._slots:
      if slot.state is not _State.FREE:
        continue
      request = next_request()
      if request is None:
        break
      started += 1
      slot.request = request
      slot.fed = 0
      slot.cache_version = -1
      self._call(slot, functools.partial(slot.holder.reset, request.task_index))
    self.counts["episodes_started"] += started
    return started

  def collect(
    self, *, wait_all: bool = False, wait_s: float = 0.0, stop: threading.Event | None = None
  ) -> None:
    """Takes in what environments answered, in slot order; gives up those that hang.

    Args:
      wait_all: wait for every running call.
      wait_s: wait this long for the first answer.
      stop: ends the wait for every call.
    """
    done = self._workers.poll(wait_s)
    self._give_up_hanging()
    while wait_all and len(done) < len(self._tasks) and not (stop is not None and stop.is_set()):
      done += self._workers.poll(_POLL_S)
      self._give_up_hanging()
    answers = [(slot, task) for task in done if (slot := self._tasks.pop(task, None)) is not None]
    for slot, task in sorted(answers, key=lambda x: x[0].index):
      if task.error is not None:
        self._fail(slot, task.error)
      elif slot.episode is None:
        assert slot.request is not None
        self.counts["reset_retries"] += task.result.retries
        slot.episode = Episode(slot.request, task.result)
        slot.feed()
      else:
        self._take_answer(slot, *task.result)

  def cut(self, requests: Collection[EpisodeRequest]) -> set[EpisodeRequest]:
    """Ends the episodes of `requests` where they are: 'truncated', or failed if nothing was sampled yet.

    Returns:
      Those whose environment is at work: they cannot be ended now.
    """
    waiting = set()
    for slot in self._slots:
      if slot.request is None or slot.request not in requests:
        continue
      if slot.state is _State.ENV:
        waiting.add(slot.request)
      elif slot.episode is None or not (slot.episode.num_turns or slot.episode.action_length):
        self._failures.append((slot.request, EpisodeFailure("cut", "cut before its first token.")))
        slot.free()
      else:
        if slot.episode.action_length:
          slot.episode.cut_action = slot.episode.end_action()
        self._end(slot, "truncated")
    return waiting

  def prefill(self, params: Params) -> int:
    """Dispatches a piece of every context that must be fed; returns how many there were."""
    feeding = [slot for slot in self._slots if slot.state is _State.FEED]
    for lane in range(self._sampler.num_lanes):
      self._prefill_lane(params, [slot for slot in feeding if slot.index % self._sampler.num_lanes == lane])
    return len(feeding)

  def dispatch(self, params: Params, key: jax.Array) -> RunningChunk | None:
    """Dispatches a decode chunk; None if no slot is decoding."""
    needs = [0] * self._sampler.num_lanes
    for slot in self._slots:
      if slot.state is _State.DECODE:
        assert slot.episode is not None
        lane = slot.index % len(needs)
        needs[lane] = max(needs[lane], slot.episode.length - 1 + self._config.chunk_steps)
    if not any(needs):
      return None
    self.counts["chunks"] += 1
    return self._sampler.decode(params, key, live_lens=[need and bucket(self._window_lengths, need) for need in needs])

  def absorb(self, out: RunningChunk) -> None:
    """Waits for the chunk `out` and takes in what it sampled; finished actions go to their environments."""
    chunk = self._sampler.fetch(out)
    for slot in self._slots:
      if slot.state is not _State.DECODE:
        continue
      episode = slot.episode
      assert episode is not None
      count = int(chunk.num_sampled[slot.index])
      tokens = chunk.tokens[:count, slot.index].copy()
      episode.add_sampled(tokens, chunk.logp[:count, slot.index].copy(), self._version)
      slot.fed += count
      self.counts["tokens_generated"] += count
      if chunk.active[slot.index]:
        continue
      action = episode.end_action()
      if int(tokens[-1]) in self._stop_ids:
        self._call(slot, functools.partial(slot.holder.step, action))
      else:
        episode.cut_action = action
        self._end(slot, "truncated")

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

  def _prefill_lane(self, params: Params, feeding: list[_Slot]) -> None:
    # Similar lengths share a call, so that few columns are padding.
    feeding.sort(key=lambda slot: -len(slot.pending))
    largest = self._config.prefill_rows[-1]
    for i in range(0, len(feeding), largest):
      rows = [self._next_piece(slot) for slot in feeding[i : i + largest]]
      self._sampler.prefill(
        params,
        rows,
        num_rows=bucket(self._config.prefill_rows, len(rows)),
        width=bucket(self._config.prefill_tokens, max(len(row.tokens) for row in rows)),
        live_len=bucket(self._live_lengths, max(row.start + len(row.tokens) for row in rows)),
      )
      self.counts["prefills"] += 1
      self.counts["prefill_tokens"] += sum(len(row.tokens) for row in rows)

  def _next_piece(self, slot: _Slot) -> PrefillRow:
    """The next tokens to feed to a slot; it decodes once nothing is left."""
    episode = slot.episode
    assert episode is not None
    if slot.fed and self._config.recompute_cache_on_update and slot.cache_version != self._version:
      self.counts["cache_recomputes"] += 1
      slot.fed = 0
      slot.feed()
    slot.cache_version = self._version
    start = slot.fed
    piece = slot.pending[:-1][: self._config.prefill_tokens[-1]]
    slot.fed += len(piece)
    slot.pending = slot.pending[len(piece) :]
    complete = len(slot.pending) == 1
    if complete:
      slot.state = _State.DECODE
    return PrefillRow(
      slot.index, start, piece, int(slot.pending[0]), episode.budget(self._config), complete, episode.request.episode_id
    )

  def _take_answer(self, slot: _Slot, action_text: str, answer: Answer) -> None:
    """An environment answered an action: the episode ends or goes on."""
    episode = slot.episode
    assert episode is not None
    ended = episode.take_answer(action_text, answer, self._config)
    if ended is None:
      slot.feed()
    else:
      self._end(slot, ended)

  def _end(self, slot: _Slot, how: Ended) -> None:
    assert slot.episode is not None
    self._ended.append((slot.episode, how))
    slot.free()

  def _fail(self, slot: _Slot, error: BaseException) -> None:
    """The slot's episode fails alone; the slot gets a fresh environment, since this one's state is unknown."""
    assert slot.request is not None
    failure = error if isinstance(error, EpisodeFailure) else EpisodeFailure("engine_error", repr(error))
    self._failures.append((slot.request, failure))
    self._dispose(slot)
    slot.free()

  def _call(self, slot: _Slot, call: Callable[[], object]) -> None:
    slot.state = _State.ENV
    task = Task(call, slot.holder.close)
    self._tasks[task] = slot
    self._workers.submit(task)

  def _dispose(self, slot: _Slot) -> None:
    holder, slot.holder = slot.holder, self._new_holder()
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
      slot = self._tasks.pop(task)
      if slot is not None:
        assert slot.request is not None
        slot.holder = self._new_holder()
        what = f"task {slot.request.task_index}: the environment did not answer within env_timeout_s = {limit}"
        self._failures.append((slot.request, EpisodeFailure("timeout", what)))
        slot.free()
