"""Settings of the rollout engine."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """Settings of `Engine`; checked when made.

  Every (rows, tokens, live length) triple of the buckets below is one compiled prefill program and every live length
  one compiled decode program, so keep the tuples short. `max_len` bounds a whole trajectory: prompt, actions and
  observations.
  """

  num_slots: int = 32
  """Episodes decoded at once: rows of the cache."""
  num_episodes: int | None = None
  """Live episodes; None: `num_slots`. With more, one that waits for its environment gives its slot to one that can go
  on; its keys and values are copied to the host, or computed again when it comes back, whichever is cheaper."""
  num_streams: int = 1
  """Groups of slots, each decoded by a thread of its own; divides `num_slots`. On a CPU that has nothing else to do its
  number of cores, since most operations of a small model run on one; on an accelerator 1."""
  max_len: int = 512
  """Tokens of a trajectory; what does not fit is cut and the trajectory is 'truncated'."""
  max_action_tokens: int = 128
  """Tokens of one action. One that reaches it without a stop id ends its episode: 'truncated', reward 0 for it."""
  max_turns: int = 8
  """Actions of a trajectory; an environment that wants more is cut after that many ('truncated', last reward kept)."""
  truncated_reward: float | None = None
  """Reward of a trajectory that was cut off, in place of all that it earned; None: it keeps what it earned.

  It is booked on the last action token, whatever cut the trajectory: a limit here or its environment. The paper says
  nothing of either choice. `learner.truncation` decides whether the value of the state it was cut off in is added.
  """
  temperature: float = 1.0
  """Sampling temperature; recorded log-probs are those of the tempered distribution. Greedy decoding is not offered."""
  top_p: float = 1.0
  """Below 1 only the most probable tokens are sampled, as few as reach this probability, and recorded log-probs are
  those of this truncated distribution. For evaluation: a run with RL refuses it, since the learner scores the whole."""
  chunk_steps: int = 16
  """Decode steps per jitted chunk: host and weights are looked at between chunks."""
  prefill_rows: tuple[int, ...] = (8,)
  """Row counts a prefill call may have, ascending."""
  prefill_tokens: tuple[int, ...] = (32, 128)
  """Tokens per row of a prefill call, ascending; longer contexts take several calls, decoding in between."""
  live_buckets: tuple[int, ...] = ()
  """Lengths the attention may be cut to, ascending, the last one `max_len`; empty: doubling from 128 up to it."""
  env_workers: int = 16
  """Threads that run environments; 0 runs them inline, in slot order (deterministic)."""
  wait_for_env: bool = False
  """Wait after each chunk for all environments and take their answers in slot order: deterministic with threads too."""
  env_timeout_s: float | None = 120.0
  """A reset or step that takes longer fails its episode. Needs threads: inline calls cannot be interrupted."""
  recompute_cache_on_update: bool = False
  """After a weight swap recompute the keys and values of live contexts with the new weights; else keep them."""
  prefix_rows: int = 8
  """Beginnings shared by prompts (system prompt, examples, the prompt of a group) that are kept computed, each of the
  size of a slot's cache: fed once per policy version and copied into the slots. 0: every prompt is fed whole."""
  max_observation_chars: int = 1_000_000
  """A longer observation or prompt fails its episode before it is tokenised."""
  max_abs_reward: float = 1e6
  """A reward beyond this, in either direction, fails its episode: its square must stay far inside float32."""
  reset_retries: int = 1
  """A factory or `reset` that raises is tried so often again, each time with a fresh environment; a `step` never is."""
  max_failed_share: float = 0.5
  """The engine stops with an error when more than this share of the last 256 episodes failed (of at least 64); 1.0
  never stops."""

  def __post_init__(self) -> None:
    for name in ("num_slots", "max_action_tokens", "max_turns", "chunk_steps", "max_observation_chars"):
      if getattr(self, name) < 1:
        raise ValueError(f"EngineConfig.{name} must be >= 1; received {getattr(self, name)}.")
    if self.num_episodes is not None and self.num_episodes < self.num_slots:
      raise ValueError(
        f"EngineConfig.num_episodes must be >= num_slots = {self.num_slots} or None; received {self.num_episodes}."
      )
    if self.prefix_rows < 0:
      raise ValueError(f"EngineConfig.prefix_rows must be >= 0; received {self.prefix_rows}.")
    if self.num_streams < 1 or self.num_slots % self.num_streams:
      raise ValueError(
        f"EngineConfig.num_streams must be a divisor of num_slots = {self.num_slots}; received {self.num_streams}."
      )
    if self.max_len < 2:
      raise ValueError(f"EngineConfig.max_len must be >= 2 (a prompt and an action token); received {self.max_len}.")
    if not 0.0 < self.temperature < float("inf"):
      raise ValueError(f"EngineConfig.temperature must be finite and > 0; received {self.temperature}.")
    if not 0.0 < self.top_p <= 1.0:
      raise ValueError(f"EngineConfig.top_p must be in (0, 1]; received {self.top_p}.")
    if self.truncated_reward is not None and not math.isfinite(self.truncated_reward):
      raise ValueError(f"EngineConfig.truncated_reward must be finite or None; received {self.truncated_reward}.")
    if self.env_workers < 0:
      raise ValueError(f"EngineConfig.env_workers must be >= 0; received {self.env_workers}.")
    if self.env_timeout_s is not None and not self.env_timeout_s > 0:
      raise ValueError(f"EngineConfig.env_timeout_s must be > 0 or None; received {self.env_timeout_s}.")
    if not 0.0 < self.max_abs_reward <= 1e18:
      raise ValueError(f"EngineConfig.max_abs_reward must be in (0, 1e18]; received {self.max_abs_reward}.")
    if self.reset_retries < 0:
      raise ValueError(f"EngineConfig.reset_retries must be >= 0; received {self.reset_retries}.")
    if not 0.0 <= self.max_failed_share <= 1.0:
      raise ValueError(f"EngineConfig.max_failed_share must be in [0, 1]; received {self.max_failed_share}.")
    for name in ("prefill_rows", "prefill_tokens", "live_buckets"):
      sizes = tuple(getattr(self, name))
      object.__setattr__(self, name, sizes)  # presets hand over lists
      if (not sizes and name != "live_buckets") or any(x < 1 for x in sizes) or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"EngineConfig.{name} must be ascending sizes >= 1; received {sizes}.")
    if self.live_buckets and self.live_buckets[-1] != self.max_len:
      raise ValueError(
        f"EngineConfig.live_buckets must end with max_len = {self.max_len}; received {self.live_buckets}."
      )

  @property
  def live_episodes(self) -> int:
    """`num_episodes`, or `num_slots` where it is None."""
    return self.num_slots if self.num_episodes is None else self.num_episodes

  def live_lengths(self) -> tuple[int, ...]:
    """The lengths attention may be cut to."""
    if self.live_buckets:
      return self.live_buckets
    sizes = []
    size = 128
    while size < self.max_len:
      sizes.append(size)
      size *= 2
    return (*sizes, self.max_len)

  def window_lengths(self) -> tuple[int, ...]:
    """The lengths of decode windows: those of `live_lengths`, the last one with room for a chunk past `max_len`."""
    return (*self.live_lengths()[:-1], self.max_len + self.chunk_steps)


def bucket(sizes: tuple[int, ...], need: int) -> int:
  """Smallest of the ascending `sizes` that holds `need`, else the largest.

  >>> bucket((8, 32), 9), bucket((8, 32), 99)
  (32, 32)
  """
  for size in sizes:
    if size >= need:
      return size
  return sizes[-1]
