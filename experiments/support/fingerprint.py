"""Whether a checkpoint or a file of problems is still the one that earlier samples were made with."""

from __future__ import annotations

import hashlib
import os
import pathlib

_SUFFIXES = (".json", ".jinja", ".safetensors")
"""Of the files of a Hugging Face directory that decide what a model says."""
_PIECE = 16 * 2**20


def fingerprint(path: str | os.PathLike[str]) -> str:
  """A digest of a file, or of the weights, settings and tokenizer in a directory.

  Of a large file only its size, beginning, middle and end are read: a training step changes every weight.

  Raises:
    FileNotFoundError: there is nothing of this name.
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
