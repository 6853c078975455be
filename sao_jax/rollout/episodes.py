"""One episode on the host while it is being generated, and its way into a `Trajectory`."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sao_jax.rollout.engine.config import EngineConfig
from sao_jax.rollout.user_errors import describe
from sao_jax.types import Ended, Step, Tokenizer, Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeRequest:
  """An episode that the engine is asked to run."""

  task_index: int
  """Which task (`Environment.reset`)."""
  episode_id: int
  """Unique in the run, 0 <= id < 2**31; also what the episode's sampling noise is derived from."""
  group_id: int
  """Shared by the episodes that are compared with one another; equal to `episode_id` for single rollouts."""
  max_action_tokens: int | None = None
  """Tokens of one action, if fewer than `EngineConfig.max_action_tokens`; None: that many."""

  def __post_init__(self) -> None:
    if self.max_action_tokens is not None and self.max_action_tokens < 1:
      raise ValueError(f"EpisodeRequest.max_action_tokens must be >= 1 or None; received {self.max_action_tokens}.")
    if not 0 <= self.episode_id < 2**31:
      raise ValueError(f"EpisodeRequest.episode_id must be in [0, 2**31); received {self.episode_id}.")
    if self.task_index < 0:
      raise ValueError(f"EpisodeRequest.task_index must be >= 0; received {self.task_index}.")


class EpisodeFailure(Exception):
  """An episode that fails alone; `kind` is what it is counted under."""

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvResponse:
  """What an environment answered, checked: the engine's loop meets no other value of a user's making."""

  text: str
  ids: np.ndarray
  """`[n]` int32: `text` tokenised."""
  reward: float = 0.0
  done: bool = False
  truncated: bool = False
  success: bool | None = None
  retries: int = 0
  """Of a reset: failed attempts before this one."""


def check_text(text: Any, what: str, max_chars: int) -> str:
  """Returns `text` if it is a str of bearable size; `EpisodeFailure` otherwise."""
  if not isinstance(text, str):
    raise EpisodeFailure(f"bad_{what}", f"{what} must be a str; received {type(text).__name__}.")
  text = str.__str__(text)  # of a subclass (numpy.str_, say) the characters only, not its methods
  if len(text) > max_chars:
    raise EpisodeFailure(f"{what}_too_long", f"{what} has {len(text)} characters; allowed are {max_chars}.")
  try:
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise EpisodeFailure(f"bad_{what}", f"{what} must be text that UTF-8 can hold: {error}") from error
  return text


def check_step(step: Any, encode: Callable[[str], np.ndarray], max_chars: int, max_abs_reward: float) -> EnvResponse:
  """Returns what `Environment.step` answered if it can be used; `EpisodeFailure` otherwise."""
  if not isinstance(step, Step):
    raise EpisodeFailure("bad_step", f"Environment.step must return a Step; received {type(step).__name__}.")
  text = check_text(step.observation, "observation", max_chars)
  reward = _number(step.reward, max_abs_reward)
  done = _flag("done", step.done)
  success = step.info.get("success")
  return EnvResponse(
    text=text,
    # What follows a final action is never fed to the policy.
    ids=np.zeros(0, np.int32) if done else encode(text),
    reward=reward,
    done=done,
    truncated=_flag("truncated", step.truncated),
    success=None if success is None else _flag("info['success']", success),
  )


def _scalar(value: Any) -> Any:
  """A Python number in place of a NumPy, JAX or PyTorch scalar."""
  return value.item() if getattr(value, "shape", None) == () else value


def _number(value: Any, most: float) -> float:
  plain = _scalar(value)
  try:
    number = float(plain) if isinstance(plain, numbers.Real) else math.nan
  except OverflowError:  # an int may be too large for a float
    number = math.nan
  if not -most <= number <= most:  # NaN is in no range
    limit, received = f"EngineConfig.max_abs_reward = {most:g}", describe(value, most=80)
    raise EpisodeFailure("bad_reward", f"Step.reward must be a number within +-{limit}; received {received}.")
  return number


def _flag(name: str, value: Any) -> bool:
  plain = _scalar(value)
  if isinstance(plain, bool) or (type(plain) is int and plain in (0, 1)):
    return bool(plain)
  raise EpisodeFailure("bad_step", f"Step.{name} must be a bool; received {describe(value, most=80)}.")


def encode_text(tokenizer: Tokenizer, text: str) -> np.ndarray:
  """`[n]` int32: the tokens of `text`; `EpisodeFailure` if what the tokenizer gives are no ids of its vocabulary."""
  ids = np.asarray(tokenizer.encode(text))
  if ids.size == 0:
    return np.zeros(0, np.int32)
  if ids.ndim != 1 or ids.dtype.kind not in "iu":
    received = f"{ids.dtype.name}{list(ids.shape)}"
    raise EpisodeFailure("bad_tokens", f"a tokenizer must give a flat list of integers; received {received}.")
  outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
  if outside.size:
    size, listed = tokenizer.vocab_size, outside[:5].tolist()
    raise EpisodeFailure("bad_tokens", f"token ids must be in [0, {size}); the tokenizer gave {listed}.")
  return ids.astype(np.int32)


class Episode:
  """Tokens, log-probs, versions and rewards of an episode so far, in pieces (one per prompt, chunk, observation)."""

  def __init__(self, request: EpisodeRequest, prompt: EnvResponse):
    self.request = request
    self.num_turns = 0
    self.length = 0
    """Tokens so far."""
    self.action_length = 0
    """Tokens of the action being written."""
    self.cut_action: np.ndarray | None = None
    """The last action, if it ran out of tokens: no environment has seen it."""
    self._action: list[np.ndarray] = []
    self._tokens: list[np.ndarray] = []
    self._logp: list[np.ndarray | None] = []
    self._versions: list[int] = []
    self._rewards: list[tuple[int, float]] = []
    self._texts: list[str] = []
    self._success: bool | None = None
    self._append(prompt.ids, None, -1)
    self._texts.append(prompt.text)

  def _append(self, tokens: np.ndarray, logp: np.ndarray | None, version: int) -> None:
    self._tokens.append(tokens)
    self._logp.append(logp)
    self._versions.append(version)
    self.length += tokens.shape[0]

  def tokens(self) -> np.ndarray:
    """All tokens so far, `[length]` int32."""
    return np.concatenate(self._tokens)

  def add_sampled(self, tokens: np.ndarray, logp: np.ndarray, version: int) -> None:
    """Appends action tokens `[n]` with the log-probs `[n]` and the one version that they were sampled with."""
    self._append(tokens, logp, version)
    self._action.append(tokens)
    self.action_length += tokens.shape[0]

  def budget(self, config: EngineConfig) -> int:
    """Tokens that the current action may still have."""
    limit = min(config.max_action_tokens, self.request.max_action_tokens or config.max_action_tokens)
    return min(limit - self.action_length, config.max_len - self.length)

  def end_action(self) -> np.ndarray:
    """Closes the action and returns its tokens."""
    action = np.concatenate(self._action)
    self._action = []
    self.action_length = 0
    self.num_turns += 1
    return action

  def take_response(self, action_text: str, answer: EnvResponse, config: EngineConfig) -> Ended | None:
    """Books an environment's answer to the last action; returns how the episode ended, or None if it goes on."""
    self._add_reward(action_text, answer)
    if answer.done:
      return "truncated" if answer.truncated else "terminal"
    if self.num_turns >= config.max_turns or self.length + len(answer.ids) >= config.max_len:
      return "truncated"
    self._add_observation(answer)
    return None

  def _add_reward(self, action_text: str, answer: EnvResponse) -> None:
    """Books the answer's reward on the last action token (call before `_add_observation`)."""
    self._texts.append(action_text)
    self._rewards.append((self.length - 1, answer.reward))
    self._success = answer.success

  def _add_observation(self, answer: EnvResponse) -> None:
    """Appends what the environment said."""
    if answer.ids.shape[0]:
      self._append(answer.ids, None, -1)
    self._texts.append(answer.text)

  def finish(
    self, ended: Ended, decode: Callable[[Sequence[int]], str], *, truncated_reward: float | None = None
  ) -> Trajectory:
    """Builds the trajectory; `EpisodeFailure` if its checks refuse it.

    Args:
      ended: how the episode ended.
      decode: the tokenizer's.
      truncated_reward: with 'truncated', the reward in place of all that was earned; None: that stays.
    """
    if self.cut_action is not None:
      try:
        self._texts.append(decode(self.cut_action.tolist()))
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
        text="".join(self._texts).encode("utf-8", "replace").decode("utf-8"),  # a tokenizer may decode to surrogates
      )
    except ValueError as error:
      raise EpisodeFailure("bad_trajectory", str(error)) from error
