"""Abnormal loads for `experiments.soak`: environments that are slow, stall or misbehave."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator, Mapping

import numpy as np

from experiments.tasks.digits import DigitsTokenizer
from sao_jax.types import Domain, Environment, Split, Step

LONG_EPISODE = 100
"""Number of the long episode. Others are running when it starts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
  """A kind of abnormal load. Times are in seconds and hold for the whole run unless stated otherwise."""

  learner_s: float = 0.0
  """Additional time of every learner step."""
  tool_s: float = 0.002
  """Time of every step of an environment."""
  slow_share: float = 0.0
  """Share of the episodes whose last step takes `--slow_tool_s`."""
  long_turns: int = 0
  """Number of turns of one episode; all others then have one turn."""
  faults: bool = False
  """Some environments raise, hang, flood or return nonsense."""
  stalls: bool = False
  """All tools stop for `--stall_s` every `--stall_every_s`."""
  episodes: int | None = None
  """The run ends after training on this many trajectories; None to end after `--minutes`."""
  max_len: int = 32


SCENARIOS: Mapping[str, Scenario] = {
  "slow_learner": Scenario(learner_s=0.5),
  "slow_rollouts": Scenario(tool_s=0.1),
  "short_episodes": Scenario(tool_s=0.0, episodes=10_000),
  "long_episode": Scenario(long_turns=1000, max_len=2560),
  "slow_tool": Scenario(slow_share=0.03),
  "stall": Scenario(stalls=True),
  "mixed": Scenario(learner_s=0.2, tool_s=0.02, slow_share=0.01, faults=True, stalls=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
  """The lengths of the run and of delays."""

  minutes: float
  slow_tool_s: float
  stall_every_s: float
  stall_s: float
  env_timeout_s: float


class Clock:
  """Measures time from the first episode on, which excludes compilation, and counts episodes and hanging calls."""

  def __init__(self) -> None:
    self.began: float | None = None
    self._episodes = itertools.count()
    self._lock = threading.Lock()
    self.timed_out = 0
    """Number of calls that now hang beyond `env_timeout_s`. Each holds a thread that cannot be ended."""

  @contextlib.contextmanager
  def hangs(self) -> Iterator[None]:
    """Counts the block as a call that hangs beyond its timeout."""
    with self._lock:
      self.timed_out += 1
    try:
      yield
    finally:
      with self._lock:
        self.timed_out -= 1

  def episode(self) -> int:
    """Returns the number of a starting episode, from 0."""
    self.began = self.began or time.monotonic()
    return next(self._episodes)

  @property
  def seconds(self) -> float:
    return 0.0 if self.began is None else time.monotonic() - self.began


class OverloadEnv(Environment):
  """Answers `w` to every action until its task's number of turns is reached. Misbehaves as the scenario says."""

  def __init__(self, scenario: Scenario, times: Times, clock: Clock):
    self._scenario, self._times, self._clock = scenario, times, clock
    self._turns_left, self._last_s, self._fault = 0, 0.0, ""

  def reset(self, task_index: int) -> str:
    number = self._clock.episode()
    rng = np.random.default_rng(task_index)
    scenario = self._scenario
    self._turns_left = int(rng.integers(1, 4))
    if scenario.long_turns or scenario.episodes is not None:
      self._turns_left = scenario.long_turns if scenario.long_turns and number == LONG_EPISODE else 1
    self._last_s = self._times.slow_tool_s if rng.random() < scenario.slow_share else scenario.tool_s
    faults = ("raise", "flood", "nonsense", "hang")
    self._fault = str(rng.choice(faults, p=(0.3, 0.3, 0.3, 0.1))) if scenario.faults and rng.random() < 0.04 else ""
    if self._fault == "raise" and rng.random() < 0.5:
      raise ConnectionError("the tool server does not answer")
    return f"?{task_index % 10}"

  def step(self, action: str) -> Step:
    self._turns_left -= 1
    done = self._turns_left == 0
    time.sleep(self._last_s if done else self._scenario.tool_s)
    if self._scenario.stalls and self._clock.seconds > self._times.stall_every_s:
      time.sleep(max(0.0, self._times.stall_s - self._clock.seconds % self._times.stall_every_s))
    if self._fault == "raise":
      raise RuntimeError("the tool died")
    if self._fault == "flood":
      return Step(observation="w" * 3_000_000)
    if self._fault == "hang":
      time.sleep(self._times.env_timeout_s)
      with self._clock.hangs():
        time.sleep(self._times.env_timeout_s)
    reward = float("nan") if self._fault == "nonsense" else float(action.startswith(";"))
    return Step(observation="" if done else "w", reward=reward, done=done)

  def close(self) -> None:
    """Does nothing: there are no resources."""


def make_domain(scenario: Scenario, times: Times, clock: Clock) -> Domain:
  """Makes the domain. Demonstrations always say `;`, so that episodes take the number of turns of their task."""

  def make_env(split: Split) -> OverloadEnv:
    return OverloadEnv(scenario, times, clock)

  def demonstrate(task_index: int, rng: np.random.Generator) -> list[tuple[str, bool]]:
    turns = [(";", True), ("w", False)] * int(rng.integers(1, 4))
    return [(f"?{task_index % 10}", False), *turns[:-1]]

  return Domain(
    make_env=make_env, tokenizer=DigitsTokenizer(), num_train_tasks=1_000_000, num_eval_tasks=1, demonstrate=demonstrate
  )
