"""Settings of the rollout engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

REMOVED_FIELDS: Mapping[str, str] = {
  "prefill_rows": "set token_budget, the number of prompt tokens per step.",
  "prefill_tokens": "set token_budget, the number of prompt tokens per step.",
  "live_buckets": "context lengths are chosen by the engine. Delete the setting.",
  "prefix_rows": "prompts share pages of the cache, whose size is cache_tokens. Delete the setting.",
}
"""Fields of earlier versions, with what to do instead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
  """Validated settings of `Engine`; `ValueError` if a field is out of range.

  >>> EngineConfig(num_slots=4, max_len=1000, page_size=16).num_pages  # room for four sequences of full length
  252
  """

  num_slots: int = 32
  """Maximum number of sequences in a step: rows of the decoded batch."""
  num_episodes: int | None = None
  """Number of live episodes, >= `num_slots`; None: `num_slots`. With more episodes than slots, others decode while a
  sequence waits for its environment."""
  page_size: int = 16
  """Tokens per page of the KV cache: at most 16, or a multiple of 16. Prompts share whole pages only. On TPUs use 64 or
  more."""
  cache_tokens: int | None = None
  """Size of the KV cache in tokens, >= `num_streams * max_len`; None: `num_slots * max_len`. If it is full, the pages
  of waiting sequences are swapped out to the host, or recomputed later, whichever is cheaper."""
  token_budget: int = 256
  """Maximum number of prompt and observation tokens that a step computes, beside one token per decoding sequence. The
  rest of a long prompt follows in later steps, so that it does not hold up other sequences."""
  num_streams: int = 1
  """Number of decode streams: groups of slots with their own pages, each run by its own thread. A divisor of
  `num_slots`. Use the number of cores on an otherwise idle CPU, since most operations of a small model run on one core;
  use 1 on an accelerator."""
  max_len: int = 512
  """Maximum tokens of a trajectory: prompt, actions and observations. A longer one is 'truncated'."""
  max_action_tokens: int = 128
  """Maximum tokens of one action. Without a stop id until then, the episode ends 'truncated'. The action
  earns nothing; earlier rewards stay unless `truncated_reward` is given."""
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
  """Tokens that a sequence decodes per call of the jitted step. Between calls the engine reads responses, requests and
  new weights."""
  env_workers: int = 16
  """Number of threads that run environments; 0 runs them inline, in the order of the sequences (deterministic)."""
  wait_for_env: bool = False
  """Whether to wait after each chunk for all environments, which is deterministic with threads too."""
  env_timeout_s: float | None = 120.0
  """A `reset` or `step` that takes longer fails its episode; None: no limit. Inline calls cannot be interrupted."""
  recompute_cache_on_update: bool = False
  """Whether to recompute the keys and values of live contexts after a weight update; otherwise they are kept. It takes
  as many steps as the contexts have times `token_budget` tokens. If weights change faster, the last in line never get
  there."""
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

  def __new__(cls, *_: object, **settings: object) -> EngineConfig:
    for name, instead in REMOVED_FIELDS.items():
      if name in settings:
        raise TypeError(f"EngineConfig has no field {name!r} any more: {instead}")
    return super().__new__(cls)

  def __post_init__(self) -> None:
    positive = ("num_slots", "page_size", "token_budget", "max_action_tokens", "max_turns", "chunk_steps")
    for name in (*positive, "max_observation_chars"):
      if getattr(self, name) < 1:
        raise ValueError(f"EngineConfig.{name} must be >= 1; received {getattr(self, name)}.")
    if self.page_size > 16 and self.page_size % 16:
      raise ValueError(f"EngineConfig.page_size must be at most 16, or a multiple of 16; received {self.page_size}.")
    if self.num_episodes is not None and self.num_episodes < self.num_slots:
      raise ValueError(
        f"EngineConfig.num_episodes must be >= num_slots = {self.num_slots} or None; received {self.num_episodes}."
      )
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
    if self.cache_tokens is not None and self.cache_tokens < self.num_streams * self.max_len:
      raise ValueError(
        f"EngineConfig.cache_tokens must be >= num_streams * max_len = {self.num_streams * self.max_len} or None; "
        f"received {self.cache_tokens}."
      )

  @property
  def live_episodes(self) -> int:
    """`num_episodes`, or `num_slots` if that is None."""
    return self.num_slots if self.num_episodes is None else self.num_episodes

  @property
  def max_pages(self) -> int:
    """Number of pages of a sequence of `max_len` tokens."""
    return -(-self.max_len // self.page_size)

  @property
  def num_pages(self) -> int:
    """Number of pages of all streams: `cache_tokens`, rounded up to whole pages per stream or sequence."""
    if self.cache_tokens is None:
      return self.num_slots * self.max_pages
    per_stream = -(-self.cache_tokens // self.num_streams)
    return self.num_streams * max(-(-per_stream // self.page_size), self.max_pages)


def context_buckets(max_pages: int, page_size: int) -> tuple[int, ...]:
  """Returns the context lengths, in pages, that programs are compiled for.

  They are 128, 256, 384, 512, 768, ... tokens (powers of two, and halfway between), up to all.

  >>> context_buckets(max_pages=63, page_size=16)
  (8, 16, 24, 32, 48, 63)
  """
  sizes, size = set(), 128
  while size < max_pages * page_size:
    sizes |= {-(-size // page_size), -(-(size + size // 2) // page_size) if size > 128 else max_pages}
    size *= 2
  return (*sorted(n for n in sizes if n < max_pages), max_pages)


def bucket(sizes: tuple[int, ...], need: int) -> int:
  """Returns the smallest of the ascending `sizes` that is at least `need`, or else the largest.

  >>> bucket((8, 32), 9), bucket((8, 32), 99)
  (32, 32)
  """
  for size in sizes:
    if size >= need:
      return size
  return sizes[-1]
