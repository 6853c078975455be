"""Fingerprints of checkpoints and problem files, to detect that they have changed since earlier samples."""

from __future__ import annotations

import hashlib
import os
import pathlib

_SUFFIXES = (".json", ".jinja", ".safetensors")
"""Suffixes of the files in a Hugging Face directory that determine a model's output."""
_PIECE = 16 * 2**20


def fingerprint(path: str | os.PathLike[str]) -> str:
  """Returns a digest of a file, or of the weights, settings and tokenizer in a directory.

  Of a large file, only the size, the beginning, the middle and the end are read. This detects training, which changes
  every weight.

  Raises:
    FileNotFoundError: the path does not exist.
  """
  path = pathlib.Path(path)
  files = sorted(x for x in path.iterdir() if x.suffix in _SUFFIXES) if path.is_dir() else [path]
  digest = hashlib.sha256()
  for file in files:
    size = file.stat().st_size
    digest.update(f"{file.name if path.is_dir() else ''}:{size};".encode())
    with open(file, "rb") as content:
      if size <= 3 * _PIECE:
        digest.update(content.read())
        continue
      for start in (0, (size - _PIECE) // 2, size - _PIECE):
        content.seek(start)
        digest.update(content.read(_PIECE))
  return digest.hexdigest()[:16]
