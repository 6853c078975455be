"""Live episodes: their phases, from the request over environments and steps to the trajectory."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from collections.abc import Sequence as AnySequence
from typing import NamedTuple

import jax

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.environments import EnvironmentRunner, Response
from sao_jax.rollout.engine.model_runner import ModelRunner, RunningStep
from sao_jax.rollout.engine.scheduler import ScheduledRow, Scheduler
from sao_jax.rollout.engine.sequence import Sequence, Status
from sao_jax.rollout.episodes import EnvResponse, Episode, EpisodeFailure, EpisodeRequest
from sao_jax.rollout.user_errors import describe
from sao_jax.types import Ended, EnvironmentFactory, Params, Tokenizer, Trajectory


class Dispatched(NamedTuple):
  """Contents of a dispatched step."""

  rows: int
  """Number of sequences."""
  decodes: bool
  """Whether one of them decodes."""


class _Running(NamedTuple):
  """A dispatched step."""

  step: RunningStep
  rows: list[ScheduledRow]
  version: int
  began: float


class LiveEpisodes:
  """The live episodes of an engine, with their environments, schedulers and model runners. Not thread-safe.

  Sequence number i belongs to decode stream i % num_streams.

  Args:
    config: settings.
    make_env: makes environments.
    tokenizer: used on the environment threads.
    runners: one per stream; closed with this object.
  """

  def __init__(
    self,
    *,
    config: EngineConfig,
    make_env: EnvironmentFactory,
    tokenizer: Tokenizer,
    runners: AnySequence[ModelRunner],
  ):
    self._config = config
    self._decode = tokenizer.decode
    self._stop_ids = frozenset(tokenizer.stop_ids)
    self._environments = EnvironmentRunner(make_env, tokenizer, config)
    self._sequences = [Sequence(i, self._environments.new_holder()) for i in range(config.live_episodes)]
    self._runners = runners
    self.counts = Counter[str]()
    self._schedulers = [
      Scheduler(config, runner, self._sequences[i :: len(runners)], self.counts) for i, runner in enumerate(runners)
    ]
    self._running: dict[int, _Running] = {}
    """Dispatched steps by decode stream."""
    self._step_s = 0.0
    """Duration of the last step of any stream, in seconds."""
    self._collected_at = 0.0
    """Time at which the tokens of the last step arrived."""
    self._clock = itertools.count()
    self._ended: list[tuple[Episode, Ended]] = []
    self._failures: list[tuple[EpisodeRequest, EpisodeFailure]] = []

  @property
  def num_streams(self) -> int:
    return len(self._runners)

  @property
  def waiting(self) -> bool:
    """Whether a sequence waits for its environment."""
    return self._environments.waiting

  @property
  def running(self) -> bool:
    """Whether a step is running in any stream."""
    return bool(self._running)

  @property
  def ready(self) -> bool:
    """Whether a sequence can be prefilled or decoded, in any stream."""
    return any(sequence.status in (Status.PREFILL, Status.DECODE) for sequence in self._sequences)

  def reset(self) -> None:
    """Drops unfinished episodes, and empties the caches."""
    self.abandon_all()
    for scheduler in self._schedulers:
      scheduler.reset()

  def abandon_all(self) -> None:
    """Drops unfinished episodes and abandons running environment calls."""
    self._environments.abandon_all()
    self._running.clear()
    for runner in self._runners:
      runner.discard()
    self._ended.clear()
    self._failures.clear()
    for sequence in self._sequences:
      self._free(sequence)

  def close(self) -> None:
    """Abandons running calls, closes idle environments and ends the threads."""
    self.abandon_all()
    self._environments.close(self._sequences)
    for runner in self._runners:
      runner.close()

  def start_episodes(self, next_request: Callable[[], EpisodeRequest | None]) -> int:
    """Starts episodes until there is no free sequence or no request. Returns the number of episodes started."""
    started = 0
    for sequence in self._sequences:
      if sequence.status is not Status.FREE:
        continue
      request = next_request()
      if request is None:
        break
      started += 1
      sequence.request = request
      self._call(sequence, functools.partial(sequence.holder.reset, request.task_index))
    self.counts["episodes_started"] += started
    return started

  def collect_responses(self, stream: int, stop: threading.Event | None) -> None:
    """Processes the responses of environments before the next step of a stream.

    Args:
      stream: the stream; with `wait_for_env`, the environments of all streams are waited for.
      stop: ends the wait.
    """
    if self._config.wait_for_env:
      self._process(self._environments.collect_all(stop))
      return
    self._process(self._environments.collect())
    sequences = self._sequences[stream :: self.num_streams]
    ready = sum(x.status in (Status.PREFILL, Status.DECODE) for x in sequences)
    self._process(
      self._environments.collect_fresh(sequences, since=self._collected_at, ready=ready, step_s=self._step_s)
    )

  def wait(self, seconds: float) -> None:
    """Processes the responses of environments; waits up to `seconds` for the first."""
    self._process(self._environments.collect(wait_s=seconds))

  def cut(self, requests: Collection[EpisodeRequest]) -> set[EpisodeRequest]:
    """Ends the episodes of `requests` now: 'truncated', or failed if nothing was sampled yet.

    Returns:
      Requests that cannot be ended now, because their environment is running or their step is in flight.
    """
    waiting = set()
    in_flight = {id(row.sequence) for running in self._running.values() for row in running.rows}
    for sequence in self._sequences:
      if sequence.request is None or sequence.request not in requests:
        continue
      if sequence.status is Status.ENV or id(sequence) in in_flight:
        waiting.add(sequence.request)
      elif sequence.episode is None or not (sequence.episode.num_turns or sequence.episode.action_length):
        self._failures.append((sequence.request, EpisodeFailure("cut", "ended by Engine.cut before its first token.")))
        self._free(sequence)
      else:
        if sequence.episode.action_length:
          sequence.episode.unfinished_action = sequence.episode.end_action()
        self._end(sequence, "truncated")
    return waiting

  def dispatch(self, params: Params, version: int, key: jax.Array, stream: int) -> Dispatched:
    """Dispatches the next step of a stream, if there is anything to compute."""
    rows = self._schedulers[stream].schedule(params, version)
    if not rows:
      return Dispatched(0, False)
    decodes = any(row.row.budget for row in rows)
    self.counts["chunks"] += decodes
    self.counts["prefills"] += any(row.row.num_prefilled for row in rows)
    began = time.monotonic()
    step = self._runners[stream].step(params, [row.row for row in rows], key)
    self._running[stream] = _Running(step, rows, version, began)
    return Dispatched(len(rows), decodes)

  def collect_tokens(self, stream: int) -> None:
    """Waits for a stream's step, if any, and appends its tokens. Complete actions are passed to the environments."""
    running = self._running.pop(stream, None)
    if running is None:
      return
    output = self._runners[stream].fetch(running.step)
    self._collected_at = time.monotonic()
    self._step_s = self._collected_at - running.began
    for i, (sequence, row) in enumerate(running.rows):
      if not row.budget:
        continue
      episode, count = sequence.episode, int(output.num_sampled[i])
      assert episode is not None
      tokens = output.tokens[:count, i].copy()
      episode.add_sampled(tokens, output.logp[:count, i].copy(), running.version)
      sequence.num_computed += count
      self.counts["tokens_generated"] += count
      if int(tokens[-1]) in self._stop_ids:
        self._call(sequence, functools.partial(sequence.holder.step, episode.end_action()))
      elif count == row.budget:
        episode.unfinished_action = episode.end_action()
        self._end(sequence, "truncated")

  def take_finished(self) -> tuple[list[Trajectory], list[tuple[EpisodeRequest, EpisodeFailure]]]:
    """Returns the trajectories of episodes that ended, and the failures, since the last call.

    `counts["episodes_answered"]` counts the trajectories with at least one answer of the environment.
    """
    ended, self._ended = self._ended, []
    trajectories = []
    for episode, how in ended:
      try:
        reward = self._config.truncated_reward
        trajectories.append(episode.finish(how, self._decode, truncated_reward=reward))
        self.counts["episodes_answered"] += episode.answered
      except EpisodeFailure as failure:
        self._failures.append((episode.request, failure))
    failures, self._failures = self._failures, []
    self.counts["episodes_finished"] += len(trajectories)
    return trajectories, failures

  def _process(self, responses: list[Response]) -> None:
    for sequence, result, error in responses:
      if error is not None:
        self._fail(sequence, error)
      elif sequence.episode is None:
        assert sequence.request is not None and isinstance(result, EnvResponse)
        self.counts["reset_retries"] += result.retries
        sequence.episode = Episode(sequence.request, result)
        sequence.set_status(Status.PREFILL, next(self._clock))
      else:
        assert isinstance(result, tuple)
        self._add_response(sequence, *result)

  def _add_response(self, sequence: Sequence, action_text: str, response: EnvResponse) -> None:
    """Adds an environment's response to an episode, and ends or continues it."""
    assert sequence.episode is not None
    ended = sequence.episode.add_response(action_text, response, self._config)
    if ended is None:
      sequence.set_status(Status.PREFILL, next(self._clock))
    else:
      self._end(sequence, ended)

  def _call(self, sequence: Sequence, call: Callable[[], object]) -> None:
    sequence.set_status(Status.ENV, next(self._clock))
    self._environments.call(sequence, call)

  def _end(self, sequence: Sequence, how: Ended) -> None:
    assert sequence.episode is not None
    self._ended.append((sequence.episode, how))
    self._free(sequence)

  def _fail(self, sequence: Sequence, error: BaseException) -> None:
    """Fails the sequence's episode and gives it a fresh environment, since the state of the old one is unknown."""
    assert sequence.request is not None
    failure = error if isinstance(error, EpisodeFailure) else EpisodeFailure("engine_error", describe(error))
    self._failures.append((sequence.request, failure))
    self._environments.replace(sequence)
    self._free(sequence)

  def _free(self, sequence: Sequence) -> None:
    self._schedulers[sequence.index % self.num_streams].release(sequence)
    sequence.status = Status.FREE
    sequence.request = None
    sequence.episode = None
