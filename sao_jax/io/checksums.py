"""Checksums that tell a damaged file from a whole one (not a forged one)."""

from __future__ import annotations

import json
import pathlib
import zlib
from typing import Any

from sao_jax.utils import untrusted_files


def of_file(path: pathlib.Path) -> list[int]:
  """Size and CRC-32 of a file.

  Raises:
    ValueError: it is no regular file: a pipe or a device may have no end.
  """
  untrusted_files.check_regular(path)
  size = crc = 0
  with path.open("rb") as file:
    while block := file.read(1 << 20):
      size += len(block)
      crc = zlib.crc32(block, crc)
  return [size, crc]


def of_json(value: Any) -> int:
  """CRC-32 of a JSON value, whatever the order of its keys."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode("utf-8"))
