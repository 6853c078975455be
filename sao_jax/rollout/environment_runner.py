"""Checked calls into a user's environments. Errors in them become an `EpisodeFailure`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.episodes import EnvResponse, EpisodeFailure, check_step, check_text, encode_text
from sao_jax.rollout.user_errors import describe, format_traceback, is_interrupt
from sao_jax.types import Environment, EnvironmentFactory, Tokenizer

_log = logging.getLogger(__name__)


class EnvironmentHolder:
  """One environment, made on first use. Its methods run on a worker thread, one at a time.

  Args:
    make_env: makes the environment, and makes it again after a failed `reset`.
    tokenizer: encodes prompts and observations, decodes actions.
    config: limits on lengths and rewards; number of `reset` retries.
  """

  def __init__(self, make_env: EnvironmentFactory, tokenizer: Tokenizer, config: EngineConfig):
    self._make_env = make_env
    self._tokenizer = tokenizer
    self._encode = functools.partial(encode_text, tokenizer)
    self._config = config
    self._env: Environment | None = None

  def reset(self, task_index: int) -> EnvResponse:
    """Starts an episode and returns its prompt. A `reset` that raises is retried with a fresh environment.

    Args:
      task_index: passed to `Environment.reset`, >= 0.

    Raises:
      EpisodeFailure: every attempt raised, or the prompt is empty, too long or not text.
    """
    limit = self._config.max_len
    prompt, retries = self._try_reset(task_index)
    try:
      ids = self._encode(prompt)
    except EpisodeFailure:
      raise
    except BaseException as error:
      if is_interrupt(error):
        raise
      raise EpisodeFailure("reset_error", f"task {task_index}: {describe(error)}") from error
    if ids.shape[0] == 0:
      raise EpisodeFailure("empty_prompt", f"task {task_index}: the prompt has no tokens.")
    if ids.shape[0] >= limit:
      raise EpisodeFailure(
        "prompt_too_long",
        f"task {task_index}: the prompt has {ids.shape[0]} tokens, which leaves no room for an action in "
        f"EngineConfig.max_len = {limit}; prompts are never trimmed.",
      )
    return EnvResponse(text=prompt, ids=ids, retries=retries)

  def _try_reset(self, task_index: int) -> tuple[str, int]:
    """Returns `(prompt, number of failed attempts)`."""
    attempts = 1 + self._config.reset_retries
    for attempt in range(attempts):
      try:
        if self._env is None:
          self._env = self._make_env()
        prompt = self._env.reset(task_index)
      except BaseException as error:
        if is_interrupt(error):
          raise
        failure = error  # raised after the last attempt
        self.close()
      else:
        return check_text(prompt, "prompt", self._config.max_observation_chars), attempt
    what = f"task {task_index}, {attempts} attempts: {describe(failure)}"
    raise EpisodeFailure("reset_error", what) from failure

  def step(self, action: np.ndarray) -> tuple[str, EnvResponse]:
    """Decodes an action, passes it to the environment, and returns its text and the checked response.

    Args:
      action: `[n]` int32 token ids, stop id included.

    Raises:
      EpisodeFailure: the environment or the tokenizer raised, or the response cannot be used.
    """
    assert self._env is not None
    limits = self._config.max_observation_chars, self._config.max_abs_reward
    try:
      text = self._tokenizer.decode(action.tolist())
      return text, check_step(self._env.step(text), self._encode, *limits)
    except EpisodeFailure:
      raise
    except BaseException as error:
      if is_interrupt(error):
        raise
      raise EpisodeFailure("step_error", describe(error)) from error

  def close(self, *_: Any) -> None:
    """Closes the environment if there is one. An error in its `close` is only logged: nothing depends on it."""
    env, self._env = self._env, None
    if env is None:
      return
    try:
      env.close()
    except BaseException as error:
      if is_interrupt(error):
        raise
      _log.warning("Environment.close() failed: %s", format_traceback(error))
