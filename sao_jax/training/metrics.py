"""Metrics of the training loop: one row per learner step, and the files with these rows."""

from __future__ import annotations

import collections
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.io import trajectories as trajectory_io
from sao_jax.io.loggers import MetricsLogger
from sao_jax.io.metrics import MetricsWriter
from sao_jax.parallel.distributed import is_main_process
from sao_jax.rollout.failures import check_share_between, new_failures
from sao_jax.rollout.schedules import RolloutSchedule
from sao_jax.training.components import Components
from sao_jax.training.placement import Placement
from sao_jax.types import Trajectory


class StepMetrics:
  """Rows of `metrics.jsonl`: one per learner step. Each row covers the time since the previous row.

  Args:
    parts: components of the run, for the engines' counters.
  """

  def __init__(self, parts: Components):
    self._read_counters = parts.rollout_counters
    self._seconds_before = 0.0
    self._failed_before = collections.Counter[str]()
    self._failed_at_start = collections.Counter[str]()
    self._counts_at_start: Mapping[str, Any] = {}
    self._began = self._last = self._learner_began = time.monotonic()
    self._ended: float | None = None
    self._counts: Mapping[str, Any] = {}

  def start(self) -> None:
    """Starts the clock."""
    self._began = self._last = time.monotonic()
    self._counts = self._counts_at_start = self._read_counters()
    self._failed_at_start = collections.Counter(self._counts["failed_by_kind"])

  def stop(self) -> None:
    """Stops the clock and the counts."""
    self._ended = time.monotonic()
    self._counts = self._read_counters()

  def batch_received(self) -> None:
    """Marks the start of the learner's work, which lasts until the next row."""
    self._learner_began = time.monotonic()

  def evaluated(self, seconds: float, failed: int) -> dict[str, int]:
    """Leaves an evaluation between two learner steps out of the RL's time, rates and failed episodes.

    Args:
      seconds: its duration; it has just ended.
      failed: its failed episodes.

    Returns:
      Its failures by kind. If training episodes failed at the same time, the most frequent kinds are taken first.
    """
    before = self._counts
    self._began += seconds
    self._last, self._counts = time.monotonic(), self._read_counters()
    by_kind: dict[str, int] = {}
    for kind, count in new_failures(before, self._counts).most_common():
      by_kind[kind] = min(count, failed - sum(by_kind.values()))
    self._failed_at_start.update(by_kind)
    return +collections.Counter(by_kind)

  @property
  def seconds(self) -> float:
    """Seconds of RL so far, including earlier runs in the workdir."""
    return self._seconds_before + (self._ended or time.monotonic()) - self._began

  def failures(self) -> dict[str, Any]:
    """Returns the number of episodes that failed in RL, in all and by kind, including earlier runs in the workdir.

    Those of value pretraining and of evaluations are not among them.
    """
    by_kind = self._failed_by_kind()
    return {"failed_episodes": sum(by_kind.values()), "failed_by_kind": by_kind}

  def check_failures(self, max_share: float) -> None:
    """Raises `TooManyFailuresError` if too large a share failed of all episodes from `start` to `stop`.

    The engine looks only at many recent episodes; a short run has fewer. Evaluations between the learner steps count
    too. Episodes of earlier runs in the workdir do not, so that a run can go on once their cause is gone.

    Args:
      max_share: `EngineConfig.max_failed_share`, in [0, 1].
    """
    what = "episodes of RL in which the environment was called failed. The policy is saved."
    check_share_between(self._counts_at_start, self._counts, max_share, what)

  def _failed_by_kind(self) -> dict[str, int]:
    """Failures until the engines' counters were last read."""
    here = collections.Counter(self._counts["failed_by_kind"]) - self._failed_at_start
    return dict(self._failed_before + here)

  def row(
    self, step: int, trajectories: Sequence[Trajectory], report: Mapping[str, Any], schedule: RolloutSchedule
  ) -> dict[str, float | int]:
    """Returns the metrics row of a learner step, whose batch was used at policy version `step - 1`.

    Args:
      step: the learner step, from 1.
      trajectories: the batch.
      report: metrics of the learner step, on the host.
      schedule: for its counters.
    """
    now = time.monotonic()
    counts = self._read_counters()
    elapsed = max(now - self._last, 1e-9)
    rate = {key: counts[key] - self._counts[key] for key in ("tokens_generated", "busy_seconds")}
    self._last, self._counts = now, counts
    failed = self._failed_by_kind()
    staleness = np.array([step - 1 - x.oldest_version for x in trajectories])
    rewards = np.array([x.total_reward for x in trajectories])
    row: dict[str, float | int] = {
      "policy_version": step,
      "time_s": self.seconds,
      "reward_mean": float(rewards.mean()),
      "reward_std": float(rewards.std()),
      "success_rate": float(np.mean([x.success for x in trajectories])),
      "trajectories": len(trajectories),
      "turns_mean": float(np.mean([x.num_turns for x in trajectories])),
      "tokens_mean": float(np.mean([x.tokens.size for x in trajectories])),
      "observation_fraction": _observation_fraction(trajectories),
      "truncated_fraction": float(np.mean([x.ended == "truncated" for x in trajectories])),
      "staleness_mean": float(staleness.mean()),
      "staleness_max": int(staleness.max()),
      "mixed_version_fraction": float(np.mean([x.mixed_versions for x in trajectories])),
      **{key: float(value) for key, value in report.items()},
      **schedule.counters(),
      "failed_episodes": sum(failed.values()),
      **{f"failed/{kind}": count for kind, count in failed.items()},
      **environment_numbers(trajectories),
      "rollout_tokens_per_s": rate["tokens_generated"] / elapsed,
      "learner_busy_fraction": (now - self._learner_began) / elapsed,
      "engine_busy_fraction": rate["busy_seconds"] / elapsed,
    }
    row["action_tokens"] = sum(x.num_actions for x in trajectories)
    return row

  def note(self, row: Mapping[str, float | int]) -> str:
    """Formats a row as the console's one-line summary. The reward is shown where it differs from success."""
    same = abs(row["reward_mean"] - row["success_rate"]) < 1e-6
    reward = "" if same else f"reward {row['reward_mean']:.3g}  "
    failed = f"  failed {row['failed_episodes']}" if row["failed_episodes"] else ""
    return (
      f"{reward}success {row['success_rate']:.2f}  turns {row['turns_mean']:.1f}  "
      f"staleness {row['staleness_mean']:.1f}  "
      f"masked {row['dis_masked_fraction']:.2%}  EV {row['explained_variance']:.2f}  "
      f"{row['rollout_tokens_per_s']:.0f} tok/s{failed}"
    )

  def state(self) -> dict[str, Any]:
    return {"seconds": self.seconds, "failed_by_kind": self._failed_by_kind()}

  def restore(self, state: Mapping[str, Any]) -> None:
    self._seconds_before = float(state["seconds"])
    # Version 0.3 saved only their number.
    by_kind = state.get("failed_by_kind", {"unknown": state.get("failed_episodes", 0)})
    self._failed_before = +collections.Counter({kind: int(count) for kind, count in by_kind.items()})


def environment_numbers(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """Means of the environments' own numbers, each over the trajectories that have it.

  Returns:
    `env/NAME` by name, and `reward/NAME` for names that begin so: the parts of a reward.
  """
  values = collections.defaultdict[str, list[float]](list)
  for trajectory in trajectories:
    for name, value in trajectory.info.items():
      values[name if name.startswith("reward/") else f"env/{name}"].append(value)
  return {name: float(np.mean(numbers)) for name, numbers in sorted(values.items())}


def _observation_fraction(trajectories: Sequence[Trajectory]) -> float:
  """Share of observation tokens among the tokens after the prompts: those that skip-observation GAE skips."""
  after_prompt = sum(x.tokens.size - int(np.argmax(x.action_mask)) for x in trajectories)
  return 1.0 - sum(x.num_actions for x in trajectories) / after_prompt


class RunLog:
  """Log files of a run: metrics, and a sample of trajectories. Only the main process writes.

  Args:
    workdir: the run's folder.
    restored_step: see `io.metrics.MetricsWriter`.
    placement: sends results of the main process to the others.
    loggers: see `io.metrics.MetricsWriter`.
  """

  def __init__(
    self, workdir: pathlib.Path, *, restored_step: int, placement: Placement, loggers: Sequence[MetricsLogger] = ()
  ):
    self._placement = placement
    self._metrics: MetricsWriter | None = None
    self._samples: trajectory_io.TrajectoryWriter | None = None
    if is_main_process():
      self._metrics = MetricsWriter(workdir, restored_step=restored_step, loggers=loggers)
      self._samples = trajectory_io.TrajectoryWriter(workdir, restored_step=restored_step)

  def evaluated(self, step: int) -> bool:
    """Whether the evaluation after `step` is already written; every process must call it."""
    found = self._metrics is not None and self._metrics.has_evaluation(step)
    return bool(self._placement.exchange(found)[0])

  def step(self, step: int, row: Mapping[str, Any]) -> None:
    if self._metrics is not None:
      self._metrics.write(step, row)

  def evaluation(self, step: int, **values: Any) -> None:
    if self._metrics is not None:
      self._metrics.write_evaluation(step, **values)

  def samples(self, step: int, trajectories: Sequence[Trajectory]) -> None:
    if self._samples is not None:
      self._samples.write(step, trajectories)

  def close(self) -> None:
    for writer in (self._metrics, self._samples):
      if writer is not None:
        writer.close()
