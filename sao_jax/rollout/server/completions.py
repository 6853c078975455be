"""Single completions from the rollout engine: what a server needs, token ids in and out, many at once."""

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
"""Digits of an id and a blank, and room."""
_STOP_S = 5.0

_log = logging.getLogger(__name__)

Finish = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
  """What the policy wrote after a prompt; all of it with one set of weights."""

  tokens: np.ndarray
  """`[n]` int32; the last one is a stop id if `finish` is "stop". Empty only if `finish` is "abort"."""
  logp: np.ndarray
  """`[n]` float32: log-probs that the tokens were sampled with."""
  finish: Finish
  label: str
  """Of the weights."""


@dataclasses.dataclass(eq=False)
class Job:
  """A completion that was asked for; `result` is set once it is there."""

  prompt: Sequence[int]
  request: EpisodeRequest
  result: Future[Completion] = dataclasses.field(default_factory=Future)
  aborted: bool = False


class _IdTokenizer:
  """Text that is the token ids, so that an environment's prompt reaches the engine as the ids that were sent."""

  def __init__(self, vocab_size: int, stop_ids: Sequence[int]):
    self.vocab_size = vocab_size
    self.stop_ids: Sequence[int] = tuple(stop_ids)

  def encode(self, text: str) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, ids: Sequence[int]) -> str:
    return " ".join(str(i) for i in ids)


class _OneAction(Environment):
  """Task n is the prompt of job n; the episode is over after its first action."""

  def __init__(self, jobs: dict[int, Job]):
    self._jobs = jobs

  def reset(self, task_index: int) -> str:
    return " ".join(str(i) for i in self._jobs[task_index].prompt)

  def step(self, action: str) -> Step:
    return Step(done=True)

  def close(self) -> None:
    pass


class _SeenStore(WeightStore):
  """Knows which version the engine works with: it may still hold the old one when a new one is published."""

  seen = -1

  def latest(self) -> tuple[Params, int]:
    params, self.seen = super().latest()
    return params, self.seen


class Completions:
  """An engine that completes prompts, with continuous batching; thread-safe. Use as a context manager.

  A completion never mixes weights: `update` waits until nothing runs. Who asked goes on with prompt and part of the
  answer if it was aborted for that.

  Args:
    model: the policy, with its cache.
    params: its parameters.
    label: what the weights are called.
    vocab_size: prompts hold ids below it.
    stop_ids: ids that end a completion.
    config: settings of the engine; those of environments and turns are not used.
    seed: base of the sampling noise.
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
    self._store = _SeenStore()
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
    """Asks for a completion.

    Args:
      prompt: ids; at least one, and room for an answer in `max_len`.
      max_tokens: of the answer; what does not fit in `max_len` is cut.
      seed: same seed, prompt and weights, same answer; None: noise of its own.

    Raises:
      ValueError: a prompt or limit that the engine cannot serve.
    """
    limit = self.config.max_len
    if not 0 < len(prompt) < limit:
      raise ValueError(f"prompt must have 1 to {limit - 1} tokens; received {len(prompt)}.")
    outside = [i for i in prompt if not 0 <= i < self.vocab_size]
    if outside:
      raise ValueError(f"prompt must hold ids in [0, {self.vocab_size}); received {outside[:5]}.")
    if not 1 <= max_tokens <= self.config.max_action_tokens:
      raise ValueError(f"max_tokens must be in [1, {self.config.max_action_tokens}]; received {max_tokens}.")
    with self._lock:
      number = next(self._numbers)
      noise = int(self._random.integers(2**31)) if seed is None else seed % 2**31
      request = EpisodeRequest(task_index=number, episode_id=noise, group_id=number, max_action_tokens=max_tokens)
      job = Job(prompt, request)
      job.result.set_running_or_notify_cancel()  # whoever stops waiting for it cannot cancel it under the engine
      self._waiting.append(job)
    return job

  def abort(self, job: Job) -> None:
    """Ends a job with what it wrote so far (`finish` "abort"), within a decode chunk."""
    with self._lock:
      job.aborted = True
      waiting = job in self._waiting
      if waiting:
        self._waiting.remove(job)
    if waiting:
      job.result.set_result(self._nothing())
    else:
      self._engine.cut(job.request)

  def abort_all(self) -> int:
    """Aborts every job, waiting ones included; returns how many."""
    with self._lock:
      jobs = [*self._running.values(), *self._waiting]
    for job in jobs:
      self.abort(job)
    return len(jobs)

  @property
  def outstanding(self) -> int:
    """Jobs that wait or run."""
    with self._lock:
      return len(self._waiting) + len(self._running)

  @property
  def running(self) -> int:
    """Jobs that the engine works on."""
    with self._lock:
      return len(self._running)

  @property
  def label(self) -> str:
    """Name of the weights that the next completion is written with."""
    return self._label

  @label.setter
  def label(self, label: str) -> None:
    self._label = label

  @property
  def paused(self) -> bool:
    """Whether jobs are kept waiting; set it to keep them, or to go on."""
    return self._paused

  @paused.setter
  def paused(self, paused: bool) -> None:
    with self._lock:
      self._paused = paused

  def update(self, params: Params, label: str) -> None:
    """Makes `params` the weights of every completion that starts from now on.

    Raises:
      RuntimeError: something runs: pause, and wait until `running` is 0.
    """
    with self._lock:
      if not self._paused or self._running:
        raise RuntimeError(f"weights change only while paused and idle; {len(self._running)} completions run.")
      self._version += 1
      self._store.publish(params, self._version)
      self._label = label

  def check(self) -> None:
    """Raises what ended the engine, if it has ended."""
    self._thread.check()

  def __enter__(self) -> Completions:
    self._thread.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Ends the engine; what was asked for and is not there fails."""
    try:
      self._thread.stop(_STOP_S)
    except TimeoutError as error:
      _log.warning("%s It is left behind.", error)  # compiling, say; it ends with the process
    finally:
      self._engine.close()
      with self._lock:
        jobs = [*self._running.values(), *self._waiting]
        self._running.clear()
        self._waiting.clear()
      for job in jobs:
        job.result.set_exception(RuntimeError("the engine was stopped."))

  def _nothing(self) -> Completion:
    return Completion(tokens=np.zeros(0, np.int32), logp=np.zeros(0, np.float32), finish="abort", label=self._label)

  def _next_request(self) -> EpisodeRequest | None:
    with self._lock:
      if self._paused or not self._waiting or self._store.seen != self._version:
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
      job.result.set_result(self._nothing())
    else:
      job.result.set_exception(RuntimeError("the engine could not complete this prompt; its log says why."))
