"""Metrics of a run: `metrics.jsonl`, a row per learner step, and the same numbers for TensorBoard."""

from __future__ import annotations

import logging
import math
import os
import pathlib
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from sao_jax.io import jsonl
from sao_jax.io import workdir as workdir_lib

LEARNER_KEYS = (
  "step", "policy_version", "time_s", "reward_mean", "success_rate", "trajectories", "action_tokens", "staleness_mean",
  "staleness_max", "mixed_version_fraction", "dis_masked_fraction", "dis_masked_low", "dis_masked_high", "ratio_mean",
  "approx_kl", "policy_loss", "policy_grad_norm", "entropy", "value_loss", "critic_grad_norm", "explained_variance",
  "lambda_policy_mean", "advantage_mean", "advantage_std", "queue_size", "dropped_stale", "failed_episodes",
  "rollout_tokens_per_s", "learner_busy_fraction", "engine_busy_fraction",
)  # fmt: skip
"""What a learner row holds at least."""


class MetricsWriter:
  """Writes learner rows and evaluation rows, one line each, at once; continues a file without gap or double.

  A learner row has `LEARNER_KEYS`; an evaluation row has `step`, `eval_success_rate`, `eval_n` (one per step, beside
  the learner row of that step, 0 for before the first). NaN and infinities are written as null, as JSON has none.
  """

  def __init__(self, workdir: str | os.PathLike[str], *, restored_step: int = 0) -> None:
    """Opens the files.

    Args:
      workdir: the run's folder, which exists.
      restored_step: the last learner step that the restored checkpoint holds, 0 for a new run. Rows after it, written
        by a run that was killed later, are dropped: the resumed run writes them again.
    """
    path = pathlib.Path(workdir) / "metrics.jsonl"
    kept = jsonl.cut_after_step(path, restored_step)
    self._evaluated = {row["step"] for row in kept if "eval_n" in row}
    steps = [row["step"] for row in kept if "eval_n" not in row]
    if steps != list(range(1, restored_step + 1)):
      # Only a machine that lost power, or another hand, can do this: rows are written before their checkpoint is.
      logging.warning("%s: expected rows of steps 1 to %d, found %d rows.", path, restored_step, len(steps))
    self._last_step = restored_step
    self._file = jsonl.JsonlFile(path)
    # Not `tensorboardX.SummaryWriter`: on a full disk the thread that it writes with dies, and the next event waits for
    # ever. Here the error comes out of the call.
    self._events = pathlib.Path(workdir) / "events"
    self._board = EventsWriter(str(self._events), f".{os.getpid()}")
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    with workdir_lib.named_errors(self._events):
      self._board.write_event(event_pb2.Event(wall_time=time.time(), step=restored_step + 1, session_log=start))

  def write(self, step: int, values: Mapping[str, Any]) -> None:
    """Writes the row of learner step `step` (1, 2, ...).

    Args:
      step: the learner step.
      values: at least `LEARNER_KEYS` but for `step`; Python, NumPy or jax scalars.

    Raises:
      ValueError: a step out of turn, a missing key or a value that is no scalar.
    """
    if step != self._last_step + 1:
      raise ValueError(f"The next metrics row is that of step {self._last_step + 1}; received step {step}.")
    if missing := [key for key in LEARNER_KEYS[1:] if key not in values]:
      raise ValueError(f"Metrics of step {step} lack {missing}.")
    self._emit(step, values)
    self._last_step = step

  def has_evaluation(self, step: int) -> bool:
    """Whether the evaluation after `step` is already written (by the run that this one resumes)."""
    return step in self._evaluated

  def write_evaluation(self, step: int, *, success_rate: float, n: int, **more: float) -> None:
    """Writes the evaluation of the policy after learner step `step`.

    Args:
      step: learner steps taken before the evaluation.
      success_rate: fraction of `n` held-out episodes that succeeded.
      n: number of episodes.
      **more: further scalars, e.g. the ends of a confidence interval.

    Raises:
      ValueError: `step` has an evaluation already.
    """
    if step in self._evaluated:
      raise ValueError(f"The evaluation of step {step} is already written.")
    self._emit(step, {"eval_success_rate": success_rate, "eval_n": n, **more})
    self._evaluated.add(step)

  def _emit(self, step: int, values: Mapping[str, Any]) -> None:
    row = {"step": step} | {key: _scalar(key, value) for key, value in values.items() if key != "step"}
    self._file.append({key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()})
    scalars = [
      summary_pb2.Summary.Value(tag=key, simple_value=value)
      for key, value in row.items()
      if key != "step" and math.isfinite(value)
    ]
    summary = summary_pb2.Summary(value=scalars)
    with workdir_lib.named_errors(self._events):
      self._board.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
      self._board.flush()

  def close(self) -> None:
    self._file.close()
    with workdir_lib.named_errors(self._events):
      self._board.close()

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self.close()


def read_metrics(workdir: str | os.PathLike[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Reads a workdir's `metrics.jsonl`, also while the run goes on.

  Returns:
    `(learner rows, evaluation rows)`, null given back as NaN.

  Raises:
    ValueError: a malformed line, with its number.
  """
  learner: list[dict[str, Any]] = []
  evaluation: list[dict[str, Any]] = []
  path = pathlib.Path(workdir) / "metrics.jsonl"
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
