"""Batches of demonstrations for the warm start, made on a thread while the learner works on the batch before."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sao_jax.learner import demonstration_trajectory
from sao_jax.rollout.episodes import EpisodeFailure, encode_text
from sao_jax.training.components import Components
from sao_jax.training.signals import Interrupted, StopSignals
from sao_jax.types import Trajectory

_POLL_S = 0.5


class DemonstrationBatches:
  """Batches without end, of tasks in random order; the next one is made ahead.

  Args:
    parts: the run's parts.

  Raises:
    ValueError: the domain has no demonstrations.
  """

  def __init__(self, parts: Components):
    if parts.domain.demonstrate is None:
      steps = parts.config.warm_start.num_steps
      raise ValueError(f"warm_start.num_steps must be 0 for a domain without demonstrations; received {steps}.")
    self._parts = parts
    self._demonstrate = parts.domain.demonstrate
    self._rng = np.random.default_rng((parts.config.seed, 1))
    self._state = dict(self._rng.bit_generator.state)
    self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="demonstrations")
    self._coming: concurrent.futures.Future[tuple[list[Trajectory], dict[str, Any]]] | None = None

  def next(self, signals: StopSignals, *, on_signal: Callable[[], None] | None = None) -> list[Trajectory]:
    """The next batch.

    Args:
      signals: end the wait for a demonstration that takes long, where there is one process.
      on_signal: called then, before `Interrupted` is raised.
    """
    coming = self._coming or self._pool.submit(self._make)
    try:
      while not coming.done():
        concurrent.futures.wait([coming], _POLL_S)
        signals.check_local()
    except Interrupted:
      if on_signal is not None:
        on_signal()
      raise
    batch, self._state = coming.result()
    self._coming = self._pool.submit(self._make)
    return batch

  def state(self) -> dict[str, Any]:
    """The random number generator after the last batch that `next` returned: JSON values."""
    return self._state

  def restore(self, state: dict[str, Any]) -> None:
    """Continues from `state()`; called before the first `next`."""
    self._rng.bit_generator.state = self._state = state

  def close(self) -> None:
    """Does not wait for the batch that is being made."""
    self._pool.shutdown(wait=False, cancel_futures=True)

  def _make(self) -> tuple[list[Trajectory], dict[str, Any]]:
    domain, settings = self._parts.domain, self._parts.config.warm_start
    tasks = self._rng.integers(domain.num_train_tasks, size=settings.batch_size)
    batch = [
      encode_demonstration(self._parts, self._demonstrate(int(task), self._rng), index=i)
      for i, task in enumerate(tasks)
    ]
    return batch, dict(self._rng.bit_generator.state)


def encode_demonstration(parts: Components, pieces: Sequence[tuple[str, bool]], *, index: int = 0) -> Trajectory:
  """A demonstration's pieces of (text, is_action) as a trajectory. Each piece is tokenized by itself, as in a rollout.

  Raises:
    ValueError: the tokenizer returns something else than ids of its vocabulary.
  """
  try:
    ids = [encode_text(parts.domain.tokenizer, text) for text, _ in pieces]
  except EpisodeFailure as error:
    raise ValueError(f"demonstration {index} of a batch: {error}") from error
  mask = [is_action for piece, (_, is_action) in zip(ids, pieces, strict=True) for _ in piece]
  return demonstration_trajectory(np.concatenate(ids), np.asarray(mask), index=index)
