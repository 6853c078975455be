"""Concurrent single completions from the rollout engine, with token ids as input and output."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Literal

import numpy as np

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.engine.engine import Engine, EngineThread
from sao_jax.rollout.episodes import EpisodeRequest
from sao_jax.rollout.weight_sync import WeightStore
from sao_jax.types import CachedPolicy, Environment, Params, Step, Trajectory

_CHARS_PER_TOKEN = 12
"""Upper bound on the characters of one token in `_IdTokenizer`: the digits of an id and a blank."""
_STOP_S = 5.0

_log = logging.getLogger(__name__)

Finish = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """Completion of a prompt, generated with one version of the weights."""

  tokens: np.ndarray
  """`[n]` int32; the last one is a stop id if `finish` is "stop". Empty only if `finish` is "abort"."""
  logp: np.ndarray
  """`[n]` float32, <= 0: log-probs under the distribution that the tokens were sampled from."""
  finish: Finish
  label: str
  """Label of the weights."""


@dataclasses.dataclass(eq=False)
class Job:
  """A submitted completion; `result` is set when it has ended."""

  prompt: Sequence[int]
  request: EpisodeRequest
  result: Future[Completion] = dataclasses.field(default_factory=Future)
  aborted: bool = False


class _IdTokenizer:
  """Tokenizer whose text is the token ids as numbers, so that prompts reach the engine with their ids unchanged."""

  def __init__(self, vocab_size: int, stop_ids: Sequence[int]):
    self.vocab_size = vocab_size
    self.stop_ids: Sequence[int] = tuple(stop_ids)

  def encode(self, text: str) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in ids)


class _OneAction(Environment):
  """Environment with episodes of one action; the prompt of task n is that of job n."""

  def __init__(self, jobs: dict[int, Job]):
    self._jobs = jobs

  def reset(self, task_index: int) -> str:
    return " ".join(str(i) for i in self._jobs[task_index].prompt)

  def step(self, action: str) -> Step:
    return Step(done=True)

  def close(self) -> None:
    pass


class _TrackedStore(WeightStore):
  """Weight store that records the version last read: the engine may still use an older one after a `publish`."""

  last_read = -1

  def latest(self) -> tuple[Params, int]:
    params, self.last_read = super().latest()
    return params, self.last_read


class Completions:
  """Engine that completes prompts with continuous batching; thread-safe. Use as a context manager.

  A completion never mixes versions of the weights: `set_weights` requires that no completion runs. A client whose
  completion was aborted for an update may continue it with a new request, whose prompt includes the tokens so far.

  Args:
    model: the policy with its KV cache.
    params: the policy's parameters.
    label: label of these weights.
    vocab_size: upper bound (exclusive) on the ids of prompts.
    stop_ids: ids that end a completion.
    config: settings of the engine. Those for environments and turns are ignored.
    seed: seed of the sampling noise.
  """

  def __init__(
    self,
    *,
    model: CachedPolicy,
    params: Params,
    label: str,
    vocab_size: int,
    stop_ids: Sequence[int],
    config: EngineConfig,
    seed: int = 0,
  ):
    self.config = dataclasses.replace(
      config,
      max_turns=1,
      env_workers=0,
      reset_retries=0,
      max_failed_share=1.0,
      max_observation_chars=_CHARS_PER_TOKEN * config.max_len,
    )
    self.vocab_size = vocab_size
    self.stop_ids = frozenset(stop_ids)
    self._running: dict[int, Job] = {}
    self._waiting: collections.deque[Job] = collections.deque()
    self._paused = False
    self._lock = threading.Lock()
    self._numbers = itertools.count()
    self._random = np.random.default_rng(seed)
    self._store = _TrackedStore()
    self._store.publish(params, 0)
    self._version = 0
    self._label = label
    self._engine = Engine(
      model=model,
      make_env=lambda: _OneAction(self._running),
      tokenizer=_IdTokenizer(vocab_size, stop_ids),
      config=self.config,
      seed=seed,
    )
    self._thread = EngineThread(
      self._engine,
      weights=self._store,
      next_request=self._next_request,
      emit=self._emit,
      on_failure=self._fail,
    )

  def submit(self, prompt: Sequence[int], *, max_tokens: int, seed: int | None = None) -> Job:
    """Submits a completion.

    Args:
      prompt: token ids in [0, vocab_size); 1 to `max_len - 1` of them.
      max_tokens: maximum tokens of the completion, in [1, max_action_tokens]. Prompt and completion have at most
        `max_len` tokens.
      seed: equal seeds, prompts and weights give equal completions. None: a random seed.

    Raises:
      ValueError: an argument is out of range.
    """
    limit = self.config.max_len
    if not 0 < len(prompt) < limit:
      raise ValueError(f"prompt must have 1 to {limit - 1} tokens; received {len(prompt)}.")
    outside = [i for i in prompt if not 0 <= i < self.vocab_size]
    if outside:
      raise ValueError(f"prompt must have ids in [0, {self.vocab_size}); received {outside[:5]}.")
    if not 1 <= max_tokens <= self.config.max_action_tokens:
      raise ValueError(f"max_tokens must be in [1, {self.config.max_action_tokens}]; received {max_tokens}.")
    with self._lock:
      number = next(self._numbers)
      noise = int(self._random.integers(2**31)) if seed is None else seed % 2**31
      request = EpisodeRequest(task_index=number, episode_id=noise, group_id=number, max_action_tokens=max_tokens)
      job = Job(prompt, request)
      job.result.set_running_or_notify_cancel()  # from now on a client that stops waiting cannot cancel the future
      self._waiting.append(job)
    return job

  def abort(self, job: Job) -> None:
    """Ends a job within a decode chunk, with the tokens so far and `finish` "abort"."""
    with self._lock:
      job.aborted = True
      waiting = job in self._waiting
      if waiting:
        self._waiting.remove(job)
    if waiting:
      job.result.set_result(self._empty())
    else:
      self._engine.cut(job.request)

  def abort_all(self) -> int:
    """Aborts all waiting and running jobs; returns their number."""
    with self._lock:
      jobs = [*self._running.values(), *self._waiting]
    for job in jobs:
      self.abort(job)
    return len(jobs)

  @property
  def outstanding(self) -> int:
    """Number of jobs that wait or run."""
    with self._lock:
      return len(self._waiting) + len(self._running)

  @property
  def running(self) -> int:
    """Number of jobs in the engine."""
    with self._lock:
      return len(self._running)

  @property
  def label(self) -> str:
    """Label of the weights of the next completion."""
    return self._label

  @label.setter
  def label(self, label: str) -> None:
    self._label = label

  @property
  def paused(self) -> bool:
    """Whether waiting jobs are held back from the engine; may be set."""
    return self._paused

  @paused.setter
  def paused(self, paused: bool) -> None:
    with self._lock:
      self._paused = paused

  def set_weights(self, params: Params, label: str) -> None:
    """Uses `params` for every completion that starts from now on. Set `paused` and wait until `running` is 0 first.

    Raises:
      RuntimeError: not paused, or completions are running.
    """
    with self._lock:
      if not self._paused or self._running:
        raise RuntimeError(
          f"weights can change only while paused and idle; paused is {self._paused}, and {len(self._running)} "
          "completions are running."
        )
      self._version += 1
      self._store.publish(params, self._version)
      self._label = label

  def check(self) -> None:
    """Raises the exception that ended the engine, if any."""
    self._thread.check()

  def __enter__(self) -> Completions:
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Stops the engine. Unfinished jobs fail."""
    try:
      self._thread.stop(_STOP_S)
    except TimeoutError as error:
      _log.warning("%s The thread is left behind.", error)  # it may be compiling; it ends with the process
    finally:
      self._engine.close()
      with self._lock:
        jobs = [*self._running.values(), *self._waiting]
        self._running.clear()
        self._waiting.clear()
      for job in jobs:
        job.result.set_exception(RuntimeError("the engine was stopped."))

  def _empty(self) -> Completion:
    return Completion(tokens=np.zeros(0, np.int32), logp=np.zeros(0, np.float32), finish="abort", label=self._label)

  def _next_request(self) -> EpisodeRequest | None:
    with self._lock:
      if self._paused or not self._waiting or self._store.last_read != self._version:
        return None
      job = self._waiting.popleft()
      self._running[job.request.task_index] = job
      return job.request

  def _emit(self, trajectory: Trajectory) -> None:
    tokens = trajectory.tokens[trajectory.action_mask]
    with self._lock:
      job = self._running.pop(trajectory.task_index)
      label = self._label
    if int(tokens[-1]) in self.stop_ids:
      finish: Finish = "stop"
    else:
      limit = min(job.request.max_action_tokens or 0, self.config.max_len - len(job.prompt))
      finish = "abort" if job.aborted and tokens.size < limit else "length"
    logp = trajectory.behavior_logp[trajectory.action_mask]
    job.result.set_result(Completion(tokens=tokens, logp=logp, finish=finish, label=label))

  def _fail(self, request: EpisodeRequest) -> None:
    with self._lock:
      job = self._running.pop(request.task_index)
    if job.aborted:
      job.result.set_result(self._empty())
    else:
      job.result.set_exception(RuntimeError("the engine could not complete this prompt; see its log."))
