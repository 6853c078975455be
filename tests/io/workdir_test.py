"""Locks between real processes, configurations compared, atomic writes."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from sao_jax.io import metrics, workdir

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOLDER = """
import sys, time
from sao_jax.io import workdir
lock = workdir.WorkdirLock(sys.argv[1])
print("locked", flush=True)
time.sleep(500)
"""


def test_two_runs_in_one_workdir_are_refused_until_the_first_is_dead(tmp_path):
  folder = tmp_path / "new" / "run"
  command = [sys.executable, "-c", HOLDER, str(folder)]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(RuntimeError, match=f"in use by another run .process {process.pid}.; .*--workdir"):
      workdir.WorkdirLock(folder)
    process.send_signal(signal.SIGKILL)
  with workdir.WorkdirLock(folder), pytest.raises(RuntimeError, match=f"process {os.getpid()}"):
    workdir.WorkdirLock(folder)
  workdir.WorkdirLock(folder).close()


def test_config_is_written_once_and_compared(tmp_path):
  config = {"seed": 0, "learner": {"eps_low": 0.3, "shape": (1, 2), "clip": None}}
  workdir.write_or_check_config(tmp_path, config)
  workdir.write_or_check_config(tmp_path, config)
  other = {"seed": 1, "learner": {"eps_low": 0.2, "shape": [1, 2]}, "lag": 2}
  with pytest.raises(ValueError) as caught:
    workdir.write_or_check_config(tmp_path, other)
  assert str(caught.value).splitlines()[1:] == [
    "  lag: recorded nothing, now 2",
    "  learner.clip: recorded null, now nothing",
    "  learner.eps_low: recorded 0.3, now 0.2",
    "  seed: recorded 0, now 1",
  ]
  assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0
  workdir.write_or_check_config(tmp_path, config | {"seed": 5}, may_differ=["seed"])
  assert json.loads((tmp_path / "config.json").read_text())["seed"] == 5


def test_fields_that_are_newer_than_the_record_may_be_missing_from_it():
  old, new = {"a": 1, "b": {"c": 2}}, {"a": 1, "b": {"c": 2, "d": 3}, "e": {"f": 4}}
  assert workdir.config_differences(old, new, may_be_missing={"b.d", "e"}) == []
  assert workdir.config_differences(old, new, may_be_missing={"b.d"}) == ['e: recorded nothing, now {"f": 4}']
  # What is there is compared all the same, and what only the record has is a difference.
  assert workdir.config_differences(new, new | {"e": {"f": 5}}, may_be_missing={"e"}) == ["e.f: recorded 4, now 5"]
  assert workdir.config_differences(new, old, may_be_missing={"b.d", "e"}) != []


def test_true_and_one_differ():
  assert workdir.config_differences({"a": True}, {"a": 1}) == ["a: recorded true, now 1"]
  assert workdir.config_differences({"a": 1}, {"a": 1.0}) == []


def test_a_broken_config_file_is_named(tmp_path):
  for content in ("{", "[" * 100_000, "[]"):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json must be .*Choose another --workdir"):
      workdir.write_or_check_config(tmp_path, {})


def test_endless_differences_are_cut(tmp_path):
  workdir.write_or_check_config(tmp_path, {f"k{i:03}": 0 for i in range(300)})
  with pytest.raises(ValueError, match=r"k099: recorded 0, now nothing\n  \.\.\. and 200 more$"):
    workdir.write_or_check_config(tmp_path, {})


def test_summary_needs_its_keys(tmp_path):
  summary = dict.fromkeys(workdir.SUMMARY_KEYS, 0) | {"seconds_by_stage": {"sao": 1.0}}
  workdir.write_summary(tmp_path, summary | {"note": "x"})
  assert json.loads((tmp_path / "summary.json").read_text())["note"] == "x"
  del summary["n"]
  with pytest.raises(ValueError, match=r"missing: \['n'\]"):
    workdir.write_summary(tmp_path, summary)


def test_a_failed_atomic_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
  path = tmp_path / "a.json"
  workdir.atomic_write_json(path, {"x": 1})
  with pytest.raises(ValueError, match="JSON compliant"):
    workdir.atomic_write_json(path, {"x": float("nan")})

  def full(descriptor):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", full)
  with pytest.raises(OSError, match="No space left"):
    workdir.atomic_write_json(path, {"x": 2})
  assert json.loads(path.read_text()) == {"x": 1}
  assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_a_lock_file_says_does_not_matter(tmp_path):
  (tmp_path / ".lock").write_bytes(b"\xff\xfe not a pid")
  with workdir.WorkdirLock(tmp_path), pytest.raises(RuntimeError, match=f"process {os.getpid()}"):
    workdir.WorkdirLock(tmp_path)
  (tmp_path / ".lock").write_text("1\n")  # of a process that lives, and holds nothing
  workdir.WorkdirLock(tmp_path).close()


def test_a_folder_that_is_still_written_into_is_deleted_once_its_writer_ends(tmp_path):
  folder = tmp_path / "partial"
  (folder / "state").mkdir(parents=True)
  until = time.monotonic() + 0.3

  def write() -> None:
    while time.monotonic() < until:
      # What is made can be deleted between any two calls, those inside of `mkdir` too.
      with contextlib.suppress(FileNotFoundError, FileExistsError):
        (folder / "state").mkdir(parents=True, exist_ok=True)
        (folder / "state" / f"{time.monotonic_ns()}").write_text("x")

  writer = threading.Thread(target=write)
  writer.start()
  workdir.delete(folder)
  writer.join()
  workdir.delete(folder)
  assert not folder.exists()


def test_a_folder_that_is_written_into_for_ever_is_an_error(tmp_path, monkeypatch):
  def never_empty(path: pathlib.Path) -> None:
    raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

  monkeypatch.setattr(workdir.shutil, "rmtree", never_empty)
  monkeypatch.setattr(workdir, "_DELETE_TIMEOUT_S", 0.1)
  (tmp_path / "partial").mkdir()
  with pytest.raises(OSError, match=r"not empty.*partial"):
    workdir.delete(tmp_path / "partial")


def test_rests_of_killed_writes_are_removed(tmp_path):
  (tmp_path / ".config.json.abc.tmp").write_text("half")
  (tmp_path / "mine.tmp").write_text("not ours")
  workdir.WorkdirLock(tmp_path).close()
  assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "mine.tmp"]


@pytest.mark.parametrize("make", [lambda path: path.write_text("x"), lambda path: path.symlink_to(path)])
@pytest.mark.parametrize("name", ["", ".lock/", "metrics.jsonl/"])
def test_files_links_and_folders_in_the_way_are_named(make, name, tmp_path):
  folder = tmp_path / "run"
  if name:
    (folder / name).mkdir(parents=True)
  else:
    make(folder)
  told = "Cannot write to workdir" if name else "workdir must be a folder; '.*/run' is a (file|link that leads nowhere)"
  refused = pytest.raises(workdir.WorkdirError, match=told)
  with refused, workdir.writing(folder), workdir.WorkdirLock(folder):
    metrics.MetricsWriter(folder)


def test_a_folder_that_cannot_be_made():
  told = r"^cannot make the folder /proc/sao_run: .*; choose another workdir\.$"
  with pytest.raises(workdir.WorkdirError, match=told):
    workdir.WorkdirLock("/proc/sao_run")
