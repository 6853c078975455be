"""Files from elsewhere: what is wrong with one is a ValueError that names it, in bounded time and memory."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from sao_jax.io import bad_batches, jsonl, trajectory_arrays
from sao_jax.utils import untrusted_files


def test_an_object_is_read(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "x.json"
  assert untrusted_files.read_object_if_there(path) == {}
  path.write_text('{"a": "é"}', encoding="utf-8")
  assert untrusted_files.read_object(path) == untrusted_files.read_object_if_there(path) == {"a": "é"}
  with pytest.raises(FileNotFoundError, match=r"missing\.json"):
    untrusted_files.read_object(tmp_path / "missing.json")


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "must be JSON"),
    (b"[1]", "must be a JSON object; received list"),
    (b'{"a": ' * 100_000, "less nesting"),
    (b'{"a": \xff}', "must be text in UTF-8: .* at byte 6"),
    (b'{"a": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
  ],
)
def test_what_is_no_object_is_named(content: bytes, message: str, tmp_path: pathlib.Path) -> None:
  (tmp_path / "x.json").write_bytes(content)
  with pytest.raises(ValueError, match=rf"{tmp_path}/x\.json.*{message}"):
    untrusted_files.read_object(tmp_path / "x.json")


def test_what_is_too_large_is_not_held(tmp_path: pathlib.Path) -> None:
  with open(tmp_path / "x.json", "wb") as file:
    file.truncate(1 << 40)  # holds nothing on the disk
  with pytest.raises(ValueError, match=r"x\.json must have at most \d+ bytes"):
    untrusted_files.read_object(tmp_path / "x.json")


@pytest.mark.parametrize(
  "read",
  [
    untrusted_files.read_object,
    untrusted_files.open_gguf,
    trajectory_arrays.read,
    lambda path: list(jsonl.read_rows(path)),
    lambda path: bad_batches.read(path.parent.parent, 3),
  ],
)
def test_pipes_and_devices_are_not_opened(read: Any, tmp_path: pathlib.Path) -> None:
  path = tmp_path / "bad_batches" / "3.json"
  path.parent.mkdir()
  os.mkfifo(path)
  with pytest.raises(ValueError, match=r"3\.json must be a regular file"):
    read(path)
  path.unlink()
  path.symlink_to("/dev/zero")
  with pytest.raises(ValueError, match=r"3\.json must be a regular file"):
    read(path)
