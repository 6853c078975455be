"""Advantages from rewards alone, computed on the host for algorithms without a critic.

A baseline never contains the reward it is subtracted from, except for the group's and the batch's mean, which are
defined so. Prompts are `task_index`; they need not be known beforehand. What is remembered is one small dict that
JSON can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from sao_jax.learner.config import LearnerConfig
from sao_jax.ops import advantages as advantage_ops
from sao_jax.types import Trajectory

PROMPT_WINDOW = 8
GLOBAL_WINDOW = 128


class Baselines(Protocol):
  """Turns the trajectories of one learner step into one advantage each."""

  def advantages(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """`[N]` float32; remembers the rewards for later calls."""
    ...

  def state(self) -> dict[Any, Any]:
    """What is remembered, in types that JSON can hold. Cheap for many prompts: it is taken before every step."""
    ...

  def restore(self, state: dict[Any, Any]) -> None:
    """Takes back what `state` gave, or what has become of it in JSON."""
    ...


def make_baselines(config: LearnerConfig) -> Baselines | None:
  """The config's baseline; None for algorithms with a critic, whose batches carry none."""
  if config.baseline == "group":
    return GroupBaseline(normalize_std=config.normalize_group_std)
  if config.baseline == "batch_mean":
    return BatchMean()
  if config.baseline == "running_mean":
    return RunningMeans(window=config.baseline_window or PROMPT_WINDOW, per_prompt=True)
  if config.baseline == "global_running_mean":
    return RunningMeans(window=config.baseline_window or GLOBAL_WINDOW, per_prompt=False)
  if config.baseline == "spo":
    return SpoTracker()
  return None


class _Memoryless:
  """What baselines of one batch share: nothing to remember."""

  def state(self) -> dict[Any, Any]:
    return {}

  def restore(self, state: dict[Any, Any]) -> None:
    if state:
      raise ValueError(f"{type(self).__name__} remembers nothing; received a state with {sorted(state)}.")


class GroupBaseline(_Memoryless):
  """GRPO: (R - mean of the group) / std of the group; a group is all trajectories of one `group_id`."""

  def __init__(self, *, normalize_std: bool) -> None:
    self._normalize_std = normalize_std

  def advantages(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
    _, ids = np.unique([t.group_id for t in trajectories], return_inverse=True)
    # As many groups as could be: one compiled shape for every batch size.
    adv = advantage_ops.group_relative_advantages(
      _rewards(trajectories),
      ids.astype(np.int32),
      num_groups=len(trajectories),
      normalize_std=self._normalize_std,
    )
    return np.asarray(adv)


class BatchMean(_Memoryless):
  """REINFORCE: R - mean of the batch."""

  def advantages(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
    rewards = _rewards(trajectories)
    return rewards - rewards.mean()


class RunningMeans:
  """R - mean of the last `window` rewards, of the same prompt or of all (METHOD, baselines; windows 8 and 128).

  Trajectories of one call are taken in order, each seeing those before it. Where nothing is remembered yet the
  advantage is 0: without a baseline a reward says nothing.
  """

  def __init__(self, *, window: int, per_prompt: bool) -> None:
    self._window = window
    self._per_prompt = per_prompt
    self._memory: dict[int, tuple[float, ...]] = {}

  def advantages(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
    out = np.zeros(len(trajectories), np.float32)
    for i, reward in enumerate(_rewards(trajectories)):
      key = int(trajectories[i].task_index) if self._per_prompt else 0  # NumPy's ints are no keys in JSON
      remembered = self._memory.get(key, ())
      if remembered:
        out[i] = reward - sum(remembered) / len(remembered)
      self._memory[key] = (*remembered, float(reward))[-self._window :]
    return out

  def state(self) -> dict[Any, Any]:
    return dict(self._memory)

  def restore(self, state: dict[Any, Any]) -> None:
    self._memory = {int(k): tuple(map(float, v))[-self._window :] for k, v in state.items()}


class SpoTracker:
  """Single-stream policy optimization (arXiv 2509.13232): a Beta tracker per prompt, advantages normalised over the
  batch.

  v = a / (a + b); a <- rho a + R, b <- rho b + 1 - R; A = (R - v) / std over the batch, less its mean.
  Rewards must lie in [0, 1].

  Deviations: the paper forgets by the KL divergence between visits (rho in [0.875, 0.96]); the host does not know
  that, so rho is its lower bound, a memory of 8 rewards. A new prompt starts from the mean of all prompts' v (the
  paper: from 8 samples of its own). Prompts are not re-weighted.
  """

  RHO = 0.875

  def __init__(self) -> None:
    self._memory: dict[int, tuple[float, float]] = {}

  def advantages(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
    rewards = _rewards(trajectories)
    if ((rewards < 0.0) | (rewards > 1.0)).any():
      raise ValueError(f"SPO needs rewards in [0, 1]; received values from {rewards.min()} to {rewards.max()}.")
    known = [a / (a + b) for a, b in self._memory.values()]
    start = float(np.mean(known)) if known else 0.5
    weight = 1.0 / (1.0 - self.RHO)
    raw = np.zeros(len(trajectories), np.float32)
    for i, reward in enumerate(rewards):
      task = int(trajectories[i].task_index)
      a, b = self._memory.get(task, (weight * start, weight * (1.0 - start)))
      raw[i] = reward - a / (a + b)
      self._memory[task] = (self.RHO * a + float(reward), self.RHO * b + 1.0 - float(reward))
    spread = raw.std()
    return (raw - raw.mean()) / spread if spread > 0 else np.zeros_like(raw)

  def state(self) -> dict[Any, Any]:
    return dict(self._memory)

  def restore(self, state: dict[Any, Any]) -> None:
    self._memory = {int(key): (float(a), float(b)) for key, (a, b) in state.items()}


def _rewards(trajectories: Sequence[Trajectory]) -> np.ndarray:
  return np.array([t.total_reward for t in trajectories], np.float32)
