"""Environment runner: calls the environments of live sequences on threads, and collects their responses."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.env_wait_policy import EnvWaitPolicy
from sao_jax.rollout.engine.sequence import Sequence
from sao_jax.rollout.environment_runner import EnvironmentHolder
from sao_jax.rollout.episodes import EpisodeFailure
from sao_jax.rollout.workers import Task, Workers
from sao_jax.types import EnvironmentFactory, Tokenizer

_POLL_S = 0.02
_CLOSE_TIMEOUT_S = 10.0


class Response(NamedTuple):
  """The end of an environment call."""

  sequence: Sequence
  result: object
  error: BaseException | None


class EnvironmentRunner:
  """Runs the environment calls of all live sequences. Not thread-safe.

  Args:
    make_env: makes environments.
    tokenizer: used on the environment threads.
    config: settings.
  """

  def __init__(self, make_env: EnvironmentFactory, tokenizer: Tokenizer, config: EngineConfig):
    self.new_holder: Callable[[], EnvironmentHolder] = functools.partial(EnvironmentHolder, make_env, tokenizer, config)
    self._timeout_s = config.env_timeout_s
    self._workers = Workers(config.env_workers)
    self._wait_policy = EnvWaitPolicy()
    self._tasks: dict[Task, Sequence | None] = {}
    """Running calls. None: an environment is being closed, and no sequence waits for it."""

  @property
  def waiting(self) -> bool:
    """Whether a sequence waits for its environment."""
    return any(sequence is not None for sequence in self._tasks.values())

  def call(self, sequence: Sequence, call: Callable[[], object]) -> None:
    """Starts a call for a sequence, which must not have another one."""
    task = Task(call, sequence.holder.close)
    self._tasks[task] = sequence
    self._workers.submit(task)

  def replace(self, sequence: Sequence) -> None:
    """Gives a sequence a fresh environment and closes the old one, whose state is unknown."""
    holder, sequence.holder = sequence.holder, self.new_holder()
    task = Task(holder.close, lambda _: None)
    self._tasks[task] = None
    self._workers.submit(task)

  def collect(self, *, wait_s: float = 0.0) -> list[Response]:
    """Returns the calls that have ended, in the order of the sequences. Waits up to `wait_s` seconds for the first."""
    return self._responses(self._workers.poll(wait_s))

  def collect_all(self, stop: threading.Event | None) -> list[Response]:
    """Waits for the calls of all sequences, or until `stop` is set."""
    done = self._workers.poll()
    responses = self._responses(done)
    while self.waiting and not (stop is not None and stop.is_set()):
      responses += self._responses(self._workers.poll(_POLL_S))
    return sorted(responses, key=lambda x: x.sequence.index)

  def collect_fresh(
    self, sequences: Collection[Sequence], *, since: float, ready: int, step_s: float
  ) -> list[Response]:
    """Waits for the environments that are likely to respond soon; see `EnvWaitPolicy`.

    Args:
      sequences: those that could take part in the next step.
      since: time from which on calls are fresh, in seconds of `time.monotonic`.
      ready: number of sequences that can proceed now.
      step_s: duration of a step, in seconds.

    Returns:
      The calls that have ended, in the order of the sequences.
    """
    done = self._workers.poll()
    fresh = [task for task, x in self._tasks.items() if x in sequences and task.submitted_at >= since]
    fresh = [task for task in fresh if task not in done]
    limit = self._wait_policy.limit(fresh=len(fresh), ready=ready + len(done), chunk_s=step_s)
    while limit:
      left = [task.submitted_at + limit - time.monotonic() for task in fresh if task not in done]
      if not left or max(left) <= 0:
        break
      done += self._workers.poll(max(left))
    return self._responses(done)

  def abandon_all(self) -> None:
    """Abandons the calls of sequences; their threads close the environments. Those that are being closed go on."""
    for task, sequence in list(self._tasks.items()):
      if sequence is not None:
        del self._tasks[task]
        if self._workers.abandon(task):
          sequence.holder = self.new_holder()
        elif task.error is not None:
          self.replace(sequence)
    for task in self._workers.poll():
      self._tasks.pop(task, None)

  def close(self, sequences: Collection[Sequence]) -> None:
    """Abandons running calls, closes the idle environments of `sequences` and ends the threads."""
    self.abandon_all()
    for sequence in sequences:
      self.replace(sequence)
    deadline = time.monotonic() + _CLOSE_TIMEOUT_S
    while self._tasks and time.monotonic() < deadline:
      for task in self._workers.poll(_POLL_S):
        self._tasks.pop(task, None)
    self._workers.close()

  def _responses(self, done: list[Task]) -> list[Response]:
    """Removes the calls that have ended or hang, and returns their responses in the order of the sequences."""
    responses = []
    for task in done:
      sequence = self._tasks.pop(task, None)
      if sequence is not None:
        assert task.finished_at is not None
        self._wait_policy.record(task.finished_at - task.submitted_at)
        responses.append(Response(sequence, task.result, task.error))
    return sorted(responses + self._abandon_hanging(), key=lambda x: x.sequence.index)

  def _abandon_hanging(self) -> list[Response]:
    limit, now = self._timeout_s, time.monotonic()
    failed: list[Response] = []
    if limit is None:
      return failed
    for task in [t for t in self._tasks if t.started_at is not None and now - t.started_at > limit]:
      if not self._workers.abandon(task):
        continue  # it has just ended: its response counts
      sequence = self._tasks.pop(task)
      if sequence is not None:
        assert sequence.request is not None
        sequence.holder = self.new_holder()
        what = f"task {sequence.request.task_index}: the environment did not respond within env_timeout_s = {limit}"
        failed.append(Response(sequence, None, EpisodeFailure("timeout", what)))
    return failed
