"""Calls into a user's environments: what comes out is checked, what goes wrong is an `EpisodeFailure`."""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.episodes import EnvResponse, EpisodeFailure, check_step, check_text, encode_text
from sao_jax.rollout.user_errors import describe, from_outside, trace
from sao_jax.types import Environment, EnvironmentFactory, Tokenizer

_log = logging.getLogger(__name__)


class EnvironmentHolder:
  """One environment, made when first needed; its methods run on a worker thread, one at a time."""

  def __init__(self, make_env: EnvironmentFactory, tokenizer: Tokenizer, config: EngineConfig):
    self._make_env = make_env
    self._tokenizer = tokenizer
    self._encode = functools.partial(encode_text, tokenizer)
    self._config = config
    self._env: Environment | None = None

  def reset(self, task_index: int) -> EnvResponse:
    """Starts an episode; returns the prompt. What raises is tried again with a fresh environment, a few times."""
    limit = self._config.max_len
    prompt, retries = self._try_reset(task_index)
    try:
      ids = self._encode(prompt)
    except EpisodeFailure:
      raise
    except BaseException as error:
      if from_outside(error):
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
    """`(prompt, failed attempts before)`."""
    attempts = 1 + self._config.reset_retries
    for attempt in range(attempts):
      try:
        if self._env is None:
          self._env = self._make_env()
        prompt = self._env.reset(task_index)
      except BaseException as error:
        if from_outside(error):
          raise
        failure = error  # raised once the attempts are used up
        self.close()
      else:
        return check_text(prompt, "prompt", self._config.max_observation_chars), attempt
    what = f"task {task_index}, {attempts} attempts: {describe(failure)}"
    raise EpisodeFailure("reset_error", what) from failure

  def step(self, action: np.ndarray) -> tuple[str, EnvResponse]:
    """Hands an action over; returns its text and the answer."""
    assert self._env is not None
    limits = self._config.max_observation_chars, self._config.max_abs_reward
    try:
      text = self._tokenizer.decode(action.tolist())
      return text, check_step(self._env.step(text), self._encode, *limits)
    except EpisodeFailure:
      raise
    except BaseException as error:
      if from_outside(error):
        raise
      raise EpisodeFailure("step_error", describe(error)) from error

  def close(self, *_: Any) -> None:
    """Closes the environment if there is one; an error in it is logged, since nothing depends on it any more."""
    env, self._env = self._env, None
    if env is None:
      return
    try:
      env.close()
    except BaseException as error:
      if from_outside(error):
        raise
      _log.warning("Environment.close() failed: %s", trace(error))
