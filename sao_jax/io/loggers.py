"""Further places for a run's metrics, beside `metrics.jsonl`: TensorBoard, Weights & Biases, and a function.

TensorBoard events go through `tensorboardX.event_file_writer.EventsWriter`, because `tensorboardX.SummaryWriter` writes
from a thread that ends at the first disk error, after which later calls block for ever. `clu.metric_writers` needs
TensorFlow or PyTorch.
"""

from __future__ import annotations

import math
import os
import pathlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

from sao_jax.io import workdir as workdir_lib
from sao_jax.io.metric_table import tag
from sao_jax.types import Trajectory
from sao_jax.utils.extras import require_extra

WandbMode: TypeAlias = Literal["online", "offline", "disabled"]


class MetricsLogger(Protocol):
  """Receives every row of a run, in the order in which `metrics.jsonl` has them. Who makes a logger closes it."""

  def write(self, step: int, values: Mapping[str, float], trajectories: Sequence[Trajectory] = ()) -> None:
    """Logs a row.

    Args:
      step: the learner step, or the number of steps before an evaluation.
      values: metrics by key; those of an evaluation begin with `eval_`.
      trajectories: the step's batch, or the evaluation's episodes.
    """
    ...


class CallbackLogger:
  """Calls a function with every row. Its exceptions end the run.

  >>> logger = CallbackLogger(lambda step, values, trajectories: print(step, values["entropy"], len(trajectories)))
  >>> logger.write(1, {"entropy": 0.5})
  1 0.5 0

  Args:
    function: called as `function(step, values, trajectories)`, see `MetricsLogger.write`.
  """

  def __init__(self, function: Callable[[int, Mapping[str, float], Sequence[Trajectory]], None]):
    self._function = function

  def write(self, step: int, values: Mapping[str, float], trajectories: Sequence[Trajectory] = ()) -> None:
    self._function(step, values, trajectories)


class TensorBoardLogger:
  """Writes event files, with tags grouped by topic. NaN and infinities are left out.

  Args:
    workdir: the run's folder.
    restored_step: later events of a killed run are marked as replaced.
  """

  def __init__(self, workdir: str | os.PathLike[str], *, restored_step: int = 0):
    self._events = pathlib.Path(workdir) / "events"
    self._board = EventsWriter(str(self._events), f".{os.getpid()}")
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    with workdir_lib.named_errors(self._events):
      self._board.write_event(event_pb2.Event(wall_time=time.time(), step=restored_step + 1, session_log=start))

  def write(self, step: int, values: Mapping[str, float], trajectories: Sequence[Trajectory] = ()) -> None:
    scalars = [
      summary_pb2.Summary.Value(tag=tag(key), simple_value=value)
      for key, value in values.items()
      if math.isfinite(value)
    ]
    summary = summary_pb2.Summary(value=scalars)
    with workdir_lib.named_errors(self._events):
      self._board.write_event(event_pb2.Event(wall_time=time.time(), step=step, summary=summary))
      self._board.flush()

  def close(self) -> None:
    with workdir_lib.named_errors(self._events):
      self._board.close()


class WandbLogger:
  """Logs to Weights & Biases, with names grouped by topic. A resumed run continues the same W&B run.

  W&B keeps the first row of a step: after a kill, that of before it for the steps since the last checkpoint.

  Args:
    workdir: the run's folder. `wandb_id` in it holds the id of the W&B run, and `wandb/` what is not uploaded.
    project: the W&B project.
    mode: "online", "offline" (`wandb sync` uploads it later) or "disabled".
    config: the run's config, as JSON values.

  Raises:
    MissingExtraError: wandb is not installed.
  """

  def __init__(
    self, workdir: str | os.PathLike[str], *, project: str, mode: WandbMode = "online", config: Mapping[str, Any]
  ):
    with require_extra("wandb"):
      import wandb

    folder = pathlib.Path(workdir)
    known = folder / "wandb_id"
    if not known.exists():
      workdir_lib.atomic_write(known, secrets.token_hex(4).encode())
    self._run = wandb.init(
      project=project, name=folder.name, id=known.read_text(encoding="utf-8").strip(), resume="allow", mode=mode,
      dir=str(folder), config=dict(config), settings=wandb.Settings(console="off", silent=True),
    )  # fmt: skip

  def write(self, step: int, values: Mapping[str, float], trajectories: Sequence[Trajectory] = ()) -> None:
    self._run.log({tag(key): value for key, value in values.items()}, step=step)

  def close(self) -> None:
    self._run.finish()
