"""The cost of episodes: turns, tokens and tool latencies, from distributions or recorded trajectories."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Protocol

import numpy as np

from sao_jax.io import trajectories as trajectory_io


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
  """The cost of one episode."""

  tokens: int
  """Number of action tokens."""
  turns: int
  waits_s: tuple[float, ...] = ()
  """Seconds of each wait for the environment. Decoding is assumed to be spread evenly around the waits."""

  @property
  def tool_s(self) -> float:
    """The total of all waits in seconds."""
    return math.fsum(self.waits_s)


class Workload(Protocol):
  """A source of episodes."""

  def draw(self, rng: np.random.Generator) -> Episode: ...


_MAX_MEDIAN, _MAX_SIGMA = 1e12, 10.0
"""Beyond these limits, a sum of draws may overflow or be dominated by its largest term."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogNormal:
  """median * exp(sigma * N(0, 1)). With sigma 0, it is constant."""

  median: float
  sigma: float = 0.0

  def __post_init__(self) -> None:
    if not (0 <= self.median <= _MAX_MEDIAN and 0 <= self.sigma <= _MAX_SIGMA):
      raise ValueError(
        f"LogNormal needs a median in [0, {_MAX_MEDIAN:g}] and a sigma in [0, {_MAX_SIGMA:g}]; received "
        f"{self.median} and {self.sigma}."
      )

  def draw(self, rng: np.random.Generator, size: int) -> np.ndarray:
    return self.median * np.exp(self.sigma * rng.standard_normal(size))

  @property
  def mean(self) -> float:
    return self.median * math.exp(self.sigma**2 / 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distributions:
  """Independent log-normal turns, tokens per action and latencies. Episodes are cut at either limit."""

  turns: LogNormal
  tokens: LogNormal
  """Tokens per action."""
  tool_s: LogNormal
  """Seconds per call. The last action of an episode calls no tool."""
  max_turns: int
  max_tokens: int

  def draw(self, rng: np.random.Generator) -> Episode:
    turns = min(self.max_turns, max(1, round(float(self.turns.draw(rng, 1)[0]))))
    tokens = np.maximum(1, np.rint(self.tokens.draw(rng, turns)))
    total = np.cumsum(tokens)
    turns = min(turns, int(np.searchsorted(total, self.max_tokens)) + 1)
    waits = self.tool_s.draw(rng, turns - 1)
    return Episode(tokens=int(min(total[turns - 1], self.max_tokens)), turns=turns, waits_s=tuple(waits.tolist()))


@dataclasses.dataclass(frozen=True)
class Recorded:
  """Draws from recorded episodes. Trajectories do not record tool latencies, so these follow a distribution."""

  episodes: tuple[tuple[int, int], ...]
  """The `(action tokens, turns)` of each episode."""
  tool_s: LogNormal

  @classmethod
  def read(cls, path: str | os.PathLike[str], *, tool_s: LogNormal) -> Recorded:
    """Reads the episodes from a `trajectories.jsonl`."""
    recorded = tuple((t.num_actions, t.num_turns) for t in trajectory_io.read(path))
    if not recorded:
      raise ValueError(f"{path} holds no trajectory.")
    return cls(recorded, tool_s)

  def draw(self, rng: np.random.Generator) -> Episode:
    tokens, turns = self.episodes[int(rng.integers(len(self.episodes)))]
    return Episode(tokens=tokens, turns=turns, waits_s=tuple(self.tool_s.draw(rng, max(0, turns - 1)).tolist()))
