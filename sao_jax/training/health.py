"""Health checks of learning: skipped updates, whose batches are kept, the engine's log-probs, a diverging critic."""

from __future__ import annotations

import collections
import logging
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sao_jax.io import bad_batches
from sao_jax.learner import LearnerState, make_diagnosis
from sao_jax.learner.diagnosis import Diagnosis
from sao_jax.models import lora
from sao_jax.parallel.distributed import is_main_process
from sao_jax.training.components import Components
from sao_jax.training.config import max_logprob_error
from sao_jax.types import Trajectory

_WINDOW = 8
"""Learner steps over which the critic's error is averaged."""
_DIVERGED = 4.0
"""The critic diverges if its mean squared error exceeds this multiple of the largest mean squared return. A constant
value of 0 would then be at least four times better."""
_LOGPROB_TOKENS = 32
"""Number of tokens from which a step's `logprob_error` counts."""
_LOGPROB_STEPS = 2
"""Number of steps in a row that must exceed the bound. A single one may be due to a prompt whose keys and values are
those of older weights (`engine.recompute_cache_on_update`)."""

_log = logging.getLogger(__name__)


class RunStoppedError(RuntimeError):
  """The run cannot continue without a change. Its state is saved."""


class HealthCheck:
  """Health checks of every learner step. The warm start, which fetches few reports, uses `SkippedUpdates` instead.

  An update is skipped if a loss, gradient, log-prob, value, return or advantage is not finite. The batch of such a step
  is written to `<workdir>/bad_batches/`. `check` stops the run after `RunConfig.max_skipped_in_a_row` of them in a row.

  The metric `critic_error_ratio` is the critic's squared error on batches before it was trained on them, averaged over
  the last `_WINDOW` steps, divided by the largest mean squared return of any such window so far. Near 1, the critic is
  no better than a constant 0. Above 4 it diverges, which is logged once until the ratio falls below 2.

  `check` also stops the run if the engine's log-probs differ from the learner's although both had the same weights, by
  more than `RunConfig.max_logprob_error` in two such steps in a row. The engine then samples with other weights, in
  another dtype or at another temperature, and what is learned is wrong.

  Args:
    parts: components of the run.
    workdir: folder for bad batches.
  """

  def __init__(self, parts: Components, workdir: pathlib.Path):
    self._parts = parts
    self._workdir = workdir
    self._diagnose: Diagnosis | None = None
    self._skipped_before = 0
    self._in_a_row = 0
    self._last_report: pathlib.Path | None = None
    self._errors = collections.deque[float](maxlen=_WINDOW)
    self._squares = collections.deque[float](maxlen=_WINDOW)
    self._scale = 0.0
    self._diverged = False
    self._disagreeing: list[float] = []
    """`logprob_error` of the last steps, as far as they exceeded the bound."""

  def record(
    self, step: int, state: LearnerState, trajectories: Sequence[Trajectory], report: Mapping[str, Any]
  ) -> dict[str, float]:
    """Records a learner step and returns its health metrics.

    Args:
      step: the learner step, from 1.
      state: learner state after the step.
      trajectories: batch of the step.
      report: metrics of the step, on the host.

    Returns:
      `skipped_in_a_row` and `critic_error_ratio` (NaN until there are enough steps and a reward).
    """
    skipped = {name: int(report[f"skipped_{name}_nonfinite"]) for name in ("policy", "critic")}
    if sum(skipped.values()) > self._skipped_before:
      self._in_a_row += 1
      self._keep(step, state, trajectories, report)
    else:
      self._in_a_row = 0
    self._skipped_before = sum(skipped.values())
    self._record_agreement(report)
    return {"skipped_in_a_row": self._in_a_row, "critic_error_ratio": self._critic_error(step, report)}

  @property
  def must_stop(self) -> bool:
    """Whether `check` will raise."""
    return self._too_many_skipped or len(self._disagreeing) >= _LOGPROB_STEPS

  @property
  def _too_many_skipped(self) -> bool:
    limit = self._parts.config.max_skipped_in_a_row
    return bool(limit) and self._in_a_row >= limit

  def check(self) -> None:
    """Raises `RunStoppedError` after too many skipped updates in a row, or if the engine's log-probs are wrong."""
    limit = self._parts.config.max_skipped_in_a_row
    if len(self._disagreeing) >= _LOGPROB_STEPS:
      found = ", ".join(f"{error:.3g}" for error in self._disagreeing)
      raise RunStoppedError(
        f"The engine's log-probs differ from the learner's although both had the same weights: by {found} on average "
        f"in the last learner steps; allowed: {max_logprob_error(self._parts.config):g} (max_logprob_error). The "
        "engine samples with other weights, in another dtype or at another temperature than the learner scores."
      )
    if self._too_many_skipped:
      raise RunStoppedError(
        f"The last {self._in_a_row} learner steps skipped an update because a value was not finite "
        f"(max_skipped_in_a_row = {limit}). {self._last_report} and the reports next to it list the values and "
        "trajectories."
      )

  def state(self) -> dict[str, Any]:
    """Host state needed to resume, as JSON values."""
    return {
      "skipped_before": self._skipped_before, "in_a_row": self._in_a_row, "errors": list(self._errors),
      "squares": list(self._squares), "scale": self._scale, "diverged": self._diverged,
    }  # fmt: skip

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues from `state()`. If the run was stopped for skipped steps, their count restarts at 0."""
    self._skipped_before = int(state["skipped_before"])
    limit = self._parts.config.max_skipped_in_a_row
    self._in_a_row = 0 if limit and state["in_a_row"] >= limit else int(state["in_a_row"])
    self._errors.extend(state["errors"])
    self._squares.extend(state["squares"])
    self._scale = float(state["scale"])
    self._diverged = bool(state["diverged"])

  def _keep(
    self, step: int, state: LearnerState, trajectories: Sequence[Trajectory], report: Mapping[str, Any]
  ) -> None:
    parts = self._parts
    if self._diagnose is None:
      frozen: dict[str, Any] = {"base": parts.base, "join": lora.join} if parts.config.lora.enabled else {}
      self._diagnose = make_diagnosis(parts.learner, parts.policy_apply, parts.value_apply, **frozen)
    with parts.placement.dispatching():
      found = self._diagnose(state, trajectories)
    bad = [
      {"episode_id": trajectory.episode_id, "nonfinite": names}
      for trajectory, names in zip(trajectories, found, strict=True)
      if names
    ]
    nonfinite = sorted({name for names in found for name in names}) or ["only sums over the whole batch"]
    summary = {
      "nonfinite": nonfinite,
      "trajectories": bad,
      "metrics": {key: _json_number(float(value)) for key, value in report.items()},
    }
    self._last_report = bad_batches.report_path(self._workdir, step)
    if is_main_process():  # every process has the whole batch
      bad_batches.write(self._workdir, step, trajectories, summary)
    message = "Step %d skipped an update: %s not finite in %d of %d trajectories; the batch is kept, see %s"
    _log.warning(message, step, ", ".join(nonfinite), len(bad), len(trajectories), self._last_report)

  def _record_agreement(self, report: Mapping[str, Any]) -> None:
    """Counts the steps in a row whose `logprob_error` is too large; a step with few tokens of its version is passed."""
    if float(report.get("logprob_error_tokens", 0.0)) < _LOGPROB_TOKENS:
      return
    error = float(report["logprob_error"])
    if error > max_logprob_error(self._parts.config):
      self._disagreeing.append(error)
    else:
      self._disagreeing.clear()

  def _critic_error(self, step: int, report: Mapping[str, Any]) -> float:
    error, square = float(report["value_loss"]), float(report["returns_square_mean"])
    if math.isfinite(error) and math.isfinite(square):
      self._errors.append(error)
      self._squares.append(square)
    if len(self._errors) < _WINDOW:
      return math.nan
    self._scale = max(self._scale, float(np.mean(self._squares)))
    if self._scale == 0.0:
      return math.nan  # no reward so far: nothing to compare with
    ratio = float(np.mean(self._errors)) / self._scale
    if ratio > _DIVERGED and not self._diverged:
      message = (
        "The critic diverges: at step %d its mean squared error over %d steps is %.3g times the largest mean squared "
        "return. A lower critic learning rate, a longer warm-up or more value pretraining may help."
      )
      _log.warning(message, step, _WINDOW, ratio)
    self._diverged = ratio > (_DIVERGED / 2 if self._diverged else _DIVERGED)
    return ratio


def _json_number(value: float) -> float | str:
  """Converts NaN and infinities, which strict JSON lacks, to text."""
  return value if math.isfinite(value) else str(value)


class SkippedUpdates:
  """Health check of a warm start: stops it if it skips every update.

  Reading the number of skipped updates waits for the device, so it is read only at intervals. (`HealthCheck`, for the
  other stages, has the report and the batch of every step, and counts each skipped step.) So only intervals in which
  every update was skipped count. Demonstrations are not kept, since the task can make them again.

  Args:
    limit: `RunConfig.max_skipped_in_a_row`.
    step: number of updates so far.
    skipped: number of skipped updates among them.
  """

  def __init__(self, limit: int, step: int, skipped: int):
    self._limit = limit
    self._seen = step, skipped
    self._in_a_row = 0

  def record(self, step: int, skipped: int) -> None:
    """Records the number of skipped updates until `step`."""
    new, all_new = skipped - self._seen[1], step - self._seen[0]
    self._in_a_row = self._in_a_row + new if new == all_new else 0
    self._seen = step, skipped

  @property
  def must_stop(self) -> bool:
    """Whether `check` will raise."""
    return bool(self._limit) and self._in_a_row >= self._limit

  def check(self) -> None:
    """Raises `RunStoppedError` after too many skipped updates in a row."""
    if self.must_stop:
      raise RunStoppedError(
        f"The last {self._in_a_row} updates of the warm start were skipped: loss or gradient were not finite, or the "
        f"demonstrations have no action token (max_skipped_in_a_row = {self._limit})."
      )
