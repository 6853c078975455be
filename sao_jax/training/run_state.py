"""Everything that a resume needs, and how it is saved: the learner's state, and the host's state beside it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from sao_jax.io import trajectory_arrays
from sao_jax.io.checkpoints import Checkpointer
from sao_jax.learner import LearnerState
from sao_jax.rollout.schedules import RolloutSchedule
from sao_jax.rollout.weight_sync import WeightSync
from sao_jax.training.components import Components
from sao_jax.training.health import HealthCheck
from sao_jax.training.metrics import StepMetrics
from sao_jax.training.signals import RetryLater
from sao_jax.types import Params


@dataclasses.dataclass(frozen=True)
class RunState:
  """Host state needed to resume, and its checkpoints."""

  parts: Components
  schedule: RolloutSchedule
  weights: WeightSync
  metrics: StepMetrics
  health: HealthCheck
  checkpointer: Checkpointer

  def restore(self) -> tuple[int, LearnerState] | None:
    """Restores the newest checkpoint and returns `(step, learner state)`; None where there is no checkpoint.

    Raises:
      ValueError: an asynchronous run was saved by another number of processes.
    """
    restored = self.checkpointer.restore(checkpoint_template(self.parts))
    if restored is None:
      return None
    host, waiting = restored.host, trajectory_arrays.from_arrays(restored.host_arrays)
    saved_by, now = host["processes"], jax.process_count()
    if self.parts.config.schedule == "async" and saved_by != now:
      raise ValueError(f"An asynchronous run resumes with the {saved_by} processes that saved it; received {now}.")
    self.schedule.restore(host["schedule"], waiting)
    self.weights.restore(list(zip(restored.state["old_weights"], host["old_versions"], strict=True)))
    self.metrics.restore(host["metrics"])
    self.health.restore(host["health"])
    if self.parts.baselines is not None:
      self.parts.baselines.restore(host["baselines"])
    return restored.step, restored.state["learner"]

  def save(
    self, step: int, state: LearnerState, *, metric: float | None = None, baselines: dict[str, Any] | None = None
  ) -> None:
    """Starts to write a checkpoint; the arrays are copied before this returns. Does nothing if it exists already.

    Args:
      step: learner steps done.
      state: the learner's state after them.
      metric: decides which checkpoints are best; None: this one is not compared.
      baselines: the state of the baselines at that step; None: their present state.
    """
    self.checkpointer.wait()
    if step in self.checkpointer.steps():
      return
    schedule, waiting = self.schedule.state(step)
    older = self.weights.older()
    host = {
      "processes": jax.process_count(),
      "schedule": schedule,
      "waiting": [trajectory.episode_id for trajectory in waiting],
      "old_versions": [version for _, version in older],
      "metrics": self.metrics.state(),
      "health": self.health.state(),
      "baselines": self._baselines() if baselines is None else baselines,
    }
    placement = self.parts.placement
    tree = _checkpoint_tree(state, [placement.for_checkpoint(params, state.policy) for params, _ in older])
    host_arrays = trajectory_arrays.to_arrays(waiting)
    # Several processes write their shards together, with barriers that are programs on the devices.
    with self.parts.placement.dispatching() if jax.process_count() > 1 else contextlib.nullcontext():
      self.checkpointer.save(step, tree, host, host_arrays=host_arrays, metric=metric)

  def save_and_wait(self, step: int, state: LearnerState) -> None:
    """Writes a checkpoint, and returns when it is complete."""
    self.save(step, state)
    self.checkpointer.wait()

  def emergency_checkpoint(self, step: int, state: LearnerState) -> Callable[[], None]:
    """Returns a callback that writes a checkpoint of `state` while another thread is in the next learner step.

    Call this before the batch of that step is packed. The callback works until the step is on the device: `state` is
    donated to it then, and the callback raises `RetryLater`. A checkpoint that it writes is consistent, because all of
    `state` is copied last.
    """
    baselines = self._baselines()

    def save() -> None:
      if _any_deleted(state):
        raise RetryLater
      try:
        self.save(step, state, baselines=baselines)
      except RuntimeError as error:
        if _any_deleted(state):
          raise RetryLater from error
        raise
      self.checkpointer.wait()

    return save

  def _baselines(self) -> dict[str, Any] | None:
    return None if self.parts.baselines is None else self.parts.baselines.state()


def checkpoint_template(parts: Components) -> dict[str, Any]:
  """Shapes and shardings of a checkpoint of this run, for `Checkpointer.restore`."""
  state = parts.state_shapes()
  return _checkpoint_tree(state, [state.policy] * parts.config.lag)


def _checkpoint_tree(state: LearnerState, old_weights: list[Params]) -> dict[str, Any]:
  return {"learner": state, "old_weights": old_weights}


def _any_deleted(tree: Any) -> bool:
  return any(leaf.is_deleted() for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
