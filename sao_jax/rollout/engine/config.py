"""Settings of the rollout engine."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """Validated settings of `Engine`; `ValueError` if a field is out of range.

  Each (rows, tokens, live length) triple of the buckets below is one compiled prefill program, and each live length is
  one compiled decode program. So keep the tuples short.

  >>> config = EngineConfig(max_len=1000, prefill_tokens=(32, 128))
  >>> config.live_lengths()
  (128, 256, 512, 1000)
  >>> bucket(config.live_lengths(), 300)  # attention over a context of 300 tokens reads 512 cache entries
  512
  """

  num_slots: int = 32
  """Number of sequences decoded at once: rows of the KV cache."""
  num_episodes: int | None = None
  """Number of live episodes, >= `num_slots`; None: `num_slots`. With more episodes than slots, a sequence that waits
  for its environment gives its slot to one that is ready. Its keys and values are swapped out to the host, or
  recomputed later, whichever is cheaper."""
  num_streams: int = 1
  """Number of decode streams: groups of slots, each decoded by its own thread. A divisor of `num_slots`. Use the number
  of cores on an otherwise idle CPU, since most operations of a small model run on one core; use 1 on an accelerator."""
  max_len: int = 512
  """Maximum tokens of a trajectory: prompt, actions and observations. A longer one is 'truncated'."""
  max_action_tokens: int = 128
  """Maximum tokens of one action. Without a stop id until then, the episode ends: 'truncated', reward 0."""
  max_turns: int = 8
  """Maximum actions of a trajectory. After that many the episode is 'truncated' and keeps its last reward."""
  truncated_reward: float | None = None
  """Reward of a truncated trajectory, in place of all that it earned; None: it keeps what it earned.

  It is placed on the last action token, whether a limit above or the environment truncated the episode. The paper does
  not specify either choice. `learner.truncation` decides whether the value of the final state is added.
  """
  temperature: float = 1.0
  """Sampling temperature, > 0. Log-probs are recorded under the tempered distribution. There is no greedy decoding."""
  top_p: float = 1.0
  """Nucleus mass, in (0, 1]. Below 1, only the most probable tokens up to this mass are sampled, and log-probs are
  recorded under this truncated distribution. For evaluation only: the learner scores the whole distribution."""
  chunk_steps: int = 16
  """Decode steps per jitted chunk. Between chunks the engine reads responses, requests and new weights."""
  prefill_rows: tuple[int, ...] = (8,)
  """Row counts that a prefill call may have, ascending."""
  prefill_tokens: tuple[int, ...] = (32, 128)
  """Tokens per row that a prefill call may have, ascending. Longer contexts take several calls, decoding in between."""
  live_buckets: tuple[int, ...] = ()
  """Context lengths that attention programs are compiled for, ascending, ending with `max_len`. Empty: 128, 256, ... up
  to `max_len`."""
  env_workers: int = 16
  """Number of threads that run environments; 0 runs them inline, in the order of the sequences (deterministic)."""
  wait_for_env: bool = False
  """Whether to wait after each chunk for all environments, which is deterministic with threads too."""
  env_timeout_s: float | None = 120.0
  """A `reset` or `step` that takes longer fails its episode; None: no limit. Inline calls cannot be interrupted."""
  recompute_cache_on_update: bool = False
  """Whether to recompute the keys and values of live contexts after a weight update; otherwise they are kept."""
  prefix_rows: int = 8
  """Number of shared prompt prefixes (system prompt, examples, a group's prompt) kept in the prefix cache; 0: no cache.
  Each takes the memory of one slot. It is prefilled once per policy version and copied into the slots."""
  max_observation_chars: int = 1_000_000
  """A longer observation or prompt fails its episode before it is tokenised."""
  max_abs_reward: float = 1e6
  """A reward beyond this, in either direction, fails its episode: squared rewards must stay far inside float32."""
  reset_retries: int = 1
  """Number of retries for an environment factory or `reset` that raises, each with a fresh environment. A `step` is
  never retried."""
  max_failed_share: float = 0.5
  """The engine raises an error when more than this share of the last 256 episodes failed. It judges from 64 episodes
  on, or from 16 if all of them failed. An evaluation in which more than this share failed is an error, too. 1.0 never
  raises."""

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
    """`num_episodes`, or `num_slots` if that is None."""
    return self.num_slots if self.num_episodes is None else self.num_episodes

  def live_lengths(self) -> tuple[int, ...]:
    """Returns `live_buckets`, or its default if that is empty."""
    if self.live_buckets:
      return self.live_buckets
    sizes = []
    size = 128
    while size < self.max_len:
      sizes.append(size)
      size *= 2
    return (*sizes, self.max_len)

  def window_lengths(self) -> tuple[int, ...]:
    """Returns the lengths of decode windows: `live_lengths`, but the last is `max_len + chunk_steps`."""
    return (*self.live_lengths()[:-1], self.max_len + self.chunk_steps)


def bucket(sizes: tuple[int, ...], need: int) -> int:
  """Returns the smallest of the ascending `sizes` that is at least `need`, or else the largest.

  >>> bucket((8, 32), 9), bucket((8, 32), 99)
  (32, 32)
  """
  for size in sizes:
    if size >= need:
      return size
  return sizes[-1]
