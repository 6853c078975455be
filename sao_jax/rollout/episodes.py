"""Host-side record of an episode while it is generated, and its conversion to a `Trajectory`."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.user_errors import describe
from sao_jax.types import Ended, Step, Tokenizer, Trajectory

_MOST_NUMBERS = 64
"""Largest number of an environment's own numbers: each is a metric."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
  """A request to run one episode; `ValueError` if a field is out of range."""

  task_index: int
  """Index of the task, >= 0; passed to `Environment.reset`."""
  episode_id: int
  """Number of the episode, unique in the run, in [0, 2**31). The episode's sampling noise is derived from it."""
  group_id: int
  """Shared by the episodes of one prompt whose rewards are compared; equal to `episode_id` for single rollouts."""
  max_action_tokens: int | None = None
  """Upper bound on the tokens of one action, >= 1, if lower than `EngineConfig.max_action_tokens`; None: no other."""

  def __post_init__(self) -> None:
    if self.max_action_tokens is not None and self.max_action_tokens < 1:
      raise ValueError(f"EpisodeRequest.max_action_tokens must be >= 1 or None; received {self.max_action_tokens}.")
    if not 0 <= self.episode_id < 2**31:
      raise ValueError(f"EpisodeRequest.episode_id must be in [0, 2**31); received {self.episode_id}.")
    if self.task_index < 0:
      raise ValueError(f"EpisodeRequest.task_index must be >= 0; received {self.task_index}.")


class EpisodeFailure(Exception):
  """Failure of a single episode. The other episodes go on.

  Args:
    kind: short name under which the failure is counted ("timeout", "bad_reward", ...).
    message: the details.
  """

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvResponse:
  """Checked response of an environment: the prompt after `reset`, the observation and reward after `step`."""

  text: str
  """Prompt or observation."""
  ids: np.ndarray
  """`[n]` int32: the tokens of `text`; empty after a final action."""
  reward: float = 0.0
  """Reward of the action, within +-`EngineConfig.max_abs_reward`."""
  done: bool = False
  """The episode is over."""
  truncated: bool = False
  """With `done`: the environment ended the episode early (out of turns or time)."""
  success: bool | None = None
  """`Step.info["success"]`; None if it is missing."""
  info: Mapping[str, float] = dataclasses.field(default_factory=dict)
  """The other finite numbers of `Step.info`."""
  retries: int = 0
  """After `reset`: number of attempts that failed before."""


def check_text(text: Any, what: str, max_chars: int) -> str:
  """Returns `text` as a plain str; `EpisodeFailure` if it is no str, too long, or not encodable as UTF-8.

  Args:
    text: what a user's environment returned.
    what: "prompt" or "observation", for the kind and the message of the failure.
    max_chars: longest text allowed.
  """
  if not isinstance(text, str):
    raise EpisodeFailure(f"bad_{what}", f"{what} must be a str; received {type(text).__name__}.")
  text = str.__str__(text)  # a subclass (numpy.str_, say) may override methods such as __len__
  if len(text) > max_chars:
    raise EpisodeFailure(f"{what}_too_long", f"{what} must have at most {max_chars} characters; received {len(text)}.")
  try:
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise EpisodeFailure(f"bad_{what}", f"{what} must be encodable as UTF-8: {error}") from error
  return text


def check_step(step: Any, encode: Callable[[str], np.ndarray], max_chars: int, max_abs_reward: float) -> EnvResponse:
  """Checks the return value of `Environment.step`.

  Args:
    step: what the environment returned.
    encode: text to `[n]` int32 token ids.
    max_chars: longest observation allowed.
    max_abs_reward: largest reward allowed, in either direction.

  Raises:
    EpisodeFailure: it is no `Step`, or a field has a wrong type or is out of range.
  """
  if not isinstance(step, Step):
    raise EpisodeFailure("bad_step", f"Environment.step must return a Step; received {type(step).__name__}.")
  text = check_text(step.observation, "observation", max_chars)
  reward = _number(step.reward, max_abs_reward)
  done = _flag("done", step.done)
  success = step.info.get("success")
  return EnvResponse(
    text=text,
    # The policy never sees an observation after the final action.
    ids=np.zeros(0, np.int32) if done else encode(text),
    reward=reward,
    done=done,
    truncated=_flag("truncated", step.truncated),
    success=None if success is None else _flag("info['success']", success),
    info=_numbers_of(step.info),
  )


def _numbers_of(info: Mapping[str, Any]) -> dict[str, float]:
  """Returns the finite numbers and bools of `Step.info`, without `success`. Texts and other values are not logged."""
  numbers_of = {}
  for name, value in info.items():
    plain = _scalar(value)
    if isinstance(name, str) and name != "success" and isinstance(plain, numbers.Real):
      number = _float(plain)
      if math.isfinite(number):
        numbers_of[name] = number
  if len(numbers_of) > _MOST_NUMBERS:
    received = f"{len(numbers_of)}, among them {describe(sorted(numbers_of)[:5], most=200)}"
    raise EpisodeFailure("bad_step", f"Step.info must hold at most {_MOST_NUMBERS} numbers; received {received}.")
  return numbers_of


def _scalar(value: Any) -> Any:
  """Converts a NumPy, JAX or PyTorch scalar to a Python number; returns other values as they are."""
  return value.item() if getattr(value, "shape", None) == () else value


def _number(value: Any, most: float) -> float:
  plain = _scalar(value)
  number = _float(plain) if isinstance(plain, numbers.Real) else math.nan
  if not -most <= number <= most:  # NaN is in no range
    limit, received = f"EngineConfig.max_abs_reward = {most:g}", describe(value, most=80)
    raise EpisodeFailure("bad_reward", f"Step.reward must be a number within +-{limit}; received {received}.")
  return number


def _float(value: numbers.Real) -> float:
  try:
    return float(value)
  except OverflowError:  # an int may be too large for a float
    return math.nan


def _flag(name: str, value: Any) -> bool:
  plain = _scalar(value)
  if isinstance(plain, bool) or (type(plain) is int and plain in (0, 1)):
    return bool(plain)
  raise EpisodeFailure("bad_step", f"Step.{name} must be a bool; received {describe(value, most=80)}.")


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """Encodes `text` as `[n]` int32; `EpisodeFailure` if the tokenizer returns anything but ids of its vocabulary."""
  ids = np.asarray(tokenizer.encode(text))
  if ids.size == 0:
    return np.zeros(0, np.int32)
  if ids.ndim != 1 or ids.dtype.kind not in "iu":
    received = f"{ids.dtype.name}{list(ids.shape)}"
    raise EpisodeFailure("bad_tokens", f"Tokenizer.encode must return a flat list of integers; received {received}.")
  outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
  if outside.size:
    size, listed = tokenizer.vocab_size, outside[:5].tolist()
    raise EpisodeFailure("bad_tokens", f"Tokenizer.encode must return ids in [0, {size}); received {listed}.")
  return ids.astype(np.int32)


class Episode:
  """Tokens, log-probs, versions and rewards of an episode so far, kept as one piece per prompt, chunk or observation.

  Args:
    request: the episode.
    prompt: response to `reset`.
  """

  def __init__(self, request: EpisodeRequest, prompt: EnvResponse):
    self.request = request
    self.num_turns = 0
    self.length = 0
    """Number of tokens so far."""
    self.action_length = 0
    """Number of tokens of the current action."""
    self.unfinished_action: np.ndarray | None = None
    """`[n]` int32: the last action, if it was truncated before its stop id. The environment has not seen it."""
    self._action: list[np.ndarray] = []
    self._tokens: list[np.ndarray] = []
    self._logp: list[np.ndarray | None] = []
    self._versions: list[int] = []
    self._rewards: list[tuple[int, float]] = []
    self._texts: list[str] = []
    self._success: bool | None = None
    self._info: dict[str, float] = {}
    self._append(prompt.ids, None, -1)
    self._texts.append(prompt.text)

  def _append(self, tokens: np.ndarray, logp: np.ndarray | None, version: int) -> None:
    self._tokens.append(tokens)
    self._logp.append(logp)
    self._versions.append(version)
    self.length += tokens.shape[0]

  def tokens(self) -> np.ndarray:
    """Returns all tokens so far, `[length]` int32."""
    return np.concatenate(self._tokens)

  @property
  def answered(self) -> bool:
    """Whether the environment has answered an action: not so if the first one was truncated."""
    return bool(self._rewards)

  @property
  def last_token(self) -> int:
    """The last token so far."""
    return int(self._tokens[-1][-1])

  def add_sampled(self, tokens: np.ndarray, logp: np.ndarray, version: int) -> None:
    """Appends sampled tokens of the current action.

    Args:
      tokens: `[n]` int32.
      logp: `[n]` float32 behaviour log-probs.
      version: policy version that sampled all of them, >= 0.
    """
    self._append(tokens, logp, version)
    self._action.append(tokens)
    self.action_length += tokens.shape[0]

  def budget(self, config: EngineConfig) -> int:
    """Returns the number of tokens that may still be sampled for the current action."""
    limit = min(config.max_action_tokens, self.request.max_action_tokens or config.max_action_tokens)
    return min(limit - self.action_length, config.max_len - self.length)

  def end_action(self) -> np.ndarray:
    """Ends the current action and returns its tokens, `[n]` int32."""
    action = np.concatenate(self._action)
    self._action = []
    self.action_length = 0
    self.num_turns += 1
    return action

  def add_response(self, action_text: str, response: EnvResponse, config: EngineConfig) -> Ended | None:
    """Records the environment's response to the last action: its reward and, unless the episode ends, its observation.

    Returns:
      How the episode ended; None if it goes on.
    """
    self._add_reward(action_text, response)
    if response.done:
      return "truncated" if response.truncated else "terminal"
    if self.num_turns >= config.max_turns or self.length + len(response.ids) >= config.max_len:
      return "truncated"
    self._add_observation(response)
    return None

  def _add_reward(self, action_text: str, response: EnvResponse) -> None:
    """Records the reward on the last action token; must be called before `_add_observation`."""
    self._texts.append(action_text)
    self._rewards.append((self.length - 1, response.reward))
    self._success = response.success
    self._info.update(response.info)

  def _add_observation(self, response: EnvResponse) -> None:
    if response.ids.shape[0]:
      self._append(response.ids, None, -1)
    self._texts.append(response.text)

  def finish(
    self, ended: Ended, decode: Callable[[Sequence[int]], str], *, truncated_reward: float | None = None
  ) -> Trajectory:
    """Builds the trajectory.

    Args:
      ended: how the episode ended.
      decode: `Tokenizer.decode`.
      truncated_reward: with 'truncated', replaces all rewards of the episode; None: they stay.

    Raises:
      EpisodeFailure: decoding failed, or `Trajectory` refused the arrays (a log-prob that is not finite, say).
    """
    if self.unfinished_action is not None:
      try:
        self._texts.append(decode(self.unfinished_action.tolist()))
      except Exception as error:
        raise EpisodeFailure("decode_error", describe(error)) from error
    tokens = self.tokens()
    sizes = [piece.shape[0] for piece in self._tokens]
    mask = np.repeat(np.array([logp is not None for logp in self._logp]), sizes)
    versions = np.repeat(np.array(self._versions, np.int32), sizes)
    logp = np.concatenate(
      [np.full(n, np.nan, np.float32) if x is None else x for x, n in zip(self._logp, sizes, strict=True)]
    )
    rewards = np.zeros(tokens.shape, np.float32)
    for index, reward in self._rewards:
      rewards[index] = reward
    if ended == "truncated" and truncated_reward is not None:
      rewards[:] = 0.0
      rewards[np.flatnonzero(mask)[-1]] = truncated_reward
    total = float(rewards.sum())
    try:
      return Trajectory(
        tokens=tokens,
        action_mask=mask,
        behavior_logp=logp,
        versions=versions,
        rewards=rewards,
        ended=ended,
        task_index=self.request.task_index,
        episode_id=self.request.episode_id,
        group_id=self.request.group_id,
        num_turns=self.num_turns,
        success=total > 0 if self._success is None else self._success,
        text="".join(self._texts).encode("utf-8", "replace").decode("utf-8"),  # a tokenizer may return surrogates
        info=self._info,
      )
    except ValueError as error:
      raise EpisodeFailure("bad_trajectory", str(error)) from error
