"""Advantages from rewards alone, computed on the host for algorithms without a critic.

A baseline does not contain the reward that it is subtracted from, except for the means of a group or a batch, which are
defined that way. A prompt is a `task_index`; prompts need not be known beforehand.

The arithmetic is that of `ops.baselines`, whose states have a fixed number of prompts. Here the memory is a dict, which
grows with the prompts and is plain JSON. Each call makes a state of its own prompts from the dict, updates it, and
writes it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int

from sao_jax import ops
from sao_jax.learner.config import LearnerConfig
from sao_jax.types import Trajectory

PROMPT_WINDOW = 8
GLOBAL_WINDOW = 128


@runtime_checkable
class Baselines(Protocol):
  """Computes an advantage for each trajectory of a learner step."""

  def advantages(self, trajectories: Sequence[Trajectory]) -> Float32[np.ndarray, "N"]:
    """Returns one advantage per trajectory, and remembers the rewards for later calls."""
    ...

  def state(self) -> dict[Any, Any]:
    """Returns the memory in JSON types. It is taken before every step, so it must be cheap for many prompts."""
    ...

  def restore(self, state: dict[Any, Any]) -> None:
    """Restores a memory returned by `state`, directly or read back from JSON."""
    ...


def make_baselines(config: LearnerConfig) -> Baselines | None:
  """Makes the config's baseline; None for algorithms with a critic."""
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
  """Base of baselines that need only the present batch."""

  def state(self) -> dict[Any, Any]:
    return {}

  def restore(self, state: dict[Any, Any]) -> None:
    if state:
      raise ValueError(f"{type(self).__name__} has no state to restore; received a state with {sorted(state)}.")


class GroupBaseline(_Memoryless):
  """GRPO: A = (R − mean of the group) / std of the group. Trajectories of a group share a `group_id`."""

  def __init__(self, *, normalize_std: bool) -> None:
    self._normalize_std = normalize_std

  def advantages(self, trajectories: Sequence[Trajectory]) -> Float32[np.ndarray, "N"]:
    _, ids = np.unique([t.group_id for t in trajectories], return_inverse=True)
    # The largest possible number of groups, so that a batch size has one compiled shape.
    adv = ops.group_relative_advantages(
      _rewards(trajectories),
      ids.astype(np.int32),
      num_groups=len(trajectories),
      normalize_std=self._normalize_std,
    )
    return np.asarray(adv)


class BatchMean(_Memoryless):
  """REINFORCE: A = R − mean of the batch."""

  def advantages(self, trajectories: Sequence[Trajectory]) -> Float32[np.ndarray, "N"]:
    rewards = _rewards(trajectories)
    return rewards - rewards.mean()


class RunningMeans:
  """A = R − mean of the last `window` rewards, of the same prompt or of all (arXiv 2607.07508, Section 4: 8 or 128).

  See `ops.RunningMean`. The trajectories of one call are taken in order: each sees the rewards of those before it. As
  long as no reward is remembered there is no baseline, and the advantage is 0.
  """

  def __init__(self, *, window: int, per_prompt: bool) -> None:
    self._window = window
    self._per_prompt = per_prompt
    self._memory: dict[int, tuple[float, ...]] = {}

  def advantages(self, trajectories: Sequence[Trajectory]) -> Float32[np.ndarray, "N"]:
    rewards = _rewards(trajectories)
    prompts, first, ids = _prompts([int(t.task_index) if self._per_prompt else 0 for t in trajectories])
    rows = len(rewards) if self._per_prompt else 1  # not the number of prompts: each shape is compiled
    buffers, seen = np.zeros((rows, self._window), np.float32), np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
      past = self._memory.get(prompt, ())
      buffers[row, : len(past)], seen[row] = past, len(past)
    state, values = _in_order(_update_mean, ops.RunningMean(jnp.asarray(buffers), jnp.asarray(seen)), ids, rewards)
    adv = rewards - values
    adv[first[seen[: len(prompts)] == 0]] = 0.0
    for row, prompt in enumerate(prompts):
      count = int(state.seen[row])
      # The oldest reward comes first: in a ring buffer that has wrapped around, it stands where the next one goes.
      ring = np.roll(state.rewards[row], -(count % self._window)) if count > self._window else state.rewards[row]
      self._memory[prompt] = tuple(ring[:count].tolist())
    return adv

  def state(self) -> dict[Any, Any]:
    return dict(self._memory)

  def restore(self, state: dict[Any, Any]) -> None:
    self._memory = {int(k): tuple(map(float, v))[-self._window :] for k, v in state.items()}


class SpoTracker:
  """Single-stream policy optimization (arXiv 2509.13232): a Beta tracker per prompt, advantages normalised over the
  batch.

  v = α / (α + β); α ← ρ α + R, β ← ρ β + 1 − R (`ops.ValueTracker`); A = (R − v − mean(R − v)) / std(R − v), with mean
  and std over the batch. Rewards must lie in [0, 1].

  Deviations: in the paper, ρ in [0.875, 0.96] follows from the KL divergence between visits. The host does not know it,
  so ρ is the lower bound, a memory of 8 rewards. A new prompt starts from the mean of all prompts' v (in the paper,
  from 8 samples of its own). Prompts are not re-weighted.
  """

  RHO = 0.875

  def __init__(self) -> None:
    self._memory: dict[int, tuple[float, float]] = {}

  def advantages(self, trajectories: Sequence[Trajectory]) -> Float32[np.ndarray, "N"]:
    rewards = _rewards(trajectories)
    if ((rewards < 0.0) | (rewards > 1.0)).any():
      raise ValueError(f"SPO needs rewards in [0, 1]; received values from {rewards.min()} to {rewards.max()}.")
    known = [a / (a + b) for a, b in self._memory.values()]
    start = np.full(len(rewards), np.mean(known) if known else 0.5)
    alpha, beta = (np.array(x) for x in ops.ValueTracker.init(start, rho_min=self.RHO))
    prompts, _, ids = _prompts([int(t.task_index) for t in trajectories])
    for row, prompt in enumerate(prompts):
      alpha[row], beta[row] = self._memory.get(prompt, (alpha[row], beta[row]))
    state, values = _in_order(_update_tracker, ops.ValueTracker(jnp.asarray(alpha), jnp.asarray(beta)), ids, rewards)
    for row, prompt in enumerate(prompts):
      self._memory[prompt] = (float(state.alpha[row]), float(state.beta[row]))
    raw = rewards - values
    spread = raw.std()
    return (raw - raw.mean()) / spread if spread > 0 else np.zeros_like(raw)

  def state(self) -> dict[Any, Any]:
    return dict(self._memory)

  def restore(self, state: dict[Any, Any]) -> None:
    self._memory = {int(key): (float(a), float(b)) for key, (a, b) in state.items()}


State = TypeVar("State", ops.RunningMean, ops.ValueTracker)


def _in_order(
  update: Callable[[State, jax.Array, jax.Array], State],
  state: State,
  ids: Int[np.ndarray, "N"],
  rewards: Float32[np.ndarray, "N"],
) -> tuple[State, Float32[np.ndarray, "N"]]:
  """Updates a state with rewards in order. Returns it, and for each reward the baseline from those before it."""
  done: tuple[State, Any] = jax.device_get(_scan(update, state, ids, rewards))
  return done


@functools.partial(jax.jit, static_argnums=0)
def _scan(
  update: Callable[[State, jax.Array, jax.Array], State], state: State, ids: jax.Array, rewards: jax.Array
) -> tuple[State, jax.Array]:
  def one(state: State, visit: tuple[jax.Array, jax.Array]) -> tuple[State, jax.Array]:
    prompt, reward = visit
    return update(state, prompt, reward), state.value(prompt)

  return jax.lax.scan(one, state, (ids, rewards))


def _update_mean(state: ops.RunningMean, prompt: jax.Array, reward: jax.Array) -> ops.RunningMean:
  return state.update(prompt, reward)


def _update_tracker(state: ops.ValueTracker, prompt: jax.Array, reward: jax.Array) -> ops.ValueTracker:
  return state.update(prompt, reward, 0.0, half_life=1.0, rho_min=SpoTracker.RHO, rho_max=SpoTracker.RHO)


def _prompts(tasks: Sequence[int]) -> tuple[list[int], np.ndarray, np.ndarray]:
  """Returns the distinct tasks, the index of each one's first visit, and for each visit the task's row."""
  prompts, first, ids = np.unique(tasks, return_index=True, return_inverse=True)
  return prompts.tolist(), first, ids.astype(np.int32)


def _rewards(trajectories: Sequence[Trajectory]) -> Float32[np.ndarray, "N"]:
  return np.array([t.total_reward for t in trajectories], np.float32)
