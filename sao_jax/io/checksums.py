"""Listings of a folder's files with their sizes and checksums, which detect damage but not forgery."""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

from sao_jax.io import workdir as workdir_lib
from sao_jax.utils import untrusted_files

LISTING = "files.json"
"""Name of the file that lists a checkpoint's files."""


def write_listing(folder: pathlib.Path, fields: Mapping[str, Any]) -> None:
  """Writes `files.json` with `fields`, the size and checksum of every file in `folder`, and a checksum of its own."""
  files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
  listing = {**fields, "files": {path.relative_to(folder).as_posix(): of_file(path) for path in files}}
  workdir_lib.atomic_write_json(folder / LISTING, listing | {"crc32": of_json(listing)})


def read_listing(folder: pathlib.Path) -> dict[str, Any]:
  """Reads the listing of a folder without checking its files.

  Raises:
    OSError: it is missing.
    ValueError: it is not a JSON object.
  """
  return untrusted_files.read_object(folder / LISTING)


def verify(folder: pathlib.Path) -> dict[str, Any]:
  """Checks every file of a folder against the listing, and returns the listing.

  Raises:
    OSError, LookupError, TypeError, ValueError: a file is missing or differs, the listing is malformed, or the folder
      holds or names anything but regular files inside it.
  """
  listing = read_listing(folder)
  if listing.pop("crc32", None) != of_json(listing):
    raise ValueError(f"the checksum of {LISTING} itself is wrong")
  if not isinstance(listing["files"], dict):
    raise ValueError(f"'files' of {LISTING} must be an object; received {listing['files']!r:.200}")
  paths = {name: untrusted_files.check_inside(folder, name) for name in listing["files"]}
  untrusted_files.check_folder(folder)  # before any file is read, here or by the caller
  for name, recorded in listing["files"].items():
    # A file of the wrong size is not read: it may be huge.
    if [paths[name].stat().st_size] != recorded[:1] or of_file(paths[name]) != recorded:
      raise ValueError(f"size or checksum of {name} is wrong")
  return listing


def of_file(path: pathlib.Path) -> list[int]:
  """Returns the size and the CRC-32 of a file.

  Raises:
    ValueError: it is not a regular file; a pipe or a device may have no end.
  """
  untrusted_files.check_regular(path)
  size = crc = 0
  with path.open("rb") as file:
    while block := file.read(1 << 20):
      size += len(block)
      crc = zlib.crc32(block, crc)
  return [size, crc]


def of_json(value: Any) -> int:
  """Returns the CRC-32 of a JSON value, whatever the order of its keys."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode("utf-8"))
