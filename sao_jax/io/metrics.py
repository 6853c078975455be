"""Metrics of a run: `metrics.jsonl`, one row per learner step, and the same numbers in `loggers`."""

from __future__ import annotations

import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from sao_jax.io import jsonl
from sao_jax.io.loggers import MetricsLogger, TensorBoardLogger

LEARNER_KEYS = (
  "step", "policy_version", "time_s", "reward_mean", "success_rate", "trajectories", "action_tokens", "staleness_mean",
  "staleness_max", "mixed_version_fraction", "dis_masked_fraction", "dis_masked_low", "dis_masked_high", "ratio_mean",
  "approx_kl", "policy_loss", "policy_grad_norm", "entropy", "value_loss", "critic_grad_norm", "explained_variance",
  "lambda_policy_mean", "advantage_mean", "advantage_std", "queue_size", "dropped_stale", "failed_episodes",
  "rollout_tokens_per_s", "learner_busy_fraction", "engine_busy_fraction",
)  # fmt: skip
"""Keys that every learner row has."""


class MetricsWriter:
  """Writes learner and evaluation rows immediately, one line each; on resume, continues without gaps or duplicates.

  A learner row has `LEARNER_KEYS`. An evaluation row has `step` (0 before the first learner step),
  `eval_success_rate` and `eval_n`; there is at most one per step. NaN and infinities become null, as JSON lacks them.
  """

  def __init__(
    self, workdir: str | os.PathLike[str], *, restored_step: int = 0, loggers: Sequence[MetricsLogger] = ()
  ) -> None:
    """Opens the files.

    Args:
      workdir: the run's folder; must exist.
      restored_step: the learner step of the restored checkpoint, 0 for a new run. Later rows, which a killed run wrote,
        are dropped: the resumed run writes them again.
      loggers: further places for the rows, besides TensorBoard's event files. The caller closes them.
    """
    path = pathlib.Path(workdir) / "metrics.jsonl"
    kept = jsonl.cut_after_step(path, restored_step)
    self._evaluated = {row["step"] for row in kept if "eval_n" in row}
    steps = [row["step"] for row in kept if "eval_n" not in row]
    if steps != list(range(1, restored_step + 1)):
      # Rows are written before their checkpoint, so only a power failure or an edit of the file leads here.
      logging.warning("%s: expected rows of steps 1 to %d, found %d rows.", path, restored_step, len(steps))
    self._last_step = restored_step
    self._file = jsonl.JsonlFile(path)
    self._board = TensorBoardLogger(workdir, restored_step=restored_step)
    self._loggers = (self._board, *loggers)

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes the row of learner step `step` (1, 2, ...).

    Args:
      step: the learner step.
      values: Python, NumPy or jax scalars by key, with all of `LEARNER_KEYS` except `step`.

    Raises:
      ValueError: `step` is not the next one, a key is missing, or a value is not a scalar.
    """
    if step != self._last_step + 1:
      raise ValueError(f"step must be {self._last_step + 1}, the next one; received {step}.")
    if missing := [key for key in LEARNER_KEYS[1:] if key not in values]:
      raise ValueError(f"Metrics of step {step} lack {missing}.")
    self._emit(step, values)
    self._last_step = step

  def has_evaluation(self, step: int) -> bool:
    """Returns whether the evaluation after `step` is already written, for example by the run that this one resumes."""
    return step in self._evaluated

  def write_evaluation(self, step: int, *, success_rate: float, n: int, **more: float) -> None:
    """Writes the evaluation of the policy after learner step `step`.

    Args:
      step: number of learner steps before the evaluation.
      success_rate: fraction of the `n` held-out episodes that succeeded.
      n: number of episodes.
      **more: further scalars, for example the ends of a confidence interval.

    Raises:
      ValueError: the evaluation of `step` is already written.
    """
    if step in self._evaluated:
      raise ValueError(f"The evaluation of step {step} is already written.")
    self._emit(step, {"eval_success_rate": success_rate, "eval_n": n, **more})
    self._evaluated.add(step)

  def _emit(self, step: int, values: Mapping[str, Any]) -> None:
    row = {"step": step} | {key: _scalar(key, value) for key, value in values.items() if key != "step"}
    self._file.append({key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()})
    del row["step"]
    for logger in self._loggers:
      logger.write(step, row)

  def close(self) -> None:
    try:
      self._file.close()
    finally:
      self._board.close()

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


def read_metrics(workdir: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Reads a workdir's `metrics.jsonl`, even while the run is writing it.

  Returns:
    `(learner rows, evaluation rows)`; null becomes NaN.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: a line is malformed; the message holds its number.
  """
  learner: list[dict[str, Any]] = []
  evaluation: list[dict[str, Any]] = []
  path = pathlib.Path(workdir) / "metrics.jsonl"
  if not path.is_file():
    raise FileNotFoundError(f"workdir must be the folder of a run; {os.fspath(workdir)!r} holds no metrics.jsonl.")
  for number, row in jsonl.read_rows(path):
    jsonl.check_step(path, number, row)
    for key, value in row.items():
      if value is not None and type(value) not in (int, float):
        raise ValueError(f"{path}:{number}: key {key!r:.200} must be a number or null; received {value!r:.200}.")
    row = {key: math.nan if value is None else value for key, value in row.items()}
    (evaluation if "eval_n" in row else learner).append(row)
  return learner, evaluation


def _scalar(key: str, value: Any) -> int | float:
  if hasattr(value, "shape") and value.shape == ():
    value = value.item()
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f"Metric {key!r} must be a scalar number; received {value!r}.")
  return value
