"""Readers of small untrusted files: sizes are limited, and every error names the file."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import stat
from typing import Any

import numpy as np

from sao_jax.utils.extras import require_extra

MOST_BYTES = 1 << 26
"""Largest JSON file. Parsed, it takes about twenty times as much memory."""
_MOST_GGUF_VALUES = 4_000_000
"""Largest number of values in the header of a GGUF file. A vocabulary of 256 thousand tokens needs two million."""


def check_regular(path: str | os.PathLike[str]) -> None:
  """Checks that a path is a regular file. Reading a pipe, socket or device might never end. Links are followed.

  Raises:
    OSError: the path does not exist, or it is a folder.
    ValueError: the path is not a regular file.
  """
  mode = os.stat(path).st_mode
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
  if not stat.S_ISREG(mode):
    raise ValueError(f"{path} must be a regular file.")


def check_inside(folder: str | os.PathLike[str], name: Any) -> pathlib.Path:
  """Returns the path of a regular file that a listing in `folder` names. Opens nothing.

  Raises:
    OSError: the file does not exist, or it is a folder.
    ValueError: `name` is not a relative path, or the path leads out of the folder (perhaps through a link) or to a
      pipe, socket or device.
  """
  parts = pathlib.PurePosixPath(name).parts if isinstance(name, str) else ()
  if not parts or "\0" in name or name.startswith("/") or ".." in parts:
    raise ValueError(f"a listing must name files by their paths inside {folder}; received {name!r:.200}.")
  path = pathlib.Path(folder, name)
  _check_target(pathlib.Path(os.path.realpath(folder)), path)
  check_regular(path)
  return path


def check_folder(folder: str | os.PathLike[str]) -> None:
  """Checks that a folder holds only regular files, folders, and links that stay inside it.

  Raises:
    OSError: the folder cannot be read, or a link is broken.
    ValueError: the folder holds a link that leads out of it, a pipe, a socket or a device; the message names it.
  """
  root = pathlib.Path(os.path.realpath(folder))
  waiting = [root]
  while waiting:
    with os.scandir(waiting.pop()) as entries:
      for entry in entries:
        path = pathlib.Path(entry.path)
        if entry.is_symlink():
          _check_target(root, path)
        if entry.is_dir(follow_symlinks=False):
          waiting.append(path)
        elif not path.is_dir():
          check_regular(path)


def _check_target(root: pathlib.Path, path: pathlib.Path) -> None:
  target = pathlib.Path(os.path.realpath(path, strict=True))
  if not target.is_relative_to(root):
    raise ValueError(f"{path} must stay inside its folder; it is a link to {target}.")


def read_text(path: str | os.PathLike[str], *, most_bytes: int = MOST_BYTES) -> str:
  """Reads a text file.

  Raises:
    FileNotFoundError: the file does not exist.
    ValueError: the file is not a regular file, is larger than `most_bytes`, or is not UTF-8; the message names it.
  """
  check_regular(path)
  with open(path, "rb") as file:
    content = file.read(most_bytes + 1)
  if len(content) > most_bytes:
    raise ValueError(f"{path} must have at most {most_bytes} bytes.")
  try:
    return content.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(f"{path} must be text in UTF-8: {error.reason} at byte {error.start}.") from error


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads a file that holds a JSON object. Raises as `read_text` does, and ValueError for other content."""
  text = read_text(path)
  try:
    values = json.loads(text)
  except ValueError as error:
    raise ValueError(f"{path} must be JSON: {error}") from error
  except RecursionError as error:
    raise ValueError(f"{path} must be JSON with less nesting.") from error
  if not isinstance(values, dict):
    raise ValueError(f"{path} must be a JSON object; received {type(values).__name__}.")
  return values


def read_object_if_there(path: pathlib.Path) -> dict[str, Any]:
  """Reads a JSON object like `read_object`; returns an empty one if the file does not exist."""
  return read_object(path) if path.exists() else {}


def open_gguf(path: str | os.PathLike[str]) -> Any:
  """Opens a GGUF file with a `gguf.GGUFReader` that checks the sizes that the file declares.

  Raises:
    MissingExtraError: the optional package `gguf` is not installed.
    FileNotFoundError: the file does not exist.
    ValueError: the file is not a complete GGUF file; the message names it.
  """
  with require_extra("gguf"):
    import gguf

  class Reader(gguf.GGUFReader):
    """A reader with limits. Its base returns nothing past the end, and keeps an object for each value of an array."""

    left = _MOST_GGUF_VALUES

    def _get(self, offset: int, dtype: Any, count: Any = 1, *rest: Any, **more: Any) -> Any:
      self.left -= 1
      if self.left < 0:
        raise ValueError(f"it has more than {_MOST_GGUF_VALUES} values outside its tensors")
      if int(offset) + int(count) * np.dtype(dtype).itemsize > self.data.size:
        raise ValueError(f"it has {self.data.size} bytes, but claims {int(count)} values at byte {int(offset)}")
      return super()._get(offset, dtype, count, *rest, **more)

  check_regular(path)
  try:
    return Reader(os.fspath(path))
  except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:  # The parser raises them all.
    raise ValueError(f"{path} is not a valid GGUF file: {error}") from error
