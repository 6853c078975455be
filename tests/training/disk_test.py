"""A full disk and a read-only workdir: a clear message, no damaged checkpoint, and the run goes on once there is room.

The disk is full by RLIMIT_FSIZE: every write beyond a size fails in the kernel, Orbax's own included.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from sao_jax.io import jsonl, workdir
from sao_jax.io.checkpoints import Checkpointer, CheckpointError
from sao_jax.io.metrics import MetricsWriter, read_metrics
from sao_jax.training import loop
from sao_jax.training.config import CheckpointConfig
from sao_jax.training.run_state import RunState
from tests.bare_run import bare, busy_domain
from tests.training.loop_test import final_params, without_times

ROOT = pathlib.Path(__file__).resolve().parents[2]
# When a write fails, Orbax closes the event loop that its other writes then report to.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def random_state(seed: int) -> dict[str, jax.Array]:
  return {"x": jax.random.normal(jax.random.key(seed), (100_000,))}


@pytest.mark.parametrize("size", [100, 40_000, 300_000])  # in the small files, in the arrays, in their last part
def test_a_save_that_fails_leaves_the_earlier_checkpoint_and_no_rest(tmp_path: pathlib.Path, size: int) -> None:
  with Checkpointer(tmp_path, config={}) as checkpointer:
    checkpointer.save(1, random_state(1), {"step": 1})
    checkpointer.wait()
    with files_of_at_most(size):
      checkpointer.save(2, random_state(2), {"step": 2})
      with pytest.raises(CheckpointError, match=r"could not be written .*File too large.*steps \[1\]"):
        checkpointer.wait()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    checkpointer.save(2, random_state(2), {"step": 2})
    restored = checkpointer.restore(random_state(0))
  assert restored is not None and restored.step == 2
  np.testing.assert_array_equal(restored.state["x"], random_state(2)["x"])


@pytest.mark.parametrize("when", ["metrics", "checkpoint"])
def test_a_run_stops_with_a_message_and_goes_on_when_there_is_room(
  when: str, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
  config = bare(checkpoint=CheckpointConfig(every_steps=100 if when == "metrics" else 2))
  full, whole = tmp_path / "full", tmp_path / "whole"
  loop.train(config, busy_domain(), whole)
  limits = contextlib.ExitStack()
  owner, method = (MetricsWriter, "write") if when == "metrics" else (RunState, "save")
  original = getattr(owner, method)

  def fills(*args: Any, **options: Any) -> Any:
    if when == "checkpoint" or args[1] == 3:
      limits.enter_context(files_of_at_most((full / "metrics.jsonl").stat().st_size + 20))
    return original(*args, **options)

  with monkeypatch.context() as patch, limits:
    patch.setattr(owner, method, fills)
    with pytest.raises((workdir.WorkdirError, CheckpointError)) as caught:
      loop.train(config, busy_domain(), full)
  assert str(full) in str(caught.value)
  if when == "metrics":
    assert "metrics.jsonl" in str(caught.value) and "make room" in str(caught.value)
  loop.train(config, busy_domain(), full)
  assert without_times(full) == without_times(whole) and len(read_metrics(full)[0]) == 6
  jax.tree.map(np.testing.assert_array_equal, final_params(config, full), final_params(config, whole))


def test_a_line_that_does_not_fit_is_named(tmp_path: pathlib.Path) -> None:
  file = jsonl.JsonlFile(tmp_path / "a.jsonl")
  file.append({"step": 1})
  with files_of_at_most(15), pytest.raises(OSError, match=r"File too large: .*a\.jsonl"):
    file.append({"step": 2})
  file.close()
  assert [row for _, row in jsonl.read_rows(tmp_path / "a.jsonl")] == [{"step": 1}]
  assert jsonl.cut_after_step(tmp_path / "a.jsonl", 1) == [{"step": 1}]


def test_events_that_do_not_fit_are_named(tmp_path: pathlib.Path) -> None:
  writer = MetricsWriter(tmp_path)
  events = next(tmp_path.glob("events*"))
  size = events.stat().st_size + 60  # room for the line, none for the event
  with pytest.raises(workdir.WorkdirError, match="File too large"), workdir.writing(tmp_path), files_of_at_most(size):
    writer.write_evaluation(0, success_rate=0.5, n=4)
  assert read_metrics(tmp_path)[1][0]["eval_n"] == 4


def test_only_errors_of_the_workdir_are_turned(tmp_path: pathlib.Path) -> None:
  for path, kind in ((tmp_path / "x", workdir.WorkdirError), ("/elsewhere", PermissionError), (None, OSError)):
    with pytest.raises(kind), workdir.writing(tmp_path):
      raise OSError(errno.EACCES, "no", path)
  with pytest.raises(FileNotFoundError), workdir.writing(tmp_path):
    raise FileNotFoundError(errno.ENOENT, "no", str(tmp_path / "x"))


def test_a_workdir_that_cannot_be_made_ends_the_command_with_a_message() -> None:
  """In /sys nobody, root included, makes a folder."""
  done = subprocess.run(
    [sys.executable, "-m", "experiments.train", "--workdir=/sys/kernel/sao_run"], cwd=ROOT, capture_output=True,
    text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}, timeout=500,
  )  # fmt: skip
  assert done.returncode == 1
  assert "train: cannot make the folder /sys/kernel/sao_run: " in done.stderr and "Traceback" not in done.stderr


def test_a_checkpoint_folder_that_is_a_file_is_refused_before_anything_is_trained(tmp_path: pathlib.Path) -> None:
  (tmp_path / "stages").write_text("not a folder")
  with pytest.raises(workdir.WorkdirError, match="stages"):
    loop.train(bare(), busy_domain(), tmp_path)
